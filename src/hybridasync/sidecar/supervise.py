"""The life of a launched engine: start, wait until it is ready, notice its end at once, kill and start anew."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, Self
from urllib.parse import urlsplit

import anyio
import psutil
from anyio.abc import Process
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hybridasync.errors import ConfigError, EngineError, OperatingError
from hybridasync.observability.process import child_environment, exit_name
from hybridasync.sidecar.engine_client import EngineClient, EngineControl
from hybridasync.sidecar.host import POLL_S

PORT_ATTEMPTS = 3
"""A port that was free a moment ago may be taken when the engine binds it: SGLang can't choose one itself."""

TERM_GRACE_S = 5.0
"""SIGTERM to SIGKILL. SGLang takes up to 7 s to leave cleanly, which nobody needs; a run ends its sidecars in 8 s."""

FENCE_GRACE_S = 1.0
"""The same for a fence: the engine is in doubt, often hangs, and somebody waits with a deadline of seconds."""

LOG_LINES = 6
LOG_BYTES = 8192

log = logging.getLogger("hybridasync.sidecar")


class EngineStartError(OperatingError):
    """The engine didn't come up. Says why, with the end of its log."""


class LaunchFile(BaseModel):
    """What to launch. `{port}` and `{announce}` in the command are replaced."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["embedded", "sglang"]
    host: str = "127.0.0.1"  # the address at which the command listens
    command: tuple[str, ...] = Field(min_length=1)
    env: Mapping[str, str] = Field(default_factory=dict)
    log: Path
    init_timeout_s: float = Field(gt=0)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Raises ConfigError."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error
        except ValidationError as error:
            raise ConfigError(f"{path}: {error}") from error

    @property
    def chooses_its_port(self) -> bool:
        """An engine that announces its address may leave the choice of the port to the system."""
        return any("{announce}" in word for word in self.command)

    @property
    def fixed_port(self) -> int | None:
        """The port that the command itself names."""
        for option, value in zip(self.command, self.command[1:], strict=False):
            if option == "--port" and value.isdecimal() and int(value) > 0:
                return int(value)
        return None


class LaunchedEngine:
    """Implements EngineHost. It never restarts an engine unasked: the controller decides, with `recover` or `fence`."""

    def __init__(self, name: str, launch: LaunchFile) -> None:
        self.kind: str = launch.kind
        self.url = ""
        self.detail = ""  # why there is no engine; empty while one is being started
        self.restarts = 0
        self._name = name
        self._launch = launch
        self._process: Process | None = None
        self._client: EngineClient | None = None
        self._wanted = anyio.Event()
        self._wanted.set()

    @property
    def client(self) -> EngineControl | None:
        return self._client

    @property
    def pid(self) -> int | None:
        """None once it has ended and `detail` says how."""
        process = self._process
        if process is None or (process.returncode is not None and self._client is None):
            return None
        return process.pid

    async def run(self, on_lost: Callable[[], None]) -> None:
        while True:
            await self._wanted.wait()
            self._wanted = anyio.Event()
            self.detail = ""
            try:
                await self._start()
            except EngineStartError as error:
                log.error("%s", error)
                self.detail = str(error)
                continue
            process = self._process
            if process is not None:
                await process.wait()
                self.detail = f"the engine ended with {exit_name(process.returncode)}{self._log_tail()}"
                log.error("%s", self.detail)
                self._client = None
                _kill_group(process.pid, signal.SIGKILL)  # what it left behind, as its scheduler processes
                on_lost()

    async def recover(self, timeout_s: float) -> None:
        with anyio.fail_after(timeout_s):
            if self._client is None and self.detail:
                self._restart()
            while self._client is None:
                if self.detail:
                    raise EngineError(self._name, "recover", self.detail)
                await anyio.sleep(POLL_S)

    async def fence(self) -> None:
        # Shielded: half a fence is a killed engine that nobody starts again.
        with anyio.CancelScope(shield=True):
            self._client = None
            self._restart()
            await self._kill(FENCE_GRACE_S)

    async def stop(self) -> None:
        self._client = None
        await self._kill()

    def _restart(self) -> None:
        self.restarts += 1
        self._wanted.set()
        self.detail = ""

    async def _start(self) -> None:
        """Raises EngineStartError."""
        fixed = self._launch.fixed_port
        host = self._launch.host
        if fixed is not None and _listening(host, fixed):
            raise EngineStartError(f"port {fixed} of {self._name} is taken by another process")
        attempts = PORT_ATTEMPTS if fixed is None and not self._launch.chooses_its_port else 1
        for attempt in range(attempts):
            port = fixed if fixed is not None else 0 if self._launch.chooses_its_port else _free_port(host)
            try:
                await self._spawn_and_wait(port)
            except EngineStartError:
                # Only a stranger on our port is worth another attempt.
                if attempt + 1 == attempts or not _listening(host, port):
                    raise
            else:
                return

    async def _spawn_and_wait(self, port: int) -> None:
        announce = self._launch.log.with_suffix(".announce.json")
        words = {"{port}": str(port), "{announce}": str(announce)}
        command = [_filled(word, words) for word in self._launch.command]
        try:
            announce.unlink(missing_ok=True)
            process = await self._spawn(command)
        except OSError as error:
            raise EngineStartError(f"{self._name} can't be launched: {error}") from error
        self._process = process
        try:
            url = await self._ready(process, port, announce)
        except BaseException:
            with anyio.CancelScope(shield=True):  # an engine that isn't watched must not stay
                await self._kill()
            raise
        self.url = url
        self._client = EngineClient(self._name, url)
        log.info("%s is ready at %s (pid %d)", self._name, url, process.pid)

    async def _spawn(self, command: Sequence[str]) -> Process:
        self._launch.log.parent.mkdir(parents=True, exist_ok=True)
        with self._launch.log.open("ab") as output:
            return await anyio.open_process(
                [sys.executable, "-m", "hybridasync.sidecar.child", *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=child_environment({**os.environ, **self._launch.env}),
                start_new_session=True,
            )

    async def _ready(self, process: Process, port: int, announce: Path) -> str:
        """Its URL, once it answers. Raises EngineStartError."""
        limit = self._launch.init_timeout_s
        with anyio.move_on_after(limit):
            while process.returncode is None:
                url = self._address(port, announce)
                if url is not None and await _answers(self._name, url):
                    if not _owns(process.pid, urlsplit(url).port or 0):
                        raise EngineStartError(f"another process answers at {url}, not the engine that was launched")
                    return url
                await anyio.sleep(POLL_S)
            why = f"ended with {exit_name(process.returncode)}"
            raise EngineStartError(f"{self._name} {why} before it was ready{self._log_tail()}")
        raise EngineStartError(f"{self._name} wasn't ready within {limit:g} s{self._log_tail()}")

    def _address(self, port: int, announce: Path) -> str | None:
        if not self._launch.chooses_its_port:
            return f"http://{self._launch.host}:{port}"
        try:
            return str(json.loads(announce.read_text())["url"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    async def _kill(self, grace_s: float = TERM_GRACE_S) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        _kill_group(process.pid, signal.SIGTERM)
        with anyio.move_on_after(grace_s):
            await process.wait()
        _kill_group(process.pid, signal.SIGKILL)
        await process.wait()

    def _log_tail(self) -> str:
        try:
            with self._launch.log.open("rb") as file:
                file.seek(max(0, self._launch.log.stat().st_size - LOG_BYTES))
                text = file.read().decode("utf-8", "replace")
        except OSError as error:
            return f"; no log ({error.strerror})"
        lines = text.strip().splitlines()[-LOG_LINES:]
        return ": " + "\n".join(lines) if lines else ""


async def _answers(name: str, url: str) -> bool:
    client = EngineClient(name, url)
    try:
        return await client.ready()
    except EngineError:
        return False
    finally:
        await client.aclose()


def _filled(word: str, values: Mapping[str, str]) -> str:
    for placeholder, value in values.items():
        word = word.replace(placeholder, value)
    return word


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as server:
        return int(server.getsockname()[1])


def _listening(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((host, port)) == 0


def _owns(pid: int, port: int) -> bool:
    """Whether the process or one of its descendants listens on the port: never talk to a stranger (case C36)."""
    try:
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                connections = process.net_connections(kind="tcp")
                if any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in connections):
                    return True
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True  # it can't be looked into here; its process at least is alive
    return False


def _kill_group(pid: int, signal_number: signal.Signals) -> None:
    """The engine leads a process group of its own, which outlives it as long as it has members."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal_number)
