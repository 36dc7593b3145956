"""Health and recovery on the virtual clock: real drivers and real sidecar logic beside simulated engines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import anyio
import pytest
from kit import MemoryJournal, RecordingSink
from tests.virtual_clock import virtual

from hybridasync.config.models import EngineSection
from hybridasync.config.publication import PublicationSection
from hybridasync.drivers.fleet import Engine, Fleet
from hybridasync.drivers.generation import GroupRequest, generate_group
from hybridasync.drivers.health import Health
from hybridasync.drivers.publish import Publisher, PublishParts
from hybridasync.drivers.recovery import Recovery
from hybridasync.drivers.staged import transfer_by_disk
from hybridasync.errors import EngineError, PublicationFailed
from hybridasync.protocol.debts import Debts
from hybridasync.sim.engine import SimEngine, Speed, checksums_of, token_of
from hybridasync.sim.network import Life, Network, SimServer, SimSidecar, Weather
from hybridasync.sim.node import SimNode
from hybridasync.types import Completion, SamplingParams, WeightSnapshot

CONTROL_S = 30.0


class Trainer:
    async def decide(self, epoch: int, *, version: int, commit: bool) -> None: ...

    async def export_weights(self, version: int, path: str) -> WeightSnapshot:
        return WeightSnapshot(version, path, checksums_of(version), 8, 0.0)


class Rollouts:
    """Nodes, a fleet over them, and the drivers that keep it alive."""

    def __init__(
        self,
        tasks: anyio.abc.TaskGroup,
        count: int,
        *,
        stages: tuple[int, ...] = (),
        lease_s: float = 60.0,
        **settings: object,
    ) -> None:
        """`stages`: engines that prepare weights and switch."""
        self.settings = EngineSection(**{"use_fault_tolerance": True, "generation_probe_s": 20.0, **settings})
        self.weather = Weather(Random(0))
        network, life = Network(self.weather, tasks), Life()
        self.nodes = [
            SimNode(f"engine-{i}", Speed(), Random(i), snapshots=lambda _: True, stages=i in stages)
            for i in range(count)
        ]
        for node in self.nodes:
            tasks.start_soon(node.run)
        self.servers = [SimServer(node, network, life, CONTROL_S, 600.0) for node in self.nodes]
        sidecars = [SimSidecar(node, network, life, CONTROL_S) for node in self.nodes]
        self.fleet = Fleet([Engine(s, c) for s, c in zip(self.servers, sidecars, strict=True)])
        self.sink, self.debts, self.journal = RecordingSink(), Debts(), MemoryJournal()
        trainer: Any = Trainer()
        publication = PublicationSection(rollout_http_timeout=CONTROL_S, drain_timeout_s=60.0, lease_s=lease_s)
        transfer = transfer_by_disk(publication, trainer, self.sink)
        parts = PublishParts(self.fleet, trainer, transfer, self.journal, self.debts, self.sink)
        self.publisher = Publisher(publication, parts, session="0" * 32, mode="retract")
        self.health = Health(self.settings, self.fleet, self.sink)
        self.recovery = Recovery(self.settings, self.fleet, self.publisher, sink=self.sink)

    def engine(self, index: int) -> SimEngine:
        engine = self.nodes[index].engine
        assert engine is not None
        return engine

    async def publish(self, version: int) -> None:
        await self.publisher.publish(version, f"/{version}", step=version - 1)

    async def until(self, condition: Callable[[], bool], limit_s: float = 600.0) -> float:
        started = anyio.current_time()
        with anyio.fail_after(limit_s):
            while not condition():  # noqa: ASYNC110  # anything may be the condition, and polling is free here
                await anyio.sleep(0.05)
        return anyio.current_time() - started

    @property
    def versions(self) -> list[int | None]:
        return [engine.state.version for engine in self.fleet.engines]


@asynccontextmanager
async def rollouts(count: int = 2, **settings: Any) -> AsyncIterator[Rollouts]:
    """Started, published to at version 1, and watched."""
    async with anyio.create_task_group() as tasks:
        rig = Rollouts(tasks, count, **settings)
        await anyio.sleep(6.0)
        for server in rig.servers:
            await server.moved("")
        await rig.publish(1)
        tasks.start_soon(rig.health.run)
        tasks.start_soon(rig.recovery.run)
        yield rig
        assert not rig.debts.open
        assert all(node.control.machine.idle for node in rig.nodes if node.up)
        tasks.cancel_scope.cancel()


def request(tokens: int = 200, *, n: int = 4, retries: int = 2) -> GroupRequest:
    return GroupRequest((1, 2), SamplingParams(tokens, n=n), partial_rollout=True, max_retries=retries)


async def whole_groups(rig: Rollouts, count: int, into: list[tuple[Completion, ...]]) -> None:
    async def one() -> None:
        into.append(await generate_group(rig.fleet, request()))

    async with anyio.create_task_group() as tasks:
        for _ in range(count):
            tasks.start_soon(one)


@virtual
async def test_r109_a_killed_engine_comes_back_with_the_newest_version() -> None:
    """Respawned through its sidecar; it gets no prompt before version 1 is verified on it; the groups are whole."""
    async with rollouts() as rig, anyio.create_task_group() as tasks:
        groups: list[tuple[Completion, ...]] = []
        tasks.start_soon(whole_groups, rig, 8, groups)
        await anyio.sleep(1.0)
        first = rig.engine(0)
        first.kill()
        await rig.until(lambda: rig.versions[0] is None, 5.0)
        await rig.until(lambda: rig.versions == [1, 1])
        assert rig.engine(0) is not first and rig.engine(0).loaded == [1]
        await rig.until(lambda: len(groups) == 8)
        assert all(len(group) == 4 for group in groups)
        assert {t for group in groups for c in group for t in c.output_ids} == {token_of(1)}
        assert "engine_recovered" in rig.sink.names()


@virtual
async def test_r109_with_every_engine_away_prompts_wait_and_are_made_once_one_is_back() -> None:
    """The only engine dies: no group is dropped although every request failed, and a publication meanwhile degrades."""
    async with rollouts(1) as rig, anyio.create_task_group() as tasks:
        groups: list[tuple[Completion, ...]] = []
        tasks.start_soon(whole_groups, rig, 4, groups)
        await anyio.sleep(1.0)
        rig.engine(0).kill()
        await rig.until(lambda: rig.versions == [None], 5.0)
        with pytest.raises(PublicationFailed):
            await rig.publish(2)
        await rig.until(lambda: len(groups) == 4)
        assert rig.versions == [2], "the newest exported version, although its publication found no engine"


@virtual
async def test_r109_too_few_engines_for_too_long_end_the_run_with_the_cause() -> None:
    """An engine that can't be started again: EngineError after recovery_timeout_s, naming it and the cause."""
    with pytest.raises(BaseExceptionGroup) as caught:
        async with rollouts(1, recovery_timeout_s=100.0) as rig:
            rig.nodes[0].host.broken = True
            died_at = anyio.current_time()
            rig.engine(0).kill()
            try:
                await anyio.sleep_forever()
            finally:
                took_s = anyio.current_time() - died_at
    (error,) = caught.value.split(EngineError)[0].exceptions  # type: ignore[union-attr]
    while isinstance(error, BaseExceptionGroup):
        (error,) = error.exceptions
    assert "engine-0: recovery" in str(error) and "out of memory" in str(error)
    assert 100.0 <= took_s < 106.0


