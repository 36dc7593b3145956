"""What a sidecar asks of its engine, in SGLang's HTTP API."""

from __future__ import annotations

from typing import Protocol

import httpx

from hybridasync.errors import EngineError, NotSent, Rejected, RemoteProtocolError
from hybridasync.http import Endpoint
from hybridasync.types import PauseMode

CONTROL_TIMEOUT_S = 60.0
"""A pause in mode abort waits a second for its requests; a minute is a hang, below the 120 s that clients wait."""

PROBE_TIMEOUT_S = 5.0
"""A probe is for `status`, whose caller shall hear of a hanging engine long before its own deadline."""


class EngineControl(Protocol):
    """The engine as `control.py` needs it. Errors: NotSent, Rejected, OutcomeUnknown, RemoteProtocolError."""

    async def pause(self, mode: PauseMode) -> None: ...

    async def resume(self) -> None: ...

    async def in_flight(self) -> int: ...

    async def ready(self) -> bool: ...

    async def weight_version(self) -> str | None: ...

    async def aclose(self) -> None: ...


class EngineClient:
    """One engine process at one URL; a restarted engine gets a new client."""

    def __init__(self, name: str, base_url: str, *, control_timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        self._http = Endpoint(name, base_url, timeout_s=control_timeout_s)

    async def pause(self, mode: PauseMode) -> None:
        """`drain` pauses a drained engine with `retract`: a request that slips in is kept, not aborted."""
        word = "retract" if mode == "drain" else mode
        await self._http.call("pause_generation", "POST", "/pause_generation", json={"mode": word})

    async def resume(self) -> None:
        """Idempotent. An engine that refuses connections is gone, and its pause with it: no error."""
        try:
            await self._http.call("continue_generation", "POST", "/continue_generation", json={})
        except NotSent as error:
            if not isinstance(error.__cause__, httpx.ConnectError):
                raise

    async def in_flight(self) -> int:
        """Requests that run or wait in the engine."""
        answer = await self._http.call_json("loads", "GET", "/v1/loads", server_errors="rejected")
        try:
            return sum(int(load["num_running_reqs"]) + int(load["num_waiting_reqs"]) for load in answer["loads"])
        except (KeyError, TypeError, ValueError) as error:
            raise RemoteProtocolError(self._http.name, "loads", f"{type(error).__name__}: {error}") from error

    async def ready(self) -> bool:
        """False while the engine is paused or starting. Raises when it doesn't answer at all."""
        try:
            await self._probe("/ready")
        except Rejected as error:
            return error.status != 503  # a server without this route (404) at least answers
        return True

    async def weight_version(self) -> str | None:
        """None if it can't be had: a status without a version is better than none."""
        try:
            answer = (await self._probe("/model_info")).json()
        except (EngineError, ValueError):
            return None
        version = answer.get("weight_version") if isinstance(answer, dict) else None
        return version if isinstance(version, str) else None

    async def aclose(self) -> None:
        await self._http.aclose()

    async def _probe(self, path: str) -> httpx.Response:
        return await self._http.call(path, "GET", path, timeout_s=PROBE_TIMEOUT_S, server_errors="rejected")
