"""The publication saga: pause, swap, verify, resume. Each pause that may have happened is followed by a resume.

    export, write, stage ─▶ hold gate ─▶ switch those that staged ─────────────────────▶ verify ─▶ re-admit
                                 └─▶ the others: incur debts ─▶ pause ─▶ load ─▶ verify ─▶ [always] end all ─▶ re-admit
                                                                                                  └─▶ workers: decide

What can be done while the engines generate (export, write, stage) is done before; `transfer.py` has how. An engine that
has staged the weights changes to them between two tokens, in one request: nothing is paused, and nothing is owed. With
`publication.blocking` all is done under a pause: pause all ─▶ export ─▶ load ─▶ verify, as systems do that this one is
compared with.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import anyio
from anyio.abc import TaskGroup

from hybridasync.config.publication import PublicationSection
from hybridasync.drivers.fleet import Engine, Fleet
from hybridasync.drivers.lease import until_lost
from hybridasync.drivers.switch import doubt_of, marked, switch
from hybridasync.drivers.transfer import Transfer
from hybridasync.errors import CompensationFailed, EngineError, NotSent, PublicationFailed, Rejected, TrainerError
from hybridasync.ports import Journal, MetricSink, Trainer
from hybridasync.protocol.debts import Debts
from hybridasync.protocol.delivery import may_have_happened
from hybridasync.protocol.routing import Remedy
from hybridasync.types import PauseMode, PublicationResult, WeightSnapshot

END_ATTEMPTS = 3
"""R98. With one second between, all engines at once."""

END_SHARE = 0.5
"""Of `resume_budget_s`, for the resumes. The rest is for fencing and replacement, where they aren't confirmed."""

FENCE_PAUSE_S = 1.0

POLL_S = 0.05
"""Between two questions whether an engine is ready to pause. R57 polls each second; a loopback call costs 1 ms."""


@dataclass(slots=True)
class _Saga:
    """What one publication has found out so far."""

    txn: str
    engines: tuple[Engine, ...]  # to be paused
    mode: PauseMode
    begun_at: float
    paused: list[Engine] = field(default_factory=list)
    verified: list[Engine] = field(default_factory=list)  # under the pause
    switched: list[Engine] = field(default_factory=list)  # without one, and routed to already
    failures: dict[str, str] = field(default_factory=dict)  # engine → what went wrong
    touched: set[str] = field(default_factory=set)  # engines whose weights may have changed
    may_load_late: set[str] = field(default_factory=set)  # engines that may still change them, whatever is done now
    switch_s: float = 0.0
    switch_paused_s: float = 0.0
    asked_at: float = 0.0
    paused_at: float = 0.0
    loaded_at: float = 0.0
    verified_at: float = 0.0
    resumed_at: float = 0.0
    late_export_s: float = 0.0  # with `blocking`, under the pause

    @property
    def served(self) -> list[Engine]:
        return [*self.switched, *self.verified]


@dataclass(frozen=True, slots=True)
class _Order:
    """What is to be published."""

    version: int
    path: str
    step: int | None
    started: float
    before_sampling: Callable[[], Awaitable[None]] | None


@dataclass(slots=True)
class _Times:
    """When what is done while engines generate was done."""

    started: float
    exported: float
    staged: float = 0.0


@dataclass(frozen=True, slots=True)
class PublishParts:
    """What the saga works with; all of it is owned by `app.py`."""

    fleet: Fleet
    trainer: Trainer
    transfer: Transfer
    journal: Journal
    debts: Debts
    sink: MetricSink


