"""Waiting for a change without polling, on any anyio backend."""

from __future__ import annotations

import anyio


class Changed:
    """`wait` returns at the next `notify`. Whoever waits looks at the state again: a change is a hint, not a fact."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    def notify(self) -> None:
        self._event.set()
        self._event = anyio.Event()

    async def wait(self) -> None:
        await self._event.wait()
