"""One server for the whole suite, which speaks HTTP only: whatever claims SGLang's API can be a target.

`embedded` is started here. A real SGLang 0.5.23 is tested when HYBRIDASYNC_SGLANG_COMMAND gives its command line, with
`{model}` and `{port}` in it.
"""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from tests.contract.kit import CONTEXT, Target
from tests.engine_models import saved_model

SGLANG_COMMAND = os.environ.get("HYBRIDASYNC_SGLANG_COMMAND")


@pytest.fixture(scope="session", params=["embedded", *(["sglang"] if SGLANG_COMMAND else [])])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    root = tmp_path_factory.mktemp("contract")
    models = {
        name: saved_model(root / name, seed=seed, max_position_embeddings=CONTEXT)
        for name, seed in (("default", 1), ("1", 2))
    }
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "hybridasync.engine", "--model-path", "{model}", "--port", "{port}"]
    command += ["--max-running-requests", "64"]
    if request.param == "sglang" and SGLANG_COMMAND:
        command = shlex.split(SGLANG_COMMAND)
    command = [part.format(model=root / "default", port=port) for part in command]
    with (root / "log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_ready(url, process, root / "log")
        yield Target(request.param, url, process, {name: root / name for name in models}, models)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            if httpx.get(f"{url}/ready", trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    pytest.fail(f"the server didn't start: {log.read_text()[-2000:]}")


@pytest.fixture
async def client(target: Target) -> AsyncIterator[httpx.AsyncClient]:
    """A client; afterwards the server runs, is idle and has its first weights again."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=target.url, timeout=60, trust_env=False, limits=limits) as client:
        yield client
        await client.post("/continue_generation", json={})
        await client.post("/abort_request", json={"abort_all": True})
        await client.post("/end_weight_update", json={})
        if (await client.get("/model_info")).json()["weight_version"] != "default":
            body = {"model_path": str(target.directories["default"]), "weight_version": "default"}
            answer = await client.post("/update_weights_from_disk", json=body)
            assert answer.status_code == 200, answer.text
