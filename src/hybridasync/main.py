"""A run from start to end: signals, exit codes, summary and report. Used by rank 0 of a job and by plain scripts.

Signals cancel the work and are received to the end of the process: a second one can't kill the compensation of the
first, nor the words about how the run ended.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import anyio

from hybridasync.app import Run
from hybridasync.config.load import load
from hybridasync.config.models import Config
from hybridasync.config.pipeline import resolve
from hybridasync.errors import CompensationFailed, HybridAsyncError
from hybridasync.observability.report import write_report
from hybridasync.observability.summary import write_summary
from hybridasync.runtime.environment import Environment, is_torchrun
from hybridasync.runtime.outcome import Outcome, of_error, of_signal
from hybridasync.runtime.worker import serve_worker

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(slots=True)
class _Ending:
    """What is known of the end so far. `signal` is the first one received."""

    signal: int | None = None
    error: BaseException | None = None

    def outcome(self) -> Outcome:
        if self.signal is not None and not isinstance(self.error, HybridAsyncError):
            return of_signal(self.signal)
        return of_error(self.error) if self.error is not None else Outcome(0)


async def run_controller(config: Config, *, run_dir: Path, resume: bool = False) -> Outcome:
    """All steps of a run, on rank 0. Never raises: the outcome says what happened, summary.json and report.html too."""
    started = time.monotonic()
    outcome = await supervised(lambda: _all_steps(config, run_dir, resume))
    if outcome.code == CompensationFailed.exit_code:
        outcome = Outcome(outcome.code, f"{outcome.message}\nTry again: hybridasync resume-rollout --run-dir {run_dir}")
    write_summary(run_dir, status=outcome.status, wall_s=time.monotonic() - started, extra=outcome.summary)
    write_report(run_dir)
    return outcome


async def supervised(main: Callable[[], Awaitable[object]]) -> Outcome:
    """Run `main` with SIGINT and SIGTERM turned into a cancellation, and every error into an outcome."""
    ending = _Ending()
    with anyio.CancelScope() as work, _signals_received(work, ending):
        try:
            await main()
        except anyio.get_cancelled_exc_class():
            raise
        except Exception as error:  # noqa: BLE001  # the supervisor: everything ends as an exit code
            ending.error = error
    return ending.outcome()


def launch(main: Callable[[], Awaitable[object]], config: Config | str) -> None:
    """Entry of a script that uses `Run`. Ends the process with the run's exit code.

    In a plain script `main` runs here, and starts its own workers. In a torchrun job every rank calls this: rank 0
    runs `main`, the others serve it.
    """
    settings = resolve(load(config) if isinstance(config, str) else config).config
    if is_torchrun() and Environment.read().rank != 0:
        code = serve_worker(settings.network)
    else:
        outcome = anyio.run(supervised, main)
        if outcome.message:
            sys.stderr.write(f"{outcome.message}\n")
        code = outcome.code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a wedged library thread must not hold a finished process


async def _all_steps(config: Config, run_dir: Path, resume: bool) -> None:
    async with Run(config, run_dir=run_dir, resume=resume) as run:
        async for _ in run:
            pass
        if config.checkpoint.export_hf:
            await run.export_hf(run_dir / "hf")


@contextmanager
def _signals_received(work: anyio.CancelScope, ending: _Ending) -> Iterator[None]:
    """Signals cancel the work; those that come after it change nothing.

    Not anyio's receiver, after which a signal kills again: torchrun sends one when a worker has died, just while the
    controller writes down why.
    """
    loop = asyncio.get_running_loop()

    def receive(number: int) -> None:
        ending.signal = ending.signal or number
        work.cancel()

    for number in _SIGNALS:
        signal.signal(number, lambda number, _frame: loop.call_soon_threadsafe(receive, number) and None)
    try:
        yield
    finally:
        for number in _SIGNALS:
            signal.signal(number, _let_pass)


def _let_pass(_number: int, _frame: FrameType | None) -> None:
    """The run has ended already."""
