"""Engines, trainer and stores that cost nothing: what remains is the cost of the control plane."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio.lowlevel

from hybridasync.drivers.fleet import Engine
from hybridasync.errors import EngineError
from hybridasync.types import (
    Completion,
    PauseMode,
    Prompt,
    SamplingParams,
    ServedWeights,
    SidecarStatus,
    StepResult,
    TrainBatch,
    TrainerInfo,
    TrainSample,
    VersionSpan,
    WeightSnapshot,
)

CHECKSUMS = {"weight": "0"}


class FreeServer:
    """Implements InferenceServer: every completion is two tokens of the version that was loaded last."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.base_url = "http://fake"
        self._version = "default"

    async def generate(self, rid: str, input_ids: Sequence[int], params: SamplingParams) -> tuple[Completion, ...]:
        await anyio.lowlevel.checkpoint()
        version = int(self._version) if self._version.isdecimal() else 0
        one = Completion((10, 11), (-0.5, -0.5), (VersionSpan(version, 0, 2),), "stop", self.name)
        return (one,) * params.n

    async def abort(self, rid: str) -> None: ...

    async def stage(self, snapshot: WeightSnapshot) -> bool:
        return False

    async def switch(self, snapshot: WeightSnapshot, mode: PauseMode) -> ServedWeights:
        await self.update_weights(snapshot)
        return await self.read_back()

    async def update_weights(self, snapshot: WeightSnapshot) -> None:
        await anyio.lowlevel.checkpoint()
        self._version = str(snapshot.version)

    async def weight_version(self) -> str:
        await anyio.lowlevel.checkpoint()
        return self._version

    async def checksums(self) -> Mapping[str, str]:
        await anyio.lowlevel.checkpoint()
        return CHECKSUMS

    async def read_back(self) -> ServedWeights:
        return ServedWeights(await self.weight_version(), await self.checksums())

    async def in_flight(self) -> int:
        return 0

    async def healthy(self) -> bool:
        return True

    async def moved(self, base_url: str) -> None: ...


class FreeSidecar:
    """Implements Sidecar, in this process."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def status(self) -> SidecarStatus:
        await anyio.lowlevel.checkpoint()
        return SidecarStatus("", "fake", "running", None, None, None, None, None, False, True)

    async def pause(self, txn: str, mode: PauseMode, lease_s: float) -> bool:
        await anyio.lowlevel.checkpoint()
        return True

    async def renew(self, txn: str, lease_s: float) -> None:
        await anyio.lowlevel.checkpoint()

    async def end(self, txn: str | None) -> None:
        await anyio.lowlevel.checkpoint()

    async def recover(self, timeout_s: float) -> None: ...

    async def fence(self, txns: Sequence[str] = ()) -> None: ...


class FreeTransfer:
    """Implements Transfer: there is nothing to bring."""

    async def export(self, version: int, path: str) -> WeightSnapshot:
        await anyio.lowlevel.checkpoint()
        return WeightSnapshot(version, path, CHECKSUMS, 8, 0.0)

    async def written(self, snapshot: WeightSnapshot) -> WeightSnapshot:
        return snapshot

    async def stage(self, engines: Sequence[Engine], snapshot: WeightSnapshot) -> frozenset[str]:
        return frozenset()

    async def load(self, engines: Sequence[Engine], snapshot: WeightSnapshot) -> Mapping[str, EngineError]:
        for engine in engines:
            await engine.server.update_weights(snapshot)
        return {}


class FreeTrainer:
    """Implements Trainer."""

    async def setup(self) -> TrainerInfo:
        return TrainerInfo(8, 16, 64, 1, 1, 1, "none", {})

    async def start_phase(self, phase: str, total_steps: int) -> None: ...

    async def train_step(self, batch: TrainBatch) -> StepResult:
        await anyio.lowlevel.checkpoint()
        return StepResult(batch.step, True, {"loss": 0.0})

    async def logprobs(self, samples: Sequence[TrainSample]) -> list[list[float]]:
        return [list(sample.rollout_logprobs) for sample in samples]

    async def reference_logprobs(self, samples: Sequence[TrainSample]) -> list[list[float]]:
        return await self.logprobs(samples)

    async def export_weights(self, version: int, path: str) -> WeightSnapshot:
        return WeightSnapshot(version, path, CHECKSUMS, 8, 0.0)

    async def write_weights(self, version: int, path: str) -> WeightSnapshot:
        return await self.export_weights(version, path)

    async def export_published(self, version: int, path: str) -> int:
        return 8

    async def clear_cache(self) -> None: ...

    async def decide(self, epoch: int, *, version: int, commit: bool) -> None:
        await anyio.lowlevel.checkpoint()

    async def save_checkpoint(self, path: str) -> None: ...

    async def load_checkpoint(self, path: str) -> None: ...

    async def export_hf(self, path: str) -> None: ...

    async def memory(self) -> Mapping[str, float]:
        return {}

    async def close(self) -> None: ...


class NoStore:
    """Implements CheckpointStore and SnapshotFolder, without files."""

    def begin(self, step: int) -> Path:
        return Path(str(step))

    def commit(self, step: int, state: Mapping[str, Any]) -> Path:
        return self.begin(step)

    def verified_state(self, path: Path) -> dict[str, Any]:
        return {}

    def latest(self) -> Path | None:
        return None

    def path(self, version: int) -> str:
        return str(version)

    def drop_all_but(self, newest: int) -> None: ...


class NoJournal:
    """Implements Journal, without a disk."""

    def append(self, record: Mapping[str, Any]) -> None: ...

    def replay(self) -> list[dict[str, Any]]:
        return []


class Counter:
    """Implements PromptSource: endless."""

    def __init__(self) -> None:
        self._next = 0

    def draw(self) -> Prompt | None:
        self._next += 1
        return Prompt(self._next, self._next, 0, "fake", (1, 2, 3), "a prompt", "an answer")

    def state(self, unused: Iterable[int] = ()) -> dict[str, Any]:
        return {"next": self._next, "unused": sorted(unused)}

    def restore(self, state: Mapping[str, Any]) -> None: ...


class Parity:
    """Implements RewardFn and Tokenizer."""

    async def __call__(self, prompt: Prompt, texts: Sequence[str], completions: Sequence[Completion]) -> list[float]:
        return [float(index % 2) for index in range(len(texts))]

    def decode(self, ids: Sequence[int]) -> str:
        return "an answer"
