"""In-process stand-ins for the ports, with points before a send, after it and after the reply where a test may act."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.lowlevel

from hybridasync.drivers.fleet import Engine, Fleet
from hybridasync.errors import EngineError
from hybridasync.types import (
    Completion,
    EvalResult,
    Group,
    GroupState,
    PauseMode,
    PublicationResult,
    SamplingParams,
    ServedWeights,
    SidecarStatus,
    TrainSample,
    VersionSpan,
    WeightSnapshot,
)

CHECKSUMS = {"a": "1", "b": "2"}
Hook = Callable[[str], Awaitable[None]]


async def nothing(_point: str) -> None:
    await anyio.lowlevel.checkpoint()


@dataclass
class World:
    """What really happens on the other side, whatever the caller gets to know of it."""

    hook: Hook = nothing
    log: list[str] = field(default_factory=list)

    async def call(self, name: str, effect: Callable[[], Any]) -> Any:
        await self.hook(f"{name}: before send")
        answer = effect()
        self.log.append(name)
        await self.hook(f"{name}: after send")
        await self.hook(f"{name}: after reply")
        return answer


class FakeSidecar:
    def __init__(self, name: str, world: World) -> None:
        self.name = name
        self.paused_by: str | None = None
        self.fenced = 0
        self.not_ready = 0  # so many pauses are answered with "not ready"
        self.pauses = 0
        self.ended: set[str] = set()
        self._world = world

    async def status(self) -> SidecarStatus:
        state = "paused" if self.paused_by else "running"
        return SidecarStatus("http://x", "fake", state, None, self.paused_by, None, None, None, False, True)

    async def pause(self, txn: str, mode: PauseMode, lease_s: float) -> bool:
        def effect() -> bool:
            self.pauses += 1
            if self.not_ready:
                self.not_ready -= 1
                return False
            if txn not in self.ended:
                self.paused_by = txn
            return txn not in self.ended

        return bool(await self._world.call(f"{self.name} pause", effect))

    async def renew(self, txn: str, lease_s: float) -> None:
        return None

    async def end(self, txn: str) -> None:
        def effect() -> None:
            self.ended.add(txn)
            if self.paused_by == txn:
                self.paused_by = None

        await self._world.call(f"{self.name} end", effect)

    async def recover(self, timeout_s: float) -> None:
        return None

    async def fence(self, txns: Sequence[str] = ()) -> None:
        def effect() -> None:
            self.fenced += 1
            self.ended.update(txns)
            self.paused_by = None

        await self._world.call(f"{self.name} fence", effect)


class FakeServer:
    """Answers each generate with `reply`; by default n completions of two tokens."""

    def __init__(self, name: str, world: World) -> None:
        self.name = name
        self.base_url = f"http://{name}"
        self.version = "default"
        self.sums: Mapping[str, str] = CHECKSUMS
        self.reply: Callable[[Sequence[int], SamplingParams], Awaitable[tuple[Completion, ...]]] | None = None
        self.can_stage = False
        self.stage_error: EngineError | None = None
        self.switch_error: EngineError | None = None
        self.staged: list[tuple[int, int | None]] = []  # (version, base)
        self.requests: list[tuple[tuple[int, ...], SamplingParams]] = []
        self.aborted: list[str] = []
        self._world = world

    async def generate(self, rid: str, input_ids: Sequence[int], params: SamplingParams) -> tuple[Completion, ...]:
        self.requests.append((tuple(input_ids), params))
        await anyio.lowlevel.checkpoint()
        if self.reply is not None:
            return await self.reply(input_ids, params)
        version = int(self.version) if self.version.isdigit() else 0
        return tuple(completion(2, version=version, engine=self.name) for _ in range(params.n))

    async def abort(self, rid: str) -> None:
        self.aborted.append(rid)

    async def stage(self, snapshot: WeightSnapshot) -> bool:
        def effect() -> bool:
            if self.stage_error is not None:
                raise self.stage_error
            if self.can_stage:
                self.staged.append((snapshot.version, snapshot.base_version))
            return self.can_stage

        return bool(await self._world.call(f"{self.name} stage", effect))

    async def switch(self, snapshot: WeightSnapshot, mode: PauseMode) -> ServedWeights:
        def effect() -> ServedWeights:
            if self.switch_error is not None:
                raise self.switch_error
            self.version = str(snapshot.version)
            return ServedWeights(self.version, self.sums, 0.001)

        served = await self._world.call(f"{self.name} switch", effect)
        assert isinstance(served, ServedWeights)
        return served

    async def update_weights(self, snapshot: WeightSnapshot) -> None:
        def effect() -> None:
            self.version = str(snapshot.version)

        await self._world.call(f"{self.name} load", effect)

    async def weight_version(self) -> str:
        return str(await self._world.call(f"{self.name} version", lambda: self.version))

    async def checksums(self) -> Mapping[str, str]:
        return dict(await self._world.call(f"{self.name} checksums", lambda: self.sums))

    async def read_back(self) -> ServedWeights:
        return ServedWeights(await self.weight_version(), await self.checksums())

    async def in_flight(self) -> int:
        return 0

    async def healthy(self) -> bool:
        return True

    async def moved(self, base_url: str) -> None:
        return None


class FakeTrainer:
    """Exports instantly; log-probs are what the samples say."""

    def __init__(self) -> None:
        self.decisions: list[tuple[int, int, bool]] = []  # epoch, version, commit
        self.base: int | None = None  # exports are deltas to this version
        self.exported: list[int] = []
        self.published: list[int] = []  # versions that were written once more, in full
        self.cleared = 0

    async def decide(self, epoch: int, *, version: int, commit: bool) -> None:
        self.decisions.append((epoch, version, commit))

    async def export_weights(self, version: int, path: str) -> WeightSnapshot:
        self.exported.append(version)
        return WeightSnapshot(version, path, CHECKSUMS, 8, 0.0, 80, self.base)

    async def clear_cache(self) -> None:
        self.cleared += 1

    async def export_published(self, version: int, path: str) -> int:
        self.published.append(version)
        return 80

    async def logprobs(self, samples: Sequence[TrainSample]) -> list[list[float]]:
        return [list(sample.rollout_logprobs) for sample in samples]


class MemoryJournal:
    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def append(self, record: Mapping[str, Any]) -> None:
        self.records.append(dict(record))

    def replay(self) -> list[dict[str, Any]]:
        return list(self.records)


class RecordingSink:
    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, object]]] = []
        self.publications: list[PublicationResult] = []
        self.evaluations: list[EvalResult] = []
        self.steps: list[tuple[int, dict[str, float]]] = []
        self.groups: list[tuple[int, GroupState, dict[str, object]]] = []
        self.synced = 0  # steps that were on disk by then

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps.append((step, dict(metrics)))

    def publication(self, result: PublicationResult) -> None:
        self.publications.append(result)

    def evaluation(self, result: EvalResult) -> None:
        self.evaluations.append(result)

    def samples(self, step: int, groups: Sequence[Group], advantages: Mapping[int, Sequence[float]]) -> None:
        return None

    def group(self, uid: int, state: GroupState, **fields: object) -> None:
        self.groups.append((uid, state, fields))

    def event(self, name: str, /, **fields: object) -> None:
        self.events.append((name, fields))

    def sync(self) -> None:
        self.synced = len(self.steps)

    def names(self) -> list[str]:
        return [name for name, _ in self.events]


def completion(tokens: int, *, version: int = 0, finish: str = "stop", engine: str = "engine-0") -> Completion:
    spans = (VersionSpan(version, 0, tokens),) if tokens else ()
    return Completion(tuple(range(10, 10 + tokens)), (-0.5,) * tokens, spans, finish, engine)  # type: ignore[arg-type]


def make_fleet(
    world: World, count: int = 2, *, for_evaluation: int = 0
) -> tuple[Fleet, list[FakeServer], list[FakeSidecar]]:
    servers = [FakeServer(f"engine-{i}", world) for i in range(count)]
    sidecars = [FakeSidecar(f"engine-{i}", world) for i in range(count)]
    return (
        Fleet([Engine(*pair) for pair in zip(servers, sidecars, strict=True)], for_evaluation=for_evaluation),
        servers,
        sidecars,
    )
