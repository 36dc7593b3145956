"""The rollout side of a recipe on a node of its own: sidecars with their engines, started anew whenever one ends.

A controller elsewhere reaches them by `engine.sidecar_url`. It may come and go: engines that a dead one left paused are
resumed by their lease.
"""

from __future__ import annotations

import ipaddress
import signal
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import anyio
from anyio.abc import Process

from hybridasync.config.models import Config
from hybridasync.errors import ConfigError, leading_cause
from hybridasync.runtime.engines import log_end, open_sidecar, stop_sidecar

RESTART_PAUSE_S = 1.0
"""Before a sidecar that ended is started anew: one that can't run must not be started in a burst."""

Say = Callable[[str], None]


def check(config: Config) -> None:
    """Raises ConfigError for a recipe whose engines aren't to be launched."""
    if config.engine.sidecar_url or config.engine.kind == "attach":
        setting = "engine.sidecar_url" if config.engine.sidecar_url else "engine.kind"
        raise ConfigError(
            "this command launches engines, and the recipe says that they run already: give the recipe of the node "
            "itself (--set engine.sidecar_url=[], --set engine.kind=sglang)",
            setting=setting,
        )


def address(host: str, *, public: bool) -> str:
    """The IPv4 address of this node that `host` names. Raises ConfigError for one that no controller should use."""
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise ConfigError(f"{host!r} names no IPv4 address: {error.strerror}", setting="--host") from error
    where = ipaddress.ip_address(str(found))
    if where.is_unspecified:
        raise ConfigError(
            f"{host} is every address of this node: name the one that the controller reaches", setting="--host"
        )
    if where.is_loopback and host != str(where):
        raise ConfigError(
            f"{host} is {where} on this node, which no other one reaches: give its address", setting="--host"
        )
    if where.is_global and not public:
        raise ConfigError(
            f"{where} is a public address, and engines have no authentication: give a private one, or, behind a "
            "firewall, --set network.allow_public_address=true",
            setting="--host",
        )
    return str(where)


async def serve(config: Config, folder: Path, *, host: str, token: str, say: Say) -> None:
    """Until SIGTERM or SIGINT, after which nothing that was started here is left. Logs are in `folder/logs`.

    `say` is told the setting by which a controller reaches the engines, and what ended. Raises ConfigError for an
    address that can't be listened on.
    """
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    ports = _ports(config, host)
    urls = ", ".join(f'"http://{host}:{port}"' for port in ports)
    starts = [
        partial(open_sidecar, config, folder, index, token=token, port=port, host=host)
        for index, port in enumerate(ports)
    ]
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        try:
            async with anyio.create_task_group() as tasks:
                for index, start in enumerate(starts):
                    tasks.start_soon(_keep_running, start, folder / "logs" / f"sidecar-{index}.log", say)
                say(f"engine.sidecar_url = [{urls}]")
                async for _ in signals:
                    break
                tasks.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise leading_cause(group) from None


def _ports(config: Config, host: str) -> Sequence[int]:
    """One for each sidecar, the same for its whole life: the recipe's, or such as are free. Raises ConfigError."""
    first, count = config.engine.sidecar_port, config.engine.num_engines
    ports = []
    with ExitStack() as held:
        for index in range(count):
            port = first + index if first else 0
            try:
                listener = held.enter_context(socket.create_server((host, port)))
            except (OSError, OverflowError) as error:
                setting = "engine.sidecar_port" if first else "--host"
                raise ConfigError(f"can't listen on {host}:{port}: {error}", setting=setting) from error
            ports.append(int(listener.getsockname()[1]))
    return ports


async def _keep_running(start: Callable[[], Awaitable[Process]], log: Path, say: Say) -> None:
    while True:
        try:
            process = await start()
        except OSError as error:
            say(f"{log.stem} can't be started, and is tried again: {error}")
        else:
            try:
                await process.wait()
            finally:
                await stop_sidecar(process)
            last = log_end(log, lines=1)
            say(f"{log.stem} ended ({process.returncode}), its engine with it; both are started anew: {last}")
        await anyio.sleep(RESTART_PAUSE_S)
