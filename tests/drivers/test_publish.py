"""The publication saga: whatever fails or is cancelled, no engine stays paused and none serves doubtful weights."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from kit import (
    CHECKSUMS,
    FakeServer,
    FakeSidecar,
    FakeTrainer,
    MemoryJournal,
    RecordingSink,
    World,
    make_fleet,
    nothing,
)
from tests.virtual_clock import virtual

from hybridasync.config.publication import PublicationSection
from hybridasync.drivers.fleet import Fleet
from hybridasync.drivers.publish import Publisher, PublishParts
from hybridasync.drivers.staged import transfer_by_disk
from hybridasync.errors import (
    CheckpointError,
    CompensationFailed,
    EngineError,
    NotSent,
    OutcomeUnknown,
    PublicationFailed,
    Rejected,
)
from hybridasync.protocol.debts import Debts
from hybridasync.types import PauseMode, ServedWeights, WeightSnapshot


class HookedTrainer(FakeTrainer):
    """Its export is a point of the world, too."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self.error: Exception | None = None

    async def export_weights(self, version: int, path: str) -> WeightSnapshot:
        snapshot = await super().export_weights(version, path)

        def effect() -> WeightSnapshot:
            if self.error is not None:
                raise self.error
            return snapshot

        exported: WeightSnapshot = await self._world.call("trainer export", effect)
        return exported


WAYS = ("disk", "staged", "mixed", "blocking")


class Saga:
    """`way` is disk, staged (engines switch), mixed (the first one does) or blocking."""

    def __init__(
        self,
        *,
        count: int = 2,
        policy: str = "fence",
        way: str = "disk",
        mode: PauseMode = "retract",
        budget_s: float = 29.0,
    ) -> None:
        """`budget_s`: an end that the machine held up isn't sent again, or given up, unless that is the test."""
        self.world = World()
        self.fleet: Fleet
        self.servers: list[FakeServer]
        self.sidecars: list[FakeSidecar]
        self.fleet, self.servers, self.sidecars = make_fleet(self.world, count)
        self.journal, self.debts, self.sink = MemoryJournal(), Debts(), RecordingSink()
        settings = PublicationSection(
            resume_budget_s=budget_s,
            rollout_http_timeout=30.0,
            on_ambiguous_pause=policy,
            staged=way in ("staged", "mixed", "delta"),
            delta=way == "delta",
            blocking=way == "blocking",
        )
        self.trainer: Any = FakeTrainer() if way == "disk" else HookedTrainer(self.world)
        for index, server in enumerate(self.servers):
            server.can_stage = way in ("staged", "delta") or (way == "mixed" and index == 0)
        transfer = transfer_by_disk(settings, self.trainer, self.sink)
        parts = PublishParts(self.fleet, self.trainer, transfer, self.journal, self.debts, self.sink)
        self.publisher = Publisher(settings, parts, session="0" * 32, mode=mode)

    async def publish(self, version: int = 1) -> object:
        return await self.publisher.publish(version, "/x", step=version - 1)

    def assert_nothing_doubtful_is_routed_to(self, *, cancelled: bool = False) -> None:
        """A cancelled one may have verified weights that it didn't come to note."""
        for engine, server in zip(self.fleet.engines, self.servers, strict=True):
            if engine.state.version is not None:
                assert server.sums == CHECKSUMS
                assert int(server.version) == engine.state.version or (cancelled and server.version == "2")

    def assert_nothing_paused(self) -> None:
        assert [s.paused_by for s in self.sidecars] == [None] * len(self.sidecars)
        assert not self.debts.open
        assert not Debts.replay(self.journal.records).open


async def test_a_publication_brings_every_engine_to_the_version_and_resumes_it() -> None:
    """Pause, load, verify and end at each engine; both serve version 1 and nothing is owed."""
    saga = Saga()
    result = await saga.publish()
    assert result.engines == ("engine-0", "engine-1")  # type: ignore[attr-defined]
    assert [engine.state.version for engine in saga.fleet.engines] == [1, 1]
    saga.assert_nothing_paused()


