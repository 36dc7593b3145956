"""The sequences of a sidecar around the transaction machine: pause, end, lease, recovery.

pause ─▶ [turn] ─▶ drained? ─▶ pause the engine ─▶ still wanted? ─▶ answer
end   ─▶ [until the pause of the same id is over] ─▶ resume the engine ─▶ answer
lease ─▶ runs out ─▶ the same as an end, and the engine counts as torn
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import anyio
from anyio.lowlevel import checkpoint_if_cancelled

from hybridasync.errors import EngineError, NotSent, OperatingError, OutcomeUnknown
from hybridasync.protocol.transactions import (
    ENDED,
    Action,
    Answer,
    CapacityReachedError,
    Expired,
    RecoveryRequiredError,
    TransactionMachine,
)
from hybridasync.sidecar.engine_client import EngineControl
from hybridasync.sidecar.host import EngineHost
from hybridasync.types import PauseMode, SidecarState, SidecarStatus

R = TypeVar("R")

STRAY_WATCH_S = 120.0
"""How long after a pause of unknown outcome to look whether it took effect after its own resume (case C01)."""

STRAY_POLL_S = 2.0

OBITUARY_S = 0.5
"""A port refuses a moment before its process counts as ended: how long to wait for the cause, which says more."""

log = logging.getLogger("hybridasync.sidecar")


@dataclass(frozen=True, slots=True)
class Probe:
    """What the engine says of itself. `ready` False: paused or starting; None: no answer, and `detail` says why."""

    ready: bool | None
    gone: bool = False  # there is no process, or none that listens
    weight_version: str | None = None
    detail: str = ""


class EngineDownError(OperatingError):
    """There is no engine, so that nothing was done and nothing is owed."""


class NotHeldError(OperatingError):
    """The transaction holds no pause (any more)."""


class Control:
    """One engine. `run` must be running; the other methods are called by requests, many at once."""

    def __init__(self, host: EngineHost, machine: TransactionMachine) -> None:
        self._host = host
        self._machine = machine
        self._changed = anyio.Event()
        self._stray_until = 0.0
        self.torn = False
        self.counts: Counter[str] = Counter()

    # Requests

    async def pause(self, txn: str | None, mode: PauseMode, lease_s: float) -> Answer:
        """Raises MalformedTransactionError, CapacityReachedError, RecoveryRequiredError, EngineDownError, EngineError.

        Cancelled at any point, it leaves the engine running (R88).
        """
        step = await self._turn(txn)
        if isinstance(step, Answer):
            if step.paused:  # a second call of a transaction that holds the pause
                self._machine.renew(txn, anyio.current_time(), lease_s)
            return step
        try:
            ready = await self._drained(mode)
        except BaseException:
            self._report(lambda: self._machine.abandon(txn, anyio.current_time()))
            raise
        step = self._report(lambda: self._machine.checked(txn, ready))
        if isinstance(step, Answer):
            return step
        return await self._hold(txn, mode, lease_s)

    async def end(self, txn: str | None) -> None:
        """Resume. Raises MalformedTransactionError, CapacityReachedError, RecoveryRequiredError."""
        again = False
        while True:
            changed = self._changed
            action = self._machine.request_end(txn, anyio.current_time(), again=again)
            if action is Action.WAIT:
                await changed.wait()
                again = True
                continue
            if action is Action.SEND_RESUME:
                await self._end(txn)
                self.torn = False  # its owner is back, and verifies before it lets prompts in (U15)
            else:
                self._wake()
                await self._end_stray()
            self.counts["ends"] += 1
            return

    def renew(self, txn: str | None, lease_s: float) -> None:
        """Raises MalformedTransactionError, NotHeldError."""
        if not self._machine.renew(txn, anyio.current_time(), lease_s):
            raise NotHeldError(f"transaction {txn} holds no pause")
        self._wake()

    async def recover(self, timeout_s: float) -> None:
        """Raises EngineError, TimeoutError."""
        await self._host.recover(timeout_s)

    async def fence(self, txns: Sequence[str] = ()) -> None:
        """Kill the engine, as the end of `txns`: a pause of theirs that is still under way won't hold the next one.

        Raises MalformedTransactionError, NotSupportedError.
        """
        self.counts["fences"] += 1
        ending = [txn for txn in txns if self._condemn(txn)]
        try:
            await self._host.fence()
        except BaseException:
            for txn in ending:
                self._report(partial(self._machine.resume_failed, txn, anyio.current_time()))
            raise
        for txn in ending:
            self._report(partial(self._machine.ended, txn))

    async def status(self) -> SidecarStatus:
        probe = await self._probe()
        holder = self._machine.holder
        since = None
        if holder and holder.since is not None:
            since = time.time() - (anyio.current_time() - holder.since)
        left = holder.lease_until - anyio.current_time() if holder and holder.lease_until is not None else None
        return SidecarStatus(
            engine_url=self._host.url,
            engine_kind=self._host.kind,
            state=self._state(probe),
            weight_version=probe.weight_version,
            txn=holder.txn if holder else None,
            holder=(holder.session or "untagged") if holder else None,
            since=since,
            lease_left_s=left,
            torn=self.torn,
            healthy=probe.ready is not None,
            engine_pid=self._host.pid,
            detail=probe.detail,
        )

    @property
    def machine(self) -> TransactionMachine:
        return self._machine

    @property
    def host(self) -> EngineHost:
        return self._host

    # What goes on by itself

    async def run(self) -> None:
        """Ends what has run out; sleeps until then. Cancelled at the end of the process."""
        while True:
            changed = self._changed
            expired = self._machine.take_expired(anyio.current_time())
            if expired is not None:
                await self._expire(expired)
            elif anyio.current_time() < self._stray_until:
                with suppress(RecoveryRequiredError):  # logged, and tried again by its lease
                    await self._end_stray()
                await anyio.sleep(STRAY_POLL_S)
            else:
                deadline = self._machine.lease_deadline()
                wait_s = None if deadline is None else max(0.0, deadline - anyio.current_time())
                with anyio.move_on_after(wait_s):
                    await changed.wait()

    def engine_lost(self) -> None:
        """The engine's process has gone: nothing is paused any more, and its next weights are the initial ones."""
        self.counts["engine_exits"] += 1
        self.torn = False
        self._report(self._machine.engine_lost)

    async def release(self) -> None:
        """Resume an engine that outlives this sidecar: nobody else would know that it is paused."""
        if self._machine.holder is not None:
            client = self._host.client
            if client is not None:
                await client.resume()

    # Steps

    def _condemn(self, txn: str) -> bool:
        """Whether `txn` holds the engine, so that the fence is its resume."""
        try:
            return self._report(partial(self._machine.request_end, txn, anyio.current_time())) is Action.SEND_RESUME
        except CapacityReachedError:  # as many sessions as can be: still no reason to spare the engine
            return False

    async def _turn(self, txn: str | None) -> Action | Answer:
        """Wait until no other transaction is active. Only CHECK and answers come out."""
        while True:
            changed = self._changed
            step = self._machine.request_pause(txn, anyio.current_time())
            if step is not Action.WAIT:
                return step
            try:
                await changed.wait()
            except anyio.get_cancelled_exc_class():
                self._report(lambda: self._machine.withdraw(txn))
                raise

    async def _hold(self, txn: str | None, mode: PauseMode, lease_s: float) -> Answer:
        """From the pause of the engine on: whatever happens, it is either held by `txn` or undone."""
        # Shielded: a pause that was sent and then abandoned may take effect after its own resume.
        with anyio.CancelScope(shield=True):
            try:
                await self._engine().pause(mode)
            except (EngineDownError, NotSent) as error:
                self._report(lambda: self._machine.pause_not_sent(txn))
                raise EngineDownError(str(error)) from error
            except BaseException as error:
                if isinstance(error, OutcomeUnknown):
                    self._stray_until = anyio.current_time() + STRAY_WATCH_S
                log.warning("pause %s failed, rolling back: %s", txn, error)
                self._machine.pause_failed(txn, anyio.current_time())
                await self._roll_back(txn)
                raise
        try:
            await checkpoint_if_cancelled()
        except BaseException:
            self._machine.abandon(txn, anyio.current_time())
            # Shielded: the client has gone, so that only this resume can follow the pause (R88).
            with anyio.CancelScope(shield=True):
                await self._roll_back(txn)
            raise
        step = self._report(lambda: self._machine.pause_sent(txn, anyio.current_time(), lease_s))
        if isinstance(step, Answer):
            self.counts["pauses"] += 1
            log.info("paused by %s (%s)", txn, mode)
            return step
        with anyio.CancelScope(shield=True):  # as above: superseded pauses are undone before they answer (R86)
            if not await self._roll_back(txn):
                raise RecoveryRequiredError(f"transaction {txn} has ended, but its pause couldn't be undone")
        return ENDED

    async def _roll_back(self, txn: str | None) -> bool:
        self.counts["rollbacks"] += 1
        try:
            await self._resume()
        except BaseException as error:
            log.error("rollback of %s failed: %s", txn, error)
            self._report(lambda: self._machine.resume_failed(txn, anyio.current_time()))
            if not isinstance(error, EngineError):
                raise
            return False
        self._report(lambda: self._machine.rolled_back(txn))
        return True

    async def _end(self, txn: str | None) -> None:
        # Shielded: the machine has promised this resume, and other calls wait for it.
        with anyio.CancelScope(shield=True):
            try:
                await self._resume()
            except BaseException as error:
                log.error("end of %s failed: %s", txn, error)
                self._report(lambda: self._machine.resume_failed(txn, anyio.current_time()))
                if not isinstance(error, EngineError):
                    raise
                raise RecoveryRequiredError(f"Failed to recover weight-update transaction: {error}") from error
            self._report(lambda: self._machine.ended(txn))
            log.info("ended %s", txn)

    async def _end_stray(self) -> None:
        """Resume an engine that is paused although no transaction holds it, as after a restart of the sidecar."""
        client = self._host.client
        if client is None or not self._machine.idle:
            return
        try:
            paused = not await client.ready()
        except EngineError:
            return
        if paused and self._machine.adopt_stray(anyio.current_time()):
            log.warning("the engine is paused by nobody: resuming it")
            action = self._machine.request_end(None, anyio.current_time())
            if action is Action.SEND_RESUME:
                await self._end(None)

    async def _expire(self, expired: Expired) -> None:
        if expired.lapsed:
            self.counts["leases_expired"] += 1
            self.torn = True  # a swap may have been half done; only its owner could tell
            log.error("the lease of %s ran out: resuming, weights count as torn", expired.txn)
        try:
            await self._end(expired.txn)
        except RecoveryRequiredError:
            self.counts["resumes_failed"] += 1

    async def _drained(self, mode: PauseMode) -> bool:
        if mode != "drain":
            return True
        try:
            return await self._engine().in_flight() == 0
        except NotSent as error:
            raise EngineDownError(str(error)) from error

    async def _resume(self) -> None:
        """Without an engine there is nothing to resume: a pause lives in the engine's process."""
        client = self._host.client
        if client is not None:
            await client.resume()

    async def _probe(self) -> Probe:
        client = self._host.client
        if client is None:
            return Probe(None, gone=True, detail=self._host.detail)
        try:
            ready = await client.ready()
        except NotSent as error:
            if self._host.pid is not None:
                with anyio.move_on_after(OBITUARY_S):
                    while self._host.client is client:
                        await self._changed.wait()
            return Probe(None, gone=True, detail=self._host.detail or str(error))
        except EngineError as error:
            return Probe(None, detail=str(error))
        return Probe(ready, weight_version=await client.weight_version())

    def _state(self, probe: Probe) -> SidecarState:
        """A mute engine isn't `down`: it may be busy loading weights, and its process may still hold the pause."""
        if probe.gone:
            return "down"
        if probe.ready is False and self._machine.idle:
            return "paused"  # by somebody who didn't ask us
        return self._machine.state

    def _engine(self) -> EngineControl:
        client = self._host.client
        if client is None:
            raise EngineDownError(self._host.detail or "the engine is starting")
        return client

    def _report(self, transition: Callable[[], R]) -> R:
        """Change the machine, and wake whoever waits for a change."""
        result = transition()
        self._wake()
        return result

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
