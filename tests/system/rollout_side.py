"""Sidecars and engines that outlive runs, as on nodes of their own, and a watch on how long an engine stands still."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from tests.system.gate import free_port

from hybridasync.data.sort_digits import prepare
from hybridasync.observability.process import ProcessId, child_environment, terminate_tree

TOKEN = "chaos"
START_S = 90.0
STATUS_S = 15.0
"""A sidecar asks its engine two things, 5 s each, before it answers."""
WATCH_S = 0.05
PROBE_S = 1.0


@dataclass
class Standstill:
    """How long an engine has been paused, and how long mute, in one piece. Seconds."""

    paused: float = 0.0
    mute: float = 0.0
    since: float | None = None
    kind: str = ""

    def see(self, kind: str, now: float) -> None:
        """`kind`: "paused", "mute", or "" for an engine that serves or has ended."""
        if kind != self.kind:
            self.kind, self.since = kind, now
        if kind and self.since is not None:
            setattr(self, kind, max(getattr(self, kind), now - self.since))


@dataclass
class Node:
    """One sidecar, started by us at a fixed port, with the engine that it launches."""

    index: int
    folder: Path
    model: Path
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        announce, log = self.folder / f"announce-{self.index}.json", self.folder / f"sidecar-{self.index}.log"
        announce.unlink(missing_ok=True)
        launch = self.folder / f"launch-{self.index}.json"
        engine = [sys.executable, "-m", "hybridasync.engine", "--model-path", str(self.model), "--device", "cpu"]
        engine += ["--announce", "{announce}", "--port", "{port}", "--random-seed", str(self.index)]
        description = {"kind": "embedded", "command": engine, "init_timeout_s": START_S}
        launch.write_text(json.dumps(description | {"log": str(self.folder / f"engine-{self.index}.log")}))
        command = [sys.executable, "-m", "hybridasync.sidecar", "--name", f"engine-{self.index}"]
        command += ["--port", str(self.port), "--announce", str(announce), "--launch", str(launch)]
        environment = child_environment() | {"HYBRIDASYNC_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
        with log.open("ab") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        deadline = time.monotonic() + START_S
        while not announce.exists():
            assert self.process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)

    def status(self) -> dict[str, Any]:
        """As the sidecar tells it, past the relay; empty if it doesn't answer."""
        with suppress(httpx.HTTPError, ValueError):
            answer = httpx.get(
                f"{self.url}/v1/status", headers={"Authorization": f"Bearer {TOKEN}"}, timeout=STATUS_S, trust_env=False
            )
            return dict(answer.json())
        return {}

    def wait_ready(self) -> dict[str, Any]:
        deadline = time.monotonic() + START_S
        while not ((status := self.status()).get("healthy") and status.get("state") == "running"):
            assert time.monotonic() < deadline, f"{self.index}: {status}"
            time.sleep(0.05)
        return status

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def stop(self) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGCONT)
            terminate_tree(self.process.pid, grace_s=3)
            self.process.wait()


class RolloutSide:
    """As many nodes as it takes, one model, and a thread that asks every engine all the time whether it serves."""

    def __init__(self, folder: Path, count: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        prepare(folder / "task", 0, digits=3, layers=1, hidden=32, heads=2, context_length=32, warm_start_rows=1)
        self.task = folder / "task"
        self.nodes = [Node(index, folder, self.task / "model") for index in range(count)]
        self.standstill = [Standstill() for _ in self.nodes]
        self.engines: list[tuple[str, ProcessId] | None] = [None] * count
        self.transactions = -1  # for a test that pauses: the number of its last
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> RolloutSide:
        for node in self.nodes:
            node.start()
        for node in self.nodes:
            node.wait_ready()
        self.look()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        for node in self.nodes:
            node.stop()

    def look(self) -> None:
        """Which engine processes there are just now; those of sidecars that are mute stay as they were."""
        for index, node in enumerate(self.nodes):
            status = node.status()
            if status.get("engine_pid"):
                with suppress(psutil.NoSuchProcess):
                    self.engines[index] = (status["engine_url"], ProcessId.of(status["engine_pid"]))

    def reset(self) -> None:
        """Forget earlier standstills."""
        with self._lock:
            self.standstill = [Standstill() for _ in self.nodes]

    def _watch(self) -> None:
        with httpx.Client(timeout=PROBE_S, trust_env=False) as client:
            while not self._over.wait(WATCH_S):
                for index, engine in enumerate(self.engines):
                    if engine is not None:
                        kind = _kind(client, *engine)
                        with self._lock:
                            self.standstill[index].see(kind, time.monotonic())


def _kind(client: httpx.Client, url: str, process: ProcessId) -> str:
    try:
        return "paused" if client.get(f"{url}/ready").status_code == 503 else ""
    except httpx.TransportError as error:  # one that doesn't listen is being started, or has ended
        return "mute" if isinstance(error, httpx.ReadTimeout) and process.alive() else ""