@virtual
async def test_without_fault_tolerance_a_dead_engine_ends_the_run_naming_it() -> None:
    """The default: fewer than min_healthy_engines are left, EngineError names the engine within an interval."""
    with pytest.raises(BaseExceptionGroup) as caught:
        async with rollouts(1, use_fault_tolerance=False) as rig:
            rig.engine(0).kill()
            await anyio.sleep(60.0)
    assert caught.group_contains(EngineError, match="engine-0: health: the engine ended with SIGKILL")


@virtual
async def test_c11_d_a_frozen_engine_with_a_healthy_server_is_found_and_its_requests_are_made_elsewhere() -> None:
    """Its /ready answers, no token comes: dead after generation_probe_s × health_failures, plus two seconds."""
    async with rollouts(health_interval_s=1.0) as rig, anyio.create_task_group() as tasks:
        groups: list[tuple[Completion, ...]] = []
        tasks.start_soon(whole_groups, rig, 8, groups)
        await anyio.sleep(1.0)
        frozen = rig.engine(0)
        frozen.freeze()
        took_s = await rig.until(lambda: rig.versions[0] is None)
        assert 20.0 < took_s < 20.0 * 3 + 2
        await rig.until(lambda: len(groups) == 8)
        await rig.until(lambda: rig.versions == [1, 1])
        assert not frozen.alive


