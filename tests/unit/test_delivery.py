"""Did it happen? Requirements R60 and R61, against a raw TCP server; cases C09 and C35."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

import anyio
import httpx
import pytest
from anyio.abc import SocketStream
from tests.fake_engine import refusing

from hybridasync.errors import (
    ConfigError,
    EngineError,
    NotSent,
    OutcomeUnknown,
    Rejected,
    RemoteProtocolError,
)
from hybridasync.http import Endpoint
from hybridasync.protocol.delivery import EXCEPTIONS, classify_exception, classify_status, may_have_happened
from hybridasync.transport.sglang import SglangServer
from hybridasync.transport.sidecar import SidecarClient
from hybridasync.types import SamplingParams, WeightSnapshot

Handler = Callable[[SocketStream], Awaitable[None]]


@asynccontextmanager
async def tcp_server(handler: Handler) -> AsyncIterator[str]:
    """A server that does to each connection what `handler` says; yields its URL."""
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.extra(anyio.abc.SocketAttribute.local_port)

    async def serve(stream: SocketStream) -> None:
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream):
            await handler(stream)

    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        yield f"http://127.0.0.1:{port}"
        tasks.cancel_scope.cancel()


def answering(status: str, body: bytes, *, length: int | None = None) -> Handler:
    async def handler(stream: SocketStream) -> None:
        async with stream:
            await stream.receive()
            head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body) if length is None else length}\r\n\r\n"
            await stream.send(head.encode() + body)

    return handler


async def resets(stream: SocketStream) -> None:
    raw = stream.extra(anyio.abc.SocketAttribute.raw_socket)
    await stream.receive(1)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    await stream.aclose()


async def stalls(stream: SocketStream) -> None:
    await anyio.sleep_forever()


async def drips(stream: SocketStream) -> None:
    await stream.receive()
    await stream.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    while True:
        await stream.send(b"x")
        await anyio.sleep(0.05)


async def talks_garbage(stream: SocketStream) -> None:
    async with stream:
        await stream.receive()
        await stream.send(b"\x00\x01 this isn't HTTP\r\n\r\n")


def test_the_table_names_every_transport_error_of_httpx() -> None:
    """No exception that httpx raises for a request is classed by accident."""
    known = [cls for cls in vars(httpx).values() if isinstance(cls, type) and issubclass(cls, httpx.RequestError)]
    abstract = {"RequestError", "TransportError", "TimeoutException", "NetworkError", "ProtocolError"}
    assert {cls.__name__ for cls in known} - abstract <= set(EXCEPTIONS)


@pytest.mark.parametrize(
    ("error", "delivery"),
    [
        (httpx.ConnectError("x"), "not_sent"),
        (httpx.ConnectTimeout("x"), "not_sent"),
        (httpx.PoolTimeout("x"), "not_sent"),
        (httpx.UnsupportedProtocol("x"), "not_sent"),
        (httpx.InvalidURL("x"), "not_sent"),
        (httpx.LocalProtocolError("x"), "not_sent"),
        (httpx.ReadTimeout("x"), "unknown"),
        (httpx.ReadError("x"), "unknown"),
        (httpx.WriteError("x"), "unknown"),
        (httpx.WriteTimeout("x"), "unknown"),
        (httpx.RemoteProtocolError("x"), "unknown"),
        (httpx.CloseError("x"), "unknown"),
        (httpx.DecodingError("x"), "unknown"),
        (RuntimeError("x"), "unknown"),
        (type("NewConnectError", (httpx.ConnectError,), {})("x"), "not_sent"),
    ],
)
def test_r61_only_a_connection_that_was_never_made_proves_that_nothing_was_sent(
    error: Exception, delivery: str
) -> None:
    """R61, as a table; what nobody thought of is unknown."""
    assert classify_exception(error) == delivery


def test_statuses() -> None:
    """2xx succeeds, 4xx was refused, everything else is unknown."""
    expected = {200: None, 204: None, 400: "rejected", 404: "rejected", 429: "rejected"}
    expected |= {408: "unknown", 500: "unknown", 503: "unknown", 302: "unknown"}
    assert {status: classify_status(status) for status in expected} == expected


def test_r60_what_may_have_happened_has_to_be_undone() -> None:
    """R60: only a request that wasn't sent, or that was refused, owes nothing."""
    assert not may_have_happened(NotSent("e", "pause"))
    assert not may_have_happened(Rejected("e", "pause", 400))
    assert may_have_happened(OutcomeUnknown("e", "pause"))
    assert may_have_happened(RemoteProtocolError("e", "pause"))


