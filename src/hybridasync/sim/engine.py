"""An engine process of the virtual world, as faithful as the publication needs it.

Every token says which weights made it: `token_of(version)` for complete ones, TORN for half-updated ones. So whatever
is trained on can be traced, whatever the controller believed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from random import Random

import anyio

from hybridasync.drivers.notify import Changed
from hybridasync.errors import EngineError, NotSent, OutcomeUnknown, Rejected
from hybridasync.types import Completion, PauseMode, SamplingParams, ServedWeights, VersionSpan, WeightSnapshot

PARAMETERS = ("embedding", "layer", "head")
TORN = 7
FRESH = 8
"""Made by a process that no publication has reached yet: weights of its start, whatever they are."""

_FIRST_TOKEN = 1000


def token_of(version: int) -> int:
    """The token that complete weights of this version make."""
    return _FIRST_TOKEN + version


def checksums_of(version: int) -> dict[str, str]:
    return {name: f"{name}@{version}" for name in PARAMETERS}


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds of virtual time."""

    token_s: float = 0.15
    load_s: float = 0.3
    start_s: float = 5.0


class SimEngine:
    """One process. Data plane and control plane answer until it is killed; `frozen` stops the scheduler alone."""

    def __init__(self, name: str, speed: Speed, rng: Random, *, snapshots: Callable[[str], bool]) -> None:
        self.name = name
        self.paused = False
        self.frozen = False
        self.pause_s = 0.0  # how long a pause takes to have its effect
        self.drops = 0  # so many of the next updates leave a parameter out, and say nothing (C07)
        self.tears = 0  # so many of the next updates end half-way with an error
        self.stopped = False  # SIGSTOP: connections are accepted, nothing answers
        self.alive = True
        self.died = anyio.Event()
        self.paused_since: float | None = None
        self.label = "default"
        self.weights = checksums_of(0)
        self.loaded: list[int] = []  # versions, in the order in which they were completely loaded
        self.staged: tuple[int, dict[str, str]] | None = None
        self.on_resume: Callable[[], None] = lambda: None
        self._speed = speed
        self._rng = rng
        self._snapshots = snapshots
        self._running = 0
        self._changed = Changed()
        self._calls: dict[anyio.CancelScope, None] = {}
        self._aborted: set[str] = set()

    # What happens to it

    def kill(self) -> None:
        self.alive = False
        self.died.set()
        for scope in tuple(self._calls):
            scope.cancel()

    def freeze(self, on: bool = True) -> None:
        self.frozen = on
        self._changed.notify()

    def stop(self, on: bool = True) -> None:
        self.stopped = on
        self._changed.notify()

    # Control plane (the sidecar's EngineControl)

    async def pause(self, mode: PauseMode) -> None:
        with self._call("pause"):
            await self._answering()
            await anyio.sleep(self.pause_s)
            self.paused = True
            self.paused_since = anyio.current_time()

    async def resume(self) -> None:
        """A process that is gone holds no pause: no error, as in the real client."""
        with suppress(NotSent), self._call("resume"):
            await self._answering()
            self.paused = False
            self.paused_since = None
            self.on_resume()
            self._changed.notify()

    async def in_flight(self) -> int:
        with self._call("in_flight"):
            await self._answering()
            return self._running

    async def ready(self) -> bool:
        with self._call("ready"):
            await self._answering()
            return not self.paused

    async def weight_version(self) -> str | None:
        try:
            return await self.label_served()
        except EngineError:
            return None

    async def aclose(self) -> None: ...

    # Data plane

    async def label_served(self) -> str:
        with self._call("weight_version"):
            await self._answering()
            return self.label

    async def checksums(self) -> Mapping[str, str]:
        with self._call("checksums"):
            await self._answering()
            return dict(self.weights)

    async def stage(self, snapshot: WeightSnapshot) -> None:
        with self._call("stage"):
            await self._answering()
            self.staged = None
            applied = self._read("stage", snapshot)
            await anyio.sleep(self._speed.load_s)
            if self.tears:
                self.tears -= 1
                raise OutcomeUnknown(self.name, "stage", "HTTP 500 out of memory")
            self.staged = snapshot.version, applied

    async def switch(self, snapshot: WeightSnapshot) -> ServedWeights:
        """To what was staged, all at once."""
        with self._call("switch"):
            await self._answering()
            if self.paused or self.staged != (snapshot.version, dict(snapshot.checksums)):
                raise Rejected(self.name, "switch", 400, detail="it isn't staged, or the engine is paused")
            self.weights, self.staged = dict(snapshot.checksums), None
            self.label = str(snapshot.version)
            self.loaded.append(snapshot.version)
            return ServedWeights(self.label, dict(self.weights))

    async def update_weights(self, snapshot: WeightSnapshot) -> None:
        """Parameter by parameter: killed, cancelled or failing half-way it is torn."""
        with self._call("update_weights"):
            await self._answering()
            self.staged = None
            for name, checksum in self._read("update_weights", snapshot).items():
                await anyio.sleep(self._speed.load_s / len(snapshot.checksums))
                self.weights[name] = checksum
                if self.tears:
                    self.tears -= 1
                    raise OutcomeUnknown(self.name, "update_weights", "HTTP 500 out of memory")
            self.label = str(snapshot.version)
            self.loaded.append(snapshot.version)

    async def abort(self, rid: str) -> None:
        self._aborted.add(rid)
        self._changed.notify()

    async def generate(self, rid: str, params: SamplingParams) -> tuple[Completion, ...]:
        with self._call("generate"):
            self._running += 1
            try:
                return tuple([await self._complete(rid, params) for _ in range(params.n)])
            finally:
                self._running -= 1

    async def _complete(self, rid: str, params: SamplingParams) -> Completion:
        tokens: list[int] = []
        labels: list[int] = []
        for _ in range(self._rng.randint(1, params.max_new_tokens)):
            await self._decoded(rid)
            tokens.append(self._token())
            labels.append(int(self.label) if self.label.isdigit() else 0)
        return Completion(tuple(tokens), (-0.5,) * len(tokens), _spans(labels), "stop", self.name)

    async def _decoded(self, rid: str) -> None:
        """One step of the decoder; a pause throws away the one that it meets."""
        while True:
            await self._answering()
            if rid in self._aborted:
                raise Rejected(self.name, "generate", 400, detail="aborted")
            if self.paused or self.frozen:
                await self._changed.wait()
                continue
            await anyio.sleep(self._speed.token_s)
            if not self.paused:
                return

    def _read(self, operation: str, snapshot: WeightSnapshot) -> dict[str, str]:
        if not self._snapshots(snapshot.path):
            raise Rejected(self.name, operation, 400, detail="no such folder")
        found = dict(snapshot.checksums)
        if self.drops:
            self.drops -= 1
            found.pop("layer")
        return found

    def _token(self) -> int:
        version = int(self.weights[PARAMETERS[0]].partition("@")[2])
        if self.weights != checksums_of(version):
            return TORN
        return token_of(version) if self.loaded else FRESH

    async def _answering(self) -> None:
        while self.stopped:
            await self._changed.wait()

    @contextmanager
    def _call(self, operation: str) -> Iterator[None]:
        if not self.alive:
            raise NotSent(self.name, operation, "connection refused")
        with anyio.CancelScope() as scope:
            self._calls[scope] = None
            try:
                yield
            finally:
                self._calls.pop(scope)
        if scope.cancel_called:
            raise OutcomeUnknown(self.name, operation, "connection reset")


def _spans(labels: Sequence[int]) -> tuple[VersionSpan, ...]:
    """What the engine itself reports: the label of its weights, wrong where they are torn."""
    spans: list[VersionSpan] = []
    for index, version in enumerate(labels):
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(version, spans[-1].start, index + 1)
        else:
            spans.append(VersionSpan(version, index, index + 1))
    return tuple(spans)
