"""Wrong versions of the code, each a mistake that was made somewhere. A proof that doesn't find them proves nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import MappingProxyType, ModuleType
from typing import Any

import anyio

from hybridasync.drivers import publish
from hybridasync.drivers.fleet import Engine, Fleet
from hybridasync.drivers.publish import Publisher
from hybridasync.drivers.switch import Switched, switch
from hybridasync.errors import EngineError
from hybridasync.protocol.debts import Debts
from hybridasync.protocol.decisions import Decisions
from hybridasync.protocol.routing import EngineState, Remedy
from hybridasync.protocol.transaction_id import TransactionId
from hybridasync.protocol.transactions import Action, TransactionMachine
from hybridasync.sidecar.control import Control

Replacement = tuple[type | ModuleType, str, Callable[..., Any]]


async def _pause_abandoned(self: Any, engine: Engine, saga: Any, leases: Any) -> None:
    """The pause may be cancelled after it was sent."""
    try:
        with anyio.fail_after(self._settings.rollout_http_timeout):
            if await engine.sidecar.pause(saga.txn, saga.mode, self._settings.lease_s):
                saga.paused.append(engine)
    except (EngineError, TimeoutError) as error:
        self._settle(engine.name, saga.txn, "not sent")
        saga.failures[engine.name] = str(error)


async def _pause_before_try(self: Any, saga: Any, snapshot: Any) -> Any:
    """The resume guards the swap only, not the pause."""
    self._incur(saga.engines, saga.txn)
    async with anyio.create_task_group() as leases:
        async with anyio.create_task_group() as tasks:
            for engine in saga.engines:
                tasks.start_soon(self._pause, engine, saga, leases)
        leases.cancel_scope.cancel()
    try:
        await self._load_and_verify(saga, snapshot)
    finally:
        await self._end_all(saga)
    return snapshot


async def _end_unshielded(self: Any, saga: Any, snapshot: Any) -> Any:
    """A cancellation reaches the compensation."""
    self._incur(saga.engines, saga.txn)
    try:
        async with anyio.create_task_group() as leases:
            async with anyio.create_task_group() as tasks:
                for engine in saga.engines:
                    tasks.start_soon(self._pause, engine, saga, leases)
            await self._load_and_verify(saga, snapshot)
            leases.cancel_scope.cancel()
    finally:
        self._quarantine_doubtful(saga)
        await self._end_all(saga)
    return snapshot


def _entomb_nothing(self: Any, key: TransactionId | None, now: float) -> None:
    """An end that overtakes its pause leaves no trace."""


def _no_watermark(self: Any, key: TransactionId | None) -> bool:
    return False


def _complete_forgotten(self: Any, record: Any) -> None:
    """A transaction that has ended is forgotten: its pause may come again."""
    record.move("completed")
    self._forget(record)


def _incur_nothing(self: Any, engines: Sequence[Engine], txn: str) -> None:
    """Debts are kept in memory alone."""
    for engine in engines:
        self._parts.debts.incur(engine.name, txn)


async def _settle_first(self: Any, engine: Engine, txn: str) -> None:
    """Struck off before it is acknowledged, and tried once."""
    self._settle(engine.name, txn, "ended")
    try:
        await engine.sidecar.end(txn)
    except EngineError:
        return


async def _journal_after_send(self: Any, saga: Any, snapshot: Any) -> Any:
    """Debts are written down once the pauses have been answered."""
    try:
        async with anyio.create_task_group() as leases:
            async with anyio.create_task_group() as tasks:
                for engine in saga.engines:
                    tasks.start_soon(self._pause, engine, saga, leases)
            self._incur(saga.engines, saga.txn)
            await self._load_and_verify(saga, snapshot)
            leases.cancel_scope.cancel()
    finally:
        self._quarantine_doubtful(saga)
        with anyio.CancelScope(shield=True):
            await self._end_all(saga)
    return snapshot


async def _end_once(self: Any, engine: Engine, txn: str) -> None:
    """The first resume that fails ends the fan-out, and with it the resumes of all others."""
    await engine.sidecar.end(txn)
    self._settle(engine.name, txn, "ended")


async def _pause_or_raise(self: Any, engine: Engine, saga: Any, leases: Any) -> None:
    """The first pause that fails ends the publication, and the run."""
    if await engine.sidecar.pause(saga.txn, saga.mode, self._settings.lease_s):
        saga.paused.append(engine)
        leases.start_soon(self._keep_lease, engine, saga, anyio.current_time())


def _state_only(self: Any, engine: Engine, reason: str, remedy: Remedy | None = None) -> None:
    """A quarantined engine goes on with the prompts that it has, and its answers count."""
    engine.state.quarantine(reason, remedy)
    self.changed.notify()


async def _no_roll_back(self: Any, txn: str | None) -> bool:
    """A pause that isn't wanted any more is struck off, and not undone."""
    self._report(lambda: self._machine.rolled_back(txn))
    return True


async def _resume_whoever_asks(self: Any) -> None:
    """An end resumes the engine, whoever holds it."""
    client = self._host.client
    if client is not None:
        await client.resume()


def _no_lease(self: Any) -> float | None:
    """Only its client ends a pause; what failed is tried again."""
    record = self._active
    return record.lease_until if record is not None and record.phase == "recovery_required" else None


