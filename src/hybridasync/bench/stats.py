"""Statistics of paired trials: what a comparison is worth, with an interval instead of means alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
Comparison = Literal["ratio", "difference"]

RESAMPLES = 4000
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Arm:
    """One variant's steps in one trial: its value is sum(numerators) / sum(denominators), both [T]."""

    numerators: Sequence[float]
    denominators: Sequence[float]

    @property
    def value(self) -> float:
        """0 where the denominators sum to 0 (a mean over no publication)."""
        below = sum(self.denominators)
        return sum(self.numerators) / below if below else 0.0


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with a 95 % percentile interval. `pairs` are the estimates of the trials one by one."""

    estimate: float
    low: float
    high: float
    pairs: tuple[float, ...]


def compare(pairs: Sequence[tuple[Arm, Arm]], kind: Comparison, *, resamples: int = RESAMPLES) -> Interval:
    """First arm against the second, over pairs of trials with one seed each.

    The estimate is the geometric mean of the pairs' ratios, or the mean of their differences. Its interval is a
    two-stage bootstrap (Davison and Hinkley, Bootstrap Methods and Their Application, 1997, section 3.8): pairs are
    drawn with replacement, and in each drawn pair the steps of either arm. The draws are the same in every call.
    Raises ValueError for no pair, arms of unequal length, or a ratio of values that aren't positive.
    """
    if not pairs:
        raise ValueError("no pair to compare")
    each = np.array([[arm.value for arm in pair] for pair in pairs])
    if kind == "ratio" and not (each > 0).all():
        raise ValueError("a ratio needs positive values")
    rng = np.random.Generator(np.random.PCG64(0))
    drawn = rng.integers(len(pairs), size=(resamples, len(pairs)))
    first, second = (_resampled([pair[side] for pair in pairs], drawn, rng) for side in (0, 1))
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.nanpercentile(_combined(first, second, kind), [tail, 100 - tail])
    own = each[:, 0] / each[:, 1] if kind == "ratio" else each[:, 0] - each[:, 1]
    estimate = float(_combined(each[:, 0][None], each[:, 1][None], kind)[0])
    return Interval(estimate, float(low), float(high), tuple(float(value) for value in own))


def _resampled(arms: Sequence[Arm], drawn: Any, rng: np.random.Generator) -> Numbers:
    """Values [resamples, pairs] of the drawn arms, each over steps drawn anew."""
    above = np.array([arm.numerators for arm in arms], dtype=np.float64)
    below = np.array([arm.denominators for arm in arms], dtype=np.float64)
    steps = rng.integers(above.shape[1], size=(*drawn.shape, above.shape[1]))
    sums = [np.take_along_axis(values[drawn], steps, axis=2).sum(axis=2) for values in (above, below)]
    values: Numbers = np.divide(sums[0], sums[1], out=np.zeros_like(sums[0]), where=sums[1] != 0)
    return values


def _combined(first: Numbers, second: Numbers, kind: Comparison) -> Numbers:
    """[resamples, pairs] twice → [resamples]. A drawn ratio without a value is nan and left out."""
    if kind == "difference":
        return np.asarray((first - second).mean(axis=1))
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(first) - np.log(second)
    logs[~np.isfinite(logs)] = np.nan
    return np.asarray(np.exp(logs.mean(axis=1)))
