"""The network of the virtual world: messages are refused, lost, delayed, doubled, delivered late; replies get lost."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, Literal, TypeVar

import anyio
from anyio.abc import TaskGroup

from hybridasync.errors import EngineError, LocalProtocolError, NotSent, OperatingError, OutcomeUnknown, Rejected
from hybridasync.protocol.transaction_id import MalformedTransactionError
from hybridasync.protocol.transactions import CapacityReachedError
from hybridasync.sidecar.control import EngineDownError, NotHeldError
from hybridasync.sim.engine import SimEngine
from hybridasync.sim.node import SimNode
from hybridasync.types import Completion, PauseMode, SamplingParams, ServedWeights, SidecarStatus, WeightSnapshot

T = TypeVar("T")

Fault = Literal["refused", "request_lost", "reply_lost", "late", "doubled", "slow"]
FAULTS: tuple[Fault, ...] = ("refused", "request_lost", "reply_lost", "late", "doubled", "slow")

LATENCY_S = 0.001
SLOW_S = 20.0
LATE_S = 30.0
"""At the longest, so long after its client gave up a lost request may still be carried out."""

REFUSALS: tuple[tuple[type[Exception], int], ...] = (
    (MalformedTransactionError, 400),
    (NotHeldError, 409),
    (EngineDownError, 424),
    (CapacityReachedError, 429),
)


class ControllerKilled(Exception):
    """SIGKILL of the controller: from here on none of its code has any effect."""


@dataclass(slots=True)
class Life:
    """Of one controller process. Its adapters do nothing once it is dead."""

    dead: bool = False
    connections: dict[anyio.CancelScope, None] = field(default_factory=dict)

    def check(self) -> None:
        if self.dead:
            raise ControllerKilled

    def end(self) -> None:
        """The kernel closes its connections, those of shielded calls too."""
        self.dead = True
        for connection in tuple(self.connections):
            connection.cancel()


@dataclass(slots=True)
class Weather:
    """Chance of each fault for one message; all zero once the world has healed."""

    rng: Random
    chances: Mapping[Fault, float] = field(default_factory=dict)
    partitioned: set[str] = field(default_factory=set)
    counts: dict[str, int] = field(default_factory=dict)

    def draw(self, node: str) -> Fault | None:
        if node in self.partitioned:
            return "request_lost"
        for fault in FAULTS:
            if self.rng.random() < self.chances.get(fault, 0.0):
                self.counts[fault] = self.counts.get(fault, 0) + 1
                return fault
        return None

    def heal(self) -> None:
        self.chances = {}
        self.partitioned.clear()


class Network:
    """Carries calls. Work that a server has begun goes on in `tasks`, whatever becomes of its client."""

    def __init__(self, weather: Weather, tasks: TaskGroup) -> None:
        self._weather = weather
        self._tasks = tasks

    async def call(
        self,
        node: SimNode,
        operation: str,
        work: Callable[[], Awaitable[T]],
        *,
        timeout_s: float,
        life: Life,
        attended: bool,
        repeatable: bool,
    ) -> T:
        """One request. Raises NotSent, OutcomeUnknown, or what the server answers.

        An `attended` server stops, and compensates, when its client leaves; the other kind goes on. What is
        `repeatable` may come twice, and after the death of its client.
        """
        life.check()
        fault = self._weather.draw(node.name)
        await anyio.sleep(LATENCY_S)
        life.check()
        if not node.up or fault == "refused":
            raise NotSent(node.name, operation, "connection refused")
        if fault == "request_lost":
            await anyio.sleep(timeout_s)
            raise OutcomeUnknown(node.name, operation, "no answer")
        if fault == "late":
            keep = Life() if repeatable else life
            self._tasks.start_soon(
                partial(self._later, node, work, delay_s=self._weather.rng.uniform(0, LATE_S), life=keep)
            )
            raise OutcomeUnknown(node.name, operation, "connection reset")
        if fault == "doubled" and repeatable:
            self._tasks.start_soon(partial(self._later, node, work, delay_s=self._weather.rng.uniform(0, 1), life=life))
        if fault == "slow":
            await anyio.sleep(self._weather.rng.uniform(0, SLOW_S))
        with anyio.CancelScope() as connection:
            life.connections[connection] = None
            try:
                result = await self._served(node, operation, work, timeout_s=timeout_s, attended=attended)
            finally:
                life.connections.pop(connection)
        life.check()
        if fault == "reply_lost":
            raise OutcomeUnknown(node.name, operation, "connection reset")
        return result

    async def _served(
        self, node: SimNode, operation: str, work: Callable[[], Awaitable[T]], *, timeout_s: float, attended: bool
    ) -> T:
        scope, done = anyio.CancelScope(), anyio.Event()
        outcome: list[Any] = []

        async def serve() -> None:
            try:
                with scope:
                    outcome.append((True, await work()))
            except (OperatingError, TimeoutError) as error:
                outcome.append((False, error))
            finally:
                done.set()

        self._tasks.start_soon(serve)
        try:
            with anyio.move_on_after(timeout_s):
                await done.wait()
        finally:
            if attended:
                scope.cancel()
        if not outcome or not node.up:
            raise OutcomeUnknown(node.name, operation, "no answer")
        good, value = outcome[0]
        if not good:
            raise _answer(node.name, operation, value)
        return value  # type: ignore[no-any-return]

    async def _later(self, node: SimNode, work: Callable[[], Awaitable[T]], *, delay_s: float, life: Life) -> None:
        """A message ends with the process that it was sent to; an engine drops those of a client that has ended too."""
        process = node.control
        await anyio.sleep(delay_s)
        if node.up and node.control is process and not life.dead:
            try:
                await work()
            except (OperatingError, TimeoutError):
                return


def _answer(name: str, operation: str, error: Exception) -> EngineError:
    """As the sidecar's table of statuses, seen by its client."""
    if isinstance(error, NotSent | Rejected | OutcomeUnknown):
        return error
    for kind, status in REFUSALS:
        if isinstance(error, kind):
            return Rejected(name, operation, status, detail=str(error))
    return OutcomeUnknown(name, operation, f"HTTP 502 {error}")


