"""`hybridasync bench publication`: run the trials, then report, pack and seal."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hybridasync.bench import evidence, report
from hybridasync.bench.plan import FILE_NAME, Plan, check, read_plan
from hybridasync.bench.readings import TRIALS, read_all
from hybridasync.bench.results import Results, evaluate
from hybridasync.bench.trial import Ended, already_done, run_job
from hybridasync.errors import ConfigError

WORK = "work"
"""What isn't packed yet; a benchmark that was stopped goes on with it."""

Told = Callable[[str], None]


def run(plan: Plan, out: Path, *, tell: Told) -> Results:
    """All trials of the plan, those excepted that a stopped call with the same plan completed; `tell` gets a line each.

    Raises ConfigError (a mistake in the plan, or `out` is no place for it), OSError, Interrupted.
    """
    check(plan)
    work = prepare(plan, out)
    jobs = plan.jobs()
    with _stoppable():
        for number, job in enumerate(jobs, start=1):
            folder = work / TRIALS / job.name
            ended = already_done(folder)
            kept = ended is not None and ended.status != "infrastructure"  # a failure on the way is a result
            if ended is None or not kept:
                ended = run_job(plan, job, folder)
            tell(_line(ended, f"{number}/{len(jobs)} {job.name}", kept))
    return finish(out)


@contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM as Ctrl-C: the run under way resumes its engines and ends before this process does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def finish(out: Path) -> Results:
    """Report on the trials in `out`, pack the evidence and seal all of it. Raises OSError, EvidenceError."""
    work = out / WORK
    results = evaluate(read_all(work))
    report.write(results, out)
    evidence.pack(work, out)
    evidence.seal(out, without=WORK)
    shutil.rmtree(work)
    return results


def prepare(plan: Plan, out: Path) -> Path:
    """The working folder of a new benchmark, or of a stopped one with the same plan. Raises ConfigError."""
    if evidence.is_sealed(out):
        raise ConfigError(
            f"{out} holds a complete benchmark: check it with `hybridasync bench verify {out}`, "
            "or choose another --out",
            setting="--out",
        )
    work = out / WORK
    if (work / FILE_NAME).exists():
        try:
            before = read_plan(work)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{work / FILE_NAME} can't be read ({error}): choose another --out", setting="--out"
            ) from error
        if before != plan:
            raise ConfigError(
                f"{out} holds a stopped benchmark with other options: repeat those to go on, or choose another --out",
                setting="--out",
            )
        return work
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} isn't an empty directory: choose another --out", setting="--out")
    try:
        (work / TRIALS).mkdir(parents=True)
        (work / FILE_NAME).write_text(plan.to_json(), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"can't write to {out}: {error.strerror}", setting="--out") from error
    return work


def _line(ended: Ended, name: str, kept: bool) -> str:
    if kept:
        return f"{name}: {ended.status} already"
    tried = f", {ended.attempts} attempts" if ended.attempts > 1 else ""
    reason = f": {ended.reason}" if ended.reason else ""
    return f"{name}: {ended.status} in {ended.wall_s:.0f} s{tried}{reason}"
