"""The client of a sidecar: implements the port `Sidecar` over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, cast, get_args

from hybridasync.errors import RemoteProtocolError
from hybridasync.http import Endpoint, bearer
from hybridasync.types import PauseMode, SidecarState, SidecarStatus

T = TypeVar("T")

STATES = frozenset(get_args(SidecarState))

RECOVER_MARGIN_S = 5.0
"""How much longer than the recovery itself the call to it may take, so that the sidecar's own answer arrives."""


class SidecarClient:
    """The control plane of one engine. Every call has the deadline `timeout_s` (`rollout_http_timeout`).

    `status` may have a longer one: a sidecar whose engine is mute answers only once it has waited for it.

    Errors: NotSent, Rejected, OutcomeUnknown, RemoteProtocolError. A 5xx of an acting call is an unknown outcome.
    """

    def __init__(
        self, name: str, base_url: str, token: str, *, timeout_s: float, status_timeout_s: float | None = None
    ) -> None:
        self.name = name
        self._status_timeout_s = status_timeout_s
        self._headers = bearer(token)
        self._http = Endpoint(name, base_url, timeout_s=timeout_s, headers=self._headers)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def moved(self, base_url: str) -> None:
        """The sidecar was started anew, at another address."""
        await self._http.aclose()
        self._http = Endpoint(self.name, base_url, timeout_s=self._http.timeout_s, headers=self._headers)

    async def status(self) -> SidecarStatus:
        answer = await self._http.call_json(
            "status", "GET", "/v1/status", timeout_s=self._status_timeout_s, server_errors="rejected"
        )
        return self._parse_status(answer)

    async def pause(self, txn: str, mode: PauseMode, lease_s: float) -> bool:
        """True: paused. False: not ready, and not paused; ask again with the same `txn`.

        Rejected(424): there is no engine to pause. Like every Rejected it owes nothing.
        """
        body = {"txn": txn, "mode": mode, "lease_s": lease_s}
        answer = await self._http.call_json("pause", "POST", "/v1/pause", json=body)
        paused = answer.get("paused") if isinstance(answer, dict) else None
        if not isinstance(paused, bool):
            raise RemoteProtocolError(self.name, "pause", f"no boolean `paused` in {answer!r}")
        return paused

    async def renew(self, txn: str, lease_s: float) -> None:
        """Extend the lease. Rejected(409) when `txn` holds no pause any more."""
        await self._http.call("renew", "POST", "/v1/renew", json={"txn": txn, "lease_s": lease_s})

    async def end(self, txn: str | None) -> None:
        """Resume. Idempotent. None ends the pause of a plain client, or one that nobody holds."""
        await self._http.call("end", "POST", "/v1/end", json={"txn": txn})

    async def recover(self, timeout_s: float) -> None:
        """Bring a dead engine back; returns once it is ready, or at once if it already is."""
        body = {"timeout_s": timeout_s}
        await self._http.call("recover", "POST", "/v1/recover", json=body, timeout_s=timeout_s + RECOVER_MARGIN_S)

    async def fence(self, txns: Sequence[str] = ()) -> None:
        """Kill the engine and start it anew. Returns once the old one is gone; `status` tells when the new one runs.

        `txns` end with it: a pause of theirs that is still under way doesn't pause the new engine.
        """
        await self._http.call("fence", "POST", "/v1/fence", json={"txns": list(txns)})

    def _parse_status(self, answer: Any) -> SidecarStatus:
        try:
            if answer["state"] not in STATES:
                raise ValueError(f"unknown state {answer['state']!r}")
            return SidecarStatus(
                engine_url=str(answer["engine_url"]),
                engine_kind=str(answer["engine_kind"]),
                state=cast(SidecarState, answer["state"]),
                weight_version=_optional(answer["weight_version"], str),
                txn=_optional(answer["txn"], str),
                holder=_optional(answer["holder"], str),
                since=_optional(answer["since"], float),
                lease_left_s=_optional(answer["lease_left_s"], float),
                torn=bool(answer["torn"]),
                healthy=bool(answer["healthy"]),
                engine_pid=_optional(answer.get("engine_pid"), int),
                detail=str(answer.get("detail", "")),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise RemoteProtocolError(self.name, "status", f"{type(error).__name__}: {error}") from error


def _optional(value: Any, kind: Callable[[Any], T]) -> T | None:
    return None if value is None else kind(value)