@dataclass(slots=True)
class SimSidecar:
    """Implements the port Sidecar over the network."""

    node: SimNode
    network: Network
    life: Life
    timeout_s: float
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.node.name

    async def status(self) -> SidecarStatus:
        return await self._call("status", lambda: self.node.control.status())

    async def pause(self, txn: str, mode: PauseMode, lease_s: float) -> bool:
        answer = await self._call("pause", lambda: self.node.control.pause(txn, mode, lease_s))
        return answer.paused

    async def renew(self, txn: str, lease_s: float) -> None:
        async def renew() -> None:
            self.node.control.renew(txn, lease_s)

        await self._call("renew", renew)

    async def end(self, txn: str | None) -> None:
        await self._call("end", lambda: self.node.control.end(txn))

    async def recover(self, timeout_s: float) -> None:
        await self._call("recover", lambda: self.node.control.recover(timeout_s), timeout_s + 5.0)

    async def fence(self, txns: Sequence[str] = ()) -> None:
        await self._call("fence", lambda: self.node.control.fence(txns))

    async def _call(self, operation: str, work: Callable[[], Awaitable[T]], timeout_s: float | None = None) -> T:
        async def answered() -> T:
            try:
                return await work()
            except EngineError as error:  # what the engine did to the sidecar is no answer of the sidecar's own
                raise OutcomeUnknown(self.name, operation, f"HTTP 502 {error}") from error

        limit = self.timeout_s if timeout_s is None else timeout_s
        return await self.network.call(
            self.node, operation, answered, timeout_s=limit, life=self.life, attended=True, repeatable=True
        )


@dataclass(slots=True)
class SimServer:
    """Implements the port InferenceServer. It keeps to the engine process whose address it was given."""

    node: SimNode
    network: Network
    life: Life
    timeout_s: float
    request_timeout_s: float
    engine: SimEngine | None = None
    name: str = field(init=False)
    base_url: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.node.name
        self.base_url = f"sim://{self.name}"

    async def moved(self, base_url: str) -> None:
        self.engine = self.node.engine

    async def generate(self, rid: str, input_ids: Sequence[int], params: SamplingParams) -> tuple[Completion, ...]:
        return await self._call("generate", lambda e: e.generate(rid, params), self.request_timeout_s)

    async def abort(self, rid: str) -> None:
        await self._call("abort", lambda e: e.abort(rid))

    async def stage(self, snapshot: WeightSnapshot) -> bool:
        """False: it loads under a pause, as SGLang does."""
        if self.node.stages:
            await self._call("stage", lambda e: e.stage(snapshot), repeatable=True)
        return self.node.stages

    async def switch(self, snapshot: WeightSnapshot, mode: PauseMode) -> ServedWeights:
        return await self._call("switch", lambda e: e.switch(snapshot), repeatable=True)

    async def update_weights(self, snapshot: WeightSnapshot) -> None:
        await self._call("update_weights", lambda e: e.update_weights(snapshot))

    async def weight_version(self) -> str:
        return await self._call("weight_version", lambda e: e.label_served())

    async def checksums(self) -> Mapping[str, str]:
        return await self._call("checksums", lambda e: e.checksums())

    async def read_back(self) -> ServedWeights:
        return ServedWeights(await self.weight_version(), await self.checksums())

    async def in_flight(self) -> int:
        return await self._call("in_flight", lambda e: e.in_flight())

    async def healthy(self) -> bool:
        try:
            await self._call("healthy", lambda e: e.ready())
        except EngineError:
            return False
        return True

    async def _call(
        self,
        operation: str,
        work: Callable[[SimEngine], Awaitable[T]],
        timeout_s: float | None = None,
        *,
        repeatable: bool = False,
    ) -> T:
        engine = self.engine
        if engine is None:
            raise LocalProtocolError(f"{self.name}: {operation} before the engine's address is known")
        if not engine.alive:
            self.life.check()
            await anyio.sleep(LATENCY_S)
            raise NotSent(self.name, operation, "connection refused")
        limit = self.timeout_s if timeout_s is None else timeout_s
        return await self.network.call(
            self.node,
            operation,
            lambda: work(engine),
            timeout_s=limit,
            life=self.life,
            attended=False,
            repeatable=repeatable,
        )
