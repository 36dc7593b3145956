"""Checkpoint folders on disk. A rename makes one count; a manifest says what it must hold.

checkpoints/step_000020/{model/, run_state.json, manifest.json}     checkpoints/latest → "step_000020"

`latest_checkpointed_iteration.txt` says the same in Megatron's way: the folder is a Megatron checkpoint for
`model.load` of another run.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hybridasync.config.start import MARKER
from hybridasync.errors import CheckpointError

FORMAT = 1
STATE = "run_state.json"
MANIFEST = "manifest.json"


class CheckpointFolders:
    """Implements the port CheckpointStore. `keep` counts complete checkpoints."""

    def __init__(self, root: Path, *, keep: int) -> None:
        self._root = root
        self._keep = keep

    def begin(self, step: int) -> Path:
        folder = self._partial(step)
        try:
            remove_unfinished(self._root)
            (folder / "model").mkdir(parents=True)
        except OSError as error:
            raise CheckpointError(f"can't make {folder}: {error.strerror}") from error
        return folder

    def commit(self, step: int, state: Mapping[str, Any]) -> Path:
        folder, final = self._partial(step), self._root / f"step_{step:06d}"
        try:
            _write(folder / STATE, json.dumps(state, ensure_ascii=False))
            files = {str(path.relative_to(folder)): _digest(path) for path in _files(folder)}
            _write(folder / MANIFEST, json.dumps({"format": FORMAT, "step": step, "files": files}, indent=1))
            shutil.rmtree(final, ignore_errors=True)
            folder.rename(final)
            _sync_folder(self._root)
            self._point(MARKER, str(step))
            self._point("latest", final.name)
            _sync_folder(self._root)
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise CheckpointError(f"can't write {final}: {error.strerror or error}; the last good one stays") from error
        self._rotate()
        return final

    def latest(self) -> Path | None:
        """The folder that `latest` names; else the complete one with the highest step.

        None for a run that hasn't saved yet; raises CheckpointError if what it saved is gone (R117).
        """
        pointer = self._root / "latest"
        if pointer.is_file() and (named := self._root / pointer.read_text().strip()).joinpath(MANIFEST).is_file():
            return named
        complete = self._complete()
        if not complete and pointer.is_file():
            raise CheckpointError(
                f"{pointer} names {pointer.read_text().strip()}, but {self._root} has no complete checkpoint: put it "
                "back, or start a new run in another run.dir"
            )
        return complete[-1] if complete else None

    def verified_state(self, path: Path) -> dict[str, Any]:
        try:
            manifest = json.loads((path / MANIFEST).read_text())
            for name, digest in manifest["files"].items():
                if _digest(path / name) != digest:
                    raise CheckpointError(f"{path / name} isn't as it was written; resume from another checkpoint")
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{path} isn't a complete checkpoint: {error}") from error
        return run_state(path)

    def _point(self, name: str, text: str) -> None:
        part = self._root / f"{name}.tmp"
        _write(part, text)
        part.replace(self._root / name)

    def _partial(self, step: int) -> Path:
        return self._root / f"step_{step:06d}.partial"

    def _complete(self) -> list[Path]:
        return sorted(path.parent for path in self._root.glob(f"step_??????/{MANIFEST}"))

    def _rotate(self) -> None:
        for folder in self._complete()[: -self._keep]:
            shutil.rmtree(folder, ignore_errors=True)


def run_state(path: Path) -> dict[str, Any]:
    """Where the run of a checkpoint stands. Raises CheckpointError."""
    try:
        state: dict[str, Any] = json.loads((path / STATE).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} isn't a complete checkpoint: {error}") from error
    return state


def remove_unfinished(root: Path) -> None:
    """Remove what broken-off saves left. Nobody may be saving there."""
    for folder in root.glob("step_*.partial"):
        shutil.rmtree(folder, ignore_errors=True)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