async def test_the_debt_is_in_the_journal_before_the_pause_is_sent() -> None:
    """Law 3: at the moment of the first send, the journal has a debt for each engine."""
    saga = Saga()
    seen: list[int] = []

    async def hook(point: str) -> None:
        if point.endswith("pause: before send"):
            seen.append(len(saga.journal.records))

    saga.world.hook = hook
    await saga.publish()
    assert seen == [2, 2]


async def cancelled_at(saga: Saga, point: int, work: Callable[[], Awaitable[object]]) -> bool:
    """Cancels `work` at that point (before a send, after it, after a reply); whether it came so far."""
    passed = 0
    with anyio.CancelScope() as scope:

        async def hook(_point: str) -> None:
            nonlocal passed
            if passed == point:
                scope.cancel()
            passed += 1
            await anyio.lowlevel.checkpoint()

        saga.world.hook = hook
        await work()
    return passed > point


@pytest.mark.parametrize("way", WAYS)
async def test_r100_cancelled_at_every_point_no_engine_stays_paused(way: str, figure: Callable[[str], None]) -> None:
    """R68 (retract, as in fully_async): cancelled before a send, after it and after the reply, at each call of it.

    Version 2, to engines that serve version 1: what is routed to serves what it is believed to serve.
    """
    points = 0
    while True:
        saga = Saga(way=way)
        await saga.publish(1)
        reached = await cancelled_at(saga, points, partial(saga.publish, 2))
        saga.assert_nothing_paused()
        saga.assert_nothing_doubtful_is_routed_to()
        if not reached:
            break
        points += 1
    assert points >= (15 if way == "staged" else 24)
    figure(f"cancellation matrix, {way}: cancelled at {points} points (before send, after send, after reply)")


@pytest.mark.parametrize("way", WAYS)
async def test_r100_cancelled_at_every_turn_of_the_loop(way: str, figure: Callable[[str], None]) -> None:
    """R100, U14: cancelled at its first turn of the event loop, at its second, and so on: every await of it."""
    turns = 0
    finished = False
    while not finished:
        saga = Saga(way=way)
        await saga.publish(1)
        async with anyio.create_task_group() as tasks:

            async def publish(saga: Saga = saga) -> None:
                nonlocal finished
                await saga.publish(2)
                finished = True

            tasks.start_soon(publish)
            for _ in range(turns):
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        saga.assert_nothing_paused()
        saga.assert_nothing_doubtful_is_routed_to(cancelled=True)
        turns += 1
    assert turns >= (15 if way == "staged" else 25)
    figure(f"cancellation matrix, {way}: cancelled at {turns - 1} turns of the event loop")


async def test_r100_bringing_up_one_engine_is_cancelled_at_every_point(figure: Callable[[str], None]) -> None:
    """R67, R100: a publication to an engine that came back: the same, and only a verified one is routed to."""
    points = 0
    while True:
        saga = Saga()
        await saga.publish()
        newcomer = saga.fleet.engines[0]
        saga.fleet.quarantine(newcomer, "it was started anew", "recover")
        saga.servers[0].version = "default"
        reached = await cancelled_at(saga, points, partial(saga.publisher.bring_up, newcomer))
        saga.assert_nothing_paused()
        assert newcomer.state.version is None or saga.servers[0].version == "1"
        if not reached:
            break
        points += 1
    assert points >= 10
    figure(f"cancellation matrix, an engine that came back: cancelled at {points} points")


@pytest.mark.parametrize("way", ["disk", "staged", "mixed"])
@pytest.mark.parametrize("kind", [OutcomeUnknown, NotSent, Rejected])
def test_r100_failing_at_every_point_no_engine_stays_paused(
    kind: type[Exception], way: str, figure: Callable[[str], None]
) -> None:
    """The same matrix with an error instead of a cancellation: the saga degrades or raises, and owes nothing."""

    @virtual
    async def one(at: int, passed: list[int]) -> None:
        saga = Saga(way=way)
        await saga.publish(1)

        async def hook(point: str) -> None:
            await anyio.lowlevel.checkpoint()
            if point.startswith("trainer"):
                return
            passed[0] += 1
            if passed[0] - 1 == at and not (kind is NotSent and "before send" not in point):
                engine, operation = point.split(":")[0].split(" ")
                raise Rejected(engine, operation, 500) if kind is Rejected else kind(engine, operation, "injected")

        saga.world.hook = hook
        await saga.publish(2)
        saga.assert_nothing_paused()
        saga.assert_nothing_doubtful_is_routed_to()
        assert len(saga.fleet.verified) >= 1

    points = 0
    while True:
        passed = [0]
        one(points, passed)
        if passed[0] <= points:
            break
        points += 1
    assert points >= (12 if way == "staged" else 20)
    figure(f"failure matrix, {kind.__name__}, {way}: failed at {points} points")


