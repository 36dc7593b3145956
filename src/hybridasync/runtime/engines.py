"""Starting the rollout side: one sidecar process for each engine, and the engines through them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from ipaddress import ip_address
from pathlib import Path

import anyio
from anyio.abc import Process

from hybridasync.config.models import Config
from hybridasync.drivers.fleet import Engine
from hybridasync.errors import ConfigError, EngineError, NotSent
from hybridasync.observability.process import child_environment, signal_group
from hybridasync.runtime.environment import without_torchrun, workers_here
from hybridasync.runtime.sglang_launch import launch_command, launch_environment
from hybridasync.runtime.token import TOKEN_VARIABLE, token_of
from hybridasync.transport.sglang import SglangServer
from hybridasync.transport.sidecar import SidecarClient
from hybridasync.types import SidecarStatus

SIDECAR_START_S = 30.0
"""A sidecar imports no torch: it announces itself within a second or two, also on a busy machine."""

STOP_GRACE_S = 8.0
"""A sidecar ends its engine (SIGTERM, then SIGKILL) before it ends itself."""

REVIVE_GRACE_S = 1.0
"""For a sidecar that doesn't answer, within the budget of owed resumes. The kernel ends its engine with it."""

POLL_S = 0.1

LOOPBACK = "127.0.0.1"

SEEDS = 2**32
"""SGLang's scheduler gives its seed to numpy, which refuses larger ones: so a seed of 20260802 ended every engine."""


@asynccontextmanager
async def running_engines(config: Config, run_dir: Path) -> AsyncIterator[list[Engine]]:
    """All engines of the recipe, ready to serve; those that were started here end with the block.

    Raises EngineError with the last lines of the log where one doesn't come up, ConfigError for a port that is taken.
    """
    token = token_of(run_dir)
    count = len(config.engine.sidecar_url) or len(config.engine.url) or config.engine.num_engines
    engines: dict[int, Engine] = {}
    async with AsyncExitStack() as stack:

        async def bring_up(index: int) -> None:
            engines[index] = await _bring_up(config, run_dir, index, token=token, stack=stack)

        async with anyio.create_task_group() as starts:
            for index in range(count):
                starts.start_soon(bring_up, index)
        yield [engines[index] for index in range(count)]


async def _bring_up(config: Config, run_dir: Path, index: int, *, token: str, stack: AsyncExitStack) -> Engine:
    name = f"engine-{index}"
    process: Process | None = None

    async def start() -> str:
        nonlocal process
        if process is not None:
            await stop_sidecar(process, grace_s=REVIVE_GRACE_S)
        process, url = await _start_sidecar(config, run_dir, index, token=token, stack=stack)
        return url

    async def revive() -> None:
        await sidecar.moved(await start())

    elsewhere = bool(config.engine.sidecar_url)
    url = config.engine.sidecar_url[index] if elsewhere else await start()
    timeout = config.publication.rollout_http_timeout
    sidecar = await stack.enter_async_context(SidecarClient(name, url, token, timeout_s=timeout))
    status = await _ready(config, sidecar, process)
    server = SglangServer(
        name, status.engine_url, control_timeout_s=timeout, request_timeout_s=config.rollout.request_timeout_s
    )
    await stack.enter_async_context(server)
    await _check_version(config, server)
    pid = None if elsewhere else status.engine_pid
    return Engine(server, sidecar, pid, None if elsewhere else revive)


async def _check_version(config: Config, server: SglangServer) -> None:
    """Raises ConfigError for a server that this version can't work with as the recipe says."""
    version = await server.version()
    if not version.spans and config.publication.pause_mode == "retract":
        raise ConfigError(
            f"retract needs a server that says which weights made which token; SGLang {version.text} doesn't. "
            "Use drain or abort, or SGLang 0.5.23",
            setting="publication.pause_mode",
        )


async def _start_sidecar(
    config: Config, run_dir: Path, index: int, *, token: str, stack: AsyncExitStack
) -> tuple[Process, str]:
    port = config.engine.sidecar_port + index if config.engine.sidecar_port else 0
    announce = run_dir / "logs" / f"sidecar-{index}.json"
    process = await open_sidecar(config, run_dir, index, token=token, port=port)
    stack.push_async_callback(stop_sidecar, process)
    with anyio.move_on_after(SIDECAR_START_S):
        while process.returncode is None:
            if announce.is_file():
                return process, json.loads(announce.read_text())["url"]
            await anyio.sleep(POLL_S)
    tail = log_end(run_dir / "logs" / f"sidecar-{index}.log")
    if process.returncode == ConfigError.exit_code:
        raise ConfigError(tail.splitlines()[-1] if tail else f"port {port} is taken", setting="engine.sidecar_port")
    raise EngineError(f"engine-{index}", "start", f"its sidecar didn't come up (exit {process.returncode}): {tail}")


