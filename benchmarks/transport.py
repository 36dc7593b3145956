"""Times of a publication's transfer by transport (disk, collective, tensor), on the same model in one run.

Each round brings a new version to a paused engine by every transport in turn, and copies as many bytes in memory:

  transfer  from the first request until the weights are in effect
  pause     from asking for the pause until the engine generates again; version and checksums are read back in it
  copy      the snapshot's bytes from one place in memory to another, by one thread

  pause     from asking for the pause until the engine generates again, with version and checksums read back
--sglang PYTHON also a real SGLang in the environment of that interpreter.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch, and for all processes

import anyio
import httpx
import torch

from hybridasync.bench.measure import Foreign, Spread, write_results
from hybridasync.config.load import validate
from hybridasync.config.models import Config
from hybridasync.config.pipeline import resolve
from hybridasync.data.sort_digits import write_model
from hybridasync.runtime.sglang_launch import launch_command, launch_environment
from hybridasync.runtime.transfer import sender_of
from hybridasync.transport.sglang import SglangServer
from hybridasync.types import SendTarget, WeightSnapshot
from hybridasync.weights.buckets import buckets_of
from hybridasync.weights.checksums import checksums
from hybridasync.weights.snapshot import read_tensors

TRANSPORTS = ("disk", "collective", "tensor")
START_TIMEOUT_S = 300
WHOLE = 1 << 40

Load = Callable[[WeightSnapshot], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Shape:
    layers: int
    hidden: int

    def __str__(self) -> str:
        return f"{self.layers} layers, hidden {self.hidden}"


SHAPES = {"quickstart": Shape(2, 128), "larger": Shape(8, 512)}
QUICK = {"quick": Shape(1, 32)}


@dataclass(frozen=True, slots=True)
class Measured:
    transfer_s: float
    pause_s: float


def recipe(model: Path, transport: str, python: str | None) -> Config:
    """A recipe of which only the engine and the transport matter."""
    values: dict[str, dict[str, Any]] = {
        "model": {"hf_checkpoint": str(model)},
        "data": {"prompt_data": "unused"},
        "rollout": {
            "num_rollout": 1,
            "rollout_batch_size": 2,
            "n_samples_per_prompt": 2,
            "max_response_tokens": 4,
        },
        "publication": {"transport": transport},
        "engine": {"kind": "sglang", "python": python, "device": "cpu"} if python else {"device": "cpu"},
    }
    return resolve(validate(values, source="benchmark")).config


@contextmanager
def engine_process(model: Path, folder: Path, python: str | None) -> Iterator[str]:
    """URL of an engine."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    address = ("--host", "127.0.0.1", "--port", str(port), "--max-running-requests", "8")
    command = [sys.executable, "-m", "hybridasync.engine", "--model-path", str(model), *address]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    if python:
        command = launch_command(recipe(model, "disk", python), device="cpu", address=address)
        environment |= launch_environment(device="cpu", tensor_parallel_size=1)
    url = f"http://127.0.0.1:{port}"
    with (
        (folder / "engine.log").open("wb") as log,
        subprocess.Popen(command, env=environment, stdout=log, stderr=log) as process,
    ):
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not _ready(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the engine didn't start: {(folder / 'engine.log').read_text()[-1000:]}")
                time.sleep(0.1)
            yield url
        finally:
            process.terminate()


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


@asynccontextmanager
async def loading(transport: str, server: SglangServer, model: Path, folder: Path) -> AsyncIterator[Load]:
    """How a snapshot gets into the server by this transport."""
    if transport == "disk":
        yield server.update_weights
        return
    async with sender_of(recipe(model, transport, None), folder / transport) as sender:
        sent = 0

        async def load(snapshot: WeightSnapshot) -> None:
            nonlocal sent
            target = SendTarget(server.name, server.base_url, fresh=sent == 0)
            sent += 1
            for error in (await sender.send([target], snapshot)).values():
                raise error

        yield load


def snapshots(folder: Path, shape: Shape) -> list[WeightSnapshot]:
    """Two different sets of weights of the same model, in shared memory where there is some."""
    found = []
    for seed in (0, 1):
        path = folder / f"weights-{seed}"
        write_model(path, seed=seed, layers=shape.layers, hidden=shape.hidden, heads=4, context_length=256)
        named = list(read_tensors(path))
        tied = "lm_head.weight" not in dict(named)
        size = sum(tensor.nbytes for _, tensor in named)
        found.append(WeightSnapshot(seed, str(path), checksums(named, tie_word_embeddings=tied), size, 0.0))
    return found


def copy_seconds(snapshot: WeightSnapshot) -> float:
    parts = [bucket.flat for bucket in buckets_of(snapshot.path, WHOLE)]
    targets = [torch.ones_like(part) for part in parts]  # written to, so that the memory is there
    started = time.perf_counter()
    for part, target in zip(parts, targets, strict=True):
        target.copy_(part)
    return time.perf_counter() - started


async def publish(server: SglangServer, client: httpx.AsyncClient, snapshot: WeightSnapshot, *, load: Load) -> Measured:
    """Pause, load, verify, go on, as the controller does."""
    asked = time.perf_counter()
    (await client.post("/pause_generation", json={"mode": "retract"})).raise_for_status()
    started = time.perf_counter()
    await load(snapshot)
    loaded = time.perf_counter()
    if await server.weight_version() != str(snapshot.version) or await server.checksums() != snapshot.checksums:
        raise RuntimeError("the weights aren't those that were sent")
    (await client.post("/continue_generation", json={})).raise_for_status()
    return Measured(loaded - started, time.perf_counter() - asked)


async def rounds_of(url: str, sets: list[WeightSnapshot], *, folder: Path, rounds: int) -> list[dict[str, Any]]:
    model, found, version = Path(sets[0].path), [], 0
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, trust_env=False, timeout=120))
        server = await stack.enter_async_context(
            SglangServer("engine-0", url, control_timeout_s=120, request_timeout_s=120)
        )
        loads = {
            transport: await stack.enter_async_context(loading(transport, server, model, folder))
            for transport in TRANSPORTS
        }
        order = list(TRANSPORTS)
        for number in range(rounds + 1):  # the first one opens groups and connections, and isn't counted
            entry: dict[str, Any] = {"copy_s": copy_seconds(sets[number % 2])}
            for transport in order:
                version += 1
                weights = sets[version % 2]
                snapshot = WeightSnapshot(version, weights.path, weights.checksums, weights.bytes, 0.0)
                entry[transport] = await publish(server, client, snapshot, load=loads[transport])
            order.append(order.pop(0))  # nobody always goes first
            if number:
                found.append(entry)
    return found


