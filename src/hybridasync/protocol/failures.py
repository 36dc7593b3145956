"""When failures stop being bad luck: the share of the last so many attempts."""

from __future__ import annotations

from collections import deque


class FailureBudget:
    """`spent` once the window is full and more than `share` of it failed; with share 1.0, if all of it failed."""

    def __init__(self, *, window: int, share: float) -> None:
        self._outcomes: deque[bool] = deque(maxlen=window)
        self._share = share

    def record(self, *, failed: bool, times: int = 1) -> None:
        self._outcomes.extend([failed] * times)

    @property
    def spent(self) -> bool:
        full = len(self._outcomes) == self._outcomes.maxlen
        failures = sum(self._outcomes)
        return full and (failures > self._share * len(self._outcomes) or failures == len(self._outcomes))
