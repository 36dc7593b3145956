"""How many steps lie between two publications, chosen from what they cost (`update_weights_interval = "auto"`).

K is the smallest number of steps in [k_min, k_max] with which publications take at most SHARE of the run:
cost / (cost + K · work), where `cost` is what a publication holds training up for and `work` what a step takes without
one, both medians over the last WINDOW of their kind. Weights that are older than need be cost learning, so the smallest
one will do; and so that K doesn't go back and forth between neighbours, a smaller one has to be clearly good enough.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

SHARE = 0.03
"""Of the run's time, for publications. Below it, what they cost is less than what runs differ by anyway."""

CLEARLY = 0.75
"""Times SHARE: what the share at a smaller interval must keep within before K goes down."""

WINDOW = 5
"""Measurements of each kind that count. The first ones are slow (files and connections are new) and soon forgotten."""


@dataclass(frozen=True, slots=True)
class Choice:
    interval: int
    reason: str


def share(cost_s: float, work_s: float, interval: int) -> float:
    """Of the time, what a publication each `interval` steps takes.

    >>> share(1.0, 4.0, 1), share(1.0, 4.0, 2) < 0.12
    (0.2, True)
    """
    return cost_s / (cost_s + interval * work_s) if cost_s > 0 else 0.0


def choose_interval(
    costs_s: Sequence[float], works_s: Sequence[float], *, current: int, k_min: int, k_max: int
) -> Choice:
    """The next interval, from the last measurements; a function of its arguments alone."""
    if not costs_s or not works_s:
        return Choice(k_min, "nothing is measured yet")
    cost, work = median(costs_s[-WINDOW:]), median(works_s[-WINDOW:])

    def smallest(limit: float) -> int:
        return next((k for k in range(k_min, k_max) if share(cost, work, k) <= limit), k_max)

    enough = smallest(SHARE)
    chosen = enough if enough >= current else max(k_min, min(current, smallest(SHARE * CLEARLY)))
    measured = f"a publication costs {cost:.3g} s and a step {work:.3g} s"
    reason = f"{measured}: {share(cost, work, chosen):.1%} of the time with K = {chosen}"
    if share(cost, work, chosen) > SHARE:
        reason += f", more than {SHARE:.0%}, but K isn't above {k_max}"
    elif chosen > enough:
        reason += f"; {enough} would just do"
    return Choice(chosen, reason)


@dataclass(slots=True)
class Pace:
    """The interval in effect, and the measurements that it is from. Its state continues in a resumed run."""

    k_min: int
    k_max: int
    interval: int = 0
    published: int = 0  # completed steps at the last publication
    costs_s: list[float] = field(default_factory=list)
    works_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.interval = self.interval or self.k_min

    def worked(self, seconds: float) -> None:
        """What a step took without a publication."""
        self.works_s = [*self.works_s, seconds][-WINDOW:]

    def tried(self, completed: int, cost_s: float | None) -> Choice | None:
        """A publication after `completed` steps; `cost_s` None: it doesn't count. Answers a choice that changes K."""
        self.published = completed
        if cost_s is None:
            return None
        self.costs_s = [*self.costs_s, cost_s][-WINDOW:]
        choice = choose_interval(self.costs_s, self.works_s, current=self.interval, k_min=self.k_min, k_max=self.k_max)
        changed, self.interval = choice.interval != self.interval, choice.interval
        return choice if changed else None

    def state(self) -> dict[str, Any]:
        return {
            "interval": self.interval,
            "published": self.published,
            "costs_s": self.costs_s,
            "works_s": self.works_s,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Within the bounds of this run, which may be others."""
        self.interval = min(max(int(state["interval"]), self.k_min), self.k_max)
        self.published = int(state["published"])
        self.costs_s = [float(value) for value in state["costs_s"]]
        self.works_s = [float(value) for value in state["works_s"]]
