"""run.lock: runtime/lock.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybridasync.errors import ConfigError
from hybridasync.runtime import lock

HOLD = (
    "import sys; from pathlib import Path; from hybridasync.runtime import lock\n"
    "with lock.hold(Path(sys.argv[1])): print('held', flush=True); input()"
)


def _holder(run_dir: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLD, str(run_dir)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_live_run_keeps_others_out(tmp_path: Path) -> None:
    """While another process holds the directory, both questions name its pid; once killed, it is free."""
    with _holder(tmp_path) as other:
        for ask in (lock.check_free, lambda path: lock.hold(path).__enter__()):
            with pytest.raises(
                ConfigError, match=rf"belongs to a live run \(process {other.pid}, running since"
            ) as caught:
                ask(tmp_path)
            assert caught.value.setting == "run.dir"
        owner = lock.holder(tmp_path)
        assert owner is not None and owner.pid == other.pid
        other.kill()
        other.wait()
    assert lock.holder(tmp_path) is None
    lock.check_free(tmp_path)
    with lock.hold(tmp_path):
        assert json.loads((tmp_path / lock.FILE_NAME).read_text())["pid"] == os.getpid()


def test_one_process_may_hold_it_more_than_once(tmp_path: Path) -> None:
    """Nested blocks share the lock, which is free only after the outermost, also when a block fails."""
    with pytest.raises(ZeroDivisionError), lock.hold(tmp_path / "new"):
        with lock.hold(tmp_path / "new" / ".." / "new"):
            pass
        assert lock.holder(tmp_path / "new") is not None
        raise ZeroDivisionError
    assert lock.holder(tmp_path / "new") is None
    with lock.hold(tmp_path / "new"):
        pass


def test_children_don_t_inherit_it(tmp_path: Path) -> None:
    """A child that outlives the holder doesn't keep the directory."""
    with lock.hold(tmp_path):
        child = subprocess.Popen(["sleep", "30"], close_fds=False)
    lock.check_free(tmp_path)
    child.kill()
    child.wait()


def test_free_directory_isn_t_touched(tmp_path: Path) -> None:
    """Asking leaves no file behind."""
    lock.check_free(tmp_path)
    assert list(tmp_path.iterdir()) == []
