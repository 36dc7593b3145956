"""Which engine gets the next request: the least loaded of those whose weights are verified."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Remedy = Literal["publish", "fence", "recover"]
"""What brings an engine back: a whole publication to it; a new process first; or the process that is being started."""


@dataclass(slots=True)
class EngineState:
    """What the controller knows of one engine. `version` None: unverified, so it serves nothing (law 4)."""

    name: str
    version: int | None = None
    in_flight: int = 0
    reason: str = "not verified yet"  # why it is out of routing, while `version` is None
    remedy: Remedy | None = None  # what it is waiting for, while `version` is None; None: the next publication
    suspect: bool = False  # a request to it failed: nothing goes to it until a probe has cleared it
    absent: bool = False  # it is being brought back: publications and probes pass it over
    swaps: int = 0  # begins and ends of publications: odd within one

    def verified(self, version: int) -> None:
        self.version = version
        self.reason = ""
        self.remedy = None
        self.suspect = False

    def quarantine(self, reason: str, remedy: Remedy | None = None) -> None:
        self.version = None
        self.reason = reason
        self.remedy = remedy

    @property
    def swapping(self) -> bool:
        return self.swaps % 2 == 1


def choose(engines: Iterable[EngineState]) -> EngineState | None:
    """The verified engine with the fewest requests in flight; the first of equals. Suspects get nothing."""
    routable = [engine for engine in engines if engine.version is not None and not engine.suspect]
    return min(routable, key=lambda engine: engine.in_flight, default=None)