@pytest.mark.parametrize(
    ("handler", "error"),
    [
        (resets, OutcomeUnknown),
        (stalls, OutcomeUnknown),
        (drips, OutcomeUnknown),
        (talks_garbage, OutcomeUnknown),
        (answering("200 OK", b'{"paused"', length=100), OutcomeUnknown),
        (answering("500 Internal Server Error", b"boom"), OutcomeUnknown),
        (answering("400 Bad Request", b"no"), Rejected),
        (answering("429 Too Many Requests", b""), Rejected),
        (answering("302 Found", b""), RemoteProtocolError),
        (answering("200 OK", b"not json"), RemoteProtocolError),
        (answering("200 OK", b"[1]"), RemoteProtocolError),
        (answering("200 OK", b'{"paused": 1}'), RemoteProtocolError),
    ],
)
async def test_r61_a_pause_tells_whether_it_may_have_happened(handler: Handler, error: type[EngineError]) -> None:
    """R61: each way in which a server can fail, and within the deadline, also when bytes keep coming."""
    # Those that answer have time to, and the others time to be connected to, on a machine that stands still as well.
    timeout_s = 3.0 if handler in (stalls, drips) else 60.0
    async with tcp_server(handler) as url, SidecarClient("e", url, "t", timeout_s=timeout_s) as sidecar:
        with anyio.fail_after(30), pytest.raises(error) as raised:
            await sidecar.pause("ha1:" + "a" * 32 + ":0", "retract", 10.0)
    assert raised.value.engine == "e" and raised.value.operation == "pause"


async def test_u2_no_control_call_is_without_a_deadline() -> None:
    """U2, R106: a server that accepts and says nothing: each call of sidecar and engine ends after its deadline."""
    txn = "ha1:" + "a" * 32 + ":0"
    snapshot = WeightSnapshot(1, "/x", {}, 0, 0.0)
    async with (
        tcp_server(stalls) as url,
        SidecarClient("e", url, "t", timeout_s=3.0) as sidecar,
        SglangServer("e", url, control_timeout_s=3.0, request_timeout_s=3.0) as server,
    ):
        calls: list[Callable[[], Awaitable[object]]] = [
            sidecar.status,
            partial(sidecar.pause, txn, "retract", 1.0),
            partial(sidecar.renew, txn, 1.0),
            partial(sidecar.end, txn),
            partial(sidecar.recover, 3.0),
            sidecar.fence,
            partial(server.generate, "r", [1], SamplingParams(max_new_tokens=1)),
            partial(server.abort, "r"),
            partial(server.stage, snapshot),
            partial(server.update_weights, snapshot),
            server.weight_version,
            server.checksums,
            server.read_back,
            server.in_flight,
        ]

        async def unanswered(call: Callable[[], Awaitable[object]]) -> None:
            with pytest.raises(OutcomeUnknown):
                await call()

        # All at once: a deadline in which they are surely connected to, even on a machine that stands still meanwhile.
        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                for call in calls:
                    tasks.start_soon(unanswered, call)
            assert await server.healthy() is False


async def test_r63_a_refused_connection_is_known_at_once() -> None:
    """R61, R63: nothing listens, nothing was sent, and that is known long before the deadline."""
    with refusing() as url:
        async with SidecarClient("e", url, "t", timeout_s=60.0) as sidecar:
            with anyio.fail_after(30), pytest.raises(NotSent):
                await sidecar.end("ha1:" + "a" * 32 + ":0")


