"""`python -m hybridasync.sidecar`: one sidecar beside one engine. Without torch, so that it is up within a second."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import uvicorn
from anyio.abc import TaskGroup

from hybridasync.errors import ConfigError, EngineError
from hybridasync.http import answer_at_once
from hybridasync.observability.jsonl import replace_atomically
from hybridasync.observability.process import PARENT_PID_VARIABLE, die_with_parent
from hybridasync.protocol.transactions import TransactionMachine
from hybridasync.sidecar.app import SidecarApi
from hybridasync.sidecar.control import Control
from hybridasync.sidecar.host import AttachedEngine, EngineHost
from hybridasync.sidecar.supervise import LaunchedEngine, LaunchFile

TOKEN_VARIABLE = "HYBRIDASYNC_TOKEN"

log = logging.getLogger("hybridasync.sidecar")

RELEASE_BUDGET_S = 5.0
"""For the last resume of an attached engine; a run ends its sidecars within 8 s."""


class _Server(uvicorn.Server):
    """Signals belong to `_serve`: uvicorn's own handling ends the process before the engine is looked after."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 after SIGTERM or SIGINT, 2 for a mistake of the user's."""
    options = _parser().parse_args(argv)
    if os.environ.get(PARENT_PID_VARIABLE):
        die_with_parent(signal.SIGTERM)  # not SIGKILL: an attached engine has to be resumed first
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    for chatty in ("httpx", "uvicorn"):  # a line for every probe, and lines about itself
        logging.getLogger(chatty).setLevel(logging.WARNING)
    try:
        token = os.environ.get(TOKEN_VARIABLE, "")
        if not token.strip():
            raise ConfigError("set it to the secret that callers must send", setting=TOKEN_VARIABLE)
        host = _host(options)
        with _listener(options.host, options.port) as listener:
            anyio.run(partial(_serve, host, listener, token=token, announce=options.announce))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


DESCRIPTION = (
    "Pause and resume one engine, safely; callers send the secret in HYBRIDASYNC_TOKEN. "
    "For example: hybridasync sidecar --engine-url http://127.0.0.1:30000 --port 31000"
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hybridasync sidecar", description=DESCRIPTION)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: loopback)")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0: the system chooses")
    engine = parser.add_mutually_exclusive_group(required=True)
    engine.add_argument("--engine-url", help="base URL of an engine that runs already")
    engine.add_argument("--launch", type=Path, help="JSON file that says how to launch the engine")
    parser.add_argument("--announce", type=Path, help="file to write this sidecar's URL, port and pid to")
    parser.add_argument("--name", default="engine-0", help="name of the engine in messages")
    return parser


def _host(options: argparse.Namespace) -> EngineHost:
    if options.launch is not None:
        return LaunchedEngine(options.name, LaunchFile.load(options.launch))
    return AttachedEngine(options.name, options.engine_url)


def _listener(host: str, port: int) -> socket.socket:
    try:
        listener = socket.create_server((host, port), backlog=128)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"can't listen on {host}:{port}: {error}", setting="--port") from error
    answer_at_once(listener)
    return listener


async def _serve(host: EngineHost, listener: socket.socket, *, token: str, announce: Path | None) -> None:
    control = Control(host, TransactionMachine())
    # Outermost: a second signal must not cut the last resume short.
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with _tended(control) as tasks:
            application = SidecarApi(control, token=token, tasks=tasks).application()
            config = uvicorn.Config(
                application, lifespan="off", log_config=None, access_log=False, timeout_graceful_shutdown=1
            )
            server = _Server(config)

            async def stop_on_signal() -> None:
                async for _ in signals:
                    server.should_exit = True

            tasks.start_soon(stop_on_signal)
            _announce(announce, listener)
            await server.serve(sockets=[listener])
            tasks.cancel_scope.cancel()


def _announce(path: Path | None, listener: socket.socket) -> None:
    address, port = listener.getsockname()[:2]
    content = {"url": f"http://{address}:{port}", "port": port, "pid": os.getpid()}
    log.info("listening on %s", content["url"])
    if path is not None:
        replace_atomically(path, json.dumps(content).encode())


@asynccontextmanager
async def _tended(control: Control) -> AsyncIterator[TaskGroup]:
    """The background of a sidecar. At the end no engine that it launched runs, and none that it found stays paused."""
    host = control.host
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(host.run, control.engine_lost)
            tasks.start_soon(control.run)
            yield tasks
    finally:
        # Shielded, each part with a deadline of its own: nobody else would do it.
        with anyio.CancelScope(shield=True):
            if isinstance(host, AttachedEngine):
                with anyio.move_on_after(RELEASE_BUDGET_S), contextlib.suppress(EngineError):
                    await control.release()
            await host.stop()


if __name__ == "__main__":
    sys.exit(main())
