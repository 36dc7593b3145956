"""The decoder's thread, the only thread of the engine that touches the batch: commands in, one token at a time out.

Commands are functions that run between two tokens; their result comes back in a `concurrent.futures.Future`, which an
event loop awaits with `asyncio.wrap_future`.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from hybridasync.engine.scheduler import Scheduler

_log = logging.getLogger(__name__)
_MAX_CONSECUTIVE_FAILURES = 3
"""A step may fail on one bad batch (out of memory, say); one that fails again and again won't recover."""
T = TypeVar("T")


class EngineDeadError(RuntimeError):
    """The decoder's thread has ended."""


class DecoderThread:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="decoder", daemon=True)
        self.failure: str | None = None

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self.failure is None

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 1.0) -> None:
        """Ask the thread to end and wait for it; a step that is under way is finished first."""
        self._commands.put(None)
        self._thread.join(timeout_s)

    def call(self, function: Callable[[Scheduler], T]) -> Future[T]:
        """Run `function(scheduler)` between two tokens."""
        future: Future[T] = Future()

        def run() -> None:
            _settle(future, lambda: function(self._scheduler))

        return self._put(future, run)

    def call_exclusive(self, function: Callable[[Scheduler], T]) -> Future[T]:
        """Run it while nothing is in flight, or between two tokens if the engine is paused."""
        future: Future[T] = Future()

        def run() -> None:
            self._scheduler.when_exclusive(lambda: _settle(future, lambda: function(self._scheduler)))

        return self._put(future, run)

    def _put(self, future: Future[T], run: Callable[[], None]) -> Future[T]:
        if not self.alive:
            future.set_exception(EngineDeadError(self.failure or "the engine is shutting down"))
        else:
            self._commands.put(run)
        return future

    def _run(self) -> None:
        failures = 0
        with torch.inference_mode():
            while True:
                if not self._drain_commands():
                    return
                try:
                    self._scheduler.step()
                    failures = 0
                except Exception as error:  # noqa: BLE001 - a bad batch must not take the server with it
                    failures += 1
                    _log.exception("a decoding step failed")
                    reason = f"{type(error).__name__}: {error}"
                    if failures >= _MAX_CONSECUTIVE_FAILURES:
                        self.failure = f"{failures} steps in a row failed; the last with {reason}"
                    self._scheduler.fail_all(reason)

    def _drain_commands(self) -> bool:
        """Run what is queued; wait if there is nothing else to do. False: stop."""
        while True:
            try:
                command = self._commands.get(block=not self._scheduler.has_work())
            except queue.Empty:
                return True
            if command is None:
                return False
            command()


def _settle(future: Future[Any], function: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except Exception as error:  # noqa: BLE001 - handed to whoever asked
        future.set_exception(error)
    else:
        future.set_result(result)
