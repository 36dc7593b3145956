"""Which engine gets the next request: the least loaded of those whose weights are verified."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class EngineState:
    """What the controller knows of one engine. `version` None: unverified, so it serves nothing (law 4)."""

    name: str
    version: int | None = None
    in_flight: int = 0
    reason: str = "not verified yet"  # why it is out of routing, while `version` is None

    def verified(self, version: int) -> None:
        self.version = version
        self.reason = ""

    def quarantine(self, reason: str) -> None:
        self.version = None
        self.reason = reason


def choose(engines: Iterable[EngineState]) -> EngineState | None:
    """The verified engine with the fewest requests in flight; the first of equals."""
    routable = [engine for engine in engines if engine.version is not None]
    return min(routable, key=lambda engine: engine.in_flight, default=None)
