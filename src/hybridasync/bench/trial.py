"""One trial: a real `hybridasync train` in a process of its own, watched from outside."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from hybridasync.bench import manifest
from hybridasync.bench.plan import Job, Plan
from hybridasync.bench.usage import PERIOD_S, Usage
from hybridasync.errors import HybridAsyncError
from hybridasync.observability.jsonl import JsonLines, read
from hybridasync.observability.process import log_tail
from hybridasync.runtime.outcome import SIGNAL_EXIT

FILE_NAME = "trial.json"
RUN = "run"
ATTEMPTS = 2
"""A start that fails before its first step is tried once more; what it left is kept apart (R112)."""

_STOP_S = 90.0
"""A run that is stopped resumes its engines first (`publication.resume_budget_s` and torchrun's own 30 s)."""

# Secret, or large and of no use as evidence: what was made from seeds is named by its digest in the manifest.
_DROPPED = ("checkpoints", "prepared", "hf", "tensorboard", "run.lock", "metrics.prom", ".token")

Status = Literal["complete", "failed", "infrastructure"]


@dataclass(frozen=True, slots=True)
class Ended:
    """How a trial ended. `infrastructure`: it failed before its first step, which says nothing about its variant."""

    variant: str
    trial: int
    seed: int
    status: Status
    returncode: int
    steps: int
    wall_s: float
    start_s: float  # until the first step began to be recorded; 0 if none did
    attempts: int = 1
    reason: str = ""


class Interrupted(HybridAsyncError):
    """The benchmark was told to stop. What is complete is kept."""

    exit_code = 130


def run_job(plan: Plan, job: Job, folder: Path) -> Ended:
    """Run a trial in `folder`, again after a failed start. What a failed start left goes to `folder`-attempt-N.

    Raises OSError, Interrupted.
    """
    for attempt in range(1, ATTEMPTS + 1):
        ended = _attempt(plan, job, folder, number=attempt)
        if ended.status != "infrastructure" or attempt == ATTEMPTS:
            break
        aside = folder.with_name(f"{folder.name}-attempt-{attempt}")
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
    return ended


def already_done(folder: Path) -> Ended | None:
    """The outcome of a trial that an earlier call completed."""
    try:
        values: Any = json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))
        return Ended(**values)
    except (OSError, ValueError, TypeError):
        return None


def _attempt(plan: Plan, job: Job, folder: Path, *, number: int) -> Ended:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    started = time.monotonic()
    returncode = _watched(_command(plan, job, folder), folder)
    wall_s = time.monotonic() - started
    steps = sum(1 for _ in read(folder / RUN / "metrics.jsonl"))
    status: Status = "complete" if returncode == 0 and steps == plan.steps else "failed"
    if status == "failed" and steps == 0:
        status = "infrastructure"
    reason = "" if status == "complete" else _reason(folder, returncode, steps)
    if (folder / RUN / "config.resolved.toml").exists():
        text = json.dumps(manifest.build(plan, job, folder / RUN), indent=1)
        (folder / manifest.FILE_NAME).write_text(text + "\n", encoding="utf-8")
    for name in _DROPPED:
        _drop(folder / RUN / name)
    ended = Ended(
        job.variant,
        job.trial,
        job.seed,
        status,
        returncode,
        steps,
        round(wall_s, 3),
        _start_s(folder),
        number,
        reason,
    )
    (folder / FILE_NAME).write_text(json.dumps(asdict(ended), indent=1) + "\n", encoding="utf-8")
    return ended


def _command(plan: Plan, job: Job, folder: Path) -> list[str]:
    overrides = [part for override in plan.settings(job) for part in ("--set", override)]
    return [sys.executable, "-m", "hybridasync_cli", "train", plan.recipe, "--run-dir", str(folder / RUN), *overrides]


def _watched(command: Sequence[str], folder: Path) -> int:
    """Run to the end, with a sample of its use of the machine each half second."""
    (folder / "command.json").write_text(json.dumps(list(command), indent=1) + "\n", encoding="utf-8")
    usage_file = JsonLines(folder / "usage.jsonl")
    with (
        (folder / "output.log").open("wb") as output,
        subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL) as process,
    ):
        usage = Usage(process.pid, folder / RUN)
        try:
            while True:
                try:
                    return process.wait(PERIOD_S)
                except subprocess.TimeoutExpired:
                    usage_file.append(usage.sample())
        except BaseException as error:
            _stop(process)
            if isinstance(error, KeyboardInterrupt):
                raise Interrupted("stopped; the same command goes on with what is missing") from error
            raise
        finally:
            usage_file.close()


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()


def _start_s(folder: Path) -> float:
    """From the launch to the first step's start."""
    try:
        born = (folder / "command.json").stat().st_mtime
        first = next(iter(read(folder / RUN / "metrics.jsonl")))
        return round(max(0.0, epoch_s(str(first["time"])) - float(str(first["step_s"])) - born), 3)
    except (OSError, StopIteration, KeyError, ValueError):
        return 0.0


def epoch_s(text: str) -> float:
    """A time of the run's files, as seconds since the epoch."""
    return datetime.fromisoformat(text).timestamp()


def _reason(folder: Path, returncode: int, steps: int) -> str:
    how = f"signal {returncode - SIGNAL_EXIT}" if returncode > SIGNAL_EXIT else f"exit code {returncode}"
    tail = log_tail(folder / "output.log").strip().splitlines()[-3:]
    return f"{how} after {steps} steps: {' '.join(line.strip(' |') for line in tail)}"


def _drop(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
