"""The embedded engine as a process: how it starts, refuses to start, and ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.engine_models import saved_model

from hybridasync.observability.process import ProcessId, wait_ended

pytestmark = pytest.mark.slow
COMMAND = [sys.executable, "-m", "hybridasync.engine"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
LONG = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 200_000, "ignore_eos": True}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    saved_model(path, max_position_embeddings=1 << 18)
    return path


def announced(path: Path, process: subprocess.Popen[Any]) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while not path.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    content: dict[str, Any] = json.loads(path.read_text())
    return content


@pytest.fixture
def engine(model: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[Any], dict[str, Any]]]:
    announce = tmp_path / "announce" / "engine.json"
    arguments = ["--model-path", str(model), "--port", "0", "--announce", str(announce), "--api-key", "sesame"]
    process = subprocess.Popen([*COMMAND, *arguments, "--weight-version", "3"], env=ENVIRONMENT)
    try:
        yield process, announced(announce, process)
    finally:
        process.kill()
        process.wait()


def refused(*arguments: str) -> str:
    """Standard error of an engine that must not start."""
    result = subprocess.run([*COMMAND, *arguments], env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 2
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    return line


def test_mistakes_are_one_line_and_exit_2(model: Path, tmp_path: Path) -> None:
    """A port that is taken, a directory that isn't there or isn't a model: said in a line that names the setting."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refused("--model-path", str(model), "--port", str(port))
    assert "--port" in line
    assert str(port) in line
    line = refused("--model-path", str(tmp_path / "missing"), "--port", "0")
    assert "--model-path" in line
    assert "missing" in line
    assert "config.json" in refused("--model-path", str(tmp_path), "--port", "0")


def test_announcement_and_key(engine: tuple[subprocess.Popen[Any], dict[str, Any]]) -> None:
    """The announcement names a server that answers; without the key only health checks do."""
    process, content = engine
    assert content["pid"] == process.pid
    assert content["url"] == f"http://127.0.0.1:{content['port']}"
    with httpx.Client(base_url=content["url"], trust_env=False) as client:
        assert client.get("/health").status_code == 200
        assert client.get("/ready").status_code == 200
        assert client.get("/model_info").status_code == 401
        assert client.get("/model_info", headers={"authorization": "Bearer wrong"}).status_code == 401
        answer = client.get("/model_info", headers={"authorization": "Bearer sesame"})
        assert answer.json()["weight_version"] == "3"


def quickest_s(url: str, path: str, **options: Any) -> float:
    """Of twenty answers over one connection."""
    times = []
    with httpx.Client(base_url=url, trust_env=False) as client:
        for _ in range(20):
            started = time.perf_counter()
            assert client.get(path, **options).status_code == 200
            times.append(time.perf_counter() - started)
    return min(times)


def test_answers_over_a_kept_connection_come_at_once(engine: tuple[subprocess.Popen[Any], dict[str, Any]]) -> None:
    """A head that waits until it is acknowledged before the body follows takes 40 ms, each time."""
    _, where = engine
    assert quickest_s(where["url"], "/model_info", headers={"Authorization": "Bearer sesame"}) < 0.03


def test_sigterm_ends_it_soon_with_requests_in_flight(engine: tuple[subprocess.Popen[Any], dict[str, Any]]) -> None:
    """Exit code 0, although a request would take minutes more."""
    process, content = engine
    outcome: list[object] = []

    def ask() -> None:
        try:
            headers = {"authorization": "Bearer sesame"}
            outcome.append(httpx.post(f"{content['url']}/generate", json=LONG, headers=headers, timeout=60))
        except httpx.TransportError as error:
            outcome.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(1)
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    assert time.monotonic() - started < 10  # about 1.5 s on an idle machine
    thread.join(10)
    assert len(outcome) == 1


def test_it_dies_with_its_parent(model: Path, tmp_path: Path) -> None:
    """SIGKILL of the process that started it leaves no engine behind."""
    announce = tmp_path / "engine.json"
    command = [*COMMAND, "--model-path", str(model), "--port", "0", "--announce", str(announce)]
    parent = subprocess.Popen(
        [sys.executable, "-c", f"import subprocess; subprocess.Popen({command!r}).wait()"], env=ENVIRONMENT
    )
    child = ProcessId.of(announced(announce, parent)["pid"])
    parent.kill()
    parent.wait()
    assert not wait_ended([child], 10)
