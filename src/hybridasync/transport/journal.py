"""The journal of debts: a file of JSON lines that survives `kill -9`. Implements the port `Journal`."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from hybridasync.errors import OperatingError
from hybridasync.observability import jsonl
from hybridasync.protocol.debts import must_be_durable


class JournalError(OperatingError):
    """A debt couldn't be put on disk, so that it must not be incurred."""


class JournalFile:
    """Append-only; a line torn by a crash is passed over. A debt is on the disk when `append` returns.

    A settlement survives the death of this process at once, that of the machine a little later.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._torn = False

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds `at`, seconds since the epoch. Raises JournalError, but not for a settlement (see `must_be_durable`)."""
        durable = must_be_durable(record)
        try:
            self._write(jsonl.encode({**record, "at": time.time()}), durable=durable)
        except OSError as error:
            message = f"{self._path}: {error.strerror or error}"
            if durable:
                raise JournalError(message) from error
            jsonl.complain(message)

    def replay(self) -> list[dict[str, Any]]:
        """All whole records, oldest first; none if there is no file. Raises OSError if it can't be read."""
        return list(jsonl.read(self._path))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, line: bytes, *, durable: bool) -> None:
        if self._file is None:
            self._file = self._path.open("ab", buffering=0)
            self._torn = self._file.tell() > 0  # the last line may be torn; an empty line does no harm
            _sync_folder(self._path.parent)
        data = b"\n" + line if self._torn else line
        self._torn = True
        written = self._file.write(data)
        if written != len(data):
            raise OSError(f"wrote {written} of {len(data)} bytes")
        if durable:
            os.fsync(self._file.fileno())
        self._torn = False


def _sync_folder(folder: Path) -> None:
    """Make the name of a new file durable too."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
