"""Checkpoint folders: complete or not there, whatever happens while they are written."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from hybridasync.errors import CheckpointError
from hybridasync.transport import checkpoints
from hybridasync.transport.checkpoints import CheckpointFolders


def save(store: CheckpointFolders, step: int, **state: Any) -> Path:
    folder = store.begin(step)
    (folder / "model" / "weights.bin").write_bytes(bytes([step]) * 64)
    return store.commit(step, {"step": step, **state})


@pytest.mark.parametrize("file", ["run_state.json", "manifest.json"])
def test_c32_a_full_disk_leaves_the_last_checkpoint_as_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """C32: ENOSPC in the middle of a file of step 4: step 2 stays, the error has path and reason, nothing is half."""
    store = CheckpointFolders(tmp_path, keep=2)
    save(store, 2)
    write = checkpoints._write

    def full(path: Path, text: str) -> None:
        if path.name == file:
            path.write_text(text[: len(text) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, text)

    monkeypatch.setattr(checkpoints, "_write", full)
    with pytest.raises(CheckpointError, match="step_000004: No space left on device; the last good one stays"):
        save(store, 4)
    monkeypatch.undo()
    latest = store.latest()
    assert latest == tmp_path / "step_000002"
    assert store.verified_state(latest) == {"step": 2}
    assert [path.name for path in sorted(tmp_path.glob("step_*"))] == ["step_000002"]


def test_c32_what_a_kill_leaves_never_counts(tmp_path: Path) -> None:
    """C32: killed before the rename, between rename and pointer, or with empty files in place: step 2 is resumed."""
    store = CheckpointFolders(tmp_path, keep=5)
    save(store, 2, position=7)
    folder = store.begin(4)
    (folder / "model" / "weights.bin").write_bytes(b"half")
    assert CheckpointFolders(tmp_path, keep=5).latest() == tmp_path / "step_000002"
    (tmp_path / "step_000006" / "model").mkdir(parents=True)
    (tmp_path / "step_000006" / "model" / "weights.bin").touch()
    latest = CheckpointFolders(tmp_path, keep=5).latest()
    assert latest == tmp_path / "step_000002"
    assert store.verified_state(latest)["position"] == 7
    save(store, 4)
    assert not list(tmp_path.glob("*.partial"))
    (tmp_path / "latest").write_text("step_000006")
    assert CheckpointFolders(tmp_path, keep=5).latest() == tmp_path / "step_000004"


def test_r117_a_file_that_changed_or_is_missing_is_named(tmp_path: Path) -> None:
    """R117: checksums of every file are compared on load; a flipped byte or a missing state is an error."""
    store = CheckpointFolders(tmp_path, keep=2)
    folder = save(store, 2)
    weights = folder / "model" / "weights.bin"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match=r"weights\.bin isn't as it was written"):
        store.verified_state(folder)
    folder = save(store, 4)
    (folder / "run_state.json").unlink()
    with pytest.raises(CheckpointError, match="step_000004 isn't a complete checkpoint"):
        store.verified_state(folder)


def test_the_newest_are_kept(tmp_path: Path) -> None:
    """keep 2 of four: the two newest are left, and the pointer is at the newest."""
    store = CheckpointFolders(tmp_path, keep=2)
    for step in (2, 4, 6, 8):
        save(store, step)
    assert [path.name for path in sorted(tmp_path.glob("step_*"))] == ["step_000006", "step_000008"]
    assert store.latest() == tmp_path / "step_000008"
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "8"
