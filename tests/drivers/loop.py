"""A whole controller over fakes: what tests of the training loop share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
from kit import FakeTrainer, MemoryJournal, RecordingSink, World, make_fleet

from hybridasync.config.load import validate
from hybridasync.config.models import Config
from hybridasync.config.pipeline import schedule_of
from hybridasync.drivers.checkpointing import Checkpointing
from hybridasync.drivers.evaluation import Evaluation, EvaluationParts
from hybridasync.drivers.generation import Limits
from hybridasync.drivers.publish import Publisher, PublishParts
from hybridasync.drivers.rollout import Rollout, RolloutParts
from hybridasync.drivers.training import LoopParts, TrainingLoop
from hybridasync.drivers.transfer import DiskTransfer
from hybridasync.errors import CheckpointError
from hybridasync.protocol.debts import Debts
from hybridasync.protocol.ledger import RolloutLedger
from hybridasync.types import Completion, Prompt, StepResult, TrainBatch, TrainSample


class Trainer(FakeTrainer):
    """Writes down what it is asked for."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log
        self.batches: list[TrainBatch] = []

    async def train_step(self, batch: TrainBatch) -> StepResult:
        self.log.append(f"train {batch.step}")
        self.batches.append(batch)
        return StepResult(batch.step, True, {"loss": 0.0})

    async def decide(self, epoch: int, *, version: int, commit: bool) -> None:
        await super().decide(epoch, version=version, commit=commit)
        self.log.append(f"{'commit' if commit else 'abort'} {version}")

    async def reference_logprobs(self, samples: Sequence[TrainSample]) -> list[list[float]]:
        return [[-1.0] * len(sample.rollout_logprobs) for sample in samples]

    async def save_checkpoint(self, path: str) -> None:
        self.log.append("save")


class Source:
    """Endless prompts with an exact position."""

    def __init__(self) -> None:
        self.next = 0
        self.again: list[int] = []

    def draw(self) -> Prompt:
        if self.again:
            return _prompt(self.again.pop(0))
        self.next += 1
        return _prompt(self.next - 1)

    def state(self, unused: Sequence[int] = ()) -> dict[str, Any]:
        return {"next": self.next, "unused": list(unused)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.next, self.again = state["next"], list(state["unused"])


def _prompt(uid: int) -> Prompt:
    return Prompt(uid, uid, 0, "d", (1, 2 + uid), "p", "l")


class Store:
    """Checkpoints in memory; `full` is a disk without room."""

    def __init__(self) -> None:
        self.states: dict[int, dict[str, Any]] = {}
        self.full = False

    def begin(self, step: int) -> Path:
        if self.full:
            raise CheckpointError(f"can't make step_{step}: No space left on device")
        return Path("x")

    def commit(self, step: int, state: Mapping[str, Any]) -> Path:
        self.states[step] = dict(state)
        return Path(f"step_{step}")


class Snapshots:
    def path(self, version: int) -> str:
        return f"/v{version}"

    def drop_all_but(self, newest: int) -> None:
        return None


class Tokens:
    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


async def reward(_prompt: Prompt, texts: Sequence[str], _completions: Sequence[Completion]) -> list[float]:
    return [float(index % 2) for index, _ in enumerate(texts)]


def recipe(steps: int, **sections: dict[str, Any]) -> Config:
    base: dict[str, Any] = {
        "model": {"hf_checkpoint": "m"},
        "data": {"prompt_data": "d"},
        "rollout": {"num_rollout": steps, "rollout_batch_size": 2, "n_samples_per_prompt": 2, "max_response_tokens": 8},
        # Far beyond any standstill of the machine: what isn't confirmed in time is sent again, or fenced.
        "publication": {"pause_mode": "drain", "resume_budget_s": 29.0, "rollout_http_timeout": 30.0},
    }
    merged = {name: {**base.get(name, {}), **sections.get(name, {})} for name in {*base, *sections}}
    return validate(merged, source="test")


class Bench:
    """A whole controller over one fake engine; `log` has what reached engine and trainer, in order."""

    def __init__(self, config: Config, *, steps_per_epoch: int | None = None) -> None:
        self.config = config
        self.world, self.store, self.sink = World(), Store(), RecordingSink()
        self.log = self.world.log
        self.fleet, (self.server,), (self.sidecar,) = make_fleet(self.world, 1)
        self.trainer = Trainer(self.log)
        self.source = Source()
        self.served: list[tuple[int, str]] = []  # (trainer's step, engine's version) of each evaluation request
        self.schedule = schedule_of(
            config, num_rollout=config.rollout.num_rollout or 0, steps_per_epoch=steps_per_epoch
        )

    @asynccontextmanager
    async def loop(self, state: Mapping[str, Any] | None = None) -> AsyncIterator[TrainingLoop]:
        config, limits = self.config, Limits(8, 64)
        ledger = RolloutLedger(
            batch_size=2, max_staleness=config.rollout.max_staleness, num_rollout=self.schedule.num_rollout
        )
        rollout = Rollout(config, ledger, RolloutParts(self.fleet, self.source, reward, Tokens(), self.sink, limits))  # type: ignore[arg-type]
        transfer = DiskTransfer(self.trainer)  # type: ignore[arg-type]
        publish = PublishParts(self.fleet, self.trainer, transfer, MemoryJournal(), Debts(), self.sink)  # type: ignore[arg-type]
        pause_mode = config.publication.pause_mode or "drain"
        publisher = Publisher(config.publication, publish, session="0" * 32, mode=pause_mode)
        evaluation = None
        async with anyio.create_task_group() as work:
            if self.schedule.eval_interval is not None:
                parts = EvaluationParts(
                    self.fleet, self.trainer, self._judge, Tokens(), self.sink, limits, [_prompt(0)]
                )  # type: ignore[arg-type]
                evaluation = Evaluation(config, parts)
            loop = TrainingLoop(
                config,
                self.schedule,
                LoopParts(
                    rollout,
                    self.fleet,
                    self.trainer,  # type: ignore[arg-type]
                    publisher,
                    evaluation,
                    Checkpointing(self.store, self.trainer),  # type: ignore[arg-type]
                    self.sink,
                    Snapshots(),
                    dict,
                ),
                background=work,
            )
            if state is not None:
                loop.restore(state)
            self._loop = loop
            with anyio.fail_after(20):
                yield loop
            work.cancel_scope.cancel()

    async def _judge(self, _prompt: Prompt, texts: Sequence[str], completions: Sequence[Completion]) -> list[float]:
        self.served.append((self._loop.step, str(completions[0].oldest_version)))
        return [1.0 for _ in texts]

    async def run(self, state: Mapping[str, Any] | None = None) -> TrainingLoop:
        async with self.loop(state) as loop:
            await loop.begin()
            while await loop.one_step() is not None:
                pass
            return loop


TIS = {"use_tis": True}
EVAL = {"eval_prompt_data": "e", "sampled": False, "logprob_check_samples": 0}