class Publisher:
    """One publication at a time. `session` is 32 hex digits, fixed for this controller process (R59)."""

    def __init__(self, settings: PublicationSection, parts: PublishParts, *, session: str, mode: PauseMode) -> None:
        self._settings = settings
        self._parts = parts
        self._session = session
        self._mode = mode
        self._sequence = 0
        self._epoch = 0
        self._lock = anyio.Lock()
        self._latest: WeightSnapshot | None = None

    @property
    def has_published(self) -> bool:
        return self._latest is not None

    async def publish(
        self,
        version: int,
        path: str,
        *,
        step: int | None,
        before_sampling: Callable[[], Awaitable[None]] | None = None,
        exported: Callable[[], None] | None = None,
        outcome: Callable[[PublicationResult | None], None] | None = None,
    ) -> PublicationResult:
        """Bring weight version `version` of the trainer to every engine, by way of the folder `path`.

        `exported` is called once the trainer may change its weights, which with `blocking` never happens before the
        end. `before_sampling` is awaited once engines serve the version, and before rollout requests start again (R51).
        `outcome` is called once engines serve it, or with None once it is known that none will, before the workers
        hear of that: they may be busy with the next step.
        Raises PublicationFailed when not one engine serves it afterwards, CompensationFailed when a resume isn't
        confirmed and fencing didn't help. Some engines missing is a degraded result, not an error (R63, R66).
        """
        order = _Order(version, path, step, anyio.current_time(), before_sampling)
        beside = exported is not None
        result: PublicationResult | PublicationFailed
        async with self._lock:
            snapshot = None if self._settings.blocking else await self._parts.transfer.export(version, path)
            try:
                if snapshot is not None:
                    if exported is not None:
                        exported()
                    snapshot = await self._parts.transfer.written(snapshot)
                result = await self._bring_to_all(order, snapshot)
            except PublicationFailed as error:
                result = error
            except BaseException:
                # What ends the run doesn't wait for the training step that the workers are in.
                if not beside:
                    await self._abort(version, beside=beside)
                raise
        # The lock is free by now: the workers may be in a long step, and an engine waits to be brought up.
        served = result if isinstance(result, PublicationResult) else None
        if outcome is not None:
            outcome(served)
        if isinstance(result, PublicationFailed):
            await self._abort(version, beside=beside)
            raise result
        await self._decide(version, commit=True, beside=beside)
        return result

    async def _abort(self, version: int, *, beside: bool) -> None:
        with suppress(TrainerError):  # the next call to the workers reports it; what failed before comes first
            await self._decide(version, commit=False, beside=beside)

    async def _bring_to_all(self, order: _Order, snapshot: WeightSnapshot | None) -> PublicationResult:
        """`snapshot` None: it is exported under the pause."""
        times = _Times(order.started, anyio.current_time())
        staged = frozenset() if snapshot is None else await self._parts.transfer.stage(self._present(), snapshot)
        times.staged = anyio.current_time()
        with self._parts.fleet.held():
            await self._drain(order.version)
            saga = self._begin(self._present(), self._mode)
            self._latest = snapshot or self._latest
            if snapshot is not None:
                await self._switch(saga, snapshot, staged)
            if snapshot is None or saga.engines:
                snapshot = await self._swap_under_pause(saga, order if snapshot is None else snapshot)
            self._readmit(saga, order.version)
            if saga.served and order.before_sampling is not None:
                await order.before_sampling()
        result = _result(saga, snapshot, step=order.step, times=times)
        self._parts.sink.publication(result)
        if not saga.served:
            details = "; ".join(f"{name}: {why}" for name, why in saga.failures.items()) or "no engine is up"
            raise PublicationFailed(order.version, [], list(saga.failures), detail=details)
        return result

    async def _export_late(self, order: _Order, saga: _Saga) -> WeightSnapshot:
        begun = anyio.current_time()
        taken = await self._parts.transfer.export(order.version, order.path)
        self._latest = await self._parts.transfer.written(taken)
        saga.late_export_s = anyio.current_time() - begun
        return self._latest

    async def _decide(self, version: int, *, commit: bool, beside: bool) -> None:
        """One outcome for all workers (R105a): where no engine took the version, the one before stays published."""
        epoch, self._epoch = self._epoch, self._epoch + 1
        # Shielded: workers that never hear of the outcome would disagree with the engines. The trainer bounds it.
        # Not beside a training step: it would wait for that step, and only the end of the run cancels it there.
        with anyio.CancelScope(shield=not beside):
            await self._parts.trainer.decide(epoch, version=version, commit=commit)

    async def bring_up(self, engine: Engine) -> None:
        """Bring the last published version to this engine alone, which serves nothing yet; the others go on.

        Raises PublicationFailed where it isn't verified afterwards, CompensationFailed as `publish` does.
        """
        async with self._lock:
            snapshot = self._latest
            if snapshot is None or engine.state.version is not None:
                return
            saga = self._begin((engine,), "retract")
            await self._swap_under_pause(saga, snapshot)
            self._readmit(saga, snapshot.version)
            if not saga.verified:
                detail = saga.failures.get(engine.name, "")
                raise PublicationFailed(snapshot.version, [], [engine.name], detail=detail)

    def _present(self) -> tuple[Engine, ...]:
        return tuple(engine for engine in self._parts.fleet.engines if not engine.state.absent)

    def _begin(self, engines: tuple[Engine, ...], mode: PauseMode) -> _Saga:
        return _Saga(self._next_txn(), engines, mode, begun_at=anyio.current_time())

    async def _drain(self, version: int) -> None:
        if self._mode == "drain":
            with anyio.move_on_after(self._settings.drain_timeout_s) as waiting:
                await self._parts.fleet.drained()
            if waiting.cancelled_caught:
                live = [engine.name for engine in self._parts.fleet.verified]
                limit = self._settings.drain_timeout_s
                detail = f"requests were still in flight after publication.drain_timeout_s = {limit:g} s"
                raise PublicationFailed(version, live, [], detail=detail)

    async def _switch(self, saga: _Saga, snapshot: WeightSnapshot, staged: frozenset[str]) -> None:
        """Those of `staged`. One that certainly hasn't switched stays among the engines to be paused."""
        ready = [engine for engine in saga.engines if engine.name in staged]
        with marked(ready):
            switched = await switch(ready, snapshot, saga.mode, fleet=self._parts.fleet, sink=self._parts.sink)
        saga.switched = switched.verified
        saga.failures |= switched.doubts
        settled = {*switched.doubts, *(engine.name for engine in switched.verified)}
        saga.engines = tuple(engine for engine in saga.engines if engine.name not in settled)
        saga.switch_s = anyio.current_time() - saga.begun_at
        # Drained engines have nothing to do before prompts are let in again.
        saga.switch_paused_s = saga.switch_s if saga.mode == "drain" else switched.paused_s

    async def _swap_under_pause(self, saga: _Saga, what: WeightSnapshot | _Order) -> WeightSnapshot:
        """Answers the snapshot, which for an order is made meanwhile."""
        with marked(saga.engines):
            self._incur(saga.engines, saga.txn)
            saga.asked_at = anyio.current_time()
            try:
                async with anyio.create_task_group() as leases:
                    async with anyio.create_task_group() as tasks:
                        for engine in saga.engines:
                            tasks.start_soon(self._pause, engine, saga, leases)
                    saga.paused_at = anyio.current_time()
                    snapshot = await self._export_late(what, saga) if isinstance(what, _Order) else what
                    await self._load_and_verify(saga, snapshot)
                    leases.cancel_scope.cancel()
            finally:
                self._quarantine_doubtful(saga)
                # Shielded: cancelled here, an engine would stay paused for ever.
                with anyio.CancelScope(shield=True):
                    await self._end_all(saga)
        return snapshot

    async def _load_and_verify(self, saga: _Saga, snapshot: WeightSnapshot) -> None:
        saga.touched.update(engine.name for engine in saga.paused)
        for name, error in (await self._parts.transfer.load(tuple(saga.paused), snapshot)).items():
            saga.failures[name] = f"load: {error}"
            if may_have_happened(error):
                saga.may_load_late.add(name)
        saga.loaded_at = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            for engine in [e for e in saga.paused if e.name not in saga.failures]:
                tasks.start_soon(self._verify, engine, saga, snapshot)
        saga.verified_at = anyio.current_time()

    async def _pause(self, engine: Engine, saga: _Saga, leases: TaskGroup) -> None:
        """Its lease is kept from the moment when it is paused: another engine's pause may take longer than a lease."""
        deadline = anyio.current_time() + self._settings.drain_timeout_s
        try:
            while True:
                # Shielded with a deadline: a pause that was sent and then abandoned may take effect after its resume.
                asked = anyio.current_time()
                with anyio.fail_after(self._settings.rollout_http_timeout, shield=True):
                    if await engine.sidecar.pause(saga.txn, saga.mode, self._settings.lease_s):
                        saga.paused.append(engine)
                        leases.start_soon(self._keep_lease, engine, saga, asked)
                        return
                if anyio.current_time() > deadline:
                    saga.failures[engine.name] = f"not ready to pause within {self._settings.drain_timeout_s:g} s"
                    return
                await anyio.sleep(POLL_S)
        except NotSent as error:
            self._settle(engine.name, saga.txn, "not sent")
            saga.failures[engine.name] = str(error)
        except (EngineError, TimeoutError) as error:
            saga.failures[engine.name] = f"pause: {error or 'no answer in time'}"

    async def _keep_lease(self, engine: Engine, saga: _Saga, since: float) -> None:
        """What an engine makes while it is loaded without a pause is of no version: it is interrupted (law 4)."""
        why = await until_lost(engine, saga.txn, self._settings.lease_s, since=since, sink=self._parts.sink)
        saga.failures.setdefault(engine.name, why)
        saga.paused = [other for other in saga.paused if other is not engine]
        self._parts.fleet.quarantine(engine, why, "publish")

    async def _verify(self, engine: Engine, saga: _Saga, snapshot: WeightSnapshot) -> None:
        """Version and checksum read back; any doubt means torn (R55, U15)."""
        try:
            doubt = doubt_of(await engine.server.read_back(), snapshot)
            await engine.sidecar.renew(saga.txn, self._settings.lease_s)  # only a pause that still holds can be renewed
        except Rejected as error:
            saga.failures[engine.name] = f"verify: the pause ended during the swap, or the engine refuses: {error}"
            return
        except EngineError as error:
            saga.failures[engine.name] = f"verify: {error}"
            return
        if doubt:
            saga.failures[engine.name] = doubt
        elif engine.name not in saga.failures:
            saga.verified.append(engine)

    def _quarantine_doubtful(self, saga: _Saga) -> None:
        """Before the resume, so that no prompt reaches an engine that may be half-updated (law 4)."""
        verified = {engine.name for engine in saga.verified}
        for engine in saga.engines:
            if engine.name in saga.touched and engine.name not in verified:
                reason = saga.failures.get(engine.name, "the swap was interrupted")
                # A load that was given up may be carried out later, onto better weights: only a new process is safe.
                remedy: Remedy = "fence" if engine.name in saga.may_load_late else "publish"
                self._parts.fleet.quarantine(engine, reason, remedy)

    def _readmit(self, saga: _Saga, version: int) -> None:
        for engine in saga.verified:
            self._parts.fleet.readmit(engine, version)
        for name, why in saga.failures.items():
            self._parts.sink.event("publication_degraded", level="warning", engine=name, version=version, cause=why)

    async def _end_all(self, saga: _Saga) -> None:
        """All of it within `resume_budget_s` (R102, U11)."""
        owed = self._parts.debts.owed(saga.txn)
        deadline = anyio.current_time() + self._settings.resume_budget_s
        with anyio.move_on_after(END_SHARE * self._settings.resume_budget_s):
            async with anyio.create_task_group() as tasks:
                for engine in saga.engines:
                    if engine.name in owed:
                        tasks.start_soon(self._end, engine, saga.txn)
        left = self._parts.debts.owed(saga.txn)
        try:
            if left:
                await self._last_resort([e for e in saga.engines if e.name in left], saga, deadline=deadline)
        finally:
            saga.resumed_at = anyio.current_time()

    async def _end(self, engine: Engine, txn: str) -> None:
        share_s = END_SHARE * self._settings.resume_budget_s / END_ATTEMPTS
        pause_s = min(1.0, share_s / END_ATTEMPTS)
        timeout = share_s - pause_s
        for attempt in range(END_ATTEMPTS):
            try:
                with anyio.fail_after(timeout):
                    await engine.sidecar.end(txn)
            except (EngineError, TimeoutError) as error:
                self._parts.sink.event(
                    "resume_failed", level="warning", engine=engine.name, attempt=attempt + 1, cause=str(error)
                )
                await anyio.sleep(pause_s)
            else:
                self._settle(engine.name, txn, "ended")
                return

    async def _last_resort(self, engines: Sequence[Engine], saga: _Saga, *, deadline: float) -> None:
        """U1: fence what can't be resumed; if that fails too, the run ends with exit code 3."""
        with anyio.CancelScope(deadline=deadline):
            async with anyio.create_task_group() as tasks:
                for engine in engines:
                    saga.failures[engine.name] = "its resume was never confirmed"
                    saga.verified = [e for e in saga.verified if e is not engine]
                    self._parts.fleet.quarantine(engine, saga.failures[engine.name])
                    if self._settings.on_ambiguous_pause == "fence":
                        tasks.start_soon(self._fence, engine, saga)
        left = self._parts.debts.owed(saga.txn)
        if left and self._settings.on_ambiguous_pause != "degrade":
            raise CompensationFailed(sorted(left))

    async def _fence(self, engine: Engine, saga: _Saga) -> None:
        """One attempt through a sidecar of ours, which is replaced if it fails; else attempts to the budget's end."""
        while True:
            try:
                # A part of the budget: a sidecar that hangs must leave time for what is tried next.
                with anyio.fail_after((1 - END_SHARE) * self._settings.resume_budget_s / END_ATTEMPTS):
                    await engine.sidecar.fence((saga.txn,))
                break
            except (EngineError, TimeoutError) as error:
                cause = str(error) or "no answer in time"
                self._parts.sink.event("fence_failed", level="error", engine=engine.name, cause=cause)
                if engine.revive is not None:
                    if await self._revived(engine, saga.txn):
                        break
                    return
                if isinstance(error, Rejected):
                    return
            await anyio.sleep(FENCE_PAUSE_S)  # its node may have a supervisor that is starting it anew
        self._settle(engine.name, saga.txn, "fenced")
        self._parts.fleet.quarantine(engine, "fenced: its resume was never confirmed", "recover")

    async def _revived(self, engine: Engine, txn: str) -> bool:
        """A sidecar that is ours takes its engine along when it dies: the harshest fence.

        An engine that it only attached to survives it, so that the new one is told of the end as well.
        """
        try:
            if engine.revive is not None:
                await engine.revive()
            await engine.sidecar.end(txn)
        except (EngineError, OSError) as error:
            self._parts.sink.event("revive_failed", level="error", engine=engine.name, cause=str(error))
            return False
        return True

    def _incur(self, engines: Sequence[Engine], txn: str) -> None:
        """Law 3: recorded, on disk, before the first byte leaves."""
        for engine in engines:
            self._parts.journal.append(self._parts.debts.incur(engine.name, txn))

    def _settle(self, engine: str, txn: str, how: str) -> None:
        self._parts.journal.append(self._parts.debts.settle(engine, txn, how))

    def _next_txn(self) -> str:
        txn = f"ha1:{self._session}:{self._sequence}"
        self._sequence += 1
        return txn


def _result(saga: _Saga, snapshot: WeightSnapshot, *, step: int | None, times: _Times) -> PublicationResult:
    return PublicationResult(
        version=snapshot.version,
        step=step,
        engines=tuple(engine.name for engine in saga.served),
        prepare_s=times.staged - times.started,
        drain_s=saga.begun_at - times.staged,
        wait_s=max(0.0, saga.paused_at - saga.asked_at),
        transfer_s=saga.switch_s + max(0.0, saga.loaded_at - saga.paused_at),
        verify_s=max(0.0, saga.verified_at - saga.loaded_at),
        resume_s=max(0.0, saga.resumed_at - saga.verified_at),
        pause_s=max(saga.switch_paused_s, saga.resumed_at - saga.asked_at),
        bytes=snapshot.bytes,
        degraded=bool(saga.failures),
        export_s=saga.late_export_s or times.exported - times.started,
        stage_s=times.staged - times.exported,
        full_bytes=snapshot.full_bytes or snapshot.bytes,
        kind="full" if snapshot.base_version is None else "delta",
    )