@virtual
async def test_c11_a_a_stopped_process_is_fenced_after_consecutive_failures_only() -> None:
    """SIGSTOP: one failed probe changes nothing; after three the engine is killed, restarted and published to."""
    async with rollouts() as rig:
        stopped = rig.engine(1)
        stopped.stop()
        await anyio.sleep(8.0)
        stopped.stop(False)
        await anyio.sleep(30.0)
        assert rig.versions == [1, 1] and stopped.alive
        stopped.stop()
        await rig.until(lambda: rig.versions[1] is None)
        await rig.until(lambda: rig.versions == [1, 1])
        assert not stopped.alive


@virtual
async def test_c11_b_a_probe_that_crosses_a_publication_says_nothing() -> None:
    """R69: a publication in which the engine answers no probe: nobody is killed, and monitoring goes on after it."""
    async with rollouts(health_interval_s=1.0) as rig:
        slow = rig.engine(0)
        update = slow.update_weights

        async def mute(snapshot: WeightSnapshot) -> None:
            rig.weather.partitioned.add("engine-0")
            await anyio.sleep(25.0)
            rig.weather.partitioned.clear()
            await update(snapshot)

        slow.update_weights = mute  # type: ignore[method-assign]
        await rig.publish(2)
        await anyio.sleep(20.0)
        assert slow.alive and rig.versions == [2, 2]
        rig.engine(0).kill()
        await rig.until(lambda: rig.versions[0] is None, 3.0)
        await rig.until(lambda: rig.versions == [2, 2])


@virtual
async def test_c11_b_an_engine_that_has_switched_is_believed_while_others_are_still_paused() -> None:
    """Its version is known at once: a monitor that asks for it meanwhile finds what it expects."""
    async with rollouts(stages=(0,), use_fault_tolerance=False, min_healthy_engines=2) as rig:
        rig.engine(1).pause_s = 20.0
        await rig.publish(2)
        assert rig.versions == [2, 2] and rig.engine(0).loaded == [1, 2]
        assert "engine_unhealthy" not in rig.sink.names()


@virtual
async def test_law_4_an_engine_that_has_switched_and_died_is_brought_up_like_any_other() -> None:
    """It dies while another one is being paused: its successor gets no prompt before weights were loaded to it."""
    async with rollouts(stages=(0,)) as rig, anyio.create_task_group() as tasks:
        rig.engine(1).pause_s = 20.0
        tasks.start_soon(rig.publish, 2)
        await rig.until(lambda: rig.versions[0] == 2)
        first = rig.engine(0)
        first.kill()
        await rig.until(lambda: rig.versions[0] is None)
        await rig.until(lambda: rig.versions == [2, 2])
        assert rig.engine(0) is not first and rig.engine(0).loaded == [2]


@virtual
async def test_law_4_a_pause_that_cannot_be_kept_counts_as_over_before_its_lease_ends() -> None:
    """Its sidecar will resume the engine while another one is still being paused: nobody loads to it, or believes it.

    (Seed 43533: an answer that was made in the middle of such a load was trained on.)
    """
    async with rollouts(lease_s=5.0) as rig, anyio.create_task_group() as tasks:
        rig.engine(1).pause_s = 20.0
        tasks.start_soon(rig.publish, 2)
        await rig.until(lambda: rig.engine(0).paused)
        rig.weather.partitioned.add("engine-0")
        assert await rig.until(lambda: rig.versions[0] is None) <= 5.0
        assert rig.engine(0).paused and rig.engine(0).loaded == [1]
        assert "renewed" in rig.fleet.engines[0].state.reason
        await rig.until(lambda: not rig.engine(0).paused, 1.0)
        rig.weather.partitioned.clear()
        await rig.until(lambda: rig.versions[1] == 2)
        assert rig.engine(0).loaded == [1]
        await rig.until(lambda: rig.versions == [2, 2])


