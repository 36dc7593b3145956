"""`python -m hybridasync.runtime.sender`: sends snapshots to engines, over a process group or in HTTP requests.

A process of its own beside the trainer's first rank, which wrote the snapshot. Whatever becomes of a transfer, no rank
of the trainer waits in it: a server that dies or refuses is met by this process alone. And its end, the harshest abort
there is, closes every connection, so that engines which wait in a broadcast get an error at once.

Each engine has a group of its own: one that fails tears no other engine's transfer. After a failure the process ends,
and the next transfer has a new one, with new groups.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Self, TextIO, TypeVar

import anyio
import anyio.to_thread

from hybridasync.data.model_dir import parameter_shapes, read_model_facts
from hybridasync.errors import ConfigError, EngineError, NotSent, OutcomeUnknown, leading_cause
from hybridasync.observability.jsonl import complain
from hybridasync.observability.process import die_with_parent
from hybridasync.runtime.transfer import SenderSettings
from hybridasync.transport.sender import HEARTBEAT_S, Request, encode_failure
from hybridasync.transport.sglang import GroupAddress, ServerLayout, SglangServer
from hybridasync.types import SendTarget
from hybridasync.weights.buckets import Bucket, buckets_of
from hybridasync.weights.group import SENDER_RANK, close_group, open_group, serve_store, start_broadcast

REFUSAL_S = 2.0
"""A broadcast that breaks is explained by the server's answer, which comes within this time if the server lives."""

THREADS = 256
"""Each transfer under way waits in a thread."""

T = TypeVar("T")
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class _Receiver:
    """An engine whose parameters were compared with the snapshot's, and which is in the group if it takes one."""

    server: SglangServer
    ranks: int


class Sender:
    """Knows the engines that it has sent to. Its end closes every group, also one in which a transfer was given up."""

    def __init__(self, settings: SenderSettings) -> None:
        self._settings = settings
        self._servers: dict[str, SglangServer] = {}
        self._receivers: dict[str, _Receiver] = {}
        self._groups: dict[str, Any] = {}
        self._threads = anyio.CapacityLimiter(THREADS)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in tuple(self._groups):
            self._leave(name)
        for server in self._servers.values():
            await server.__aexit__(kind, error, trace)

    async def send(self, request: Request) -> dict[str, EngineError]:
        """Failures by engine."""
        try:
            buckets = buckets_of(request.path, self._settings.bucket_bytes)
        except (OSError, ValueError, RuntimeError) as error:
            detail = f"the snapshot {request.path} can't be read: {error}"
            return {target.name: NotSent(target.name, "send", detail) for target in request.targets}
        failures: dict[str, EngineError] = {}

        async def send_to(target: SendTarget) -> None:
            try:
                await self._send_to(target, request, buckets)
            except EngineError as error:
                failures[target.name] = error

        async with anyio.create_task_group() as tasks:
            for target in request.targets:
                tasks.start_soon(send_to, target)
        return failures

    async def _send_to(self, target: SendTarget, request: Request, buckets: Sequence[Bucket]) -> None:
        known = self._receivers.pop(target.name, None)
        if known is None or target.fresh or known.server.base_url != target.url:
            known = await self._meet(await self._server(target), request, buckets)
        async with known.server.updating():
            for bucket in buckets[:-1]:
                await self._pass(known, bucket, version=None)
            await self._pass(known, buckets[-1], version=str(request.version))
        self._receivers[target.name] = known

    async def _server(self, target: SendTarget) -> SglangServer:
        if target.name in self._servers:
            await self._servers[target.name].moved(target.url)
        else:
            timeout_s = self._settings.timeout_s
            self._servers[target.name] = SglangServer(
                target.name, target.url, control_timeout_s=timeout_s, request_timeout_s=timeout_s
            )
        return self._servers[target.name]

    async def _meet(self, server: SglangServer, request: Request, buckets: Sequence[Bucket]) -> _Receiver:
        """Compare what the engine holds with what will be sent, before the first byte, and make the group."""
        layout = await server.layout()
        if problem := _difference(layout, await server.checksums(), request, buckets=buckets):
            raise NotSent(server.name, "send", problem)
        if self._settings.transport == "collective":
            await self._join(server, layout)
        return _Receiver(server, layout.ranks)

    async def _join(self, server: SglangServer, layout: ServerLayout) -> None:
        settings, timeout = self._settings, timedelta(seconds=self._settings.timeout_s)
        name, world_size = _group_name(server), 1 + layout.ranks
        self._leave(name)
        await server.leave_group(name)  # of this sender or an earlier one
        store = serve_store(settings.address, timeout)
        address = GroupAddress(name, settings.address, store.port, world_size, settings.backend)
        join = partial(open_group, store, SENDER_RANK, world_size, name=name, backend=settings.backend, timeout=timeout)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(server.join_group, address)
                self._groups[name] = await self._in_thread(join)
        except BaseExceptionGroup as errors:
            raise _engine_error(errors, server.name, "join_group") from None

    async def _pass(self, receiver: _Receiver, bucket: Bucket, *, version: str | None) -> None:
        """One bucket. The last one has the version."""
        server = receiver.server
        group = self._groups.get(_group_name(server))
        if group is None:
            payload = await self._in_thread(partial(_payload, bucket))
            await server.load_tensors(payload, ranks=receiver.ranks, version=version)
            return
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._broadcast, server.name, group, bucket)
                await server.receive_weights(bucket, _group_name(server), version=version)
        except BaseExceptionGroup as errors:
            raise _engine_error(errors, server.name, "broadcast") from None

    async def _broadcast(self, engine: str, group: Any, bucket: Bucket) -> None:
        flat = bucket.flat.cuda() if self._settings.backend == "nccl" else bucket.flat
        try:
            await self._in_thread(start_broadcast(group, flat).wait)
        except RuntimeError as error:
            await anyio.sleep(REFUSAL_S)
            raise OutcomeUnknown(engine, "broadcast", str(error)) from error

    def _leave(self, name: str) -> None:
        if name in self._groups:
            close_group(self._groups.pop(name))

    async def _in_thread(self, function: Callable[[], T]) -> T:
        # Abandoned when the other half of the transfer fails: the process ends then, and the thread with it.
        return await anyio.to_thread.run_sync(function, abandon_on_cancel=True, limiter=self._threads)


