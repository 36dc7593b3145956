"""Where the engine of a sidecar comes from: launched by it (supervise.py), or running already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import anyio

from hybridasync.errors import EngineError, OperatingError
from hybridasync.sidecar.engine_client import EngineClient, EngineControl

POLL_S = 0.1


class NotSupportedError(OperatingError):
    """This sidecar can't do that to its engine."""


class EngineHost(Protocol):
    """`client` is None while there is no engine that could answer; `detail` then says why, once that is known."""

    kind: str
    url: str
    detail: str
    restarts: int

    @property
    def pid(self) -> int | None: ...

    @property
    def client(self) -> EngineControl | None: ...

    async def run(self, on_lost: Callable[[], None]) -> None:
        """Look after the engine until cancelled; `on_lost` is called whenever its process has gone."""
        ...

    async def recover(self, timeout_s: float) -> None:
        """Return once the engine answers. Raises EngineError, TimeoutError."""
        ...

    async def fence(self) -> None:
        """Kill the engine and begin to start a new one. Raises NotSupportedError."""
        ...

    async def stop(self) -> None:
        """End what was launched. Whoever runs `run` cancels it first."""
        ...


class AttachedEngine:
    """An engine that somebody else launched. It can't be restarted from here."""

    def __init__(self, name: str, url: str) -> None:
        self.kind = "attach"
        self.pid: int | None = None
        self.detail = ""
        self.restarts = 0
        self.url = url
        self._client = EngineClient(name, url)

    @property
    def client(self) -> EngineControl:
        return self._client

    async def run(self, on_lost: Callable[[], None]) -> None:
        """Nothing to look after."""

    async def recover(self, timeout_s: float) -> None:
        with anyio.fail_after(timeout_s):
            while True:
                try:
                    await self._client.ready()
                except EngineError:
                    await anyio.sleep(POLL_S)
                else:
                    return

    async def fence(self) -> None:
        raise NotSupportedError(f"the engine at {self.url} wasn't launched by this sidecar: restart it by hand")

    async def stop(self) -> None:
        await self._client.aclose()
