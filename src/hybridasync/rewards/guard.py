"""When failing rewards stop a run: a grader that fails is not a wrong answer (C50)."""

from __future__ import annotations

from collections import deque

WINDOW = 64


class ErrorShare:
    """Share of failures among the last 64 samples. Pure counter; it judges only once it has seen so many."""

    def __init__(self, limit: float, window: int = WINDOW) -> None:
        self._limit = limit
        self._last: deque[bool] = deque(maxlen=window)
        self._window = window
        self.failures = 0  # of the whole run
        self.samples = 0

    def record(self, samples: int, *, failed: bool) -> None:
        """Count a group: if its reward failed, all of its samples are lost to it."""
        self._last.extend([failed] * samples)
        self.samples += samples
        self.failures += samples if failed else 0

    @property
    def share(self) -> float:
        """Of the window; 0.0 before the first sample."""
        return sum(self._last) / len(self._last) if self._last else 0.0

    @property
    def exceeded(self) -> bool:
        return len(self._last) == self._window and self.share > self._limit

    @property
    def message(self) -> str:
        return (
            f"the reward function failed for {self.share:.0%} of the last {len(self._last)} samples "
            f"(run.max_reward_error_fraction is {self._limit:g}; {self.failures} of {self.samples} in all)"
        )
