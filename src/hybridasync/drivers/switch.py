"""Engines that have staged a snapshot change to it between two tokens: no pause, so that none can be left.

switch ─▶ it says what it serves now ─▶ that is the snapshot: verified, and routed to at once
   │                                └─▶ anything else, or no answer: out of routing until the snapshot is loaded
   └─▶ refused, or not sent: nothing has changed, and the publication pauses it instead
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import anyio

from hybridasync.drivers.fleet import Engine, Fleet
from hybridasync.errors import EngineError
from hybridasync.ports import MetricSink
from hybridasync.protocol.delivery import may_have_happened
from hybridasync.types import PauseMode, ServedWeights, WeightSnapshot


@dataclass(slots=True)
class Switched:
    """What became of engines that were asked. In neither of the two: they haven't switched."""

    verified: list[Engine] = field(default_factory=list)
    doubts: dict[str, str] = field(default_factory=dict)  # engine → why it may serve anything
    paused_s: float = 0.0  # as the engines say, the longest


async def switch(
    engines: Sequence[Engine], snapshot: WeightSnapshot, mode: PauseMode, *, fleet: Fleet, sink: MetricSink
) -> Switched:
    """What is known of an engine is said of it at once: others may still have to be paused, and it may die meanwhile.

    One in doubt serves either version as a whole. It waits for the snapshot to be loaded, and not for a new process:
    the engine forgets what it staged when it loads, so that a switch that is still on its way finds nothing.
    """
    result = Switched()

    async def ask(engine: Engine) -> None:
        doubt = "the switch was interrupted"
        try:
            served = await engine.server.switch(snapshot, mode)
            doubt = doubt_of(served, snapshot)
            result.paused_s = max(result.paused_s, served.paused_s)
            if not doubt:
                fleet.readmit(engine, snapshot.version)
                result.verified.append(engine)
        except EngineError as error:
            doubt = f"switch: {error}" if may_have_happened(error) else ""
            if not doubt:
                fields = {"engine": engine.name, "version": snapshot.version, "cause": str(error)}
                sink.event("switch_failed", level="warning", **fields)
        finally:
            if doubt:
                result.doubts[engine.name] = doubt
                fleet.quarantine(engine, doubt, "publish")

    async with anyio.create_task_group() as tasks:
        for engine in engines:
            tasks.start_soon(ask, engine)
    return result


def doubt_of(served: ServedWeights, snapshot: WeightSnapshot) -> str:
    """Why what an engine serves isn't the snapshot; empty if it is. A parameter that only one side has differs."""
    if served.version != str(snapshot.version):
        return f"serves version {served.version}, not {snapshot.version}"
    left, right = served.checksums, snapshot.checksums
    differing = sorted(name for name in left.keys() | right.keys() if left.get(name) != right.get(name))
    return f"checksum differs for {', '.join(differing[:3])} ({len(differing)} in all)" if differing else ""


@contextmanager
def marked(engines: Sequence[Engine]) -> Iterator[None]:
    """A probe that meets this says nothing about the engine (C11); monitoring goes on whatever happens here."""
    for engine in engines:
        engine.state.swaps += 1
    try:
        yield
    finally:
        for engine in engines:
            engine.state.swaps += 1
