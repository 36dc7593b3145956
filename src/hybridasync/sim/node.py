"""A rollout node of the virtual world: the real sidecar control and transaction machine beside a simulated engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from random import Random
from typing import TypeVar

import anyio
import anyio.lowlevel

from hybridasync.errors import EngineError, OutcomeUnknown
from hybridasync.protocol.transactions import TransactionMachine
from hybridasync.sidecar.control import Control
from hybridasync.sidecar.engine_client import CONTROL_TIMEOUT_S, PROBE_TIMEOUT_S, EngineControl
from hybridasync.sim.engine import SimEngine, Speed
from hybridasync.types import PauseMode

T = TypeVar("T")


class DeadlineClient:
    """The sidecar's client of its engine: the same calls, each with the deadline of the real one."""

    def __init__(self, engine: SimEngine) -> None:
        self._engine = engine

    async def pause(self, mode: PauseMode) -> None:
        await self._bounded("pause", lambda: self._engine.pause(mode))

    async def resume(self) -> None:
        await self._bounded("resume", self._engine.resume)

    async def in_flight(self) -> int:
        return await self._bounded("in_flight", self._engine.in_flight)

    async def ready(self) -> bool:
        return await self._bounded("ready", self._engine.ready, PROBE_TIMEOUT_S)

    async def weight_version(self) -> str | None:
        try:
            return await self._bounded("weight_version", self._engine.weight_version, PROBE_TIMEOUT_S)
        except EngineError:
            return None

    async def aclose(self) -> None: ...

    async def _bounded(self, operation: str, call: Callable[[], Awaitable[T]], limit_s: float = CONTROL_TIMEOUT_S) -> T:
        try:
            with anyio.fail_after(limit_s):
                return await call()
        except TimeoutError as error:
            raise OutcomeUnknown(self._engine.name, operation, f"no answer in {limit_s:g} s") from error


class SimHost:
    """Implements the sidecar's EngineHost: starts an engine, notices its end, fences it."""

    kind = "embedded"

    def __init__(self, name: str, start: Callable[[], SimEngine], speed: Speed) -> None:
        self.name = name
        self.url = ""
        self.detail = ""
        self.restarts = 0
        self.pid: int | None = None
        self.engine: SimEngine | None = None
        self.broken = False  # its engines don't come up any more
        self._start = start
        self._speed = speed
        self._client: DeadlineClient | None = None
        self._wanted = anyio.Event()
        self._wanted.set()

    @property
    def client(self) -> EngineControl | None:
        return self._client

    async def run(self, on_lost: Callable[[], None]) -> None:
        while True:
            await self._wanted.wait()
            self._wanted = anyio.Event()
            self.detail = ""
            await anyio.sleep(self._speed.start_s)
            if self.broken:
                self.detail = "out of memory in the start"
                continue
            engine = self.engine = self._start()
            self.url = f"sim://{self.name}/{self.restarts}"
            self._client = DeadlineClient(engine)
            await engine.died.wait()
            self.detail = "the engine ended with SIGKILL"
            self._client = None
            on_lost()

    async def recover(self, timeout_s: float) -> None:
        with anyio.fail_after(timeout_s):
            if self._client is None and self.detail:
                self._restart()
            while self._client is None:
                if self.detail:
                    raise EngineError(self.name, "recover", self.detail)
                await anyio.sleep(0.5)

    async def fence(self) -> None:
        self._client = None
        self._restart()
        if self.engine is not None:
            self.engine.kill()
        await anyio.lowlevel.checkpoint()

    async def stop(self) -> None:
        if self.engine is not None:
            self.engine.kill()

    def _restart(self) -> None:
        self.restarts += 1
        self._wanted.set()
        self.detail = ""


class SimNode:
    """One sidecar with its engine. `run` is the life of the sidecar's process; a killed one takes its engine along."""

    def __init__(self, name: str, speed: Speed, rng: Random, *, snapshots: Callable[[str], bool], stages: bool) -> None:
        self.name = name
        self.stages = stages  # its engines prepare weights while they generate
        self.engines: list[SimEngine] = []
        self._speed = speed
        self._rng = rng
        self._snapshots = snapshots
        self.up = False
        self.broken: list[str] = []  # promises
        self.host: SimHost
        self.control: Control
        self._scope: anyio.CancelScope | None = None

    @property
    def engine(self) -> SimEngine | None:
        return self.engines[-1] if self.engines else None

    async def run(self) -> None:
        """Until killed."""
        self.host = SimHost(self.name, self._new_engine, self._speed)
        self.control = Control(self.host, TransactionMachine())
        self.up = True
        try:
            async with anyio.create_task_group() as tasks:
                self._scope = tasks.cancel_scope
                tasks.start_soon(self.host.run, self.control.engine_lost)
                tasks.start_soon(self.control.run)
        finally:
            self.up = False

    def kill(self) -> None:
        """SIGKILL of the sidecar; the kernel kills its engine."""
        self.up = False
        if self.engine is not None:
            self.engine.kill()
        if self._scope is not None:
            self._scope.cancel()

    def _new_engine(self) -> SimEngine:
        engine = SimEngine(self.name, self._speed, self._rng, snapshots=self._snapshots)
        engine.on_resume = self._on_resume
        self.engines.append(engine)
        return engine

    def _on_resume(self) -> None:
        """A pause that somebody holds ends by that holder alone."""
        if self.up and self.control.machine.state == "paused":
            self.broken.append(f"{self.name} was resumed while {self.control.machine.holder} held it")
