"""The controller's end of the sender process: implements the port `WeightSender`.

One line of JSON to it for each transfer, lines from it: a sign of life each second, and one with the outcome.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from hybridasync.errors import EngineError, NotSent, OutcomeUnknown, Rejected, RemoteProtocolError
from hybridasync.observability.process import log_tail, signal_group
from hybridasync.types import SendTarget, WeightSnapshot

HEARTBEAT_S = 1.0

SILENCE_S = 30.0
"""Without a sign of life for so long, the process is taken for dead. It may be stopped for a moment, or busy."""

START_S = 120.0
"""Imports torch: seconds, on a busy machine many."""

LONGEST_LINE = 1 << 24

_KINDS: Mapping[str, type[EngineError]] = {
    kind.__name__: kind for kind in (NotSent, OutcomeUnknown, RemoteProtocolError, EngineError)
}


_LOST = (OSError, TimeoutError, anyio.BrokenResourceError, anyio.IncompleteRead)
"""What talking to a process that ended, or doesn't answer, raises."""


@dataclass(frozen=True, slots=True)
class Request:
    """What the process is asked to do. `parameters` are the names that the engines have to hold."""

    targets: tuple[SendTarget, ...]
    path: str
    version: int
    parameters: tuple[str, ...]

    def encode(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def decode(cls, line: str) -> Self:
        value = json.loads(line)
        targets = tuple(SendTarget(**target) for target in value["targets"])
        return cls(targets, value["path"], value["version"], tuple(value["parameters"]))


def encode_failure(error: EngineError) -> dict[str, object]:
    status = error.status if isinstance(error, Rejected) else None
    kind = type(error).__name__
    return {
        "kind": kind,
        "engine": error.engine,
        "operation": error.operation,
        "detail": error.detail,
        "status": status,
    }


def decode_failure(value: Mapping[str, Any]) -> EngineError:
    engine, operation, detail = value["engine"], value["operation"], value["detail"]
    if value["status"] is not None:
        return Rejected(engine, operation, value["status"], detail=detail.removeprefix(f"HTTP {value['status']} "))
    return _KINDS[value["kind"]](engine, operation, detail)


class SenderProcess:
    """Started with the block, and anew after each failure. One transfer at a time."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._command = list(command)
        self._environment = dict(environment)
        self._log = log
        self._process: Process | None = None
        self._lines: BufferedByteReceiveStream | None = None
        self._lock = anyio.Lock()

    async def __aenter__(self) -> Self:
        await self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end()

    async def send(self, targets: Sequence[SendTarget], snapshot: WeightSnapshot) -> Mapping[str, EngineError]:
        """A process that is lost in the transfer is replaced once; lost again, it has failed for all engines.

        The second one begins anew at every engine. What the first one left on its way there can do no harm later: an
        engine takes weights within a session alone, and the second one ends it.
        """
        request = Request(tuple(targets), snapshot.path, snapshot.version, tuple(sorted(snapshot.checksums)))
        async with self._lock:
            failures = await self._attempt(request)
            if failures is None:
                failures = await self._attempt(request)
        if failures is None:
            detail = f"the sender was lost in the transfer\n{log_tail(self._log)}"
            return {target.name: OutcomeUnknown(target.name, "send", detail) for target in targets}
        return failures

    async def _attempt(self, request: Request) -> Mapping[str, EngineError] | None:
        """None: the process is lost."""
        failures: Mapping[str, EngineError] | None = None
        try:
            await self._ready()
        except _LOST:
            await self._end()
            detail = f"the sender didn't start\n{log_tail(self._log)}"
            return {target.name: NotSent(target.name, "send", detail) for target in request.targets}
        try:
            with suppress(*_LOST):
                failures = await self._exchange(request)
        finally:
            if failures is None or failures:
                # Its end frees every engine that waits in a broadcast, so it comes also when we are cancelled.
                await self._end()
        return failures

    async def _start(self) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._process = await anyio.open_process(
                self._command, stderr=log, stdout=subprocess.PIPE, env=self._environment, start_new_session=True
            )
        if self._process.stdout is not None:
            self._lines = BufferedByteReceiveStream(self._process.stdout)
        self._greeted = False

    async def _ready(self) -> None:
        if self._process is None:
            await self._start()
        if not self._greeted:
            with anyio.fail_after(START_S):
                while "ready" not in await self._line():
                    pass
            self._greeted = True

    async def _exchange(self, request: Request) -> Mapping[str, EngineError]:
        if self._process is not None and self._process.stdin is not None:
            await self._process.stdin.send(request.encode().encode())
        while True:
            with anyio.fail_after(SILENCE_S):
                answer = await self._line()
            if "failures" in answer:
                return {value["engine"]: decode_failure(value) for value in answer["failures"]}

    async def _line(self) -> dict[str, Any]:
        if self._lines is None:
            raise anyio.IncompleteRead
        line: dict[str, Any] = json.loads(await self._lines.receive_until(b"\n", LONGEST_LINE))
        return line

    async def _end(self) -> None:
        process, self._process, self._lines = self._process, None, None
        if process is None:
            return
        # Shielded: it has nothing to put right, and left behind it would keep engines in a broadcast.
        with anyio.CancelScope(shield=True):
            signal_group(process.pid, 9)
            with suppress(ProcessLookupError):
                process.kill()
            await process.aclose()
