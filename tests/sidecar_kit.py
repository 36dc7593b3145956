"""A sidecar's control without processes and without HTTP: a fake engine that hangs and fails where it is told."""

from __future__ import annotations

from collections import defaultdict

import anyio

from hybridasync.protocol.transactions import TransactionMachine
from hybridasync.sidecar.control import Control

A = "a" * 32
B = "b" * 32
LEASE_S = 60.0


def txn(sequence: int, session: str = A) -> str:
    return f"ha1:{session}:{sequence}"


class FakeEngine:
    """Records what the sidecar does to it (`flags`: True a pause, False a resume); hangs and fails where it is told."""

    def __init__(self) -> None:
        self.flags: list[bool] = []
        self.asked = 0
        self.busy = 0
        self.paused = False
        self.gates: dict[str, anyio.Event] = {}
        self.reached: dict[str, anyio.Event] = defaultdict(anyio.Event)
        self.failures: dict[str, list[Exception | None]] = defaultdict(list)

    async def _at(self, point: str) -> None:
        self.reached[point].set()
        if point in self.gates:
            await self.gates[point].wait()
        failure = self.failures[point].pop(0) if self.failures[point] else None
        if failure is not None:
            raise failure

    async def pause(self, mode: str) -> None:
        self.flags.append(True)
        await self._at("pause")
        self.paused = True

    async def resume(self) -> None:
        self.flags.append(False)
        await self._at("resume")
        self.paused = False

    async def in_flight(self) -> int:
        self.asked += 1
        await self._at("check")
        return self.busy

    async def ready(self) -> bool:
        return not self.paused

    async def weight_version(self) -> str | None:
        return "3"

    async def aclose(self) -> None: ...


class FakeHost:
    kind = "attach"
    url = "http://fake"
    pid = None
    detail = ""
    restarts = 0

    def __init__(self, engine: FakeEngine | None) -> None:
        self.client = engine


class Rig:
    def __init__(self, machine: TransactionMachine | None = None) -> None:
        self.engine = FakeEngine()
        self.machine = machine or TransactionMachine()
        self.control = Control(FakeHost(self.engine), self.machine)  # type: ignore[arg-type]
        self.answers: dict[object, object] = {}

    async def pause(self, name: str | None, mode: str = "drain") -> bool:
        return (await self.control.pause(name, mode, LEASE_S)).paused  # type: ignore[arg-type]

    async def keep(self, key: object, coroutine_function, *args) -> None:
        """Run a call and keep what became of it."""
        try:
            self.answers[key] = await coroutine_function(*args)
        except Exception as error:
            self.answers[key] = error

    def hold(self, point: str) -> anyio.Event:
        gate = self.engine.gates[point] = anyio.Event()
        return gate
