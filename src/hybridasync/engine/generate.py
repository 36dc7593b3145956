"""`/generate`: from body to groups, and from finished groups to one answer or a stream of server-sent events."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from hybridasync.engine.answers import JsonResponse, Progress, dump, finished_answer
from hybridasync.engine.loop import EngineDeadError
from hybridasync.engine.requests import GeneratedSequence, Group, RequestError, StreamSink
from hybridasync.engine.schema import GenerateBody, PromptRequest, prompt_requests
from hybridasync.engine.service import EngineService

CLIENT_CLOSED_REQUEST = 499


@dataclass(frozen=True, slots=True)
class _Token:
    sequence: GeneratedSequence
    token: int
    logprob: float
    version: str


_Event = _Token | GeneratedSequence | BaseException | None  # None: everything has finished


async def generate(service: EngineService, body: GenerateBody, request: Request) -> Response:
    """Raises RequestError and pydantic's ValidationError, except in a stream, which carries its errors."""
    if body.stream:
        return StreamingResponse(_stream(service, body), media_type="text/event-stream")
    requests, single = prompt_requests(body, service.limits)
    finished: Future[None] = Future()
    finished.set_running_or_notify_cancel()  # from here on only the decoder settles it, whatever its waiter does
    groups = _groups(requests, lambda: finished.set_result(None), None)
    service.submit(groups, finished.set_exception)
    if not await _finished_or_gone(finished, request):
        service.drop(groups)
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    answers = [
        finished_answer(sequence, return_logprob=asked.return_logprob)
        for asked, group in zip(requests, groups, strict=True)
        for sequence in group.sequences
    ]
    return JsonResponse(answers[0] if single else answers)


def _groups(requests: list[PromptRequest], all_finished: Callable[[], None], stream: StreamSink | None) -> list[Group]:
    left = len(requests)

    def on_finish(_: Group) -> None:  # on the decoder's thread, so it counts without a lock
        nonlocal left
        left -= 1
        if left == 0:
            all_finished()

    return [
        Group(asked.rid, asked.input_ids, asked.sampling, on_finish, stream, asked.logprob_start) for asked in requests
    ]


async def _finished_or_gone(finished: Future[None], request: Request) -> bool:
    """False if the client disconnected first. Raises what the decoder's thread set."""
    gone = False
    async with anyio.create_task_group() as tasks:

        async def watch() -> None:
            nonlocal gone
            while (await request.receive())["type"] != "http.disconnect":
                pass
            gone = True
            tasks.cancel_scope.cancel()

        tasks.start_soon(watch)
        await asyncio.wait([waiter := asyncio.wrap_future(finished)])
        tasks.cancel_scope.cancel()
    if gone:
        return False
    waiter.result()
    return True


class _LoopSink:
    """Carries events from the decoder's thread to the event loop."""

    def __init__(self, send: MemoryObjectSendStream[_Event]) -> None:
        self._loop = asyncio.get_running_loop()
        self._send = send

    def token(self, sequence: GeneratedSequence, token: int, logprob: float, *, version: str) -> None:
        self.put(_Token(sequence, token, logprob, version))

    def end(self, sequence: GeneratedSequence) -> None:
        self.put(sequence)

    def put(self, event: _Event) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, event)

    def _deliver(self, event: _Event) -> None:
        # the reader closes its end when the client has gone; the decoder hears of that a little later
        if self._send.statistics().open_receive_streams:
            self._send.send_nowait(event)


async def _stream(service: EngineService, body: GenerateBody) -> AsyncIterator[bytes]:
    send, receive = anyio.create_memory_object_stream[_Event](math.inf)
    groups: list[Group] = []
    try:
        with receive:
            requests, single = prompt_requests(body, service.limits)
            sink = _LoopSink(send)
            groups = _groups(requests, lambda: sink.put(None), sink)
            service.submit(groups, sink.put)
            async for chunk in _chunks(receive, requests, groups, single=single):
                yield chunk
        groups = []
    except (RequestError, ValidationError, EngineDeadError) as error:
        details = {"message": str(error), "type": "invalid_request_error", "code": 400, "retryable": False}
        yield b"data: " + dump({"error": details}) + b"\n\n"
        groups = []
    finally:
        send.close()
        if groups:
            service.drop(groups)
    yield b"data: [DONE]\n\n"


async def _chunks(
    receive: MemoryObjectReceiveStream[_Event], requests: list[PromptRequest], groups: list[Group], *, single: bool
) -> AsyncIterator[bytes]:
    order = [(asked, sequence) for asked, group in zip(requests, groups, strict=True) for sequence in group.sequences]
    places = {id(sequence): place for place, (_, sequence) in enumerate(order)}
    progress = [Progress() for _ in order]
    async for event in receive:
        if event is None:
            return
        if isinstance(event, BaseException):
            raise event
        sequence = event.sequence if isinstance(event, _Token) else event
        place = places[id(sequence)]
        logprob = order[place][0].return_logprob
        if isinstance(event, _Token):
            progress[place].add(event.token, event.logprob, event.version)
            answer = progress[place].answer(sequence, return_logprob=logprob)
        else:
            answer = finished_answer(sequence, return_logprob=logprob)
        if not single:
            answer["index"] = place
        yield b"data: " + dump(answer) + b"\n\n"
