"""Kills runs with SIGKILL at random moments, resumes them, and holds each against an uninterrupted run.

    python tests/tools/killed_runs.py --runs 50 --folder killed      # `--help` has the rest; 1 on a difference

Compared: the multiset of trained prompts, samples a step, weight versions (one more each step, never back in a
response's own time), and the staleness bound.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import random
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOCK_S = 60.0
"""How long the processes of a killed run may take to be gone: they die with their parent, one after the other."""

SETTINGS = {
    "run.max_restarts": 0,
    "warm_start.steps": 2,
    "rollout.num_rollout": 8,
    "rollout.rollout_batch_size": 6,
    "rollout.n_samples_per_prompt": 4,
    "rollout.max_staleness": 1,
    "algorithm.filter_zero_variance": "false",
    "optimizer.lr_warmup_steps": 1,
    "eval.eval_interval": "none",
    "eval.eval_prompt_data": "none",
    "eval.eval_at_end": "false",
    "checkpoint.save_interval": 2,
    "checkpoint.export_hf": "false",
    "observability.samples_per_step": 100000,
    "observability.progress": "off",
    "observability.tensorboard": "false",
}
"""The quick recipe in small, with every trained sample on record."""


@dataclass(frozen=True, slots=True)
class Trained:
    """What a run was trained on, from its samples.jsonl."""

    prompts: Counter[int]  # uid → samples
    per_step: Mapping[int, int]
    stale: int  # largest step - partition
    version_lag: int


def command(recipe: str, directory: Path, overrides: Sequence[str], *, resume: bool) -> list[str]:
    """A run in `directory`, new or resumed."""
    settings = [*(f"{name}={value}" for name, value in SETTINGS.items()), *overrides]
    flags = [flag for setting in settings for flag in ("--set", setting)]
    where = f"--resume={directory}" if resume else f"--run-dir={directory}"
    return [str(Path(sys.executable).with_name("hybridasync")), "train", recipe, where, *flags]


def run(arguments: list[str], log: Path, *, kill_after_s: float | None = None) -> bool:
    """Whether the run ended by itself, with exit code 0; False if it was killed first."""
    with log.open("ab") as output:
        process = subprocess.Popen(arguments, stdout=output, stderr=output, start_new_session=True)
        try:
            code = process.wait(kill_after_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            return False
    if code:
        raise SystemExit(f"{' '.join(arguments)}: exit code {code}\n{log.read_text(errors='replace')[-3000:]}")
    return True


def wait_for_the_end_of(directory: Path) -> None:
    """Until no process of the run holds its directory any more."""
    deadline = time.monotonic() + LOCK_S
    while time.monotonic() < deadline:
        try:
            with (directory / "run.lock").open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
        except FileNotFoundError:
            return
        except BlockingIOError:
            time.sleep(0.1)
    raise SystemExit(f"{directory}: processes of the killed run still hold it after {LOCK_S:g} s")


def killed_and_resumed(arguments: argparse.Namespace, directory: Path, rng: random.Random, typical_s: float) -> int:
    """Run to the end with `arguments.kills` kills at random moments; answers how many struck."""
    log, struck = directory.with_suffix(".log"), 0
    for attempt in range(arguments.kills + 1):
        resume = (directory / "config.resolved.toml").is_file()
        if not resume:
            shutil.rmtree(directory, ignore_errors=True)
        after = rng.uniform(0.05, 1.0) * typical_s if attempt < arguments.kills else None
        done = run(command(arguments.recipe, directory, arguments.set, resume=resume), log, kill_after_s=after)
        if done:
            return struck
        struck += 1
        wait_for_the_end_of(directory)
    return struck


def trained(directory: Path) -> Trained:
    """Read what the run recorded, step by step."""
    rows = [json.loads(line) for line in (directory / "samples.jsonl").read_bytes().split(b"\n") if line.strip()]
    return Trained(
        prompts=Counter(row["uid"] for row in rows),
        per_step=dict(sorted(Counter(row["step"] for row in rows).items())),
        stale=max(row["step"] - row["partition"] for row in rows),
        version_lag=max(row["step"] - row["versions"][0] for row in rows),
    )


def problems(directory: Path, expected: Trained) -> list[str]:
    """Differences from the uninterrupted run, and broken bounds."""
    config: dict[str, Any] = tomllib.loads((directory / "config.resolved.toml").read_text())
    metrics = [json.loads(line) for line in (directory / "metrics.jsonl").read_bytes().split(b"\n") if line.strip()]
    found, limit = trained(directory), config["rollout"]["max_staleness"]
    versions = [row["weight_version"] for row in metrics]
    lag = limit + config["publication"]["update_weights_interval"] - 1
    checks = {
        f"trained prompts differ: {dict(found.prompts - expected.prompts)} too many, "
        f"{dict(expected.prompts - found.prompts)} missing": found.prompts == expected.prompts,
        f"samples a step: {found.per_step}, expected {expected.per_step}": found.per_step == expected.per_step,
        f"partition lag {found.stale} is above {limit}": found.stale <= limit,
        f"version lag {found.version_lag} isn't in 0..{lag}": 0 <= found.version_lag <= lag,
        f"weight versions {versions} don't go up one by one": versions == [step + 1 for step in expected.per_step],
    }
    return [problem for problem, holds in checks.items() if not holds]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="quickstart-fast")
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--kills", type=int, default=1, help="kills of one run, at most")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments")
    parser.add_argument("--folder", type=Path, required=True, help="empty or new; gets the run directories")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="further settings")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    reference, started = arguments.folder / "uninterrupted", time.monotonic()
    run(command(arguments.recipe, reference, arguments.set, resume=False), reference.with_suffix(".log"))
    typical_s = time.monotonic() - started
    expected, bad, rng = trained(reference), 0, random.Random(arguments.seed)
    print(f"uninterrupted: {typical_s:.1f} s, {len(expected.prompts)} prompts, {expected.per_step} samples a step")
    for number in range(arguments.runs):
        directory, started = arguments.folder / f"run-{number:03d}", time.monotonic()
        struck = killed_and_resumed(arguments, directory, rng, typical_s)
        if not struck:  # the machine has become faster: the next moment should hit
            typical_s = min(typical_s, time.monotonic() - started)
        found = problems(directory, expected)
        bad += bool(found)
        print(f"{directory.name}: {struck} kills, {'; '.join(found) or 'equal'}", flush=True)
        if not found:
            shutil.rmtree(directory / "checkpoints", ignore_errors=True)
    print(f"{arguments.runs - bad} of {arguments.runs} runs equal")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
