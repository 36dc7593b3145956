"""Processor, memory and GPU use of a run, sampled from outside. Samples of idle moments count like all others."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

PERIOD_S = 0.5
"""Half a second: fine enough for a step, and the sampling itself stays below one percent of a core."""
CENSUS_S = 4.0
"""Processes are looked up this often: going through all of the machine's costs milliseconds."""
_GPU_PERIOD_S = 1.0
_GPU_QUERY = ("--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits")

ROLES = ("trainer", "engine", "sidecar", "controller")
Row = dict[str, float]


class Usage:
    """One sample at each call of `sample`. `run_dir` says who the trainer is, once it has said so itself."""

    def __init__(self, pid: int, run_dir: Path) -> None:
        self._pid, self._run_dir = pid, run_dir
        self._roles: dict[str, list[psutil.Process]] = {}
        self._census_at = self._gpu_at = 0.0
        self._gpu: Row = {"gpu_percent": 0.0, "gpu_used_mib": 0.0}
        self._has_gpu = shutil.which("nvidia-smi") is not None
        psutil.cpu_percent()
        self._spent: dict[int, float] = {}
        self._at = time.monotonic()

    def sample(self) -> Row:
        """Percent since the last sample and MiB now. `cpu_percent` is of the machine, the roles' of one core."""
        now = time.monotonic()
        if now >= self._census_at:
            self._roles = processes_by_role(self._pid, trainer_pids(self._run_dir))
            self._census_at = now + CENSUS_S
        row: Row = {"time": time.time(), "cpu_percent": psutil.cpu_percent()}
        passed, self._at = max(1e-6, now - self._at), now
        for role in ROLES:
            row |= self._role(role, passed)
        own = sum(row[f"{role}_cpu_percent"] for role in ROLES) / (os.cpu_count() or 1)
        return row | {"others_percent": max(0.0, row["cpu_percent"] - own)} | self._gpu_use(now)

    def _role(self, role: str, passed_s: float) -> Row:
        spent = rss = peak = 0.0
        for process in self._roles.get(role, ()):
            with suppress(psutil.Error):
                times = process.cpu_times()
                total = times.user + times.system
                spent += total - self._spent.get(process.pid, total)
                self._spent[process.pid] = total
                rss += process.memory_info().rss / 2**20
                peak += peak_mib(process.pid)
        return {
            f"{role}_cpu_percent": 100 * spent / passed_s,
            f"{role}_rss_mib": rss,
            f"{role}_peak_mib": peak,
        }

    def _gpu_use(self, now: float) -> Row:
        if self._has_gpu and now >= self._gpu_at:
            self._gpu_at = now + _GPU_PERIOD_S
            self._gpu = gpu_use()
        return self._gpu


def trainer_pids(run_dir: Path) -> frozenset[int]:
    """Of the event that a run writes when its workers are there; none before."""
    with suppress(OSError, ValueError):
        for line in (run_dir / "events.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row.get("event") == "trainer_ready":
                return frozenset(int(pid) for pid in row["pids"].values())
    return frozenset()


def processes_by_role(pid: int, trainer: Iterable[int]) -> dict[str, list[psutil.Process]]:
    """`pid` and everything below it. Engines and sidecars are told from each other by their command."""
    workers = set(trainer)
    found: dict[str, list[psutil.Process]] = {role: [] for role in ROLES}
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with suppress(psutil.Error):
                found[_role_of(process, workers)].append(process)
    return found


def _role_of(process: psutil.Process, workers: set[int]) -> str:
    if process.pid in workers:
        return "trainer"
    command = " ".join(process.cmdline())
    if "hybridasync.sidecar" in command:
        return "sidecar"
    return "engine" if "hybridasync.engine" in command or "sglang" in command else "controller"


def peak_mib(pid: int) -> float:
    """Largest resident memory of a process so far (VmHWM of proc(5)); 0 where the system doesn't say."""
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    return 0.0


def gpu_use() -> Row:
    """Mean use of all GPUs, and memory of the fullest one, from nvidia-smi; zeros where it has nothing to say."""
    try:
        command = ["nvidia-smi", *_GPU_QUERY]
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
        rows = [(float(use), float(used)) for use, used in csv.reader(io.StringIO(done.stdout))]
    except (OSError, ValueError, subprocess.SubprocessError):
        rows = []
    uses, used = [row[0] for row in rows], [row[1] for row in rows]
    return {"gpu_percent": sum(uses) / max(1, len(uses)), "gpu_used_mib": max(used, default=0.0)}


def mean(rows: Iterable[Mapping[str, float]], name: str) -> float:
    """0 for no row."""
    values = [row[name] for row in rows if name in row]
    return sum(values) / len(values) if values else 0.0