@virtual
async def test_c11_c_monitoring_goes_on_after_a_failed_publication() -> None:
    """R69, R103: one engine's load fails: it is published to again by itself, and a later death is noticed."""
    async with rollouts() as rig:
        rig.nodes[0]._snapshots = rig.engine(0)._snapshots = lambda path: path != "/2"
        await rig.publish(2)
        assert rig.versions == [None, 2]
        rig.nodes[0]._snapshots = lambda _: True
        await rig.until(lambda: rig.versions == [2, 2])
        rig.engine(1).kill()
        await rig.until(lambda: rig.versions[1] is None, 6.0)
        await rig.until(lambda: rig.versions == [2, 2])


@virtual
async def test_u1_a_fenced_engine_is_published_to_and_routed_to_again() -> None:
    """Its ends are never confirmed: fenced by the saga; recovery brings version 2 to the new process alone."""
    async with rollouts(use_fault_tolerance=False) as rig:
        first = rig.engine(0)
        first_resume = first.resume

        async def never() -> None:
            if first.alive:
                raise EngineError("engine-0", "resume", "scripted")
            await first_resume()

        first.resume = never  # type: ignore[method-assign]
        await rig.publish(2)
        assert rig.versions == [None, 2] and not first.alive
        await rig.until(lambda: rig.versions == [2, 2])
        assert rig.engine(0).loaded == [2]


@virtual
async def test_law_4_nothing_that_a_torn_engine_makes_is_used() -> None:
    """U15, R68: requests live through a publication (retract) that leaves the engine torn: they are made elsewhere."""
    async with rollouts() as rig, anyio.create_task_group() as tasks:
        groups: list[tuple[Completion, ...]] = []
        tasks.start_soon(whole_groups, rig, 8, groups)
        await anyio.sleep(1.0)
        torn = rig.engine(0)
        update = torn.update_weights

        async def half(snapshot: WeightSnapshot) -> None:
            await update(WeightSnapshot(snapshot.version, snapshot.path, {"layer": "layer@2"}, 8, 0.0))

        torn.update_weights = half  # type: ignore[method-assign]
        await rig.publish(2)
        assert rig.versions == [None, 2]
        await rig.until(lambda: len(groups) == 8)
        tokens = {t for group in groups for c in group for t in c.output_ids}
        assert tokens <= {token_of(1), token_of(2)}


@virtual
async def test_an_engine_that_was_restarted_behind_our_back_gets_no_prompt() -> None:
    """Its sidecar restarted it at once: healthy, but with the weights of its start. It is found and published to."""
    async with rollouts() as rig:
        rig.engine(0).kill()
        await rig.nodes[0].control.recover(60.0)
        await rig.until(lambda: rig.engine(0).loaded == [1])
        await rig.until(lambda: rig.versions == [1, 1])
        assert rig.engine(0).loaded == [1]


@virtual
async def test_c01_a_pause_that_ended_during_the_swap_leaves_the_engine_in_doubt() -> None:
    """The lease ran out between load and verification: the engine isn't re-admitted by this publication."""
    async with rollouts() as rig:
        engine = rig.engine(0)
        checksums = engine.checksums

        async def ended_meanwhile() -> object:
            await rig.nodes[0].control.end(rig.nodes[0].control.machine.holder.txn)  # type: ignore[union-attr]
            return await checksums()

        engine.checksums = ended_meanwhile  # type: ignore[method-assign, assignment]
        await rig.publish(2)
        assert rig.versions == [None, 2]
        engine.checksums = checksums  # type: ignore[method-assign]
        await rig.until(lambda: rig.versions == [2, 2])
