"""Step time of the hybrid pipeline against the larger of pure generation and pure training of the same work.

One run of the quick start's recipe, with its real processes. Each round measures, one after the other,

  generation  the recipe's batch (prompts x samples) through controller, HTTP and engine, rewards included; trainer idle
  training    the training steps on exactly these samples; engine idle
  hybrid      as many steps of the pipeline: the two at once, a weight publication after each step

and compares medians of the round. A ratio of 1 is perfect overlap; the two one after the other would be `sequential`.
The learning rate is (nearly) zero and no sample is filtered, so that the work of each batch is the same.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: trainer and engine share the cores

import anyio
import psutil
from measure import Foreign, Spread, arguments, cpu_seconds, print_table, write_results

import hybridasync
from hybridasync.algorithms.assembly import to_train_samples
from hybridasync.config.models import Config
from hybridasync.types import Group, Prompt, TrainBatch

RECIPE = str(Path(__file__).parent.parent / "recipes" / "quickstart.toml")
WARM_UP_STEPS = 3
"""After a pause of the pipeline the first step finds its batch ready; the second is the first with both halves."""
SAME_WORK = (
    "algorithm.filter_zero_variance=false",
    "optimizer.lr=1e-12",
    "optimizer.min_lr=0.0",
    "eval.skip_eval_before_train=true",
    "eval.eval_interval=1000000",
    "eval.eval_at_end=false",
    "warm_start.steps=60",  # enough that responses have the length of an answer
    "rollout.num_rollout=1000000",
    "observability.progress=off",
)
LARGER_MODEL = ("prepare.args.layers=4", "prepare.args.hidden=256")


@dataclass(frozen=True, slots=True)
class Shape:
    settings: tuple[str, ...]
    steps: int  # of each phase in a round


SHAPES = {"quickstart": Shape((), steps=12), "larger": Shape(LARGER_MODEL, steps=6)}
TINY = ("rollout.rollout_batch_size=4", "rollout.n_samples_per_prompt=4", "warm_start.steps=2")
QUICK = {"quick": Shape(TINY, steps=2)}


class Bench:
    """A started run, and its three ways to work."""

    def __init__(self, run: hybridasync.Run, config: Config) -> None:
        self._run, self._config = run, config
        # Not a part of the API: a user has no reason to run one half of the pipeline alone.
        assembly, loop = run._started, run._loop
        self._parts, self._source = loop._parts, assembly.inputs.source()
        self.roles = _roles(trainer=set(assembly.info.pids.values()))

    async def generation(self) -> tuple[Group, ...]:
        """One batch."""
        size = self._config.rollout.rollout_batch_size
        found: list[Group] = []

        async def produce(prompt: Prompt) -> None:
            group = await self._parts.rollout._group(prompt, 0)
            if group is None:
                raise RuntimeError("a group was dropped: see events.jsonl of the run")
            found.append(group)

        async with anyio.create_task_group() as tasks:
            for _ in range(size):
                prompt = self._source.draw()
                if prompt is None:
                    raise RuntimeError("the prompts are used up")
                tasks.start_soon(produce, prompt)
        return tuple(found)

    async def training(self, groups: tuple[Group, ...]) -> Mapping[str, float]:
        batch = TrainBatch(self._run.step, "policy", to_train_samples(groups, self._config))
        return (await self._parts.trainer.train_step(batch)).metrics

    async def hybrid(self) -> Mapping[str, float]:
        return (await anext(self._run)).metrics

    async def idle(self) -> None:
        """Wait until the engines have made what the pipeline may make ahead."""
        await anyio.sleep(0.1)
        await self._parts.fleet.drained()


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


async def measure(name: str, shape: Shape, rounds: int) -> dict[str, Any]:
    config = hybridasync.load(RECIPE, [*SAME_WORK, *shape.settings])
    with tempfile.TemporaryDirectory(prefix="hybridasync-bench-") as folder:
        async with hybridasync.Run(config, run_dir=Path(folder) / "run") as run:
            bench = Bench(run, run.config)
            foreign = Foreign(pid for pids in bench.roles.values() for pid in pids)
            measured = [await _round(bench, shape.steps) for _ in range(rounds)]
            others = foreign.share()
    ratios = Spread.of(entry["ratio"] for entry in measured)
    sequential = Spread.of(entry["sequential"] for entry in measured)
    sizes = config.rollout
    work = f"{sizes.rollout_batch_size} prompts × {sizes.n_samples_per_prompt} samples"
    return {
        "shape": name,
        "work": work,
        "settings": list(shape.settings),
        "steps_per_round": shape.steps,
        "ratio": ratios,
        "sequential": sequential,
        "foreign_cpu_share": others,
        "rounds": measured,
    }


async def _round(bench: Bench, steps: int) -> dict[str, Any]:
    await bench.idle()
    generation, training, hybrid = (Phase(bench.roles) for _ in range(3))
    batches: list[tuple[Group, ...]] = await generation.run(steps, lambda _: bench.generation())
    await training.run(steps, lambda index: bench.training(batches[index]))
    for _ in range(WARM_UP_STEPS):
        await bench.hybrid()
    metrics: list[Mapping[str, float]] = await hybrid.run(steps, lambda _: bench.hybrid())
    gen_s, train_s, step_s = (median(phase.seconds) for phase in (generation, training, hybrid))
    tokens = [len(sample.completion.output_ids) for batch in batches for group in batch for sample in group.samples]
    return {
        "generation_s": gen_s,
        "training_s": train_s,
        "hybrid_s": step_s,
        "ratio": step_s / max(gen_s, train_s),
        "sequential": (gen_s + train_s) / max(gen_s, train_s),
        "pause_s": median(row["pause_ms"] for row in metrics) / 1000,
        "response_tokens": sum(tokens) / steps,
        "hybrid_response_tokens": sum(row["response_tokens_sum"] for row in metrics) / steps,
        "cpu_s": {"generation": generation.cpu, "training": training.cpu, "hybrid": hybrid.cpu},
    }


def _roles(*, trainer: set[int]) -> dict[str, tuple[int, ...]]:
    """Role → process ids. Sidecars and engines are told from each other by their command."""
    children = psutil.Process().children(recursive=True)
    commands = {child.pid: child.cmdline() for child in children}
    return {
        "controller": (os.getpid(),),
        "trainer": tuple(trainer),
        "engine": tuple(pid for pid, command in commands.items() if "hybridasync.engine" in command),
        "sidecar": tuple(pid for pid, command in commands.items() if "hybridasync.sidecar" in command),
    }


def _cpu_by_role(roles: Mapping[str, tuple[int, ...]]) -> dict[str, float]:
    return {role: sum(cpu_seconds(pid) for pid in pids) for role, pids in roles.items()}


def _print(result: Mapping[str, Any]) -> None:
    rounds = result["rounds"]
    print(f"\n{result['shape']}: {result['work']}, {len(rounds)} rounds of {result['steps_per_round']} steps")
    names = ("generation_s", "training_s", "hybrid_s", "pause_s", "response_tokens")
    print_table(("per step", "median (least to largest)"), [(n, Spread.of(r[n] for r in rounds)) for n in names])
    print(f"hybrid / max(generation, training): {result['ratio']}; sequential would be {result['sequential']}")
    print(f"processor time that others took: {result['foreign_cpu_share']:.0%}")


def main() -> None:
    options = arguments(__doc__, tuple(SHAPES)).parse_args()
    shapes = QUICK if options.quick else {name: SHAPES[name] for name in options.shapes}
    rounds = 1 if options.quick else options.rounds

    async def work() -> None:
        results = []
        for name, shape in shapes.items():
            results.append(await measure(name, shape, rounds))
            _print(results[-1])
            write_results(options.out, "overlap", results)

    hybridasync.launch(work, hybridasync.load(RECIPE))


if __name__ == "__main__":
    main()
