"""Ownership of processes: observability/process.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hybridasync.observability import process

SLEEPER = "import time; time.sleep(60)"


def _python(code: str, **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code], text=True, **options)  # type: ignore[call-overload, no-any-return]


def test_child_dies_with_its_parent() -> None:
    """When the parent is SIGKILLed, a child that called die_with_parent gets its signal."""
    child = (
        "from hybridasync.observability.process import *; import signal, time\n"
        "die_with_parent(signal.SIGKILL); print(1, flush=True); time.sleep(60)"
    )
    parent_code = (
        "import subprocess, sys, time; from hybridasync.observability.process import child_environment\n"
        f"p = subprocess.Popen([sys.executable, '-c', {child!r}], env=child_environment(), stdout=subprocess.PIPE)\n"
        "p.stdout.readline(); print(p.pid, flush=True); time.sleep(60)"
    )
    with _python(parent_code, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        grandchild = process.ProcessId.of(int(parent.stdout.readline()))
        assert grandchild.alive()
        parent.kill()
        assert process.wait_ended([grandchild], 60) == set()


def test_child_whose_parent_is_gone_already_ends() -> None:
    """A child that arms its death signal too late ends by itself."""
    code = "from hybridasync.observability.process import *; die_with_parent(9); print('alive')"
    environment = {**os.environ, process.PARENT_PID_VARIABLE: "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")


def test_parent_variable_is_not_handed_down() -> None:
    """After die_with_parent the variable is gone, so that a grandchild doesn't take it for its own parent."""
    code = (
        "from hybridasync.observability.process import *; import os\n"
        "die_with_parent(9); print(PARENT_PID_VARIABLE in os.environ)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=process.child_environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


def test_terminate_tree_kills_what_ignores_sigterm(tmp_path: Path) -> None:
    """A child and a grandchild that ignore SIGTERM are gone after the grace time, and the call is bounded."""
    ready = tmp_path / "ready"
    ignore = "import signal, subprocess, sys, time, pathlib; signal.signal(15, signal.SIG_IGN)\n"
    stubborn = f"{ignore}pathlib.Path({str(ready)!r}).touch(); time.sleep(60)"
    code = f"{ignore}subprocess.run([sys.executable, '-c', {stubborn!r}])"
    with _python(code) as child:
        while not ready.exists():
            time.sleep(0.02)
        members = process.descendants(child.pid)
        assert len(members) == 1
        assert process.terminate_tree(child.pid, grace_s=0.2) == set()
        assert not any(member.alive() for member in members)
        assert child.wait(60) == -signal.SIGKILL


def test_pid_with_another_start_time_is_another_process() -> None:
    """A recycled pid isn't taken for the process that was meant, and is never signalled."""
    with _python(SLEEPER) as child:
        real = process.ProcessId.of(child.pid)
        recycled = process.ProcessId(child.pid, real.started - 1)
        assert real.alive() and not recycled.alive()
        assert process.terminate([recycled], grace_s=0.1) == set()
        assert psutil.pid_exists(child.pid) and child.poll() is None
        child.kill()


def test_signal_group_spares_the_caller() -> None:
    """A child in our own group is signalled alone; one in its own session with its group; a dead one answers False."""
    with _python(SLEEPER) as same, _python(SLEEPER, start_new_session=True) as other:
        assert process.signal_group(same.pid, signal.SIGKILL) and same.wait(60) == -signal.SIGKILL
        assert process.signal_group(other.pid, signal.SIGKILL) and other.wait(60) == -signal.SIGKILL
        assert not process.signal_group(other.pid, signal.SIGKILL)


def test_session_is_found_without_its_leader() -> None:
    """An orphan of a session is found by the session, and a group's leader can end its children and live."""
    code = (
        "import signal, subprocess, os; from hybridasync.observability.process import *\n"
        "signal.signal(15, lambda *_: None); p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); input()\n"
        "end_own_group(); print(p.wait(), flush=True)\n"
        "p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True)"
    )
    with _python(code, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as leader:
        assert leader.stdin is not None and leader.stdout is not None
        child = process.ProcessId.of(int(leader.stdout.readline()))
        assert child in process.in_sessions([leader.pid])
        leader.stdin.write("\n")
        leader.stdin.flush()
        assert leader.stdout.readline() == "-15\n"
        orphan = process.ProcessId.of(int(leader.stdout.readline()))
        leader.wait(60)
        assert process.in_sessions([leader.pid]) == {orphan}
        assert process.terminate([orphan], grace_s=1) == set()


@pytest.mark.parametrize(
    ("code", "name"), [(0, "exit code 0"), (7, "exit code 7"), (-9, "SIGKILL"), (-(signal.SIGRTMIN + 1), "signal 35")]
)
def test_an_end_has_a_name(code: int, name: str) -> None:
    """Real-time signals, too, of which Python names two."""
    assert process.exit_name(code) == name
