"""A sidecar that launches the embedded engine: pause, swap and resume through both clients, as a publication does."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import anyio.lowlevel
import psutil
import pytest
from tests.engine_models import saved_model
from tests.system.test_sidecar import DEADLINE_S, TOKEN, Running, Sidecars, txn, wait_gone

from hybridasync.transport.sglang import SglangServer
from hybridasync.transport.sidecar import SidecarClient
from hybridasync.types import SamplingParams, WeightSnapshot

pytestmark = pytest.mark.slow

LONG = SamplingParams(max_new_tokens=2000, temperature=1.0)
"""Never ended by a token of the model: it is still under way when a busy machine comes to pause it."""
ENDLESS = {"eos_token_id": None, "max_position_embeddings": 4096}


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    saved_model(tmp_path / "model", **ENDLESS)
    command = [sys.executable, "-m", "hybridasync.engine", "--model-path", str(tmp_path / "model"), "--host"]
    command += ["127.0.0.1", "--port", "0", "--device", "cpu", "--dtype", "fp32", "--max-running-requests", "8"]
    command += ["--announce", "{announce}"]
    description = {"kind": "embedded", "command": command, "env": {"OMP_NUM_THREADS": "1"}}
    description |= {"log": str(tmp_path / "engine.log"), "init_timeout_s": 120.0}
    launch = tmp_path / "launch.json"
    launch.write_text(json.dumps(description))
    kit = Sidecars(tmp_path)
    sidecar = kit.start("--launch", str(launch))
    yield sidecar
    sidecar.process.terminate()
    sidecar.process.wait(DEADLINE_S)


def until_ready(running: Running) -> dict[str, object]:
    deadline = time.monotonic() + 120
    while not (status := running.status())["healthy"]:
        assert not status["detail"] and time.monotonic() < deadline, status
        time.sleep(0.2)
    return status


async def test_c09_a_pause_reaches_the_engine_among_200_open_generations(
    running: Running, figure: Callable[[str], None]
) -> None:
    """C09: with 200 long requests open at one engine, pause and end go through connections of their own."""
    status = await anyio.to_thread.run_sync(until_ready, running)
    url, answers = str(status["engine_url"]), 0
    async with (
        SglangServer("e", url, control_timeout_s=DEADLINE_S, request_timeout_s=120) as engine,
        running.client() as sidecar,
        anyio.create_task_group() as tasks,
    ):

        async def generate(index: int) -> None:
            nonlocal answers
            await engine.generate(f"r{index}", [1, 2, 3], LONG)
            answers += 1

        for index in range(200):
            tasks.start_soon(generate, index)
        with anyio.fail_after(DEADLINE_S):
            while True:
                if await engine.in_flight() >= 190 - answers:
                    break
                await anyio.sleep(0.05)
        took_s = []
        for sequence in range(5):
            started = time.monotonic()
            assert await sidecar.pause(txn(sequence), "retract", 60.0)
            took_s.append(time.monotonic() - started)
            await sidecar.end(txn(sequence))
        assert answers < 200
        tasks.cancel_scope.cancel()
    figure(f"200 long generations open: five pauses took {', '.join(f'{s:.3f}' for s in took_s)} s")


async def test_a_publication_by_hand_through_sidecar_and_engine(running: Running, tmp_path: Path) -> None:
    """A request in flight lives through pause, swap and resume; its tokens know their versions; kill -9 is noticed."""
    status = await anyio.to_thread.run_sync(until_ready, running)
    saved_model(tmp_path / "next", seed=1, **ENDLESS)
    snapshot = WeightSnapshot(version=1, path=str(tmp_path / "next"), checksums={}, bytes=0, prepare_s=0.0)
    url = str(status["engine_url"])
    async with (
        SidecarClient("engine-0", running.url, TOKEN, timeout_s=DEADLINE_S) as sidecar,
        SglangServer("engine-0", url, control_timeout_s=DEADLINE_S, request_timeout_s=60) as engine,
    ):
        assert await engine.healthy()
        assert await engine.weight_version() in ("0", "default")
        before = await engine.checksums()
        completions = []

        async def generate() -> None:
            completions.extend(await engine.generate("r-0", [5, 6, 7], LONG))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(generate)
            with anyio.fail_after(DEADLINE_S):
                while await engine.in_flight() == 0:
                    await anyio.lowlevel.checkpoint()
            assert not await sidecar.pause(txn(0), "drain", 60.0)
            assert await sidecar.pause(txn(0), "retract", 60.0)
            assert (await sidecar.status()).state == "paused"
            await engine.update_weights(snapshot)
            assert not completions
            await sidecar.end(txn(0))
        assert await engine.weight_version() == "1"
        assert before and (await engine.checksums()).keys() == before.keys()
        assert await engine.checksums() != before
        (completion,) = completions
        assert [span.version for span in completion.spans] in ([0, 1], [1])
        assert (await sidecar.status()).weight_version == "1"

        pid = (await sidecar.status()).engine_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        down = await anyio.to_thread.run_sync(running.until_buried)
        assert "SIGKILL" in down["detail"]
        await sidecar.recover(120.0)
        status = running.status()
        assert status["healthy"] and status["weight_version"] in ("0", "default")


def test_nothing_is_left_of_an_embedded_engine(running: Running) -> None:
    """SIGTERM of the sidecar ends the engine and everything below it."""
    pid = until_ready(running)["engine_pid"]
    assert isinstance(pid, int)
    family = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    running.process.terminate()
    assert running.process.wait(DEADLINE_S) == 0
    for member in family:
        wait_gone(member)
