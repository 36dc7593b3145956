"""A scripted engine with SGLang's control routes, in a thread of the test process or as a program of its own.

python fake_engine.py --port P [--announce FILE] [--die-after S] [--ignore-term]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

STAGING = ("/stage_weights", "/switch_weights")


class FakeEngine:
    """`faults`: path → what the next calls do, in order: a status, or seconds to sleep before it is carried out."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []  # (path, body) in the order of arrival
        self.done: list[str] = []  # paths in the order in which they were carried out
        self.paused = False
        self.running = 0
        self.waiting = 0
        self.version = "default"
        self.can_stage = False  # as the embedded engine; SGLang has no such routes
        self.faults: dict[str, list[float]] = {}
        self.bodies: dict[str, object] = {}  # path → the answer's body, in place of the usual one

    def control_calls(self) -> list[str]:
        return [path for path, _ in self.calls if path in ("/pause_generation", "/continue_generation")]

    def application(self) -> Starlette:
        paths = ("/pause_generation", "/continue_generation", "/abort_request", "/generate", "/flush_cache")
        paths += ("/update_weights_from_disk", "/weights_checker", *STAGING)
        gets = ("/ready", "/health", "/v1/loads", "/model_info", "/server_info")
        return Starlette(
            routes=[Route(path, self.handle, methods=["POST"]) for path in paths]
            + [Route(path, self.handle) for path in gets]
        )

    async def handle(self, request: Request) -> Response:
        path = request.url.path
        if path in STAGING and not self.can_stage:
            return Response(status_code=404)
        body = json.loads(await request.body() or b"null")
        self.calls.append((path, body))
        fault = self.faults.get(path, [])
        if fault:
            what = fault.pop(0)
            if what >= 100:
                return JSONResponse({"error": {"message": "scripted"}}, int(what))
            await asyncio.sleep(what)
        answer, status = self._carry_out(path, body)
        self.done.append(path)
        if answer is None and path not in self.bodies:
            return Response(status_code=status)
        return JSONResponse(self.bodies.get(path, answer), status)

    def _carry_out(self, path: str, body: object) -> tuple[object, int]:
        values = body if isinstance(body, dict) else {}
        if path == "/pause_generation":
            if values.get("mode", "abort") not in ("abort", "retract", "in_place"):
                return {"error": {"message": "no such mode"}}, 400
            self.paused = True
        elif path == "/continue_generation":
            self.paused = False
        elif path == "/ready":
            return None, 503 if self.paused else 200
        elif path in ("/health", "/abort_request"):
            return None, 200
        elif path == "/v1/loads":
            return {"loads": [{"num_running_reqs": self.running, "num_waiting_reqs": self.waiting}]}, 200
        elif path == "/server_info":
            return {"version": "0.5.23"}, 200
        elif path == "/model_info":
            return {"weight_version": self.version}, 200
        elif path == "/weights_checker":
            return {"ranks": [{"checksums": {}}]}, 200
        elif path == "/stage_weights":
            return {"success": True, "message": "ok"}, 200
        elif path in ("/update_weights_from_disk", "/switch_weights"):
            self.version = values.get("weight_version") or self.version
            return {"success": True, "message": "ok"}, 200
        return {"status": "ok"}, 200


def serving(engine: FakeEngine) -> AbstractContextManager[str]:
    """The engine over HTTP; yields its URL."""
    return served(engine.application())


@contextmanager
def refusing() -> Iterator[str]:
    """A URL where nobody listens. It is bound, so that no other process gets the port meanwhile."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@contextmanager
def served(application: Starlette) -> Iterator[str]:
    """The application over HTTP, in a thread; yields its URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(application, lifespan="off", log_level="error", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--announce", type=Path)
    parser.add_argument("--die-after", type=float)
    parser.add_argument("--ignore-term", action="store_true")
    options = parser.parse_args()
    sys.stderr.write(f"fake engine {os.getpid()} starts\n")
    listener = socket.create_server(("127.0.0.1", options.port))
    port = listener.getsockname()[1]
    if options.announce:
        partial = options.announce.with_suffix(".tmp")
        partial.write_text(json.dumps({"url": f"http://127.0.0.1:{port}", "port": port, "pid": os.getpid()}))
        partial.replace(options.announce)
    if options.die_after is not None:

        def die() -> None:
            time.sleep(options.die_after)
            sys.stderr.write("CUDA out of memory, or so\n")
            sys.stderr.flush()
            os._exit(7)

        threading.Thread(target=die, daemon=True).start()
    server = uvicorn.Server(uvicorn.Config(FakeEngine().application(), lifespan="off", log_level="error"))
    if options.ignore_term:
        threading.Thread(target=server.run, args=([listener],), daemon=True).start()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(1)
    server.run([listener])


if __name__ == "__main__":
    main()
