"""Which directory a run writes to, or goes on in."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from hybridasync.config.models import Config
from hybridasync.config.recipes import recipe_name
from hybridasync.config.resolved import FILE_NAME, read_resolved
from hybridasync.errors import ConfigError
from hybridasync.transport.checkpoints import CheckpointFolders, run_state

RUNS = Path("runs")
# Logs, metrics and one checkpoint of the smallest model; a disk with less fails in the middle of the first save.
_LEAST_FREE_BYTES = 64 * 2**20


def new_run_dir(recipe: str, config: Config, given: Path | None) -> Path:
    """The directory of a new run: the one given, or runs/<recipe>-<time>. It isn't made yet.

    Raises: ConfigError: it holds another run, or isn't a directory.
    """
    chosen = given or (Path(config.run.dir) if config.run.dir else None)
    if chosen is None:
        stem = RUNS / f"{recipe_name(recipe)}-{time.strftime('%Y%m%d-%H%M%S')}"
        chosen = next(path for n in range(1, 1000) if not (path := Path(f"{stem}-{n}" if n > 1 else stem)).exists())
    if chosen.exists() and not chosen.is_dir():
        raise ConfigError(f"{chosen} is a file; the run directory must be a new or empty directory", setting="run.dir")
    try:
        used = chosen.is_dir() and any(chosen.iterdir())
    except OSError as error:
        raise ConfigError(f"can't read {chosen}: {error.strerror}", setting="run.dir") from error
    if used:
        what = "holds a run already" if (chosen / FILE_NAME).exists() else "isn't empty"
        raise ConfigError(
            f"{chosen} {what}: choose another --run-dir, or go on with --resume {chosen}", setting="run.dir"
        )
    return chosen


def run_dir_to_resume(recipe: str | None, given: Path | None) -> Path:
    """The directory of the run to go on with: the one given, or the newest of this recipe.

    Raises: ConfigError: there is no run.
    """
    if given is None:
        if recipe is None:
            raise ConfigError("--resume needs a run directory or a recipe")
        pattern = f"{recipe_name(recipe)}-*/{FILE_NAME}"
        found = sorted(RUNS.glob(pattern), key=lambda path: path.stat().st_mtime)
        if not found:
            raise ConfigError(f"--resume: no run of {recipe_name(recipe)} in {RUNS.resolve()}; give its directory")
        return found[-1].parent
    if not (given / FILE_NAME).is_file():
        raise ConfigError(f"--resume: {given} holds no run ({FILE_NAME} is missing)")
    return given


def finished(config: Config, directory: Path) -> str | None:
    """Why there is nothing to go on with: the last checkpoint is at the run's length or past it, and all is exported.

    Raises: CheckpointError: what the run saved is gone.
    """
    latest = CheckpointFolders(directory / "checkpoints", keep=1).latest()
    exported = not config.checkpoint.export_hf or (directory / "hf").is_dir()
    wanted = None if latest is None else _steps(config, directory, latest)
    if wanted is None or latest is None or not exported or int(latest.name.removeprefix("step_")) < wanted:
        return None
    return f"nothing to do: {latest} is at step {int(latest.name.removeprefix('step_'))}, and num_rollout is {wanted}"


def _steps(config: Config, directory: Path, checkpoint: Path) -> int | None:
    """Steps of the run. Where epochs count, those that its last start found, unless what they follow from changed."""
    now = config.rollout
    if now.num_epoch is None:
        return now.num_rollout
    before = read_resolved(directory).rollout
    names = ("num_epoch", "num_rollout", "rollout_batch_size")
    if any(getattr(now, name) != getattr(before, name) for name in names):
        return None
    steps = run_state(checkpoint).get("num_rollout")
    return steps if isinstance(steps, int) else None


def make_run_dir(path: Path) -> None:
    """Make the directory and prove that it can be written to.

    Raises: ConfigError: no permission, no space, or something else is in the way.
    """
    probe = path / f".probe-{os.getpid()}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        with probe.open("wb") as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
        probe.unlink()
        free = shutil.disk_usage(path).free
    except OSError as error:
        raise ConfigError(f"can't write to {path}: {error.strerror}", setting="run.dir") from error
    if free < _LEAST_FREE_BYTES:
        raise ConfigError(
            f"no space on the disk of {path}: {free // 2**20} MiB free, a run needs {_LEAST_FREE_BYTES // 2**20} MiB "
            "or more; choose another --run-dir",
            setting="run.dir",
        )
