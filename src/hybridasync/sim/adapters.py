"""What a controller of the virtual world works with beside the network: journal, checkpoints, trainer, prompts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import anyio

from hybridasync.errors import LocalProtocolError, OperatingError, WorkerLost
from hybridasync.protocol.debts import INCURRED, Debt, Debts, must_be_durable
from hybridasync.protocol.decisions import Decisions
from hybridasync.sim.engine import checksums_of
from hybridasync.sim.network import Life
from hybridasync.sim.record import Record
from hybridasync.types import Completion, Prompt, StepResult, TrainBatch, TrainerInfo, TrainSample, WeightSnapshot

CONTEXT_LENGTH = 64
TRAIN_S = 1.0
EXPORT_S = 0.2

STALE_DECISION = 0.2
"""Chance that a worker is told of an older publication once more."""


@dataclass(slots=True)
class Disk:
    """What survives a controller: journal, checkpoints, snapshots."""

    journal: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: dict[int, str] = field(default_factory=dict)
    snapshots: list[str] = field(default_factory=list)
    full: bool = False
    was_full: bool = False
    _read: int = 0
    _debts: Debts = field(default_factory=Debts)

    @property
    def owed(self) -> tuple[Debt, ...]:
        """What the journal leaves open; read on from where the last call ended."""
        for record in self.journal[self._read :]:
            if record["event"] == INCURRED:
                self._debts.incur(record["engine"], record["txn"])
            else:
                self._debts.settle(record["engine"], record["txn"], "read")
        self._read = len(self.journal)
        return self._debts.open


class SimJournal:
    """Implements Journal. A full disk refuses debts, and forgets settlements, as the real one does."""

    def __init__(self, disk: Disk, life: Life) -> None:
        self._disk = disk
        self._life = life

    def append(self, record: Mapping[str, Any]) -> None:
        self._life.check()
        if self._disk.full:
            if must_be_durable(record):
                raise OperatingError("journal: no space left on device")
            return
        self._disk.journal.append(dict(record))

    def replay(self) -> list[dict[str, Any]]:
        return list(self._disk.journal)


class SimTrainer:
    """Implements Trainer, as far as the loop uses it. `lose_at` are steps before which a worker dies, once each."""

    def __init__(self, disk: Disk, life: Life, record: Record, *, lose_at: set[int], rng: Random) -> None:
        self._disk = disk
        self._life = life
        self._record = record
        self._lose_at = lose_at
        self._rng = rng
        self._group = anyio.Lock()  # one call at a time, in their order
        self.completed = 0
        self._decisions = Decisions()
        self._told: list[tuple[int, int, bool]] = []

    async def setup(self) -> TrainerInfo:
        return TrainerInfo(8, 16, CONTEXT_LENGTH, 1, 1, 1, "sim", {})

    async def start_phase(self, phase: str, total_steps: int) -> None:
        await self._work(0.0)

    async def train_step(self, batch: TrainBatch) -> StepResult:
        if batch.step in self._lose_at:
            self._lose_at.discard(batch.step)
            raise WorkerLost(1, "killed", step=batch.step)
        await self._work(TRAIN_S)
        if batch.step != self.completed:
            self._record.violated(f"step {batch.step} applied to weights of {self.completed} steps")
        self._record.check_batch(batch)
        self.completed = batch.step + 1
        return StepResult(batch.step, True, {"loss": 0.0})

    async def logprobs(self, samples: Sequence[TrainSample]) -> list[list[float]]:
        return [list(sample.rollout_logprobs) for sample in samples]

    async def reference_logprobs(self, samples: Sequence[TrainSample]) -> list[list[float]]:
        return await self.logprobs(samples)

    async def export_published(self, version: int, path: str) -> int:
        await self.export_weights(version, path)
        return (await self.write_weights(version, path)).bytes

    async def decide(self, epoch: int, *, version: int, commit: bool) -> None:
        """Now and then an older decision arrives once more, after it."""
        await self._work(0.0)
        self._decisions.take(epoch, version, commit=commit)
        published = self._decisions.published
        if self._told and self._rng.random() < STALE_DECISION:
            old, old_version, old_commit = self._rng.choice(self._told)
            with suppress(LocalProtocolError):
                self._decisions.take(old, old_version, commit=old_commit)
        if self._decisions.published != published:
            self._record.violated(f"workers take {self._decisions.published} for published, and it is {published}")
        self._told.append((epoch, version, commit))

    async def export_weights(self, version: int, path: str) -> WeightSnapshot:
        await self._work(EXPORT_S)
        if path not in self._disk.snapshots:
            self._disk.snapshots.append(path)
        return WeightSnapshot(version, path, {}, 0, EXPORT_S, pending=True)

    async def write_weights(self, version: int, path: str) -> WeightSnapshot:
        """Beside other calls; a kill comes before it or after it."""
        self._life.check()
        await anyio.sleep(EXPORT_S)
        self._life.check()
        return WeightSnapshot(version, path, checksums_of(version), 8, EXPORT_S)

    async def save_checkpoint(self, path: str) -> None:
        await self._work(0.1)

    async def load_checkpoint(self, path: str) -> None:
        self.completed = int(Path(path).parent.name)

    async def export_hf(self, path: str) -> None:
        await self._work(0.0)

    async def clear_cache(self) -> None:
        await self._work(0.0)

    async def memory(self) -> Mapping[str, float]:
        return {}

    async def close(self) -> None: ...

    async def _work(self, seconds: float) -> None:
        async with self._group:
            self._life.check()
            await anyio.sleep(seconds)
            self._life.check()


class SimStore:
    """Implements CheckpointStore and SnapshotFolder."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def begin(self, step: int) -> Path:
        return Path("checkpoints") / str(step)

    def commit(self, step: int, state: Mapping[str, Any]) -> Path:
        self._disk.checkpoints[step] = json.dumps(state)
        return self.begin(step)

    def verified_state(self, path: Path) -> dict[str, Any]:
        return dict(json.loads(self._disk.checkpoints[int(path.name)]))

    def latest(self) -> Path | None:
        return self.begin(max(self._disk.checkpoints)) if self._disk.checkpoints else None

    def path(self, version: int) -> str:
        return f"version-{version:08d}"

    def drop_all_but(self, newest: int) -> None:
        self._disk.snapshots[:] = sorted(self._disk.snapshots)[-newest:]


class SimSource:
    """Implements PromptSource: endless, with an exact position."""

    def __init__(self) -> None:
        self._next = 0
        self._again: list[int] = []

    def draw(self) -> Prompt | None:
        if self._again:
            uid = self._again.pop(0)
        else:
            uid, self._next = self._next, self._next + 1
        return Prompt(uid, uid, 0, "sim", (1, 2), "", "")

    def state(self, unused: Iterable[int] = ()) -> dict[str, Any]:
        return {"next": self._next, "again": sorted({*unused, *self._again})}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._next, self._again = int(state["next"]), list(state["again"])

    def __len__(self) -> int:
        return 1_000_000


class SimReward:
    """Implements RewardFn and Tokenizer. What an evaluation scores is checked; its prompts have negative uids."""

    def __init__(self, record: Record) -> None:
        self._record = record

    async def __call__(self, prompt: Prompt, texts: Sequence[str], completions: Sequence[Completion]) -> list[float]:
        if prompt.uid < 0:
            for completion in completions:
                self._record.check_answer(completion)
        return [float(index % 2) for index in range(len(texts))]

    def decode(self, ids: Sequence[int]) -> str:
        return ""
