"""Staged and delta transfers: what is prepared while engines generate, by whom, and what happens where it can't be."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kit import CHECKSUMS, FakeServer, FakeTrainer, RecordingSink, World, make_fleet

from hybridasync.config.publication import PublicationSection
from hybridasync.drivers.fleet import Engine
from hybridasync.drivers.staged import DeltaTransfer, StagedTransfer, transfer_by_disk
from hybridasync.drivers.transfer import DiskTransfer
from hybridasync.errors import CheckpointError, NotSent, Rejected
from hybridasync.types import WeightSnapshot


@dataclass
class Bench:
    """Two engines that can stage and hold version 3, and a trainer that exports deltas to it."""

    settings: PublicationSection
    world: World = field(default_factory=World)
    sink: RecordingSink = field(default_factory=RecordingSink)

    def __post_init__(self) -> None:
        fleet, self.servers, _ = make_fleet(self.world)
        self.engines: tuple[Engine, ...] = fleet.engines
        self.trainer: Any = FakeTrainer()
        self.trainer.base = 3 if self.settings.delta else None
        for engine, server in zip(self.engines, self.servers, strict=True):
            server.can_stage = True
            engine.state.verified(3)
        self.transfer: Any = transfer_by_disk(self.settings, self.trainer, self.sink)

    async def publish(self, version: int = 4) -> tuple[WeightSnapshot, set[str]]:
        """Version 4 to both; answers who staged it. The others are loaded."""
        snapshot = await self.transfer.export(version, "path")
        ready = await self.transfer.stage(self.engines, snapshot)
        for engine in self.engines:
            if engine.name in ready:
                await engine.server.switch(snapshot, "retract")
        left = [engine for engine in self.engines if engine.name not in ready]
        assert await self.transfer.load(left, snapshot) == {}
        return snapshot, set(ready)


def staged(servers: list[FakeServer]) -> list[list[tuple[int, int | None]]]:
    return [server.staged for server in servers]


DELTA = PublicationSection(delta=True)
BOTH = {"engine-0", "engine-1"}


def test_the_settings_choose_the_transfer() -> None:
    """delta, staged or neither; blocking runs come here with staged off."""
    kinds = [type(Bench(PublicationSection(**chosen)).transfer) for chosen in ({}, {"staged": False}, {"delta": True})]
    assert kinds == [StagedTransfer, DiskTransfer, DeltaTransfer]


async def test_every_engine_stages_and_none_is_loaded() -> None:
    """Both stage while they generate, and say so."""
    bench = Bench(PublicationSection())
    assert (await bench.publish())[1] == BOTH
    assert staged(bench.servers) == [[(4, None)], [(4, None)]]
    calls = [entry.split()[1] for entry in bench.world.log]
    assert calls == ["stage", "stage", "switch", "switch"]


async def test_staging_that_fails_is_an_event_and_no_failure() -> None:
    """An engine that refuses to stage loads under the pause; the other one isn't held up."""
    bench = Bench(PublicationSection())
    bench.servers[0].stage_error = Rejected("engine-0", "stage", 400)
    assert (await bench.publish())[1] == {"engine-1"}
    assert staged(bench.servers) == [[], [(4, None)]] and bench.sink.names() == ["staging_failed"]
    assert [server.version for server in bench.servers] == ["4", "4"]


async def test_engines_at_the_base_get_what_changed_and_others_everything() -> None:
    """Two engines at different versions: one stages the delta, the other complete weights, written once for it."""
    bench = Bench(DELTA)
    bench.engines[1].state.verified(2)
    snapshot, ready = await bench.publish()
    assert (snapshot.base_version, snapshot.bytes, snapshot.full_bytes) == (3, 8, 80) and ready == BOTH
    assert staged(bench.servers) == [[(4, 3)], [(4, None)]]
    assert bench.trainer.published == [4] and bench.sink.events[0][0] == "delta_not_applied"


async def test_a_delta_that_is_refused_is_followed_by_everything() -> None:
    """Any mismatch at the engine falls back to complete weights, which it stages where it can."""
    bench = Bench(DELTA)
    bench.servers[0].can_stage = False  # as SGLang
    refuse: Any = bench.servers[1]
    first = refuse.stage

    async def stage(snapshot: WeightSnapshot) -> bool:
        if snapshot.base_version is not None:
            raise Rejected("engine-1", "stage", 400)
        return bool(await first(snapshot))

    refuse.stage = stage
    assert (await bench.publish())[1] == {"engine-1"}
    assert staged(bench.servers) == [[], [(4, None)]] and bench.trainer.published == [4]
    assert [server.version for server in bench.servers] == ["4", "4"]


async def test_a_new_engine_gets_everything_without_staging() -> None:
    """What is loaded without being staged, as for an engine that comes back, is complete."""
    bench = Bench(DELTA)
    snapshot = await bench.transfer.export(4, "path")
    assert await bench.transfer.load(bench.engines[:1], snapshot) == {}
    assert bench.trainer.published == [4] and bench.servers[0].version == "4"


async def test_complete_weights_that_cannot_be_written_fail_those_engines_alone() -> None:
    """The engine that staged the delta has it; to the other one nothing was sent, and that is what is said."""
    bench = Bench(DELTA)

    async def full(version: int, path: str) -> int:
        raise CheckpointError("no space")

    snapshot = await bench.transfer.export(4, "path")
    assert await bench.transfer.stage(bench.engines[:1], snapshot) == {"engine-0"}
    bench.trainer.export_published = full
    failures = await bench.transfer.load(bench.engines[1:], snapshot)
    assert list(failures) == ["engine-1"] and isinstance(failures["engine-1"], NotSent)
    assert [server.version for server in bench.servers] == ["default", "default"]


async def test_complete_exports_need_nothing_more() -> None:
    """Where the trainer wrote everything, as at the start, no second file is asked for."""
    bench = Bench(DELTA)
    bench.trainer.base = None
    snapshot, ready = await bench.publish()
    assert snapshot.checksums == CHECKSUMS and ready == BOTH and bench.trainer.published == []
