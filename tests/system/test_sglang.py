"""A real SGLang under a sidecar: ports, tensor parallelism, and what is left when one of its processes is killed."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
from tests.engine_models import saved_model
from tests.system.test_sidecar import DEADLINE_S, TOKEN, Running, Sidecars, txn, wait_gone

from hybridasync.config.models import Config
from hybridasync.runtime.sglang_launch import launch_command, launch_environment
from hybridasync.transport.sglang import SglangServer
from hybridasync.transport.sidecar import SidecarClient
from hybridasync.types import SamplingParams, WeightSnapshot
from hybridasync.weights.checksums import checksums
from hybridasync.weights.layout import engine_layout
from hybridasync.weights.snapshot import read_tensors

PYTHON = os.environ.get("HYBRIDASYNC_SGLANG_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.sglang,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not PYTHON, reason="no real SGLang: set HYBRIDASYNC_SGLANG_PYTHON (tests/run.sh does)"),
]
START_S = 480.0
"""Half a minute alone; ranks that start beside other work on two cores took five."""


def config_of(model: Path, *, ranks: int) -> Config:
    rollout = {"num_rollout": 1, "rollout_batch_size": 1, "n_samples_per_prompt": 1, "max_response_tokens": 1}
    return Config.model_validate(
        {
            "model": {"hf_checkpoint": str(model)},
            "data": {"prompt_data": "unused.jsonl"},
            "rollout": rollout,
            "engine": {"kind": "sglang", "python": PYTHON, "tensor_parallel_size": ranks, "device": "cpu"},
        }
    )


def launch(folder: Path, config: Config, *, number: int = 0) -> Path:
    ranks = config.engine.tensor_parallel_size
    address = ("--host", "127.0.0.1", "--port", "{port}", "--max-running-requests", "8")
    description = {
        "kind": "sglang",
        "command": launch_command(config, device="cpu", address=address),
        "env": {"OMP_NUM_THREADS": "1", **launch_environment(device="cpu", tensor_parallel_size=ranks)},
        "log": str(folder / f"engine-{number}.log"),
        "init_timeout_s": START_S,
    }
    path = folder / f"launch-{number}.json"
    path.write_text(json.dumps(description))
    return path


def until(running: Running, **wanted: object) -> dict[str, Any]:
    deadline = time.monotonic() + START_S
    while True:
        status: dict[str, Any] = running.status()
        if all(status[name] == value for name, value in wanted.items()):
            return status
        assert time.monotonic() < deadline, status
        time.sleep(0.2)


def family(pid: int) -> list[psutil.Process]:
    return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    saved_model(tmp_path / "model")
    saved_model(tmp_path / "next", seed=1)
    return tmp_path


@pytest.fixture
def sidecars(folder: Path) -> Iterator[Sidecars]:
    kit = Sidecars(folder)
    yield kit
    for sidecar in kit.started:
        sidecar.process.terminate()
    for sidecar in kit.started:
        sidecar.process.wait(DEADLINE_S)


def test_two_engines_and_the_death_of_one(folder: Path, sidecars: Sidecars) -> None:
    """Ports differ; a killed scheduler takes its server along, not the other engine; recover starts it anew."""
    config = config_of(folder / "model", ranks=1)
    first, second = (sidecars.start("--launch", str(launch(folder, config, number=n))) for n in (0, 1))
    up = [until(running, state="running", healthy=True) for running in (first, second)]
    assert up[0]["engine_url"] != up[1]["engine_url"]
    members = family(up[0]["engine_pid"])
    scheduler = next(process for process in members if "scheduler" in " ".join(process.cmdline()))
    scheduler.send_signal(signal.SIGKILL)
    until(first, state="down")
    for member in members:
        wait_gone(member.pid)
    assert second.status()["healthy"]

    async def recovered() -> None:
        async with SidecarClient("engine-0", first.url, TOKEN, timeout_s=START_S) as client:
            await client.recover(START_S)

    anyio.run(recovered)
    status = until(first, state="running", healthy=True)
    members = family(status["engine_pid"])
    for running in (first, second):
        running.process.terminate()
    assert first.process.wait(DEADLINE_S) == 0
    for member in members:
        wait_gone(member.pid)


async def test_a_publication_reaches_every_rank(folder: Path, sidecars: Sidecars) -> None:
    """C07, C44: with two tensor-parallel ranks, each holds its part of every parameter, before and after an update."""
    config = config_of(folder / "model", ranks=2)
    running = sidecars.start("--launch", str(launch(folder, config)))
    status = await anyio.to_thread.run_sync(lambda: until(running, state="running", healthy=True))
    layout = engine_layout(config.engine, kv_heads=2, gpu_here=False)
    held = {
        name: checksums(read_tensors(folder / name), tie_word_embeddings=False, layout=layout)
        for name in ("model", "next")
    }
    url = str(status["engine_url"])
    async with (
        SidecarClient("engine-0", running.url, TOKEN, timeout_s=DEADLINE_S) as sidecar,
        SglangServer("engine-0", url, control_timeout_s=DEADLINE_S, request_timeout_s=60) as engine,
    ):
        assert await engine.checksums() == held["model"]
        assert await sidecar.pause(txn(0), "retract", 60.0)
        await engine.update_weights(WeightSnapshot(1, str(folder / "next"), held["next"], 0, 0.0))
        assert await engine.checksums() == held["next"]
        await sidecar.end(txn(0))
        (sample,) = await engine.generate("r", [5, 6, 7], SamplingParams(max_new_tokens=5))
        assert {span.version for span in sample.spans} == {1}
