"""Weights that engines prepare while they generate, complete or as what changed: they only switch then.

    export ─▶ stage: [delta where the engine holds its base] ─▶ [complete where that failed] ─▶ switch

Nothing here has to succeed: an engine that couldn't stage loads complete weights under a pause, as with DiskTransfer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import anyio

from hybridasync.config.publication import PublicationSection
from hybridasync.drivers.fleet import Engine
from hybridasync.drivers.transfer import DiskTransfer, Transfer
from hybridasync.errors import CheckpointError, EngineError, NotSent
from hybridasync.ports import MetricSink, Trainer
from hybridasync.types import WeightSnapshot


class StagedTransfer(DiskTransfer):
    """A snapshot in shared memory or a shared folder that engines read while they generate."""

    def __init__(self, trainer: Trainer, sink: MetricSink) -> None:
        super().__init__(trainer)
        self._trainer = trainer
        self._sink = sink

    async def stage(self, engines: Sequence[Engine], snapshot: WeightSnapshot) -> frozenset[str]:
        done: set[str] = set()

        async def stage(engine: Engine) -> None:
            try:
                if await engine.server.stage(snapshot):
                    done.add(engine.name)
            except EngineError as error:
                fields = {"engine": engine.name, "version": snapshot.version, "cause": str(error)}
                self._sink.event("staging_failed", level="warning", **fields)

        async with anyio.create_task_group() as tasks:
            for engine in engines:
                tasks.start_soon(stage, engine)
        return frozenset(done)


class DeltaTransfer(StagedTransfer):
    """As `StagedTransfer`, but the snapshot may hold only what changed. The trainer can always write the rest."""

    def __init__(self, trainer: Trainer, sink: MetricSink) -> None:
        super().__init__(trainer, sink)
        self._whole: WeightSnapshot | None = None  # the last one of which complete weights were asked for

    async def stage(self, engines: Sequence[Engine], snapshot: WeightSnapshot) -> frozenset[str]:
        base = snapshot.base_version
        ready = await super().stage([e for e in engines if base is None or e.state.version == base], snapshot)
        left = [engine for engine in engines if engine.name not in ready]
        if base is not None and left:
            names = [engine.name for engine in left]
            self._sink.event("delta_not_applied", version=snapshot.version, base=base, engines=names)
            ready |= await super().stage(left, await self._complete(snapshot))
        return ready

    async def load(self, engines: Sequence[Engine], snapshot: WeightSnapshot) -> Mapping[str, EngineError]:
        """An engine that doesn't switch, a new one say, needs complete weights."""
        if not engines:
            return {}
        try:
            return await super().load(engines, await self._complete(snapshot))
        except CheckpointError as error:
            return {engine.name: NotSent(engine.name, "load", str(error)) for engine in engines}

    async def _complete(self, snapshot: WeightSnapshot) -> WeightSnapshot:
        """The same version with complete weights at its path. Raises CheckpointError if they can't be written."""
        if snapshot.base_version is None:
            return snapshot
        if self._whole is None or self._whole.version != snapshot.version:
            written = await self._trainer.export_published(snapshot.version, snapshot.path)
            self._whole = replace(snapshot, bytes=written, base_version=None)
        return self._whole


def transfer_by_disk(settings: PublicationSection, trainer: Trainer, sink: MetricSink) -> Transfer:
    """What the settings ask for."""
    if settings.delta:
        return DeltaTransfer(trainer, sink)
    return StagedTransfer(trainer, sink) if settings.staged else DiskTransfer(trainer)
