"""hybridasync beside TRL and Ray, in turn on one machine: python compare.py ENVIRONMENTS OUT.json (see run.sh)."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from hybridasync.bench import control
from hybridasync.bench.measure import write_results
from hybridasync.bench.trial import epoch_s
from hybridasync.observability.jsonl import read

HERE = Path(__file__).resolve().parent
SKIPPED_STEPS = 1
"""Of each run: cold caches, and a pipeline that fills."""


@dataclass(frozen=True, slots=True)
class Task:
    """Equal for all: model, prompts, prompts × samples of a step, steps, learning rate, longest response, fp32."""

    name: str
    title: str
    task: str
    recipe: str
    prompts: int
    samples: int
    steps: int
    max_new: int
    lr: float
    warmup: int
    micro_batch: int

    def ours(self, folder: Path, seed: int) -> list[str]:
        return [
            f"seed={seed}",
            "prepare.function=none",
            "prepare.args={}",
            f"model.hf_checkpoint={folder / 'model'}",
            f"data.prompt_data={folder / 'train.jsonl'}",
            f"eval.eval_prompt_data={folder / 'eval.jsonl'}",
            "warm_start.steps=0",
            "warm_start.data=none",
            f"rollout.num_rollout={self.steps}",
            f"rollout.rollout_batch_size={self.prompts}",
            f"rollout.n_samples_per_prompt={self.samples}",
            f"rollout.max_response_tokens={self.max_new}",
            f"optimizer.lr={self.lr}",
            f"optimizer.lr_warmup_steps={self.warmup}",
            "eval.eval_interval=1000000",
            "eval.eval_at_end=true",
            "checkpoint.export_hf=false",
            "observability.progress=off",
            "observability.tensorboard=false",
        ]


SORT = Task("sort", "quick start (0.4 M parameters)", "sort", "quickstart-fast", 16, 16, 60, 8, 3e-4, 5, 128)
SMOL = Task("smollm2", "SmolLM2-135M", "sums", "smollm2-arithmetic", 8, 4, 4, 32, 2e-5, 2, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("environments", type=Path, help="what environments.sh made: trl/ and ray/")
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=3, help="of the quick start; of the larger model one less")
    parser.add_argument("--only", choices=("sort", "smollm2", "ray"), help="one part")
    parser.add_argument("--steps", type=int, help="fewer steps, to see that it works")
    options = parser.parse_args()
    # Of this machine's time, before anything of ours runs: what others take goes on during the measurement.
    result: dict[str, Any] = {"foreign_cpu_share": psutil.cpu_percent(interval=3.0) / 100}
    with tempfile.TemporaryDirectory(prefix="hybridasync-peers-") as folder:
        rows = []
        for task, rounds in ((SORT, options.rounds), (SMOL, max(1, options.rounds - 2))):
            if options.only in (None, task.name):
                rows += training(task, options, Path(folder) / task.name, rounds=rounds)
        if rows:
            result["training"] = {"header": TRAINING, "rows": rows}
            write_results(options.out, "peers", [result])
    if options.only in (None, "ray"):
        result["control"] = planes(options.environments)
    write_results(options.out, "peers", [result])


TRAINING = (
    "task, system",
    "samples/s",
    "ratio to TRL",
    "start to the first step, s",
    "peak memory, MiB",
    "accuracy before",
    "accuracy after the same samples",
)


def training(task: Task, options: argparse.Namespace, folder: Path, *, rounds: int) -> list[list[str]]:
    """Rows of one task: each system in turn, one seed for both in a round."""
    steps = options.steps or task.steps
    task = Task(**{name: getattr(task, name) for name in Task.__slots__} | {"steps": steps})
    trl = options.environments / "trl" / "bin" / "python"
    prepare(task, folder, trl)
    found: dict[str, list[dict[str, Any]]] = {"TRL": [], "hybridasync": []}
    for seed in range(rounds):
        order = ("TRL", "hybridasync") if seed % 2 == 0 else ("hybridasync", "TRL")
        for system in order:
            run = run_trl(task, folder, trl, seed=seed) if system == "TRL" else run_ours(task, folder, seed)
            found[system].append(run | {"samples_s": rate(run)})
            say(f"{task.name}, {system}, seed {seed}: {json.dumps(found[system][-1])[:160]}")
    pairs = zip(found["hybridasync"], found["TRL"], strict=True)
    ratio = spread((own["samples_s"] / other["samples_s"] for own, other in pairs), 2)
    return [row(task, system, runs, "1" if system == "TRL" else f"**{ratio}**") for system, runs in found.items()]


def row(task: Task, system: str, runs: Sequence[Mapping[str, Any]], ratio: str) -> list[str]:
    shown = [
        spread((run[name] for run in runs), digits)
        for name, digits in (("start_s", 1), ("peak_mib", 0), ("accuracy_before", 3), ("accuracy", 3))
    ]
    work = f"{task.title}, {task.prompts} × {task.samples}, {task.steps} steps"
    return [f"{work}: {system}", spread((run["samples_s"] for run in runs), 1), ratio, *shown]


def spread(values: Iterable[float], digits: int) -> str:
    """Median (least to largest), or the one value there is."""
    found = sorted(values)
    middle = f"{median(found):,.{digits}f}"
    return middle if len(found) == 1 else f"{middle} ({found[0]:,.{digits}f} to {found[-1]:,.{digits}f})"


def rate(run: Mapping[str, Any]) -> float:
    """Samples a second over the steps, without the first ones."""
    counted = run["step_s"][SKIPPED_STEPS:] or run["step_s"]
    return float(run["samples_per_step"] * len(counted) / sum(counted))


def prepare(task: Task, folder: Path, trl: Path) -> None:
    """The folder that both systems train from: the first task's model after its supervised warm start."""
    folder.mkdir(parents=True)
    if task.name == "smollm2":
        source = Path(control.__file__).resolve().parents[2]
        program = (
            f"from pathlib import Path; from hybridasync.data.smollm2 import prepare; prepare(Path({str(folder)!r}), 0)"
        )
        subprocess.run([trl, "-c", program], check=True, env=os.environ | {"PYTHONPATH": str(source)})
        return
    warm = folder / "warm"
    train(task.recipe, warm, ["run.debug_train_only=true", "seed=0", "observability.progress=off"])
    (warm / "hf").rename(folder / "model")
    for name in ("train.jsonl", "eval.jsonl"):
        (warm / "prepared" / name).rename(folder / name)


