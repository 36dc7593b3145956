"""HTTP as adapters and sidecar need it: finite deadlines, no proxies, errors that say whether the request happened.

Two kinds of client, never shared (C09): the *control* client opens a connection for each call, so that a dead server is
always a refused connection (proof that nothing was sent) and never a reset of a connection kept from before; the *data*
client has no cap on connections, so that a thousand long generations never make the next request wait for a slot.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Mapping
from functools import cache
from itertools import cycle
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import urlsplit

import anyio
import httpx

from hybridasync.errors import ConfigError, NotSent, OutcomeUnknown, Rejected, RemoteProtocolError
from hybridasync.protocol.delivery import classify_exception, classify_status

CONNECT_TIMEOUT_S = 5.0
"""A host that doesn't complete a handshake in this time is down. Always below the deadline of the whole call, so that
a connection that was never made is reported as such, and not as an unknown outcome."""

KEEPALIVE_EXPIRY_S = 2.0
"""Below the 5 s after which uvicorn closes idle connections: otherwise a request meets a connection that is closing."""

DATA_POOLS = 16
"""Pools of the data client. httpx goes through all connections of a pool at each request and each answer: 512 open
requests on one pool cost ten times what they cost on sixteen."""

DETAIL_CHARACTERS = 400

ServerErrors = Literal["unknown", "rejected"]


@cache
def _ssl_context() -> ssl.SSLContext:
    """One for all clients, which don't change it: reading the certificates takes 20 ms, more than many requests."""
    return httpx.create_ssl_context(trust_env=False)


class _Pools(httpx.AsyncBaseTransport):
    """Connections spread over several pools, in turn."""

    def __init__(self, count: int, limits: httpx.Limits) -> None:
        context = _ssl_context()
        self._pools = [httpx.AsyncHTTPTransport(verify=context, limits=limits, trust_env=False) for _ in range(count)]
        self._turn = cycle(self._pools)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await next(self._turn).handle_async_request(request)

    async def aclose(self) -> None:
        for pool in self._pools:
            await pool.aclose()


def _check_port(name: str, url: str) -> None:
    """httpx would take 99999, and fail at the first call."""
    try:
        _ = urlsplit(url).port
    except ValueError as error:
        raise ConfigError(f"the URL of {name} can't be used: {url!r} ({error})") from error


class Endpoint:
    """One server and one client for it. Use it as an async context manager."""

    def __init__(
        self,
        name: str,
        base_url: str,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
        keep_alive: bool = False,
    ) -> None:
        """`timeout_s` is the deadline of a whole call. `keep_alive` is for the data plane. Raises ConfigError."""
        self.name = name
        self.base_url = base_url.rstrip("/")
        self.timeout_s = timeout_s
        limits = httpx.Limits(
            max_connections=None,
            max_keepalive_connections=None if keep_alive else 0,
            keepalive_expiry=KEEPALIVE_EXPIRY_S,
        )
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(f"the URL of {name} must start with http:// or https://, got {base_url!r}")
        _check_port(name, self.base_url)
        try:
            # trust_env off: a proxy variable of the environment must not capture loopback calls (C35).
            self._client = httpx.AsyncClient(
                base_url=self.base_url,
                headers=dict(headers or {}),
                transport=_Pools(DATA_POOLS if keep_alive else 1, limits),
                trust_env=False,
            )
        except httpx.InvalidURL as error:
            raise ConfigError(f"the URL of {name} can't be used: {base_url!r} ({error})") from error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        # Shielded: closing sockets doesn't wait for the network, and a half-closed pool would leak descriptors.
        with anyio.CancelScope(shield=True):
            await self._client.aclose()

    async def call(
        self,
        operation: str,
        method: str,
        path: str,
        *,
        json: object = None,
        timeout_s: float | None = None,
        server_errors: ServerErrors = "unknown",
    ) -> httpx.Response:
        """Send one request and return the successful answer.

        `server_errors` says what a 5xx means: "unknown" for calls with an effect (R61), "rejected" for those that may
        simply be repeated. Raises NotSent, Rejected, OutcomeUnknown; RemoteProtocolError for a redirect.
        """
        deadline_s = self.timeout_s if timeout_s is None else timeout_s
        connect_s = min(CONNECT_TIMEOUT_S, deadline_s / 2)
        timeout = httpx.Timeout(deadline_s, connect=connect_s, pool=connect_s)
        try:
            # httpx's timeouts are for each read and write: a server that drips bytes would never meet one.
            with anyio.fail_after(deadline_s):
                response = await self._client.request(method, path, json=json, timeout=timeout)
        except TimeoutError as error:
            raise OutcomeUnknown(self.name, operation, f"no complete answer in {deadline_s:g} s") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._translated(operation, error) from error
        self._check_status(operation, response, server_errors)
        return response

    async def call_json(self, operation: str, method: str, path: str, **options: Any) -> Any:
        """As `call`, and the decoded JSON of the answer. Raises RemoteProtocolError if it isn't JSON."""
        response = await self.call(operation, method, path, **options)
        try:
            return response.json()
        except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
            raise RemoteProtocolError(self.name, operation, f"not JSON: {_excerpt(response)!r}") from error

    def _translated(self, operation: str, error: Exception) -> NotSent | OutcomeUnknown:
        detail = f"{type(error).__name__}: {error} ({self.base_url})"
        if classify_exception(error) == "not_sent":
            return NotSent(self.name, operation, detail)
        return OutcomeUnknown(self.name, operation, detail)

    def _check_status(self, operation: str, response: httpx.Response, server_errors: ServerErrors) -> None:
        status = response.status_code
        delivery = classify_status(status)
        if delivery is None:
            return
        if delivery == "rejected" or (status >= 500 and server_errors == "rejected"):
            raise Rejected(self.name, operation, status, detail=_excerpt(response))
        if status < 400:
            raise RemoteProtocolError(self.name, operation, f"HTTP {status}, which this API never answers")
        raise OutcomeUnknown(self.name, operation, f"HTTP {status} {_excerpt(response)}".strip())


def answer_at_once(listener: socket.socket) -> None:
    """Connections that it accepts don't hold the second part of an answer back until the first is acknowledged (40 ms).

    asyncio sets this on sockets that it makes itself, and not on those of a listener that it is given.
    """
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def bearer(token: str | None) -> dict[str, str]:
    """The header that carries `token`, or none."""
    return {"Authorization": f"Bearer {token}"} if token else {}


def _excerpt(response: httpx.Response) -> str:
    return response.text[:DETAIL_CHARACTERS]
