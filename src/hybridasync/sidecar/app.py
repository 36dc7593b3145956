"""The sidecar's HTTP API (JSON, bearer token). What it means is in control.py and protocol/transactions.py.

    GET  /v1/status                            who paused the engine, since when, for how much longer
    POST /v1/pause   {txn, mode, lease_s}      {paused, reason}; without txn: the untagged pair for plain clients
    POST /v1/renew   {txn, lease_s}            409 when txn holds no pause
    POST /v1/end     {txn}                     resume; idempotent
    POST /v1/recover {timeout_s}               returns once the engine answers; 504 when it doesn't
    POST /v1/fence   {txns}                    kill the engine and start it anew, as the end of txns; 409 when it was
                                               launched elsewhere
    GET  /metrics                              Prometheus text

400 a malformed request, 401 no token, 424 there is no engine and nothing was done, 429 too many sessions or
transactions, 502 the engine refused or its answer is unknown.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Annotated, Any, TypeVar

import anyio
from anyio.abc import TaskGroup
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from hybridasync.errors import EngineError, OperatingError
from hybridasync.protocol.transaction_id import MalformedTransactionError
from hybridasync.protocol.transactions import CapacityReachedError
from hybridasync.sidecar.control import Control, EngineDownError, NotHeldError
from hybridasync.sidecar.host import NotSupportedError
from hybridasync.sidecar.metrics import CONTENT_TYPE, exposition
from hybridasync.types import PauseMode

DEFAULT_LEASE_S = 60.0
MAX_SECONDS = 86_400.0

CLIENT_CLOSED_REQUEST = 499

STATUS_OF: tuple[tuple[type[Exception], int], ...] = (
    (MalformedTransactionError, 400),
    (NotHeldError, 409),
    (NotSupportedError, 409),
    (EngineDownError, 424),
    (CapacityReachedError, 429),
    (EngineError, 502),
    (TimeoutError, 504),
    (OperatingError, 502),
)

Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS, allow_inf_nan=False)]
Work = Callable[[], Awaitable[dict[str, Any]]]
Body = TypeVar("Body", bound=BaseModel)


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class PauseBody(_Body):
    txn: str | None = None
    mode: PauseMode = "retract"
    lease_s: Seconds = DEFAULT_LEASE_S


class RenewBody(_Body):
    txn: str | None = None
    lease_s: Seconds = DEFAULT_LEASE_S


class EndBody(_Body):
    txn: str | None = None


class RecoverBody(_Body):
    timeout_s: Seconds


class FenceBody(_Body):
    txns: list[str] = []


class SidecarApi:
    """The routes. `tasks` outlives every request: what a request began must be able to finish after it."""

    def __init__(self, control: Control, *, token: str, tasks: TaskGroup) -> None:
        self._control = control
        self._token = token.encode()
        self._tasks = tasks

    def application(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/status", self._guarded(self.status)),
                Route("/v1/pause", self._guarded(self.pause), methods=["POST"]),
                Route("/v1/renew", self._guarded(self.renew), methods=["POST"]),
                Route("/v1/end", self._guarded(self.end), methods=["POST"]),
                Route("/v1/recover", self._guarded(self.recover), methods=["POST"]),
                Route("/v1/fence", self._guarded(self.fence), methods=["POST"]),
                Route("/metrics", self._guarded(self.metrics)),
            ]
        )

    async def status(self, request: Request) -> Response:
        return JSONResponse(asdict(await self._control.status()))

    async def pause(self, request: Request) -> Response:
        body = await _parsed(request, PauseBody)

        async def work() -> dict[str, Any]:
            return asdict(await self._control.pause(body.txn, body.mode, body.lease_s))

        return await self._attended(request, work)

    async def renew(self, request: Request) -> Response:
        body = await _parsed(request, RenewBody)
        self._control.renew(body.txn, body.lease_s)
        return JSONResponse({"lease_s": body.lease_s})

    async def end(self, request: Request) -> Response:
        body = await _parsed(request, EndBody)

        async def work() -> dict[str, Any]:
            await self._control.end(body.txn)
            return {"ended": True}

        return await self._attended(request, work)

    async def recover(self, request: Request) -> Response:
        body = await _parsed(request, RecoverBody)

        async def work() -> dict[str, Any]:
            await self._control.recover(body.timeout_s)
            return {"recovered": True}

        return await self._attended(request, work)

    async def fence(self, request: Request) -> Response:
        body = await _parsed(request, FenceBody)

        async def work() -> dict[str, Any]:
            await self._control.fence(body.txns)
            return {"fenced": True}

        return await self._attended(request, work)

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(exposition(self._control, anyio.current_time()), media_type=CONTENT_TYPE)

    async def _attended(self, request: Request, work: Work) -> Response:
        """Run `work` in the server's task group, and cancel it when the client leaves or the server stops.

        The server cancels request tasks in a way that no shield withstands; `work` is cancelled through its own scope,
        so that it can finish its compensation (R88).
        """
        scope = anyio.CancelScope()
        done = anyio.Event()
        answers: list[Response] = []

        async def run() -> None:
            try:
                with scope:
                    answers.append(JSONResponse(await work()))
            except (OperatingError, TimeoutError) as error:
                answers.append(_refusal(error))
            finally:
                done.set()

        async def watch() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            scope.cancel()

        self._tasks.start_soon(run)
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(watch)
                await done.wait()
                group.cancel_scope.cancel()
        finally:
            scope.cancel()
        return answers[0] if answers else Response(status_code=CLIENT_CLOSED_REQUEST)

    def _guarded(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            given = request.headers.get("authorization", "").encode("latin-1")
            if not hmac.compare_digest(given, b"Bearer " + self._token):
                return JSONResponse({"error": "a bearer token is needed"}, 401, {"WWW-Authenticate": "Bearer"})
            try:
                return await handler(request)
            except ClientDisconnect:
                return Response(status_code=CLIENT_CLOSED_REQUEST)
            except ValidationError as error:
                return JSONResponse({"error": _explained(error)}, 400)
            except (OperatingError, TimeoutError) as error:
                return _refusal(error)

        return guarded


async def _parsed(request: Request, kind: type[Body]) -> Body:
    """Raises ValidationError, for bad JSON too. An empty body is an empty object."""
    return kind.model_validate_json(await request.body() or b"{}")


def _refusal(error: Exception) -> Response:
    status = next(code for kind, code in STATUS_OF if isinstance(error, kind))
    return JSONResponse({"error": str(error) or type(error).__name__}, status)


def _explained(error: ValidationError) -> str:
    return "; ".join(
        ": ".join([*(str(part) for part in issue["loc"]), issue["msg"]]) for issue in error.errors(include_url=False)
    )
