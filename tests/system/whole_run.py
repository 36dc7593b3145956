"""Whole runs as people start them: a command, its run directory, and every process that it ever had."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from hybridasync.observability.process import ProcessId, descendants, wait_ended

HYBRIDASYNC = str(Path(sys.executable).with_name("hybridasync"))
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
CENSUS_S = 0.5

SHORT = {
    "rollout.num_rollout": 4,
    "rollout.rollout_batch_size": 4,
    "rollout.n_samples_per_prompt": 4,
    "warm_start.steps": 5,
    "warm_start.batch_size": 32,
    "optimizer.lr_warmup_steps": 0,
    "eval.max_prompts": 16,
}
"""Settings that cut quickstart-fast down to what shows that something works, learning left out."""


def rows(path: Path) -> list[dict[str, Any]]:
    """Whole rows of a file of JSON lines; a live run may be writing another."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines if line.strip()]


def overrides(settings: Mapping[str, object]) -> list[str]:
    """`--set` options. JSON's notation of these values is TOML's, tables left out."""
    return [part for name, value in settings.items() for part in ("--set", f"{name}={json.dumps(value)}")]


@dataclass
class Census:
    """Looks at a tree of processes all the time: who belongs to it, and on which addresses it listens."""

    members: set[ProcessId] = field(default_factory=set)
    listening: set[str] = field(default_factory=set)
    _over: threading.Event = field(default_factory=threading.Event)

    def watch(self, *roots: int) -> threading.Thread:
        thread = threading.Thread(target=self._look, args=(roots,))
        thread.start()
        return thread

    def stop(self, thread: threading.Thread) -> None:
        self._over.set()
        thread.join()

    def _look(self, roots: Sequence[int]) -> None:
        while not self._over.wait(CENSUS_S):
            for root in roots:
                for member in descendants(root):
                    self.members.add(member)
                    if (process := member.find()) is not None:
                        self.listening |= _listening(process)


def _listening(process: psutil.Process) -> set[str]:
    try:
        connections = process.net_connections(kind="inet")
    except (psutil.Error, OSError):
        return set()
    return {entry.laddr.ip for entry in connections if entry.status == psutil.CONN_LISTEN}


@dataclass(frozen=True)
class Run:
    """What a run left."""

    directory: Path
    returncode: int
    output: str
    seconds: float
    listening: frozenset[str]  # addresses on which its processes listened
    left: frozenset[ProcessId]  # processes that outlived it

    def rows(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / f"{name}.jsonl").read_text().splitlines()]

    def events(self, name: str) -> list[dict[str, Any]]:
        return [row for row in self.rows("events") if row["event"] == name]

    def column(self, name: str) -> list[Any]:
        """One metric over the steps."""
        return [row[name] for row in self.rows("metrics")]

    @property
    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.directory / "summary.json").read_text())
        return found

    def explain(self) -> str:
        """For a failed assertion: the terminal's last lines, and those of the logs."""
        logs = sorted((self.directory / "logs").glob("*.log"))
        tails = [f"--- {path.name}\n" + "\n".join(path.read_text().splitlines()[-15:]) for path in logs]
        return "\n".join([self.output[-3000:], *tails])


def train(
    directory: Path,
    settings: Mapping[str, object],
    *options: str,
    recipe: str = "quickstart-fast",
    limit_s: float = 500,
) -> Run:
    """`hybridasync train` to its end, in the run directory `directory / run`."""
    command = [HYBRIDASYNC, "train", recipe, "--run-dir", str(directory / "run"), *options, *overrides(settings)]
    started = time.monotonic()
    with subprocess.Popen(
        command, cwd=directory, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        census = Census()
        thread = census.watch(process.pid)
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            output, _ = process.communicate(timeout=60)
            output += f"\nnot finished within {limit_s:g} s"
        finally:
            census.stop(thread)
    seconds = time.monotonic() - started
    left = wait_ended(census.members, 5)
    return Run(directory / "run", process.returncode, output, seconds, frozenset(census.listening), frozenset(left))
