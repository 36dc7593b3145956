"""A real SGLang under a sidecar: ports, tensor parallelism, and what is left when one of its processes is killed."""

from __future__ import annotations

import itertools
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
from tests.system import export_main
from tests.system.test_sidecar import DEADLINE_S, TOKEN, Running, Sidecars, txn, wait_gone
from tests.worker_kit import one_process, torchrun

from hybridasync.config.models import Config
from hybridasync.runtime.sender import Sender
from hybridasync.runtime.sglang_launch import launch_command, launch_environment
from hybridasync.runtime.transfer import SenderSettings
from hybridasync.transport.sender import Request
from hybridasync.transport.sglang import SglangServer
from hybridasync.transport.sidecar import SidecarClient
from hybridasync.types import SamplingParams, SendTarget, WeightSnapshot
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
BUCKET_BYTES = 10_000
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


@pytest.mark.skipif(not os.environ.get("LONG"), reason="test_sglang_runs has it and more, in whole runs: set LONG=1")
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


async def test_c44_a_publication_of_any_trainer_by_any_transport_reaches_every_rank(
    folder: Path, sidecars: Sidecars
) -> None:
    """C07, C44: trainer TP=2 and PP=2, engine TP=2: after each update all checksums are those of one process."""
    config = config_of(folder / "model", ranks=2)
    running = sidecars.start("--launch", str(launch(folder, config)))
    with one_process():
        export_main.write(folder / "next", folder / "one", tp=1, pp=1)
    one = json.loads((folder / "one.json").read_text())
    await anyio.to_thread.run_sync(torchrun, Path(export_main.__file__), 2, str(folder / "next"), str(folder))
    status = await anyio.to_thread.run_sync(lambda: until(running, state="running", healthy=True))
    layout = engine_layout(config.engine, kv_heads=2, gpu_here=False)
    first = checksums(read_tensors(folder / "model"), tie_word_embeddings=False, layout=layout)
    url, sequence = str(status["engine_url"]), itertools.count()
    async with (
        SidecarClient("engine-0", running.url, TOKEN, timeout_s=DEADLINE_S) as sidecar,
        SglangServer("engine-0", url, control_timeout_s=DEADLINE_S, request_timeout_s=60) as engine,
    ):

        async def publish(path: Path, sums: dict[str, str], transport: str) -> None:
            number = next(sequence)
            assert await sidecar.pause(txn(number), "retract", 60.0)
            if transport == "disk":
                await engine.update_weights(WeightSnapshot(number, str(path), sums, 0, 0.0))
            else:
                settings = SenderSettings(transport, BUCKET_BYTES, "gloo", "127.0.0.1", DEADLINE_S)
                request = Request((SendTarget("engine-0", url, True),), str(path), number, tuple(sums))
                async with Sender(settings) as sender:
                    assert await sender.send(request) == {}
            assert await engine.weight_version() == str(number)
            assert await engine.checksums() == sums
            await sidecar.end(txn(number))

        assert await engine.checksums() == first
        for trainer in ("tp2", "pp2"):
            assert json.loads((folder / f"{trainer}.json").read_text()) == one
            for transport in ("disk", "collective", "tensor"):
                await publish(folder / trainer, one, transport)
                await publish(folder / "model", first, "disk")
        await publish(folder / "pp2", one, "collective")
        (sample,) = await engine.generate("r", [5, 6, 7], SamplingParams(max_new_tokens=5))
        assert {span.version for span in sample.spans} == {next(sequence) - 1}
