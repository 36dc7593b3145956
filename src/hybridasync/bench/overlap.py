"""Step time of the pipeline against the larger of pure generation and pure training of the same work.

One run of a recipe for each mode, with its real processes. Each round measures, one after the other,

  generation  the recipe's batch (prompts x samples) through controller, HTTP and engine, rewards included; trainer idle
  training    the training steps on exactly these samples; engine idle
  both        as many steps of the pipeline: the two at once, a weight publication after each step

Overlap efficiency is the larger of the first two, divided by the third. 1 is perfect.
The learning rate is (nearly) zero and no sample is filtered, so that the work of each batch is the same.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

import anyio
import psutil

from hybridasync.algorithms.assembly import to_train_samples
from hybridasync.app import Run
from hybridasync.bench.measure import Foreign, Spread, cpu_seconds
from hybridasync.bench.usage import processes_by_role
from hybridasync.config.load import load
from hybridasync.config.models import Config
from hybridasync.errors import ConfigError, DataError, OperatingError
from hybridasync.types import Group, Prompt, TrainBatch

WARM_UP_STEPS = 4
"""After a pause of the pipeline the first steps find their batches ready."""

SAME_WORK = (
    "algorithm.filter_zero_variance=false",
    "optimizer.lr=1e-12",
    "optimizer.min_lr=0.0",
    "eval.eval_interval=none",
    "eval.eval_at_end=false",
    "eval.skip_eval_before_train=true",
    "rollout.num_rollout=1000000",
    "observability.progress=off",
    "observability.tensorboard=false",
)
ENOUGH_WARM_START = "warm_start.steps=60"
"""Responses then have the length of an answer."""

MODES = ("hybrid", "fully_async")


def configuration(recipe: str, mode: str, overrides: Sequence[str]) -> Config:
    """A recipe with constant work. Raises ConfigError."""
    if mode not in MODES:
        raise ConfigError(f"unknown: {mode!r}; there are {', '.join(MODES)}", setting="--modes")
    if any(override.partition("=")[0].strip() == "mode" for override in overrides):
        raise ConfigError("can't be given with --set: --modes sets it", setting="mode")
    warm_start = [ENOUGH_WARM_START] if load(recipe).warm_start.steps else []
    return load(recipe, [*SAME_WORK, *warm_start, f"mode={mode}", *overrides])


@dataclass(slots=True)
class Phase:
    """Wall and processor seconds of the steps of one phase."""

    roles: Mapping[str, tuple[int, ...]]
    seconds: list[float] = field(default_factory=list)
    cpu: dict[str, float] = field(default_factory=dict)  # per step, by role

    async def run(self, steps: int, step: Callable[[int], Awaitable[Any]]) -> list[Any]:
        before = _cpu_by_role(self.roles)
        answers = []
        for index in range(steps):
            started = time.perf_counter()
            answers.append(await step(index))
            self.seconds.append(time.perf_counter() - started)
        after = _cpu_by_role(self.roles)
        self.cpu = {role: (after[role] - before[role]) / steps for role in after}
        return answers


class Bench:
    """A started run, and its three ways to work."""

    def __init__(self, run: Run) -> None:
        self._run = run
        # Not a part of the API: a user has no reason to run one half of the pipeline alone.
        assembly, loop = run._started, run._loop
        self._config = assembly.inputs.config
        self._parts, self._source = loop._parts, assembly.inputs.source()
        found = processes_by_role(os.getpid(), assembly.info.pids.values())
        self.roles = {role: tuple(process.pid for process in of_role) for role, of_role in found.items()}

    def pin(self, cores: Sequence[int]) -> None:
        """Trainer and engine to a core each. Controller and sidecars, which wait most of the time, may use both."""
        for role, own in (("trainer", cores[:1]), ("engine", cores[1:2])):
            for pid in self.roles[role]:
                for thread in psutil.Process(pid).threads():
                    os.sched_setaffinity(thread.id, own)
                psutil.Process(pid).cpu_affinity(list(own))

    async def generation(self) -> tuple[Group, ...]:
        """One batch. Raises OperatingError for a group that was dropped, DataError when prompts are used up."""
        found: list[Group] = []

        async def produce(prompt: Prompt) -> None:
            group = await self._parts.rollout._group(prompt, 0)
            if group is None:
                raise OperatingError("a group was dropped: see events.jsonl of the run")
            found.append(group)

        async with anyio.create_task_group() as tasks:
            for _ in range(self._config.rollout.rollout_batch_size):
                prompt = self._source.draw()
                if prompt is None:
                    raise DataError("the prompts are used up")
                tasks.start_soon(produce, prompt)
        return tuple(found)

    async def training(self, groups: tuple[Group, ...]) -> None:
        batch = TrainBatch(self._run.step, "policy", to_train_samples(groups, self._config))
        await self._parts.trainer.train_step(batch)

    async def both(self) -> Mapping[str, float]:
        return (await anext(self._run)).metrics

    async def idle(self) -> None:
        """Wait until the engines have made what the pipeline may make ahead."""
        await anyio.sleep(0.1)
        await self._parts.fleet.drained()

    async def settle(self) -> None:
        """The last step's metrics are complete."""
        await self._run._loop.settle()


