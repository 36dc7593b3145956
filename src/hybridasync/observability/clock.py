"""Who waits for whom: time spent in named phases, whose intervals may overlap. Pure; time is an argument."""

from __future__ import annotations


class Stopwatch:
    """Seconds during which at least one interval of a phase was open (the union of its intervals).

    One instance for each thing whose idle time counts: a trainer, an engine. `now` must not run backwards.
    """

    def __init__(self) -> None:
        self._open: dict[str, int] = {}
        self._since: dict[str, float] = {}
        self._total: dict[str, float] = {}

    def start(self, phase: str, now: float) -> None:
        """Open an interval of `phase`; it may be open already."""
        if self._open.setdefault(phase, 0) == 0:
            self._since[phase] = now
            self._total.setdefault(phase, 0.0)
        self._open[phase] += 1

    def stop(self, phase: str, now: float) -> None:
        """Close one interval of `phase`. Raises ValueError if none is open."""
        if self._open.get(phase, 0) == 0:
            raise ValueError(f"phase {phase!r} isn't open")
        self._open[phase] -= 1
        if self._open[phase] == 0:
            self._total[phase] += now - self._since[phase]

    def is_open(self, phase: str) -> bool:
        return self._open.get(phase, 0) > 0

    def lap(self, now: float) -> dict[str, float]:
        """Seconds of each phase since the last lap; an open interval is cut in two at `now`."""
        for phase, count in self._open.items():
            if count:
                self._total[phase] += now - self._since[phase]
                self._since[phase] = now
        lap, self._total = self._total, dict.fromkeys(self._total, 0.0)
        return lap
