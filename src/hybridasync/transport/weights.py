"""Where weight snapshots lie on their way from the trainer to the engines."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Self

SHARED_MEMORY = Path("/dev/shm")
ROOM_FACTOR = 4
"""Snapshots that must fit into shared memory: two in use, one being written, one to spare for others."""


class SnapshotFolder:
    """Implements the port SnapshotFolder. Emptied at the start (what a killed run left), removed at the end."""

    def __init__(self, run_dir: Path, configured: str | None, *, local: bool, model_bytes: int) -> None:
        self._path = _choose(run_dir.resolve(), configured, local=local, model_bytes=model_bytes)

    def __enter__(self) -> Self:
        shutil.rmtree(self._path, ignore_errors=True)
        self._path.mkdir(parents=True)
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._path, ignore_errors=True)

    def path(self, version: int) -> str:
        return str(self._path / f"version-{version:08d}")

    def drop_all_but(self, newest: int) -> None:
        for path in sorted(self._path.glob("version-*"))[:-newest]:
            shutil.rmtree(path, ignore_errors=True)


def remove_leftovers(run_dir: Path, configured: str | None) -> None:
    """Remove the snapshots of a run whose controller was killed. For its launcher; engines must have ended."""
    for path in _places(run_dir.resolve(), configured):
        shutil.rmtree(path, ignore_errors=True)


def _places(run_dir: Path, configured: str | None) -> tuple[Path, ...]:
    """Where snapshots of the run may lie, best first."""
    name = "hybridasync-" + hashlib.sha256(str(run_dir).encode()).hexdigest()[:16]
    return (Path(configured) / name,) if configured is not None else (SHARED_MEMORY / name, run_dir / "weights")


def _choose(run_dir: Path, configured: str | None, *, local: bool, model_bytes: int) -> Path:
    best, *others = _places(run_dir, configured)
    if configured is not None:
        return best
    if local and SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > ROOM_FACTOR * model_bytes:
        return best
    return others[0]