async def measure(config: Config, *, rounds: int, steps: int, cores: Sequence[int] = ()) -> dict[str, Any]:
    """`rounds` of `steps` steps each, for one mode. `cores`: two cores to pin trainer and engine to.

    Raises what a run raises.
    """
    with tempfile.TemporaryDirectory(prefix="hybridasync-bench-") as folder:
        async with Run(config, run_dir=Path(folder) / "run") as run:
            bench = Bench(run)
            if cores:
                bench.pin(cores)
            foreign = Foreign(pid for pids in bench.roles.values() for pid in pids)
            measured = [await _round(bench, steps) for _ in range(rounds)]
            others = foreign.share()
    sizes = config.rollout
    return {
        "mode": config.mode,
        "work": f"{sizes.rollout_batch_size} prompts × {sizes.n_samples_per_prompt} samples",
        "pinned": list(cores),
        "steps_per_round": steps,
        "efficiency": Spread.of(entry["efficiency"] for entry in measured),
        "sequential": Spread.of(entry["sequential"] for entry in measured),
        "foreign_cpu_share": others,
        "rounds": measured,
    }


async def _round(bench: Bench, steps: int) -> dict[str, Any]:
    await bench.idle()
    generation, training, both = (Phase(bench.roles) for _ in range(3))
    batches: list[tuple[Group, ...]] = await generation.run(steps, lambda _: bench.generation())
    await training.run(steps, lambda index: bench.training(batches[index]))
    for _ in range(WARM_UP_STEPS):
        await bench.both()
    metrics: list[Mapping[str, float]] = await both.run(steps, lambda _: bench.both())
    await bench.settle()
    gen_s, train_s, step_s = (median(phase.seconds) for phase in (generation, training, both))
    tokens = [len(sample.completion.output_ids) for batch in batches for group in batch for sample in group.samples]
    return {
        "generation_s": gen_s,
        "training_s": train_s,
        "step_s": step_s,
        "efficiency": max(gen_s, train_s) / step_s,
        "sequential": (gen_s + train_s) / max(gen_s, train_s),
        "loss": loss(metrics, generation_s=gen_s, training_s=train_s),
        "response_tokens": sum(tokens) / steps,
        "both_response_tokens": sum(row["response_tokens_sum"] for row in metrics) / steps,
        "cpu_s": {"generation": generation.cpu, "training": training.cpu, "both": both.cpu},
    }


def loss(metrics: Sequence[Mapping[str, float]], *, generation_s: float, training_s: float) -> dict[str, float]:
    """Seconds of a mean step beyond the larger half, by cause. They add up to `total_s`, which may be negative.

    Where training is larger, a step is waiting + training + publication + the controller's own work in between.
    Where generation is larger, it is generation + pauses + idle engines.
    """
    row = {name: mean(one.get(name, 0.0) for one in metrics) for name in metrics[0]}
    if training_s >= generation_s:
        known = row["train_wait_s"] + row["train_s"] + row["publish_s"]
        drain_s = row.get("publish_drain_wait_s", 0.0)  # in train_wait_s; a publication caused it
        return {
            "total_s": row["step_s"] - training_s,
            "publication_s": row["publish_s"] + drain_s,
            "waiting_s": row["train_wait_s"] - drain_s,
            "slower_half_s": row["train_s"] - training_s,
            "controller_s": row["step_s"] - known,
        }
    pause_s = row["pause_ms"] / 1000
    return {
        "total_s": row["step_s"] - generation_s,
        "publication_s": pause_s,
        "waiting_s": max(0.0, row["engine_idle_s"] - pause_s),
        "slower_half_s": row["step_s"] - generation_s - max(pause_s, row["engine_idle_s"]),
        "controller_s": 0.0,
    }


def _cpu_by_role(roles: Mapping[str, tuple[int, ...]]) -> dict[str, float]:
    return {role: sum(cpu_seconds(pid) for pid in pids) for role, pids in roles.items()}