def measure(name: str, shape: Shape, rounds: int, *, python: str | None) -> dict[str, Any]:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="hybridasync-bench-", dir=memory if memory.is_dir() else None) as directory:
        folder = Path(directory)
        sets = snapshots(folder, shape)
        with engine_process(Path(sets[0].path), folder, python) as url:
            foreign = Foreign()
            measured = anyio.run(lambda: rounds_of(url, sets, folder=folder, rounds=rounds))
            others = foreign.share()
    return {
        "shape": name,
        "work": f"{shape}, {'SGLang' if python else 'embedded engine'}",
        "bytes": sets[0].bytes,
        "copy_s": Spread.of(entry["copy_s"] for entry in measured),
        "transports": {
            transport: {
                "transfer_s": Spread.of(entry[transport].transfer_s for entry in measured),
                "pause_s": Spread.of(entry[transport].pause_s for entry in measured),
                "ratio": Spread.of(entry[transport].transfer_s / entry["copy_s"] for entry in measured),
            }
            for transport in TRANSPORTS
        },
        "foreign_cpu_share": others,
        "rounds": measured,
    }


def _print(result: dict[str, Any]) -> None:
    size, rounds = result["bytes"] / 1e6, len(result["rounds"])
    print(f"\n{result['shape']}: {result['work']}; {size:.1f} MB, {rounds} rounds, median (least to largest)")
    print(f"{'transport':12}{'transfer, s':28}{'pause, s':28}transfer / memory copy")
    for transport, found in result["transports"].items():
        print(f"{transport:12}{_text(found['transfer_s']):28}{_text(found['pause_s']):28}{_text(found['ratio'])}")
    print(f"memory copy: {_text(result['copy_s'])} s; processor time of others: {result['foreign_cpu_share']:.0%}")


def _text(spread: Spread) -> str:
    return f"{spread.median:.3g} ({spread.low:.3g} to {spread.high:.3g})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file for the results, JSON")
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), default=list(SHAPES), help="default: all")
    parser.add_argument("--rounds", type=int, default=5, help="repetitions whose medians are compared (default 5)")
    parser.add_argument("--quick", action="store_true", help="a tiny shape, once: shows that it works")
    parser.add_argument("--sglang", metavar="PYTHON", help="measure a real SGLang as well")
    options = parser.parse_args()
    shapes = QUICK if options.quick else {name: SHAPES[name] for name in options.shapes}
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    results = []
    for name, shape in shapes.items():
        for python in (None, options.sglang) if options.sglang else (None,):
            results.append(measure(name, shape, 1 if options.quick else options.rounds, python=python))
            _print(results[-1])
            if options.out is not None:
                write_results(options.out, "transport", results)


if __name__ == "__main__":
    main()