async def test_r63_an_engine_that_cannot_be_reached_is_passed_over_without_an_end() -> None:
    """Not sent: no compensation to that engine, the other one is published, the result is degraded."""
    saga = Saga()

    async def hook(point: str) -> None:
        if point == "engine-0 pause: before send":
            raise NotSent("engine-0", "pause", "refused")

    saga.world.hook = hook
    result = await saga.publish()
    assert result.degraded and result.engines == ("engine-1",)  # type: ignore[attr-defined]
    assert "engine-0 end" not in saga.world.log
    saga.assert_nothing_paused()


async def test_r57_an_engine_that_is_not_ready_is_asked_again_with_the_same_id() -> None:
    """R57, R58: answers of "not ready" are polled until it is, in one transaction."""
    saga = Saga(count=1)
    saga.sidecars[0].not_ready = 2
    await saga.publish()
    assert saga.sidecars[0].pauses == 3
    assert len({record["txn"] for record in saga.journal.records}) == 1


async def test_r59_a_pause_and_its_end_share_an_id_that_is_never_used_again() -> None:
    """R59: `ha1:<session>:<n>` with n = 0, 1, 2 …; one for all engines of a publication, from pause to end."""
    saga = Saga()
    used: list[tuple[str, str]] = []
    for sidecar in saga.sidecars:
        pause, end = sidecar.pause, sidecar.end

        async def paused(txn: str, *rest: Any, call: Any = pause) -> bool:
            used.append(("pause", txn))
            return bool(await call(txn, *rest))

        async def ended(txn: str | None, call: Any = end) -> None:
            used.append(("end", str(txn)))
            await call(txn)

        sidecar.pause, sidecar.end = paused, ended  # type: ignore[method-assign]
    for version in (1, 2, 3):
        await saga.publisher.publish(version, "/x", step=version)
    expected = [(call, f"ha1:{'0' * 32}:{number}") for number in range(3) for call in ("pause", "end") for _ in "ab"]
    assert used == expected


async def test_r64_a_pause_of_unknown_outcome_is_ended_and_the_step_is_degraded() -> None:
    """R64, R97: it may have paused, so its end is sent; acknowledged, the other engine alone serves the version."""
    saga = Saga()

    async def hook(point: str) -> None:
        if point == "engine-0 pause: after send":
            raise OutcomeUnknown("engine-0", "pause", "reset")

    saga.world.hook = hook
    result = await saga.publish()
    assert result.degraded and result.engines == ("engine-1",)  # type: ignore[attr-defined]
    assert saga.world.log.count("engine-0 end") == 1 and saga.sidecars[0].fenced == 0
    saga.assert_nothing_paused()


async def test_c07_a_checksum_that_differs_quarantines_the_engine_and_resumes_it() -> None:
    """U15: resume is unconditional, re-admission is not: the engine runs, and serves nothing."""
    saga = Saga()
    saga.servers[0].sums = {"a": "1"}
    await saga.publish()
    assert saga.fleet.engines[0].state.version is None
    assert "b" in saga.fleet.engines[0].state.reason
    saga.assert_nothing_paused()


async def test_no_engine_verified_is_an_error_with_the_causes() -> None:
    """R101: with every engine quarantined the publication raises, and names what went wrong where."""
    saga = Saga()
    for server in saga.servers:
        server.sums = {}
    with pytest.raises(PublicationFailed, match="checksum differs"):
        await saga.publish()
    saga.assert_nothing_paused()