def _end_is_not_noted(self: Any, txn: str | None, now: float, *, again: bool = False) -> Any:
    """An end that comes while its pause is on its way is answered at once."""
    record = self._find(None if txn is None else TransactionId.parse(txn))
    if record is not None and record.phase in ("checking", "pausing"):
        return Action.DONE
    return _request_end(self, txn, now, again=again)


_request_end = TransactionMachine.request_end


def _resume_believed(self: Any, txn: str | None, now: float) -> None:
    """A resume that failed counts as done."""
    record = self._owned(txn, "rolling_back", "ending")
    self._complete(record)


def _any_epoch(self: Any, epoch: int, version: int, *, commit: bool) -> None:
    """The decision that comes last counts, however old it is."""
    if commit:
        self.published = version


async def _verify_nothing(self: Any, engine: Engine, saga: Any, snapshot: Any) -> None:
    """An answer of 200 is believed."""
    saga.verified.append(engine)


def _keep_doubtful(self: Any, saga: Any) -> None:
    """An engine whose load failed goes on serving."""


def _routes_to_all(self: EngineState, reason: str, remedy: Remedy | None = None) -> None:
    """Quarantine in name only: prompts go on."""
    self.reason = reason


async def _switch_believed(engines: Sequence[Engine], snapshot: Any, mode: Any, **_: Any) -> Switched:
    """An engine that was told to switch serves the new weights."""
    for engine in engines:
        with suppress(EngineError):
            await engine.server.switch(snapshot, mode)
    return Switched(verified=list(engines))


class _Mute:
    """A fleet that isn't told who is verified."""

    def __init__(self, fleet: Fleet) -> None:
        self.quarantine = fleet.quarantine

    def readmit(self, engine: Engine, version: int) -> None:
        return None


async def _switch_untold(engines: Sequence[Engine], snapshot: Any, mode: Any, *, fleet: Fleet, sink: Any) -> Switched:
    mute: Any = _Mute(fleet)
    return await switch(engines, snapshot, mode, fleet=mute, sink=sink)


def _readmit_all(self: Any, saga: Any, version: int) -> None:
    """What has switched is routed to once the others have been paused and loaded, whatever became of it meanwhile."""
    for engine in saga.served:
        self._parts.fleet.readmit(engine, version)


async def _bring_up_blindly(self: Any, engine: Engine) -> None:
    """A new engine is routed to as it is."""
    if self._latest is not None:
        self._parts.fleet.readmit(engine, self._latest.version)


MUTATIONS: Mapping[str, tuple[Replacement, ...]] = MappingProxyType(
    {
        "pause_before_try": ((Publisher, "_swap_under_pause", _pause_before_try),),
        "resume_unshielded": ((Publisher, "_swap_under_pause", _end_unshielded),),
        "pause_abandoned": ((Publisher, "_pause", _pause_abandoned),),
        "no_tombstone": ((TransactionMachine, "_entomb", _entomb_nothing),),
        "no_watermark": (
            (TransactionMachine, "_superseded", _no_watermark),
            (TransactionMachine, "_complete", _complete_forgotten),
        ),
        "journal_forgotten": ((Publisher, "_incur", _incur_nothing),),
        "journal_after_send": ((Publisher, "_swap_under_pause", _journal_after_send),),
        "first_failed_end_stops_the_others": ((Publisher, "_end", _end_once),),
        "first_failed_pause_ends_the_run": ((Publisher, "_pause", _pause_or_raise),),
        "answers_of_doubtful_engines": ((Fleet, "quarantine", _state_only),),
        "rollback_skipped": ((Control, "_roll_back", _no_roll_back),),
        "older_end_resumes_newer": ((Control, "_end_stray", _resume_whoever_asks),),
        "lease_ignored": ((TransactionMachine, "lease_deadline", _no_lease),),
        "end_under_way_not_noted": ((TransactionMachine, "request_end", _end_is_not_noted),),
        "failed_resume_believed": ((TransactionMachine, "resume_failed", _resume_believed),),
        "epoch_ignored": ((Decisions, "take", _any_epoch),),
        "settle_before_acknowledgement": ((Publisher, "_end", _settle_first),),
        "verify_nothing": ((Publisher, "_verify", _verify_nothing),),
        "torn_goes_on": ((Publisher, "_quarantine_doubtful", _keep_doubtful),),
        "quarantine_routes": ((EngineState, "quarantine", _routes_to_all),),
        "switch_believed": ((publish, "switch", _switch_believed),),
        "readmit_late": ((publish, "switch", _switch_untold), (Publisher, "_readmit", _readmit_all)),
        "readmit_unverified": ((Publisher, "bring_up", _bring_up_blindly),),
        "debts_not_replayed": ((Debts, "owed", lambda self, txn=None: frozenset()),),
    }
)


@contextmanager
def mutated(name: str | None) -> Iterator[None]:
    """The code is wrong within the block. None: it is right."""
    replaced = [(owner, attribute, getattr(owner, attribute)) for owner, attribute, _ in MUTATIONS.get(name or "", ())]
    for owner, attribute, wrong in MUTATIONS.get(name or "", ()):
        setattr(owner, attribute, wrong)
    try:
        yield
    finally:
        for owner, attribute, right in replaced:
            setattr(owner, attribute, right)
