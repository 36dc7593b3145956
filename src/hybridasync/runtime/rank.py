"""Entry point of every rank: `torchrun --nproc-per-node N+1 -m hybridasync.runtime.rank RECIPE [--run-dir DIR] …`.

Rank 0 becomes the controller and runs `hybridasync.main.run_controller`, the others become workers. `hybridasync train`
starts torchrun with this module on one machine; on several nodes torchrun (Slurm, Kubernetes) is started by hand.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import pkgutil
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn, Protocol

import anyio

from hybridasync.config.load import load
from hybridasync.config.models import Config
from hybridasync.config.pipeline import resolve
from hybridasync.config.recipes import recipe_name
from hybridasync.errors import ConfigError
from hybridasync.observability.jsonl import complain
from hybridasync.observability.process import die_with_parent
from hybridasync.runtime import lock, outcome
from hybridasync.runtime.environment import Environment
from hybridasync.runtime.outcome import Outcome
from hybridasync.runtime.worker import WorkerFactory, serve_worker

CONTROLLER = "hybridasync.main:run_controller"
"""By name: this layer is below the application's, and a worker needs nothing of it."""


class Controller(Protocol):
    """Runs the whole job and receives SIGINT and SIGTERM; its code is 128 + signal when interrupted."""

    def __call__(self, config: Config, *, run_dir: Path, resume: bool) -> Awaitable[Outcome]: ...


@dataclass(frozen=True, slots=True)
class Arguments:
    """The command line."""

    recipe: str
    overrides: tuple[str, ...]
    run_dir: Path | None
    resume: bool

    @classmethod
    def parse(cls, argv: Sequence[str] | None) -> Arguments:
        parser = argparse.ArgumentParser(prog="hybridasync.runtime.rank", description="One rank of a training job.")
        parser.add_argument("recipe", help="recipe (name or TOML file) or config.resolved.toml")
        parser.add_argument("--run-dir", type=Path, help="run directory; default run.dir, else runs/<recipe>-<time>")
        parser.add_argument("--resume", action="store_true", help="go on at the last checkpoint of the run directory")
        parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
        found = parser.parse_args(argv)
        return cls(found.recipe, tuple(found.overrides), found.run_dir, found.resume)


def main(
    argv: Sequence[str] | None = None, *, controller: Controller | None = None, worker: WorkerFactory | None = None
) -> NoReturn:
    """Be this rank, and exit. `controller` and `worker` stand in for the product's own."""
    # Until the controller has its signal receiver there is nothing to put right: end without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        arguments = Arguments.parse(argv)
        place = Environment.read()
        config = resolve(load(arguments.recipe, arguments.overrides)).config
    except ConfigError as error:
        # Every rank reads the same recipe and comes to the same end.
        if os.environ.get("RANK", "0") == "0":
            complain(f"error: {error}")
        leave(error.exit_code)
    run_dir = arguments.run_dir or (Path(config.run.dir) if config.run.dir else None)
    if place.rank == 0:
        run_dir = run_dir or Path("runs") / f"{recipe_name(arguments.recipe)}-{time.strftime('%Y%m%d-%H%M%S')}"
        run = controller or pkgutil.resolve_name(CONTROLLER)
        leave(_control(partial(run, config, run_dir=run_dir, resume=arguments.resume), run_dir))
    log = run_dir / "logs" / f"worker-{place.rank}.log" if run_dir else None
    leave(serve_worker(config.network, factory=worker, log=log, environment=place))


def _control(start: Callable[[], Awaitable[Outcome]], run_dir: Path) -> int:
    """Rank 0. A controller that computes stalls its own loop: it gets no device and no Megatron."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    die_with_parent(signal.SIGTERM)  # the way to the compensation that the launcher's own signal would take
    try:
        with lock.hold(run_dir):
            outcome.reserve(run_dir)
            ended = _run(start)
            outcome.write(run_dir, ended)
    except ConfigError as error:  # it belongs to another run: nothing there may be touched
        ended = outcome.of_error(error)
    except OSError as error:
        ended = Outcome(1, f"can't write to {run_dir}: {error}")
    if ended.message:
        complain(f"error: {ended.message}")
    return ended.code


def _run(start: Callable[[], Awaitable[Outcome]]) -> Outcome:
    try:
        return anyio.run(start)
    except BaseException as error:  # noqa: BLE001  # the end of the process: turned into its exit code
        return outcome.of_error(error)


def leave(code: int) -> NoReturn:
    """Exit without waiting for RPC's threads, which may be wedged."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a full disk under the log, or nobody at the other end
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