@virtual
async def test_u1_a_resume_that_is_never_confirmed_leads_to_fencing() -> None:
    """Three attempts, then the engine is fenced; the run goes on with the other one."""
    saga = Saga(budget_s=1.0)

    async def hook(point: str) -> None:
        await nothing(point)
        if point == "engine-0 end: before send":
            raise OutcomeUnknown("engine-0", "end", "reset")

    saga.world.hook = hook
    await saga.publish()
    assert saga.sidecars[0].fenced == 1
    assert saga.sink.names().count("resume_failed") == 3
    assert saga.fleet.engines[0].state.version is None
    saga.assert_nothing_paused()


@pytest.mark.parametrize("policy", ["fence", "fail"])
def test_c01_c_a_resume_that_cannot_be_had_ends_the_run(policy: str) -> None:
    """At most three attempts; where fencing fails too, or isn't wanted, CompensationFailed names the engine."""
    saga = Saga(policy=policy, budget_s=1.0)

    async def hook(point: str) -> None:
        await nothing(point)
        if point in ("engine-0 end: before send", "engine-0 fence: before send"):
            raise OutcomeUnknown("engine-0", "x", "reset")

    @virtual
    async def run() -> None:
        saga.world.hook = hook
        with pytest.raises(CompensationFailed, match="engine-0"):
            await saga.publish()

    run()
    assert saga.sink.names().count("resume_failed") == 3


async def test_prompts_are_held_back_from_the_pause_until_re_admission() -> None:
    """R111: while a publication runs the gate is held, and open again afterwards, also where it failed."""
    saga = Saga()
    held: list[bool] = []

    async def hook(_point: str) -> None:
        held.append(saga.fleet._held > 0)

    saga.world.hook = hook
    await saga.publish()
    assert held and all(held)
    assert saga.fleet._held == 0
    for server in saga.servers:
        server.sums = {}
    with pytest.raises(PublicationFailed):
        await saga.publisher.publish(2, "/x", step=1)
    assert saga.fleet._held == 0


def _order(saga: Saga) -> list[str]:
    """What was called, an engine's name left out."""
    return list(dict.fromkeys(call if call.startswith("trainer") else call.split()[1] for call in saga.world.log))


async def test_what_can_be_done_while_engines_generate_is_done_then() -> None:
    """Staged: export, staging, and the switch, which nobody pauses for. Blocking: everything lies inside the pause."""
    staged, mixed, blocking = Saga(way="staged"), Saga(way="mixed"), Saga(way="blocking")
    for saga in (staged, mixed, blocking):
        assert set((await saga.publish()).engines) == {"engine-0", "engine-1"}  # type: ignore[attr-defined]
        saga.assert_nothing_paused()
    assert _order(staged) == ["trainer export", "stage", "switch"] and not staged.journal.records
    assert _order(mixed) == ["trainer export", "stage", "switch", "pause", "load", "version", "checksums", "end"]
    assert {record["engine"] for record in mixed.journal.records} == {"engine-1"}
    assert _order(blocking) == ["pause", "trainer export", "load", "version", "checksums", "end"]


@pytest.mark.parametrize("error", [Rejected("engine-0", "switch", 400), NotSent("engine-0", "switch", "refused")])
async def test_an_engine_that_has_not_switched_is_paused_and_loaded(error: EngineError) -> None:
    """Refused or never sent: nothing has changed there, so that it gets the weights in the same publication."""
    saga = Saga(way="staged")
    saga.servers[0].switch_error = error
    result = await saga.publish()
    assert not result.degraded and result.engines == ("engine-1", "engine-0")  # type: ignore[attr-defined]
    assert saga.sink.names() == ["switch_failed"]
    assert [record["engine"] for record in saga.journal.records] == ["engine-0", "engine-0"]
    assert [server.version for server in saga.servers] == ["1", "1"]
    saga.assert_nothing_paused()


async def test_a_switch_of_unknown_outcome_takes_the_engine_out_until_it_is_loaded() -> None:
    """It serves one version or the other: the publication goes on without it, and `bring_up` makes sure."""
    saga = Saga(way="staged")
    saga.servers[0].switch_error = OutcomeUnknown("engine-0", "switch", "reset")
    result = await saga.publish()
    engine = saga.fleet.engines[0]
    assert result.degraded and result.engines == ("engine-1",)  # type: ignore[attr-defined]
    assert engine.state.version is None and engine.state.remedy == "publish" and "reset" in engine.state.reason
    assert not saga.journal.records and saga.sidecars[0].fenced == 0
    await saga.publisher.bring_up(engine)
    assert engine.state.version == 1 and saga.servers[0].version == "1"
    saga.assert_nothing_paused()


