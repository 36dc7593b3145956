"""Memory and processor use of the run's processes on this node."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import psutil

from hybridasync.observability import names

_MIB = 1024 * 1024

_CGROUP = Path("/sys/fs/cgroup")


def free_memory() -> int:
    """Bytes that this process may still have: the machine's, or what a container's limit leaves (cgroup v2)."""
    machine = int(psutil.virtual_memory().available)
    try:
        limit, used = ((_CGROUP / f"memory.{name}").read_text().strip() for name in ("max", "current"))
    except OSError:
        return machine
    return min(machine, max(0, int(limit) - int(used))) if limit.isdecimal() else machine


class ResourceGauge:
    """Samples processes by id; those that are gone count as nothing."""

    def __init__(self) -> None:
        psutil.cpu_percent()  # the first call has nothing to compare with and answers 0

    def sample(self, *, trainer: Iterable[int] = (), rollout: Iterable[int] = ()) -> dict[str, float]:
        """Resident memory in MiB by role, and the processor use since the last sample in percent of all cores."""
        return {
            names.CONTROLLER_RSS_MIB: _rss_mib([os.getpid()]),
            names.TRAINER_RSS_MIB: _rss_mib(trainer),
            names.ROLLOUT_RSS_MIB: _rss_mib(rollout),
            names.CPU_PERCENT: psutil.cpu_percent(),
        }


def _rss_mib(pids: Iterable[int]) -> float:
    total = 0
    for pid in pids:
        try:
            total += psutil.Process(pid).memory_info().rss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total / _MIB