async def test_a_dead_server_is_a_refused_connection_even_after_an_earlier_call() -> None:
    """Control calls keep no connection: the next call to a server that died proves that nothing was sent."""
    async with tcp_server(answering("200 OK", b"{}")) as url:
        endpoint = Endpoint("e", url, timeout_s=60.0)
        await endpoint.call("ping", "GET", "/")
    async with endpoint:
        with pytest.raises(NotSent):
            await endpoint.call("ping", "GET", "/")


async def test_a_generation_that_fails_on_the_server_may_be_repeated() -> None:
    """A 5xx of /generate has no lasting effect: it is a refusal with its status, for the caller's retries."""
    handler = answering("503 Service Unavailable", b"busy")
    async with (
        tcp_server(handler) as url,
        SglangServer("e", url, control_timeout_s=60.0, request_timeout_s=60.0) as engine,
    ):
        with pytest.raises(Rejected) as raised:
            await engine.generate("r", [1, 2], SamplingParams(max_new_tokens=1))
    assert raised.value.status == 503


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "ftp://x", "http://[::1", ""])
def test_a_url_that_cannot_be_used_is_a_mistake_of_the_user(url: str) -> None:
    """Refused when the client is made, with the URL in the message."""
    with pytest.raises(ConfigError, match="URL of engine-0"):
        Endpoint("engine-0", url, timeout_s=1.0)


async def test_c09_long_generations_do_not_starve_the_pause_call() -> None:
    """C09: with 150 generations open, as many connections exist at the server, and a control call gets through."""
    open_now = 0
    most = 0
    all_open = anyio.Event()

    async def engine(stream: SocketStream) -> None:
        nonlocal open_now, most
        head = await stream.receive()
        if not head.startswith(b"POST /generate"):
            await stream.send(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            await stream.aclose()
            return
        open_now += 1
        most = max(most, open_now)
        if most == 150:
            all_open.set()
        await anyio.sleep_forever()

    async with tcp_server(engine) as url, anyio.create_task_group() as tasks:
        server = SglangServer("e", url, control_timeout_s=10.0, request_timeout_s=60.0)
        for index in range(150):
            tasks.start_soon(server.generate, f"r{index}", [1], SamplingParams(max_new_tokens=1))
        with anyio.fail_after(30):
            await all_open.wait()
        await server.abort("r0")
        assert most == 150
        tasks.cancel_scope.cancel()


PROXIES = [
    {"HTTP_PROXY": "http://127.0.0.1:9"},
    {"NO_PROXY": "[::1]:*"},
    {"HTTP_PROXY": "http://host:port"},
    {"ALL_PROXY": "socks5://127.0.0.1:1080"},
]

PROXY_PROGRAM = """
import anyio, sys
from hybridasync.transport.sglang import SglangServer
from hybridasync.transport.sidecar import SidecarClient

async def main(url):
    async with SglangServer("e", url, control_timeout_s=60, request_timeout_s=60) as engine:
        assert await engine.healthy()
    async with SidecarClient("e", url, "t", timeout_s=60) as sidecar:
        await sidecar.end("ha1:" + "a" * 32 + ":0")

anyio.run(main, sys.argv[1])
"""


async def test_c35_proxy_variables_do_not_capture_loopback_calls() -> None:
    """C35: four environments that break a client that trusts them; here all calls succeed."""
    async with tcp_server(answering("200 OK", b"{}")) as url, anyio.create_task_group() as tasks:
        for proxies in PROXIES:
            names = {*proxies, *(name.lower() for name in proxies)}
            environment = {k: v for k, v in os.environ.items() if k not in names} | proxies
            environment |= {name.lower(): value for name, value in proxies.items()}

            async def attempt(environment: dict[str, str] = environment) -> None:
                command = [sys.executable, "-c", PROXY_PROGRAM, url]
                done = await anyio.run_process(command, env=environment, stderr=subprocess.STDOUT, check=False)
                assert done.returncode == 0, done.stdout

            tasks.start_soon(attempt)