async def test_c07_a_switch_to_other_weights_than_published_is_not_believed() -> None:
    """U15: what the engine says that it serves is compared, version and each checksum, before it gets a prompt."""
    saga = Saga(way="staged")
    saga.servers[0].sums = {"a": "1"}
    await saga.publish()
    assert [engine.state.version for engine in saga.fleet.engines] == [None, 1]
    assert "checksum differs for b" in saga.fleet.engines[0].state.reason


async def test_what_a_switch_costs_is_what_the_engine_says() -> None:
    """pause_s is the standstill; the request itself, during which engines generate, is transfer_s."""
    saga = Saga(way="staged")

    async def slow(point: str) -> None:
        await anyio.sleep(0.02 if point == "engine-0 switch: before send" else 0)

    saga.world.hook = slow
    await saga.publish()
    result = saga.sink.publications[0]
    assert result.pause_s == 0.001 and result.transfer_s >= 0.02 and result.swap_s == result.transfer_s


async def test_drained_engines_stand_still_for_the_whole_request() -> None:
    """Nothing is in flight and no prompt is let in: pause_s is what the request took, and they are told to retract."""
    saga, asked = Saga(way="staged", mode="drain"), list[str]()
    first = saga.servers[0].switch

    async def switch(snapshot: WeightSnapshot, mode: PauseMode) -> ServedWeights:
        asked.append(mode)
        await anyio.sleep(0.02)
        return await first(snapshot, mode)

    saga.servers[0].switch = switch  # type: ignore[method-assign]
    await saga.publish()
    result = saga.sink.publications[0]
    assert asked == ["drain"] and result.pause_s == result.transfer_s >= 0.02


async def test_a_delta_that_is_not_switched_to_is_followed_by_everything() -> None:
    """Started anew between staging and switch: complete weights are written, and loaded under a pause."""
    saga = Saga(way="delta")
    await saga.publish(1)
    saga.trainer.base = 1
    saga.servers[0].switch_error = Rejected("engine-0", "switch", 400)
    result = await saga.publish(2)
    assert result.engines == ("engine-1", "engine-0") and result.kind == "delta"  # type: ignore[attr-defined]
    assert [server.staged[-1] for server in saga.servers] == [(2, 1), (2, 1)]
    assert saga.trainer.published == [2] and [server.version for server in saga.servers] == ["2", "2"]
    assert [record["engine"] for record in saga.journal.records] == ["engine-0", "engine-0"]


@virtual
async def test_the_times_of_a_publication_say_where_they_were_spent() -> None:
    """Staged: export_s and stage_s make up prepare_s. Blocking: all of it is in transfer_s."""

    async def slow(point: str) -> None:
        await anyio.sleep(0.02 if point in ("trainer export: before send", "engine-0 stage: before send") else 0)

    for way in ("staged", "blocking"):
        saga = Saga(way=way)
        saga.world.hook = slow
        await saga.publish()
        result = saga.sink.publications[0]
        assert result.export_s == pytest.approx(0.02)
        assert (result.kind, result.bytes, result.full_bytes) == ("full", 8, 80)
        if way == "staged":
            assert result.stage_s == pytest.approx(0.02)
            assert result.prepare_s == pytest.approx(result.export_s + result.stage_s)
        else:
            assert result.prepare_s == 0.0 and result.transfer_s == pytest.approx(0.02)
            assert result.transfer_s <= result.pause_s


async def test_an_export_that_fails_under_the_pause_resumes_every_engine() -> None:
    """Blocking: the error ends the publication, not before every engine runs again; workers hear that it is off."""
    saga = Saga(way="blocking")
    saga.trainer.error = CheckpointError("no space")
    with pytest.raises(BaseExceptionGroup) as caught:
        await saga.publish()
    assert caught.value.subgroup(CheckpointError) is not None
    saga.assert_nothing_paused()
    assert saga.trainer.decisions == [(0, 1, False)]
    assert len(saga.fleet.verified) == 0