def train(recipe: str, run_dir: Path, overrides: Sequence[str]) -> None:
    """A run of hybridasync, two processes of one thread each for the work."""
    command = [sys.executable, "-m", "hybridasync_cli", "train", recipe, "--run-dir", str(run_dir)]
    command += [part for override in overrides for part in ("--set", override)]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"hybridasync failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")


def run_ours(task: Task, folder: Path, seed: int) -> dict[str, Any]:
    run_dir = folder / f"ours-{seed}"
    born = time.time()
    train(task.recipe, run_dir, task.ours(folder, seed))
    rows = list(read(run_dir / "metrics.jsonl"))
    summary = json.loads((run_dir / "summary.json").read_text())
    memory = [sum(float(str(one[f"{role}_rss_mib"])) for role in ("controller", "trainer", "rollout")) for one in rows]
    first_at = epoch_s(str(rows[0]["time"])) - float(str(rows[0]["step_s"]))
    return {
        "step_s": [float(str(one["step_s"])) for one in rows],
        "samples_per_step": task.prompts * task.samples,
        "samples": sum(float(str(one["samples"])) for one in rows),
        "start_s": first_at - born,
        "accuracy_before": summary["eval"]["initial"]["accuracy"],
        "accuracy": summary["eval"]["final"]["accuracy"],
        "peak_mib": max(memory),
    }


def run_trl(task: Task, folder: Path, python: Path, *, seed: int) -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0))
    numbers = {
        "prompts": task.prompts,
        "samples": task.samples,
        "steps": task.steps,
        "max-new": task.max_new,
        "micro-batch": task.micro_batch,
        "warmup": task.warmup,
        "seed": seed,
        "threads": cores,
        "lr": task.lr,
    }
    command = [str(python), str(HERE / "trl_train.py"), str(folder), "--task", task.task]
    command += [part for name, value in numbers.items() for part in (f"--{name}", str(value))]
    environment = os.environ | {"OMP_NUM_THREADS": str(cores), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"TRL failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


PLANES = ("what", "hybridasync", "Ray", "Ray without its dashboard")


def planes(environments: Path) -> dict[str, Any]:
    """Two workers (and a sidecar) against two actors: the same questions, asked by the same program."""
    ray = str(environments / "ray" / "bin" / "python")
    own = control.control_plane(10.0)
    others = [
        control.measured(lambda mode=mode: control.started([ray, str(HERE / "ray_control.py"), mode]), 10.0)
        for mode in ("dashboard", "plain")
    ]
    rows = []
    for what, shown in ROWS:
        rows.append([what, *(shown.format(**found) for found in (own, *others))])
    return {"header": PLANES, "rows": rows}


ROWS = (
    ("start to first answers, s", "{start_s:.2f}"),
    ("idle processes / threads", "{processes} / {threads}"),
    ("idle memory, RSS / PSS, MiB", "{rss_mib:.0f} / {pss_mib:.0f}"),
    ("idle memory without the driver, PSS, MiB", "{pss_without_controller_mib:.0f}"),
    ("idle processor use, % of a core", "{idle_cpu_percent:.1f}"),
    ("call to both, p50 / p99, ms", "{rpc_p50_ms:.2f} / {rpc_p99_ms:.2f}"),
    ("calls to both a second, 32 asked for at once", "{rpc_calls_per_s:.0f}"),
    ("16 MiB to both and back, ms", "{bulk_there_and_back_ms:.0f}"),
    ("end, s", "{stop_s:.2f}"),
    ("processes left 20 s after SIGKILL of the driver", "{orphans}"),
)


def say(text: str) -> None:
    sys.stderr.write(text + "\n")


if __name__ == "__main__":
    main()
