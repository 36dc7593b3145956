"""Between a client and a server, to answer in the server's place."""

from __future__ import annotations

from contextlib import AbstractContextManager

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from tests.fake_engine import served


class Proxy:
    """Passes everything on, but answers `path` with `status` itself at its `turn`-th request (0: never)."""

    def __init__(self, target: str, path: str = "", *, turn: int = 0, status: int = 500) -> None:
        self.target = target
        self.path = path
        self.turn = turn
        self.status = status
        self.seen: list[str] = []

    async def handle(self, request: Request) -> Response:
        path = request.url.path
        self.seen.append(path)
        if path == self.path and self.seen.count(path) == self.turn:
            return Response("scripted", self.status)
        async with httpx.AsyncClient(base_url=self.target, trust_env=False, timeout=60) as client:
            kind = {"Content-Type": request.headers.get("content-type", "application/json")}
            answer = await client.request(request.method, path, content=await request.body(), headers=kind)
        return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))


def proxied(proxy: Proxy) -> AbstractContextManager[str]:
    """Yields the URL to use instead of the target's."""
    return served(Starlette(routes=[Route("/{path:path}", proxy.handle, methods=["GET", "POST"])]))