def _group_name(server: SglangServer) -> str:
    return f"hybridasync-{server.name}"


def _payload(bucket: Bucket) -> str:
    """By value: handles of shared memory kill SGLang's scheduler on a CPU, and reach no other machine."""
    named = [(name, tensor.clone()) for name, tensor in bucket.tensors()]  # a part would take its whole file along
    return base64.b64encode(pickle.dumps(named)).decode()


def _difference(
    layout: ServerLayout, held: Mapping[str, str], request: Request, *, buckets: Sequence[Bucket]
) -> str | None:
    """What doesn't fit between the engine's parameters and the snapshot's, if anything (C07)."""
    if names := sorted(held.keys() ^ set(request.parameters)):
        return f"one of engine and snapshot lacks {', '.join(names[:3])} ({len(names)} in all)"
    dtype = _DTYPES.get(layout.dtype, layout.dtype)
    sent = {name: shape for bucket in buckets for name, shape in zip(bucket.names, bucket.shapes, strict=True)}
    types = {dtype for bucket in buckets for dtype in bucket.dtypes}
    if dtype != "auto" and types != {dtype}:
        return f"the engine holds {dtype}, the snapshot {', '.join(sorted(types))}"
    try:
        wanted = dict(parameter_shapes(read_model_facts(layout.model_path)))
    except ConfigError:
        return None  # its directory is on another machine, or was a snapshot that is gone: its checksums will tell
    if others := sorted(name for name in wanted.keys() | sent.keys() if wanted.get(name) != sent.get(name)):
        shapes = f"{wanted.get(others[0])} in the engine, {sent.get(others[0])} in the snapshot"
        return f"{others[0]} has the shape {shapes} ({len(others)} in all)"
    return None


def _engine_error(errors: BaseExceptionGroup[BaseException], engine: str, operation: str) -> BaseException:
    cause = leading_cause(errors)
    return OutcomeUnknown(engine, operation, str(cause)) if isinstance(cause, RuntimeError | ValueError) else cause


async def _serve(settings: SenderSettings, answers: TextIO) -> None:
    """Until the input ends, or something has failed."""

    def say(message: Mapping[str, object]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    async def beat() -> None:
        while True:
            await anyio.sleep(HEARTBEAT_S)
            say({"beat": True})

    requests = anyio.wrap_file(sys.stdin)
    say({"ready": True})
    async with Sender(settings) as sender:
        while line := await requests.readline():
            request = Request.decode(line)
            names = ", ".join(target.name for target in request.targets)
            complain(f"version {request.version} to {names} by {settings.transport}")
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(beat)
                failures = await sender.send(request)
                tasks.cancel_scope.cancel()
            for error in failures.values():
                complain(str(error))
            say({"failures": [encode_failure(error) for error in failures.values()]})
            if failures:
                return


def main(argv: Sequence[str] | None = None) -> None:
    """The only argument: SenderSettings as JSON."""
    die_with_parent(signal.SIGKILL)
    (text,) = sys.argv[1:] if argv is None else argv
    # Answers alone go to the output that our parent reads; what libraries print goes to the log.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        anyio.run(_serve, SenderSettings(**json.loads(text)), answers)
    finally:
        # Threads may wait in a transfer that was given up; its connections close with the process.
        os._exit(1 if sys.exc_info()[0] else 0)


if __name__ == "__main__":
    main()
