"""Where weight snapshots lie on their way from the trainer to the engines."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
ROOM_FACTOR = 4
"""Snapshots that must fit into shared memory: two in use, one being written, one to spare for others."""


class WeightsFolder:
    """A folder of this run, emptied at the start (what a killed run left) and removed at the end."""

    def __init__(self, run_dir: Path, configured: str | None, *, local: bool, model_bytes: int) -> None:
        self.path = self._choose(run_dir.resolve(), configured, local=local, model_bytes=model_bytes)

    def __enter__(self) -> Path:
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)
        return self.path

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    @staticmethod
    def _choose(run_dir: Path, configured: str | None, *, local: bool, model_bytes: int) -> Path:
        name = "hybridasync-" + hashlib.sha256(str(run_dir).encode()).hexdigest()[:16]
        if configured is not None:
            return Path(configured) / name
        if local and SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > ROOM_FACTOR * model_bytes:
            return SHARED_MEMORY / name
        return run_dir / "weights"


def drop_old_snapshots(folder: Path, *, keep: int) -> None:
    """Remove all but the newest `keep` snapshots."""
    for path in sorted(folder.glob("version-*"))[:-keep]:
        shutil.rmtree(path, ignore_errors=True)
