"""A TCP relay between a controller, its sidecars and its engines, which stops one request at one exact moment.

It reads whole HTTP messages and passes them on unchanged, but for the engine's address in a sidecar's status: with the
relay's own there, the controller's data plane comes through here too. A peer that goes away is passed on as well.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

T = TypeVar("T")

HOLD_LIMIT_S = 120.0
"""A test that forgot to release must not hang for ever."""


@dataclass(frozen=True, slots=True)
class Point:
    """Requests to one engine: stopped before they are passed on, or passed on and their answer kept back."""

    paths: tuple[str, ...]
    passed_on: bool
    engine: int = 0


@dataclass(frozen=True, slots=True)
class Passed:
    """What went through, in this order: a request (`answer` False), or the answer to it."""

    engine: int
    path: str
    answer: bool


@dataclass(slots=True)
class Hold:
    """One armed point. `reached` is set once; everything at the point waits for `release`."""

    point: Point
    reached: threading.Event = field(default_factory=threading.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class _Message:
    head: bytes
    body: bytes

    @property
    def path(self) -> str:
        return self.head.split(b" ", 2)[1].partition(b"?")[0].decode("latin-1")

    def with_body(self, body: bytes) -> _Message:
        lines = [line for line in self.head.split(b"\r\n")[:-2] if not line.lower().startswith(b"content-length:")]
        return _Message(b"\r\n".join([*lines, b"content-length: %d" % len(body), b"", b""]), body)


class Relay:
    """For the engine `index`: one address for its sidecar, one for the engine itself, wherever that is just now."""

    def __init__(self, gate: Gate, index: int, sidecar_url: str) -> None:
        self.index = index
        self._gate = gate
        self._sidecar = _address(sidecar_url)
        self._engine: tuple[str, int] | None = None
        self._ports = {kind: free_port() for kind in ("sidecar", "engine")}
        self._servers: dict[str, asyncio.Server] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """What the controller is given as the sidecar's address."""
        return f"http://127.0.0.1:{self._ports['sidecar']}"

    async def open(self) -> None:
        for kind, port in self._ports.items():
            if kind not in self._servers:
                self._servers[kind] = await asyncio.start_server(self._serving(kind), "127.0.0.1", port)

    async def close(self) -> None:
        """Refuse connections and drop those that are open, as the kernel does for a process that died."""
        for server in self._servers.values():
            server.close()
        self._servers.clear()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _serving(self, kind: str) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]:
        def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.ensure_future(self._serve(kind, reader, writer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        return serve

    async def _serve(self, kind: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream: asyncio.StreamWriter | None = None
        try:
            address = self._sidecar if kind == "sidecar" else self._engine
            if address is None:
                return
            answers, upstream = await asyncio.open_connection(*address)
            while (request := await _message(reader)) is not None:
                answer = await self._relayed(request, reader, answers, upstream)
                if answer is None:
                    return
                if kind == "sidecar" and request.path == "/v1/status":
                    answer = self._redirected(answer)
                writer.write(answer.head + answer.body)
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            return
        finally:
            for end in (writer, upstream):
                if end is not None:
                    end.transport.abort()

    async def _relayed(
        self,
        request: _Message,
        client: asyncio.StreamReader,
        answers: asyncio.StreamReader,
        upstream: asyncio.StreamWriter,
    ) -> _Message | None:
        """The answer; None when the client or the server has gone."""

        async def exchange() -> _Message | None:
            await self._gate.at(self.index, request.path, passed_on=False)
            self._gate.log.append(Passed(self.index, request.path, answer=False))
            upstream.write(request.head + request.body)
            await upstream.drain()
            after = self._gate.at(self.index, request.path, passed_on=True)
            _, answer = await asyncio.gather(after, _message(answers))
            self._gate.log.append(Passed(self.index, request.path, answer=True))
            return answer

        # httpx sends nothing before it has the answer: whatever arrives now is the end of the connection.
        tasks = [asyncio.ensure_future(work) for work in (exchange(), client.read(1))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return tasks[0].result() if tasks[0].done() else None  # type: ignore[return-value]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _redirected(self, answer: _Message) -> _Message:
        with suppress(ValueError, TypeError, KeyError):
            status = json.loads(answer.body)
            if status["engine_url"]:
                self._engine = _address(status["engine_url"])
                status["engine_url"] = f"http://127.0.0.1:{self._ports['engine']}"
                return answer.with_body(json.dumps(status).encode())
        return answer


class Gate:
    """The relays of a job, in a thread of their own."""

    def __init__(self, sidecar_urls: list[str]) -> None:
        self._loop = asyncio.new_event_loop()
        self._holds: list[Hold] = []
        self.log: list[Passed] = []
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.relays = [Relay(self, index, url) for index, url in enumerate(sidecar_urls)]

    def __enter__(self) -> Gate:
        self._thread.start()
        for relay in self.relays:
            self._run(relay.open())
        return self

    def __exit__(self, *_: object) -> None:
        for relay in self.relays:
            self._run(relay.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def arm(self, point: Point) -> Hold:
        hold = Hold(point)
        self._holds.append(hold)
        return hold

    def release(self, hold: Hold) -> None:
        self._holds.remove(hold)
        self._loop.call_soon_threadsafe(hold.released.set)

    def refuse(self, index: int) -> None:
        self._run(self.relays[index].close())

    def accept(self, index: int) -> None:
        self._run(self.relays[index].open())

    async def at(self, engine: int, path: str, *, passed_on: bool) -> None:
        """Wait here if the point is armed."""
        for hold in [
            hold
            for hold in self._holds
            if path in hold.point.paths and (hold.point.engine, hold.point.passed_on) == (engine, passed_on)
        ]:
            hold.reached.set()
            with suppress(TimeoutError):
                await asyncio.wait_for(hold.released.wait(), HOLD_LIMIT_S)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)


async def _message(reader: asyncio.StreamReader) -> _Message | None:
    """One HTTP/1.1 message; None at the end of the connection."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    fields = {line.partition(b":")[0].lower(): line.partition(b":")[2].strip() for line in head.split(b"\r\n")[1:]}
    if fields.get(b"transfer-encoding", b"").lower() != b"chunked":
        return _Message(head, await reader.readexactly(int(fields.get(b"content-length", b"0"))))
    body = b""
    while True:
        size = await reader.readuntil(b"\r\n")
        chunk = await reader.readexactly(int(size, 16) + 2)
        body += size + chunk
        if int(size, 16) == 0:
            return _Message(head, body)


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "127.0.0.1", parts.port or 80


def free_port() -> int:
    """Below the range that the kernel gives to outgoing connections: it stays free while its server is away."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
