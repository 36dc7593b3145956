"""How weights get from the trainer to the engines: the part of a publication that differs by transport.

export ─▶ stage   (engines generate)   ─▶   load   (engines that staged nothing, paused)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import anyio

from hybridasync.drivers.fleet import Engine
from hybridasync.errors import EngineError
from hybridasync.ports import Trainer, WeightSender
from hybridasync.types import SendTarget, WeightSnapshot


class Transfer(Protocol):
    """One way of bringing weights to engines. Whatever it does, the saga verifies version and checksums afterwards."""

    async def export(self, version: int, path: str) -> WeightSnapshot:
        """Take the trainer's weights as `version`, by way of the folder `path` where files are needed.

        The trainer may then change them, and `written` completes the snapshot.
        """
        ...

    async def written(self, snapshot: WeightSnapshot) -> WeightSnapshot:
        """The same, with its files and checksums."""
        ...

    async def stage(self, engines: Sequence[Engine], snapshot: WeightSnapshot) -> frozenset[str]:
        """What can be done while the engines generate: the names of those that can switch to the snapshot then."""
        ...

    async def load(self, engines: Sequence[Engine], snapshot: WeightSnapshot) -> Mapping[str, EngineError]:
        """Bring the weights into effect on paused engines; the failures by engine, one not holding up another."""
        ...


class DiskTransfer:
    """A versioned snapshot in shared memory or a shared folder, read by each engine (`/update_weights_from_disk`)."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    async def export(self, version: int, path: str) -> WeightSnapshot:
        return await self._trainer.export_weights(version, path)

    async def written(self, snapshot: WeightSnapshot) -> WeightSnapshot:
        return await self._trainer.write_weights(snapshot.version, snapshot.path) if snapshot.pending else snapshot

    async def stage(self, engines: Sequence[Engine], snapshot: WeightSnapshot) -> frozenset[str]:
        """Nothing: SGLang reads and installs in one call."""
        return frozenset()

    async def load(self, engines: Sequence[Engine], snapshot: WeightSnapshot) -> Mapping[str, EngineError]:
        failures: dict[str, EngineError] = {}

        async def load(engine: Engine) -> None:
            try:
                await engine.server.update_weights(snapshot)
            except EngineError as error:
                failures[engine.name] = error

        async with anyio.create_task_group() as tasks:
            for engine in engines:
                tasks.start_soon(load, engine)
        return failures


class SentTransfer(DiskTransfer):
    """The snapshot stays on the trainer's node, and a sender there brings it to each engine (collective, tensor)."""

    def __init__(self, trainer: Trainer, sender: WeightSender) -> None:
        super().__init__(trainer)
        self._sender = sender

    async def load(self, engines: Sequence[Engine], snapshot: WeightSnapshot) -> Mapping[str, EngineError]:
        # An engine without a verified version may be a new process, which is in no group any more.
        targets = [SendTarget(e.name, e.server.base_url, fresh=e.state.version is None) for e in engines]
        return await self._sender.send(targets, snapshot) if targets else {}
