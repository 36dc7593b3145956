"""Tests on the clock of the simulation: deadlines and sleeps cost no time, and a slow machine misses none of them."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable

import anyio
from trio.testing import MockClock


def virtual(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Hours pass in no time, and nothing depends on the machine's speed."""

    @functools.wraps(test)
    def run(*args: object, **kwargs: object) -> None:
        clock = MockClock(autojump_threshold=0)
        anyio.run(lambda: test(*args, **kwargs), backend="trio", backend_options={"clock": clock})

    del run.__wrapped__  # pytest must not see a coroutine function
    return run
