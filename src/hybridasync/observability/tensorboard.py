"""TensorBoard event files through tensorboard's own record format: neither torch nor TensorFlow is imported."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from hybridasync.observability.jsonl import complain


class TensorBoardFile:
    """One event file, written in the caller's thread. Never raises OSError: it says so once and stops writing.

    tensorboard's own EventFileWriter has a thread that keeps what it couldn't write for the next caller to trip over.
    """

    def __init__(self, directory: Path, *, on_loss: Callable[[str], None] = complain) -> None:
        self._on_loss = on_loss
        self._writer: RecordWriter | None = None
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._writer = RecordWriter((directory / name).open("ab", buffering=0))
        except OSError as error:
            self._give_up(error)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        self._write(Event(wall_time=time.time(), step=step, summary=summary))

    def rewind(self, step: int) -> None:
        """Tell readers to forget what earlier files say of `step` and later: these steps are run again."""
        self._write(Event(wall_time=time.time(), step=step, session_log=SessionLog(status=SessionLog.START)))

    def close(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            try:
                writer.close()
            except OSError as error:
                self._give_up(error)

    def _write(self, event: Event) -> None:
        if self._writer is None:
            return
        try:
            self._writer.write(event.SerializeToString())
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._writer = None
        self._on_loss(f"tensorboard: {error.strerror or error}; the run goes on without it")
