"""What the benchmarks share: processor time by role, spreads, the machine's description, JSON and plain tables."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch


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


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, all its threads."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


class Foreign:
    """How much of the machine others took: a share of its processor time since this was made.

    Wall times are comparable between runs only where this is small.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = tuple(pids)
        self._started, self._own, self._busy = time.monotonic(), self._own_now(), _busy_now()

    def share(self) -> float:
        """0 (nobody else ran) to 1."""
        capacity = (time.monotonic() - self._started) * (os.cpu_count() or 1)
        foreign = (_busy_now() - self._busy) - (self._own_now() - self._own)
        return min(1.0, max(0.0, foreign / capacity))

    def _own_now(self) -> float:
        return sum(cpu_seconds(pid) for pid in self._pids)


def _busy_now() -> float:
    times = psutil.cpu_times()
    waiting = times.idle + getattr(times, "iowait", 0.0)
    # guest time is contained in user time
    return float(sum(times) - waiting - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0))


def machine() -> dict[str, Any]:
    return {
        "cpus": os.cpu_count(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads_per_process": int(os.environ.get("OMP_NUM_THREADS", "1")),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def arguments(description: str | None, shapes: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file for the results, JSON")
    parser.add_argument("--shapes", nargs="+", choices=shapes, default=list(shapes), help="default: all")
    parser.add_argument("--rounds", type=int, default=5, help="repetitions whose medians are compared (default 5)")
    parser.add_argument(
        "--quick", action="store_true", help="a tiny shape, once: shows that it works, measures nothing"
    )
    return parser


def write_results(path: Path | None, benchmark: str, results: Sequence[Mapping[str, Any]]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"benchmark": benchmark, "machine": machine(), "results": results}
        path.write_text(json.dumps(content, indent=1, default=asdict) + "\n", encoding="utf-8")


def print_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
