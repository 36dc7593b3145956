"""Processes of the control plane benchmark, by their first argument.

driver DIR URL     a controller with two workers and a sidecar for an engine at URL; measures calls on request
stub               an HTTP server: the sidecar API of any number of engines, and requests that stay open
RECIPE …           one of the driver's workers: it answers with what it was given
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hybridasync.config.load import validate
from hybridasync.config.models import Config
from hybridasync.config.pipeline import resolve
from hybridasync.drivers.fleet import Engine
from hybridasync.drivers.notify import Changed
from hybridasync.http import answer_at_once
from hybridasync.runtime.controller import connect
from hybridasync.runtime.engines import running_engines
from hybridasync.runtime.rank import leave
from hybridasync.runtime.rank import main as rank_main
from hybridasync.transport.rpc import RpcTrainer

PROGRAM = ("-m", "hybridasync.bench.control_program")
WORKERS = 2
CALLS, BULK = 1500, 16 * 2**20
IN_FLIGHT = 32


def configuration(url: str = "", **sections: dict[str, object]) -> Config:
    """Two workers, and an engine that runs already at `url`."""
    engine: dict[str, object] = {"kind": "attach", "url": [url]} if url else {}
    values: dict[str, dict[str, object]] = {
        "model": {"hf_checkpoint": "model"},
        "data": {"prompt_data": "prompts.jsonl"},
        "parallel": {"num_workers": WORKERS},
        "rollout": {
            "num_rollout": 1_000_000,
            "rollout_batch_size": 2,
            "n_samples_per_prompt": 2,
            "max_response_tokens": 8,
        },
        "engine": engine,
    }
    for name, settings in sections.items():
        values[name] = values.get(name, {}) | settings
    return resolve(validate(values, source="the benchmark")).config


class EchoWorker:
    """Every operation answers its argument."""

    def __init__(self, config: Config) -> None:
        del config

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return _echo

    def close(self) -> None: ...


def _echo(value: Any = None) -> Any:
    return value


async def drive(directory: Path, url: str) -> None:
    """Say `ready` once a call to the workers and one to the sidecar are answered, then obey lines on stdin."""
    (directory / "logs").mkdir(parents=True, exist_ok=True)
    config = configuration(url)
    engines, up, released = list[Engine](), anyio.Event(), anyio.Event()

    async def hold_engines() -> None:
        async with running_engines(config, directory) as found:
            engines.extend(found)
            up.set()
            await released.wait()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(hold_engines)  # as in a run: sidecars come up while the workers do
        async with connect(config, directory, program=PROGRAM) as trainer:
            await trainer.call("train_step", 0)
            await up.wait()
            await engines[0].sidecar.status()
            _say({"ready": True})
            while (await anyio.to_thread.run_sync(sys.stdin.readline)).strip() == "calls":
                _say(await _measured(trainer, engines[0]))
        released.set()


async def _measured(trainer: RpcTrainer, engine: Engine) -> dict[str, object]:
    """Seconds of single calls, calls a second, seconds of a large argument and answer."""

    async def call() -> object:
        return await trainer.call("train_step", 0)

    rpc = await timed(call, CALLS)
    http = await timed(engine.sidecar.status, CALLS // 5)
    started = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for _ in range(IN_FLIGHT):
            tasks.start_soon(timed, call, CALLS // IN_FLIGHT)
    rate = IN_FLIGHT * (CALLS // IN_FLIGHT) / (time.perf_counter() - started)
    large = bytes(BULK)
    bulk = await timed(lambda: trainer.call("train_step", large), 10)
    return {"rpc": rpc, "http": http, "calls_per_s": rate, "bulk": bulk}


async def timed(call: Callable[[], Awaitable[object]], count: int) -> list[float]:
    """Seconds of each of `count` calls, one after the other."""
    found = []
    for _ in range(count):
        started = time.perf_counter()
        await call()
        found.append(time.perf_counter() - started)
    return found


def _say(what: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


class Stub:
    """Engine n's sidecar is at /n. /hold answers when it is released, /open/n once n are held. / is an engine."""

    def __init__(self) -> None:
        self._released = anyio.Event()
        self._arrived = Changed()
        self._open = 0

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/{engine:int}/v1/pause", _answer({"paused": True, "reason": ""}), methods=["POST"]),
                Route("/{engine:int}/v1/{call}", _answer({}), methods=["POST"]),
                Route("/hold", self._hold, methods=["POST"]),
                Route("/open/{count:int}", self._wait, methods=["GET"]),
                Route("/release", self._release, methods=["POST"]),
                Route("/{path:path}", _answer(_ENGINE), methods=["GET", "POST"]),
            ]
        )

    async def _hold(self, _request: Request) -> Response:
        self._open += 1
        self._arrived.notify()
        await self._released.wait()
        return JSONResponse({})

    async def _wait(self, request: Request) -> Response:
        while self._open < int(request.path_params["count"]):
            await self._arrived.wait()
        return JSONResponse({})

    async def _release(self, _request: Request) -> Response:
        self._released.set()
        self._released, self._open = anyio.Event(), 0
        return JSONResponse({})


# What the real client reads of an engine that it attaches to.
_ENGINE = {"version": "0.5.23", "weight_version": "default", "num_running_reqs": 0, "loads": [], "status": "ready"}


def _answer(content: dict[str, object]) -> Callable[[Request], Awaitable[Response]]:
    async def answer(_request: Request) -> Response:
        return JSONResponse(content)

    return answer


async def serve_stub() -> None:
    """Say the port, and serve until the process is ended."""
    config = uvicorn.Config(Stub().app(), log_level="error", lifespan="off")
    with socket.create_server(("127.0.0.1", 0), backlog=16384) as listener:
        answer_at_once(listener)
        _say({"url": f"http://127.0.0.1:{listener.getsockname()[1]}"})
        await uvicorn.Server(config).serve(sockets=[listener])


def main(arguments: Sequence[str]) -> None:
    if arguments[0] == "driver":
        anyio.run(drive, Path(arguments[1]), arguments[2])
        leave(0)
    if arguments[0] == "stub":
        anyio.run(serve_stub)
        leave(0)
    rank_main(arguments, worker=EchoWorker)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(sys.argv[1:])