async def open_sidecar(
    config: Config, folder: Path, index: int, *, token: str, port: int, host: str = LOOPBACK
) -> Process:
    """Start the sidecar of one engine, which listens, as its engine does, at `host`; logs are in `folder/logs`."""
    announce = folder / "logs" / f"sidecar-{index}.json"
    announce.unlink(missing_ok=True)
    command = [sys.executable, "-m", "hybridasync.sidecar", "--name", f"engine-{index}", "--host", host]
    command += ["--port", str(port), "--announce", str(announce), *_target(config, folder, index, host=host)]
    environment = child_environment(without_torchrun(os.environ)) | {TOKEN_VARIABLE: token}
    with (folder / "logs" / f"sidecar-{index}.log").open("ab") as log:
        return await anyio.open_process(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )


def _target(config: Config, run_dir: Path, index: int, *, host: str) -> list[str]:
    if config.engine.kind == "attach":
        return ["--engine-url", config.engine.url[index]]
    launch = run_dir / "logs" / f"engine-{index}.launch.json"
    description = {
        "kind": config.engine.kind,
        "host": host,
        "command": _command(config, index, host=host),
        "env": dict(_environment(config, index, host=host)),
        "log": str(run_dir / "logs" / f"engine-{index}.log"),
        "init_timeout_s": config.engine.rollout_engine_init_timeout,
    }
    launch.write_text(json.dumps(description, indent=1))
    return ["--launch", str(launch)]


def _command(config: Config, index: int, *, host: str) -> list[str]:
    engine = config.engine
    port = str(engine.port + index) if engine.port else "{port}"
    context = ["--context-length", str(engine.context_length)] if engine.context_length else []
    shared = ["--host", host, "--port", port, "--max-running-requests", str(engine.max_running_requests)]
    shared += ["--random-seed", str((config.seed * 1000 + _number(host) + index) % SEEDS), *context]
    device = device_of(config)
    if engine.kind == "sglang":
        return launch_command(config, device=device, address=tuple(shared))
    command = [sys.executable, "-m", "hybridasync.engine", "--model-path", str(config.model.hf_checkpoint)]
    command += ["--dtype", engine.dtype or config.model.dtype, "--device", device]
    return [*command, "--announce", "{announce}", *shared]


def _number(host: str) -> int:
    """So that engines of different nodes sample differently."""
    return 0 if host == LOOPBACK else int(ip_address(host)) * 1000


def device_of(config: Config) -> str:
    """ "cuda" where engines shall use a GPU: asked for, or there is one (seen without importing torch)."""
    if config.engine.device != "auto":
        return config.engine.device
    return "cuda" if Path("/dev/nvidia0").exists() else "cpu"


def _environment(config: Config, index: int, *, host: str) -> Mapping[str, str]:
    device = device_of(config)
    environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), **group_environment(config)}
    if config.engine.kind == "sglang":
        environment |= launch_environment(device=device, tensor_parallel_size=config.engine.tensor_parallel_size)
    if device == "cuda":
        first = workers_here(config.parallel.num_workers) if host == LOOPBACK else 0  # elsewhere there are none
        size = config.engine.tensor_parallel_size
        gpus = config.engine.gpu_ids or tuple(range(first, first + size * config.engine.num_engines))
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus[index * size : (index + 1) * size]))
    return environment | config.engine.env


def group_environment(config: Config) -> dict[str, str]:
    """By which interface the ranks of a collective transfer reach each other."""
    if config.publication.transport != "collective":
        return {}
    return dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), config.network.interface)


async def _ready(config: Config, sidecar: SidecarClient, process: Process | None) -> SidecarStatus:
    if process is None:
        await _fetched(sidecar, limit_s=config.engine.rollout_engine_init_timeout)
    with anyio.move_on_after(config.engine.rollout_engine_init_timeout):
        while process is None or process.returncode is None:
            status = await sidecar.status()
            if status.state == "down" and status.detail:
                raise EngineError(sidecar.name, "start", status.detail)
            if status.healthy and status.state != "down":
                return status
            await anyio.sleep(POLL_S)
        raise EngineError(sidecar.name, "start", f"its sidecar ended with exit code {process.returncode}")
    limit = config.engine.rollout_engine_init_timeout
    raise EngineError(sidecar.name, "start", f"not ready within engine.rollout_engine_init_timeout = {limit:g} s")


async def _fetched(sidecar: SidecarClient, *, limit_s: float) -> None:
    """A sidecar elsewhere may just be (re)started, and its engine may have ended since the last run.

    Raises NotSent where nobody listens, EngineError where the engine doesn't come back.
    """
    deadline = anyio.current_time() + SIDECAR_START_S
    while True:
        try:
            status = await sidecar.status()
            break
        except NotSent:
            if anyio.current_time() > deadline:
                raise
        await anyio.sleep(POLL_S)
    if status.state == "down" and status.detail:
        await sidecar.recover(limit_s)


async def stop_sidecar(process: Process, *, grace_s: float = STOP_GRACE_S) -> None:
    """End it, and with it its engine."""
    # Shielded: whatever ended the run, no sidecar and no engine may outlive it.
    with anyio.CancelScope(shield=True):
        if process.returncode is None:
            process.terminate()
            with anyio.move_on_after(grace_s):
                await process.wait()
        if process.returncode is None:
            signal_group(process.pid, 9)
        await process.aclose()


def log_end(path: Path, lines: int = 5) -> str:
    """Its last lines; empty where there is none."""
    try:
        return "\n".join(path.read_text(errors="replace").strip().splitlines()[-lines:])
    except OSError:
        return ""
