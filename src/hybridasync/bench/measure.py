"""What the benchmarks share: processor time by role, spreads, the machine's description, results as JSON."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from hybridasync.bench.manifest import machine, packages, source
from hybridasync.observability.jsonl import replace_atomically
from hybridasync.observability.process import descendants


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and largest of some measurements."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        found = sorted(values)
        return cls(statistics.median(found), found[0], found[-1])

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.low:.3g} to {self.high:.3g})"


def cpu_seconds(pid: int, *, ended: bool = False) -> float:
    """User and system time of a process, all its threads; with those of its `ended` children."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system + (times.children_user + times.children_system if ended else 0.0))


class Foreign:
    """How much of the machine others took: a share of its processor time since this was made.

    Wall times are comparable between runs only where this is small.
    """

    def __init__(self, pids: Iterable[int] | None = None) -> None:
        """`pids`: who isn't others. Default: this process and all that it starts, those included that end."""
        self._pids = None if pids is None else tuple(pids)
        self._started, self._own, self._busy = time.monotonic(), self._own_now(), _busy_now()

    def share(self) -> float:
        """0 (nobody else ran) to 1."""
        capacity = (time.monotonic() - self._started) * (os.cpu_count() or 1)
        foreign = (_busy_now() - self._busy) - (self._own_now() - self._own)
        return min(1.0, max(0.0, foreign / capacity))

    def _own_now(self) -> float:
        if self._pids is not None:
            return sum(cpu_seconds(pid) for pid in self._pids)
        family = [os.getpid(), *(process.pid for process in descendants(os.getpid()))]
        total = 0.0
        for pid in family:
            with suppress(psutil.NoSuchProcess):  # it has just ended, and is its parent's by now
                total += cpu_seconds(pid, ended=True)
        return total


def _busy_now() -> float:
    times = psutil.cpu_times()
    waiting = times.idle + getattr(times, "iowait", 0.0)
    # guest time is contained in user time
    return float(sum(times) - waiting - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0))


def write_results(path: Path, benchmark: str, results: Sequence[Mapping[str, Any]]) -> None:
    """Results with what they were measured on. Raises OSError."""
    installed = packages()
    about = machine() | {
        "hybridasync": source(),
        "torch": installed.get("torch", ""),
        "threads_per_process": int(os.environ.get("OMP_NUM_THREADS", "1")),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"benchmark": benchmark, "machine": about, "results": results}
    replace_atomically(path, (json.dumps(content, indent=1, default=asdict) + "\n").encode())
