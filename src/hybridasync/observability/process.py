"""Owning child processes: they die with their parent, and a group is ended in bounded time.

Linux only: prctl(2) PR_SET_PDEATHSIG. In a low layer, so that engines, sidecars, workers and the launcher all use it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

PARENT_PID_VARIABLE = "HYBRIDASYNC_PARENT_PID"
"""Tells a child which process must still be its parent once the death signal is armed."""

_PR_SET_PDEATHSIG = 1
_ORPHANED_EXIT_CODE = 1
_LOG_TAIL_LINES = 15
_LOG_TAIL_BYTES = 16_384


def child_environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment for a child that calls `die_with_parent`: it closes the race with a parent that dies first."""
    return {**(os.environ if base is None else base), PARENT_PID_VARIABLE: str(os.getpid())}


def die_with_parent(signal_number: int, *, parent_pid: int | None = None) -> None:
    """Ask the kernel for `signal_number` when the parent dies; end at once if it is dead already.

    The kernel counts the *thread* that started this process as its parent: start children from a thread that stays.
    `parent_pid` defaults to what `child_environment` passed on; without either, an earlier death goes unnoticed.
    """
    told = os.environ.pop(
        PARENT_PID_VARIABLE, None
    )  # removed, so that grandchildren don't take it for their own parent
    expected = parent_pid if parent_pid is not None else int(told) if told is not None else os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != expected:
        os._exit(_ORPHANED_EXIT_CODE)


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process id with its start time (seconds since the epoch): the pair never names another process later."""

    pid: int
    started: float

    @classmethod
    def of(cls, pid: int | None = None) -> ProcessId:
        """Raises psutil.NoSuchProcess when there is no such process. `pid` None is this process."""
        process = psutil.Process(pid)
        return cls(process.pid, process.create_time())

    def find(self) -> psutil.Process | None:
        """The process, or None once it has ended (a zombie has ended)."""
        try:
            process = psutil.Process(self.pid)
            if process.create_time() != self.started or process.status() == psutil.STATUS_ZOMBIE:
                return None
        except psutil.NoSuchProcess:
            return None
        return process

    def alive(self) -> bool:
        return self.find() is not None


def descendants(pid: int) -> set[ProcessId]:
    """All living processes below `pid`, itself left out."""
    found: set[ProcessId] = set()
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                found.add(ProcessId(process.pid, process.create_time()))
    return found


def wait_ended(processes: Iterable[ProcessId], timeout_s: float) -> set[ProcessId]:
    """Wait up to `timeout_s` seconds for all of them to end; answer those that still live."""
    deadline = time.monotonic() + timeout_s
    left = {process for process in processes if process.alive()}
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = {process for process in left if process.alive()}
    return left


def signal_group(pid: int, signal_number: int) -> bool:
    """Send to the process group of `pid`; False when it is gone. Never to the caller's own group."""
    try:
        group = os.getpgid(pid)
        if group == os.getpgrp():
            os.kill(pid, signal_number)
        else:
            os.killpg(group, signal_number)
    except ProcessLookupError:
        return False
    return True


def end_own_group() -> None:
    """SIGTERM to the caller's process group, if it leads one. Its own handler must let that pass."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGTERM)


def in_sessions(sessions: Iterable[int]) -> set[ProcessId]:
    """Living processes of these sessions: also those whose parent is gone, which `descendants` can't find."""
    wanted = set(sessions)
    found: set[ProcessId] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getsid(process.pid) in wanted and process.status() != psutil.STATUS_ZOMBIE:
                found.add(ProcessId(process.pid, process.create_time()))
    return found


def terminate(processes: Iterable[ProcessId], *, grace_s: float) -> set[ProcessId]:
    """SIGTERM, up to `grace_s` seconds to obey, then SIGKILL. Answers what lives even then (uninterruptible sleep)."""
    targets = {process for process in processes if process.alive()}
    for target in targets:
        _send(target, signal.SIGTERM)
    stubborn = wait_ended(targets, grace_s)
    for target in stubborn:
        _send(target, signal.SIGKILL)
    return wait_ended(stubborn, 5.0)


def terminate_tree(pid: int, *, grace_s: float) -> set[ProcessId]:
    """End `pid` and everything below it, as `terminate` does."""
    members = descendants(pid)
    with contextlib.suppress(psutil.NoSuchProcess):
        members.add(ProcessId.of(pid))
    return terminate(members, grace_s=grace_s)


def _send(target: ProcessId, signal_number: signal.Signals) -> None:
    process = target.find()
    if process is not None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal_number)


def log_tail(path: Path) -> str:
    """The last lines of a process's log, indented; empty when there is none."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _LOG_TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").rstrip().splitlines()
    except OSError:
        return ""
    return "\n".join(f"  | {line}" for line in lines[-_LOG_TAIL_LINES:])


def exit_name(code: int | None) -> str:
    """How a process ended, in words, from what subprocess says of it: `SIGKILL`, `signal 35`, `exit code 1`."""
    if code is None or code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:  # a real-time signal: most have no name
        return f"signal {-code}"
