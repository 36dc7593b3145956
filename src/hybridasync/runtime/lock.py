"""run.lock: a run directory belongs to one live run.

The kernel's lock decides, so that a run that was killed leaves nothing behind; the file's text only says who holds it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from hybridasync.errors import ConfigError
from hybridasync.observability.process import ProcessId

FILE_NAME = "run.lock"

_held: dict[Path, int] = {}
"""Run directory → how often this process holds it: a launcher's rank and the run that it makes both ask for it."""


@contextlib.contextmanager
def hold(run_dir: Path) -> Iterator[None]:
    """Own the run directory (made if need be) during the block; nested blocks of one process share it.

    Raises ConfigError naming the process when it belongs to a live run.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    key = run_dir.resolve()
    if key in _held:
        _held[key] += 1
        try:
            yield
        finally:
            _held[key] -= 1
        return
    descriptor = os.open(key / FILE_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _taken(run_dir) from error
        _write(descriptor, ProcessId.of())
        _held[key] = 1
        try:
            yield
        finally:
            del _held[key]
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def check_free(run_dir: Path) -> None:
    """Raise ConfigError when the run directory belongs to a live run. For an early answer: only `hold` is safe."""
    try:
        descriptor = os.open(run_dir / FILE_NAME, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise _taken(run_dir) from error
    finally:
        os.close(descriptor)


def holder(run_dir: Path) -> ProcessId | None:
    """The live process that owns the run directory on this machine, or None."""
    try:
        entry = json.loads((run_dir / FILE_NAME).read_text())
        process = ProcessId(entry["pid"], entry["started"])
    except (OSError, ValueError, KeyError):
        return None
    return process if process.alive() else None


def _write(descriptor: int, owner: ProcessId) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps({"pid": owner.pid, "started": owner.started}).encode(), 0)


def _taken(run_dir: Path) -> ConfigError:
    owner = holder(run_dir)
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner.started)) if owner else ""
    who = f"process {owner.pid}, running since {since}" if owner else "a process that can't be seen from here"
    return ConfigError(
        f"{run_dir} belongs to a live run ({who}): wait for it, stop it, or choose another directory", setting="run.dir"
    )
