"""The engines as one: routing, the gate that holds new prompts back, and how long engines stood idle."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import anyio

from hybridasync.drivers.notify import Changed
from hybridasync.errors import EngineError, EngineLost, Rejected
from hybridasync.ports import InferenceServer, Sidecar
from hybridasync.protocol.routing import EngineState, Remedy, choose
from hybridasync.types import Completion, SamplingParams


@dataclass(slots=True)
class Engine:
    """One engine: its data plane, its control plane, and what we know of it."""

    server: InferenceServer
    sidecar: Sidecar
    pid: int | None = None  # of the engine, where it runs on this node
    revive: Callable[[], Awaitable[None]] | None = None  # start its sidecar anew; None: it isn't ours to start
    progress_at: float = 0.0  # when it last finished a request, or began to have one
    state: EngineState = field(init=False)
    requests: dict[anyio.CancelScope, None] = field(default_factory=dict)  # in the order in which they were sent

    def __post_init__(self) -> None:
        self.state = EngineState(self.server.name)

    @property
    def name(self) -> str:
        return self.state.name


class Fleet:
    """Owner of every engine's routing state."""

    def __init__(self, engines: Sequence[Engine], *, for_evaluation: int = 0) -> None:
        """`for_evaluation`: so many, the last ones, are set apart for it; 0: all are shared (U9)."""
        self.engines = tuple(engines)
        self._for_rollout = self.engines[: len(engines) - for_evaluation]
        self._for_evaluation = self.engines[len(engines) - for_evaluation :] or self.engines
        self.changed = Changed()
        self.suspicion = Changed()
        self.watched = False  # whether a health monitor will clear suspects
        self._by_name = {engine.name: engine for engine in engines}
        self._held = 0
        self._idle_since: float | None = None
        self._idle_s = 0.0

    @property
    def in_flight(self) -> int:
        return sum(engine.state.in_flight for engine in self.engines)

    @property
    def verified(self) -> list[Engine]:
        return [engine for engine in self.engines if engine.state.version is not None]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within it no rollout request starts. Requests that run already go on."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
            self.changed.notify()

    async def generate(
        self, rid: str, input_ids: Sequence[int], params: SamplingParams, *, gated: bool = True
    ) -> tuple[Completion, ...]:
        """n completions from the least loaded verified engine; waits until there is one.

        `gated` False goes through a held gate: evaluation is sent before sampling goes on (U9).
        """
        engine = await self._admitted(gated)
        self._busy()
        if not engine.state.in_flight:
            engine.progress_at = anyio.current_time()
        engine.state.in_flight += 1
        scope = anyio.CancelScope()
        engine.requests[scope] = None
        finished = False
        try:
            with scope:
                completions = await engine.server.generate(rid, input_ids, params)
                finished = True
            if scope.cancel_called:  # also when the answer came in the same moment: its weights are in doubt (law 4)
                raise EngineLost(engine.name, "generate", engine.state.reason)
            engine.progress_at = anyio.current_time()
            return completions
        except EngineError as error:
            self._doubt(engine, error)
            raise
        finally:
            engine.requests.pop(scope)
            if not finished:
                await self._abort(engine, rid)
            engine.state.in_flight -= 1
            self._maybe_idle()
            self.changed.notify()

    def quarantine(self, engine: Engine, reason: str, remedy: Remedy | None = None) -> None:
        """No prompt goes to it, and what it is working on is interrupted, to be made elsewhere."""
        engine.state.quarantine(reason, remedy)
        for scope in tuple(engine.requests):
            scope.cancel()
        self.changed.notify()

    def readmit(self, engine: Engine, version: int) -> None:
        """Its complete weights of `version` are verified."""
        engine.state.verified(version)
        engine.progress_at = anyio.current_time()
        self.changed.notify()

    def clear(self, engine: Engine) -> None:
        """A probe found it well."""
        if engine.state.suspect:
            engine.state.suspect = False
            self.changed.notify()

    async def drained(self) -> None:
        """Returns once nothing is in flight."""
        while self.in_flight:
            await self.changed.wait()

    def take_idle_s(self) -> float:
        """Seconds with nothing in flight since the last call."""
        if self._idle_since is not None:
            now = anyio.current_time()
            self._idle_s += now - self._idle_since
            self._idle_since = now
        idle, self._idle_s = self._idle_s, 0.0
        return idle

    async def _admitted(self, gated: bool) -> Engine:
        while True:
            engine = None if gated and self._held else self._free(self._for_rollout if gated else self._for_evaluation)
            if engine is not None:
                return engine
            self._maybe_idle()
            await self.changed.wait()

    def _free(self, meant: Sequence[Engine]) -> Engine | None:
        """One of those that are `meant` for it. With all of them away the others do, so that the run goes on."""
        states = [engine.state for engine in meant]
        if all(state.version is None for state in states):
            states = [engine.state for engine in self.engines]
        state = choose(states)
        return None if state is None else self._by_name[state.name]

    async def _abort(self, engine: Engine, rid: str) -> None:
        # Shielded: a server notices a closed connection seconds later, and computes for nobody until then.
        with anyio.move_on_after(ABORT_DEADLINE_S, shield=True), suppress(EngineError):
            await engine.server.abort(rid)

    def _doubt(self, engine: Engine, error: EngineError) -> None:
        """A refusal proves that it lives. After anything else it is probed before it gets another prompt."""
        if self.watched and not isinstance(error, Rejected | EngineLost):
            engine.state.suspect = True
            self.suspicion.notify()

    def _busy(self) -> None:
        if self._idle_since is not None:
            self._idle_s += anyio.current_time() - self._idle_since
            self._idle_since = None

    def _maybe_idle(self) -> None:
        if self.in_flight == 0 and self._idle_since is None:
            self._idle_since = anyio.current_time()


ABORT_DEADLINE_S = 1.0
"""An abort is a courtesy to the engine; a dead one must not delay the exit of a run with hundreds of requests."""
