"""One server of each kind for the whole suite, which speaks HTTP only: whatever claims SGLang's API can be a target.

A test module's `TARGETS` says which kinds its tests hold for; without it, `embedded` and `sglang`. A real SGLang is
launched with the product's own command line when HYBRIDASYNC_SGLANG_PYTHON names the interpreter of an environment that
`hybridasync sglang setup` made; otherwise its tests are skipped, and the summary says so.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.contract.kit import CONTEXT, Target
from tests.engine_models import saved_model
from tests.fake_engine import FakeEngine, serving
from tests.system.gate import free_port

from hybridasync.config.models import Config
from hybridasync.runtime.sglang_launch import launch_command, launch_environment

KINDS = ("embedded", "sglang", "fake")
PYTHON_VARIABLE = "HYBRIDASYNC_SGLANG_PYTHON"
NO_SGLANG = f"no real SGLang: set {PYTHON_VARIABLE} to the interpreter of its environment (tests/run.sh does)"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "target" in metafunc.fixturenames:
        kinds = getattr(metafunc.module, "TARGETS", ("embedded", "sglang"))
        marked = [pytest.param(kind, marks=pytest.mark.sglang) if kind == "sglang" else kind for kind in kinds]
        metafunc.parametrize("target", marked, indirect=True, scope="session")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How many tests ran on each target."""
    counts: dict[str, Counter[str]] = {}
    for outcome in ("passed", "failed", "skipped"):
        for report in terminalreporter.stats.get(outcome, ()):
            kind = next((kind for kind in KINDS if f"[{kind}" in report.nodeid), None)
            if kind is not None and "contract/" in report.nodeid and (report.when == "call" or outcome == "skipped"):
                counts.setdefault(kind, Counter())[outcome] += 1
    for kind, outcomes in counts.items():
        text = ", ".join(f"{number} {outcome}" for outcome, number in outcomes.items())
        terminalreporter.write_line(f"contract on {kind}: {text}")


@pytest.fixture(scope="session")
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    kind: str = request.param
    python = os.environ.get(PYTHON_VARIABLE)
    if kind == "sglang" and not python:
        pytest.skip(NO_SGLANG)
    root = tmp_path_factory.mktemp(f"contract-{kind}")
    models = {
        name: saved_model(root / name, seed=seed, max_position_embeddings=CONTEXT)
        for name, seed in (("default", 1), ("1", 2))
    }
    directories = {name: root / name for name in models}
    if kind == "fake":
        with serving(FakeEngine()) as url:
            yield Target(kind, url, None, directories, models)
        return
    port = free_port()
    command, environment = _launch(kind, str(directories["default"]), port, python=python)
    with _running(command, environment, root / "log") as process:
        url = f"http://127.0.0.1:{port}"
        _wait_ready(url, process, root / "log")
        yield Target(kind, url, process, directories, models)


def _launch(kind: str, model: str, port: int, *, python: str | None) -> tuple[list[str], dict[str, str]]:
    address = ("--host", "127.0.0.1", "--port", str(port), "--max-running-requests", "64", "--random-seed", "1")
    if kind == "embedded":
        return [sys.executable, "-m", "hybridasync.engine", "--model-path", model, *address], {}
    config = Config.model_validate(
        {
            "model": {"hf_checkpoint": model},
            "data": {"prompt_data": "unused.jsonl"},
            "rollout": {
                "num_rollout": 1,
                "rollout_batch_size": 1,
                "n_samples_per_prompt": 1,
                "max_response_tokens": 1,
            },
            "engine": {"kind": "sglang", "python": python},
        }
    )
    return launch_command(config, device="cpu", address=address), launch_environment(
        device="cpu", tensor_parallel_size=1
    )


@contextmanager
def _running(command: list[str], environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 280
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/ready", trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    pytest.fail(f"the server didn't start: {log.read_text()[-2000:]}")


@pytest.fixture
async def client(target: Target) -> AsyncIterator[httpx.AsyncClient]:
    """A client; before and after, the server runs, is idle and has its first weights."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=target.url, timeout=60, trust_env=False, limits=limits) as client:
        await _first_weights(client, target)  # who had it before may have called them something else
        yield client
        await client.post("/continue_generation", json={})
        await client.post("/abort_request", json={"abort_all": True})
        if target.kind != "fake":  # which claims no session
            await client.post("/end_weight_update", json={})
        await _first_weights(client, target)


async def _first_weights(client: httpx.AsyncClient, target: Target) -> None:
    if (await client.get("/model_info")).json()["weight_version"] != "default":
        body = {"model_path": str(target.directories["default"]), "weight_version": "default"}
        answer = await client.post("/update_weights_from_disk", json=body)
        assert answer.status_code == 200, answer.text
