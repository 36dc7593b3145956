"""The HTTP routes, in SGLang 0.5.23's shapes and status codes. What they do is in `service` and `generate`."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from hybridasync.engine import schema
from hybridasync.engine.answers import JsonResponse, outcome, protocol_error, request_error
from hybridasync.engine.generate import CLIENT_CLOSED_REQUEST, generate
from hybridasync.engine.loop import EngineDeadError
from hybridasync.engine.requests import RequestError
from hybridasync.engine.service import SGLANG_VERSION, EngineService

MAX_GENERATE_BODY_BYTES = 64 << 20
"""A batch of 1000 prompts of 8k tokens; more is a mistake, and would be held in memory several times over."""
_OPEN_PATHS = ("/health", "/ready", "/metrics")
B = TypeVar("B", bound=schema.Body)
Handler = Callable[[EngineService, Request], Awaitable[Response]]


class _MalformedError(ValueError):
    """A body that isn't JSON, or not an object, or too large."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def build_app(service: EngineService, *, api_key: str | None = None) -> Starlette:
    def bound(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            return await handler(service, request)

        return endpoint

    routes = [Route(path, bound(handler), methods=list(methods)) for path, methods, handler in _ROUTES]
    return Starlette(
        routes=routes,
        middleware=[Middleware(_BearerAuth, api_key=api_key)] if api_key else [],
        exception_handlers={
            ValidationError: _on_invalid,
            _MalformedError: _on_malformed,
            RequestError: _on_refused,
            HTTPException: _on_http,
            EngineDeadError: _on_dead,
            ClientDisconnect: _on_disconnect,
        },
    )


async def _body(request: Request, model: type[B], *, optional: bool = False, limit: float = math.inf) -> B:
    """Raises _MalformedError and pydantic's ValidationError."""
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > limit:
            raise _MalformedError(f"the body is larger than {limit} bytes", 413)
    if optional and not data.strip():
        return model()
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _MalformedError(f"the body isn't JSON: {error}") from error
    if not isinstance(value, dict):
        if optional and value is None:
            return model()
        raise _MalformedError(f"the body should be a JSON object, not {type(value).__name__}")
    return model.model_validate(value)


# --- generation


async def _generate(service: EngineService, request: Request) -> Response:
    body = await _body(request, schema.GenerateBody, limit=MAX_GENERATE_BODY_BYTES)
    return await generate(service, body, request)


async def _abort(service: EngineService, request: Request) -> Response:
    body = await _body(request, schema.AbortBody)
    await service.abort(body.rid, body.abort_all)
    return Response(status_code=200)


# --- control


async def _pause(service: EngineService, request: Request) -> Response:
    body = await _body(request, schema.PauseBody)
    await service.pause(body.mode)
    return JsonResponse({"message": "Generation paused successfully.", "status": "ok"})


async def _continue(service: EngineService, request: Request) -> Response:
    await _body(request, schema.Body)
    await service.resume()
    return JsonResponse({"message": "Generation continued successfully.", "status": "ok"})


async def _flush(service: EngineService, request: Request) -> Response:
    try:
        timeout = float(request.query_params.get("timeout", "0"))
    except ValueError:
        timeout = -1.0
    if not 0 <= timeout < math.inf:
        raise _MalformedError("timeout should be a number of seconds that is at least 0")
    if await service.flush(timeout):
        return Response("Cache flushed.\n", media_type="text/plain")
    return Response("Flush cache failed.\n", status_code=400, media_type="text/plain")


# --- weights


async def _update_from_disk(service: EngineService, request: Request) -> Response:
    success, message = await service.update_from_disk(await _body(request, schema.UpdateFromDiskBody))
    return outcome(success, message, num_paused_requests=0)


async def _update_from_tensor(service: EngineService, request: Request) -> Response:
    return outcome(*await service.update_from_tensor(await _body(request, schema.UpdateFromTensorBody)))


async def _join_group(service: EngineService, request: Request) -> Response:
    return outcome(*await service.join_group(await _body(request, schema.JoinGroupBody)))


async def _leave_group(service: EngineService, request: Request) -> Response:
    return outcome(*await service.leave_group((await _body(request, schema.LeaveGroupBody)).group_name))


async def _update_from_distributed(service: EngineService, request: Request) -> Response:
    return outcome(*await service.update_from_distributed(await _body(request, schema.UpdateFromDistributedBody)))


async def _stage(service: EngineService, request: Request) -> Response:
    """Not SGLang's: see docs/publication.md."""
    return outcome(*await service.stage(await _body(request, schema.StageWeightsBody)))


async def _switch(service: EngineService, request: Request) -> Response:
    """Not SGLang's. The answer has what `/weights_checker` would say now: a publication needn't ask once more."""
    served = await service.switch(await _body(request, schema.SwitchBody))
    return outcome(False, served) if isinstance(served, str) else JsonResponse(served)


async def _begin_update(service: EngineService, request: Request) -> Response:
    await _body(request, schema.Body)
    return outcome(*await service.begin_update())


async def _end_update(service: EngineService, request: Request) -> Response:
    await _body(request, schema.Body)
    return outcome(*await service.end_update())


async def _update_version(service: EngineService, request: Request) -> Response:
    body = await _body(request, schema.UpdateVersionBody)
    await service.update_version(body.new_version, abort_all=body.abort_all_requests)
    return outcome(True, f"Weight version updated to {body.new_version}", new_version=body.new_version)


async def _check_weights(service: EngineService, request: Request) -> Response:
    body = await _body(request, schema.CheckWeightsBody, optional=True)
    if body.action != "checksum":
        return outcome(False, f"Unsupported action={body.action!r}")
    return JsonResponse(await service.check_weights(body.skip_tensor_list))


# --- information


async def _health(service: EngineService, request: Request) -> Response:
    return Response(status_code=200 if service.thread.alive else 503)


async def _health_generate(service: EngineService, request: Request) -> Response:
    return Response(status_code=200 if await service.healthy() else 503)


async def _ready(service: EngineService, request: Request) -> Response:
    return Response(status_code=200 if service.thread.alive and not service.paused else 503)


async def _model_info(service: EngineService, request: Request) -> Response:
    return JsonResponse(service.model_info())


async def _server_info(service: EngineService, request: Request) -> Response:
    return JsonResponse(await service.server_info())


async def _loads(service: EngineService, request: Request) -> Response:
    loads = await service.loads()
    entry: dict[str, Any] = {
        "dp_rank": 0,
        "num_running_reqs": loads.running,
        "num_waiting_reqs": loads.waiting,
        "num_used_tokens": loads.used_tokens,
        "max_total_num_tokens": service.settings.max_total_tokens,
        "max_running_requests": service.settings.max_running_requests,
    }
    return JsonResponse({"timestamp": datetime.now(UTC).isoformat(), "version": SGLANG_VERSION, "loads": [entry]})


async def _models(service: EngineService, request: Request) -> Response:
    card = {
        "id": service.model_path,
        "object": "model",
        "owned_by": "hybridasync",
        "root": service.model_path,
        "max_model_len": service.limits.context_length,
    }
    return JsonResponse({"object": "list", "data": [card]})


_ROUTES: tuple[tuple[str, tuple[str, ...], Handler], ...] = (
    ("/generate", ("POST", "PUT"), _generate),
    ("/abort_request", ("POST",), _abort),
    ("/pause_generation", ("POST",), _pause),
    ("/continue_generation", ("POST",), _continue),
    ("/flush_cache", ("GET", "POST"), _flush),
    ("/update_weights_from_disk", ("POST",), _update_from_disk),
    ("/init_weights_update_group", ("POST",), _join_group),
    ("/destroy_weights_update_group", ("POST",), _leave_group),
    ("/stage_weights", ("POST",), _stage),
    ("/switch_weights", ("POST",), _switch),
    ("/begin_weight_update", ("POST",), _begin_update),
    ("/update_weights_from_distributed", ("POST",), _update_from_distributed),
    ("/update_weights_from_tensor", ("POST",), _update_from_tensor),
    ("/end_weight_update", ("POST",), _end_update),
    ("/update_weight_version", ("POST",), _update_version),
    ("/weights_checker", ("GET", "POST"), _check_weights),
    ("/health", ("GET",), _health),
    ("/health_generate", ("GET",), _health_generate),
    ("/ready", ("GET",), _ready),
    ("/model_info", ("GET",), _model_info),
    ("/get_model_info", ("GET",), _model_info),
    ("/server_info", ("GET",), _server_info),
    ("/get_server_info", ("GET",), _server_info),
    ("/v1/loads", ("GET",), _loads),
    ("/v1/models", ("GET",), _models),
)


# --- errors and authentication


async def _on_invalid(request: Request, error: Exception) -> Response:
    return protocol_error(str(error), 400, "Bad Request")


async def _on_malformed(request: Request, error: Exception) -> Response:
    return protocol_error(str(error), error.status if isinstance(error, _MalformedError) else 400, "Bad Request")


async def _on_refused(request: Request, error: Exception) -> Response:
    return request_error(str(error))


async def _on_http(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    detail = error.detail if isinstance(error, HTTPException) else str(error)
    return protocol_error(detail, status, str(status))


async def _on_dead(request: Request, error: Exception) -> Response:
    return request_error(f"the decoder has failed: {error}", 503)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


class _BearerAuth:
    """`Authorization: Bearer <key>` on everything but health checks, as SGLang's `--api-key`."""

    def __init__(self, app: ASGIApp, *, api_key: str) -> None:
        self._app = app
        self._expected = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not scope["path"].startswith(_OPEN_PATHS):
            kind, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
            # bytes: compare_digest refuses strings that aren't ASCII
            if kind.lower() != "bearer" or not secrets.compare_digest(key.encode("utf-8", "replace"), self._expected):
                await JsonResponse({"error": "Unauthorized"}, status_code=401)(scope, receive, send)
                return
        await self._app(scope, receive, send)
