"""A controller over fakes whose calls take time: what tests of publications beside training share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
from loop import TIS, Bench, Trainer, recipe

from hybridasync.config.models import Config
from hybridasync.drivers.training import TrainingLoop
from hybridasync.types import StepResult, TrainBatch, TrainSample, WeightSnapshot


class SerialTrainer(Trainer):
    """One call at a time, in the order in which they were made; one that was given up goes on, as at the workers."""

    def __init__(self, log: list[str]) -> None:
        super().__init__(log)
        self.train_s, self.export_s = 0.001, 0.0
        self._group = anyio.Lock()
        self._busy_until = 0.0

    @asynccontextmanager
    async def _turn(self, seconds: float = 0.0) -> AsyncIterator[None]:
        async with self._group:
            await anyio.sleep_until(self._busy_until)
            self._busy_until = anyio.current_time() + seconds
            yield
            await anyio.sleep_until(self._busy_until)

    async def train_step(self, batch: TrainBatch) -> StepResult:
        async with self._turn(self.train_s):
            result = await super().train_step(batch)
        self.log.append(f"trained {batch.step}")
        return result

    async def export_weights(self, version: int, path: str) -> WeightSnapshot:
        async with self._turn(self.export_s):
            self.log.append(f"export {version}")
            return await super().export_weights(version, path)

    async def decide(self, epoch: int, *, version: int, commit: bool) -> None:
        async with self._turn():
            await super().decide(epoch, version=version, commit=commit)

    async def logprobs(self, samples: Sequence[TrainSample]) -> list[list[float]]:
        async with self._turn():
            self.log.append("compare")
            return await super().logprobs(samples)


def config_of(steps: int, *, staleness: int = 1, interval: int = 1, **sections: dict[str, Any]) -> Config:
    sections["rollout"] = {"max_staleness": staleness, **sections.get("rollout", {})}
    publication = {"update_weights_interval": interval, "resume_budget_s": 3.0, "rollout_http_timeout": 2.0}
    sections["publication"] = publication | sections.get("publication", {})
    return recipe(steps, **{"algorithm": TIS, **sections})


def bench_of(config: Config, *, train_s: float = 1.0, export_s: float = 0.1, pause_s: float = 0.3) -> Bench:
    """A step takes `train_s`; a publication `export_s`, and `pause_s` in the engine."""
    bench = Bench(config)
    trainer = bench.trainer = SerialTrainer(bench.log)
    trainer.train_s, trainer.export_s = train_s, export_s

    async def hook(point: str) -> None:
        await anyio.sleep(pause_s if point == "engine-0 pause: after send" else 0.0)

    bench.world.hook = hook
    return bench


async def steps_of(loop: TrainingLoop, count: int) -> None:
    for _ in range(count):
        assert await loop.one_step() is not None


def place(log: Sequence[str], entry: str) -> int:
    return list(log).index(entry)
