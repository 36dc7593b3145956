"""JSON lines that are never worth stopping a run for: writing, reading and rewinding them."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

Row = dict[str, object]

_MAX_DEPTH = 12
# Line breaks of Unicode that JSON leaves alone, but at which text tools cut a line.
_LINE_BREAKS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}


def complain(message: str) -> None:
    """Say something on stderr, whatever became of stderr."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{message}\n".encode("utf-8", "backslashreplace").decode("utf-8"))
        sys.stderr.flush()


def plain(value: object, depth: int = 0) -> object:
    """`value` as JSON can hold it: numbers that aren't finite become None, what has no JSON form becomes its repr."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if depth >= _MAX_DEPTH:
        return "…"
    if isinstance(value, Mapping):
        return {str(key): plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item, depth + 1) for item in value]
    if callable(item := getattr(value, "item", None)) and getattr(value, "shape", None) == ():
        return plain(item(), depth + 1)
    return str(value) if isinstance(value, (BaseException, os.PathLike)) else repr(value)


def encode(row: Mapping[str, object]) -> bytes:
    """One line. Lone surrogates stay JSON escapes; every line break inside a string is escaped."""
    text = json.dumps(plain(row), ensure_ascii=False, allow_nan=False).translate(_LINE_BREAKS)
    return text.encode("utf-8", "backslashreplace") + b"\n"


def read(path: Path) -> Iterator[Row]:
    """The rows of a file; none if there is no file. A line torn by a crash is passed over."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for line in file:
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict):
                    yield row


def replace_atomically(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Readers see the old content or the new one. Raises OSError and then leaves the old one.

    `durable` False: not so after a crash of the machine, but without waiting for the disk.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


class JsonLines:
    """Appends rows to a file. Never raises OSError: what can't be written is counted, and said once."""

    def __init__(self, path: Path, *, on_first_loss: Callable[[str], None] = complain) -> None:
        self.path = path
        self.lost = 0
        self._on_first_loss = on_first_loss
        self._file: BinaryIO | None = None
        self._torn = False

    def append(self, row: Mapping[str, object]) -> bool:
        """Whether the row was written."""
        return self._attempt(lambda: self._write(encode(row)))

    def rewind(self, key: str, limit: int) -> None:
        """Drop the rows whose `key` is at least `limit`: they belong to steps that are run again after a resume."""

        def rewrite() -> None:
            if not self.path.exists():
                return
            kept = [row for row in read(self.path) if not (isinstance(at := row.get(key), int) and at >= limit)]
            self.close()
            replace_atomically(self.path, b"".join(encode(row) for row in kept))

        self._attempt(rewrite)

    def sync(self) -> None:
        """What was appended stays, whatever happens to the machine."""
        if (file := self._file) is not None:
            self._attempt(lambda: os.fsync(file.fileno()))

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None

    def _attempt(self, action: Callable[[], None]) -> bool:
        try:
            action()
        except OSError as error:
            self.lost += 1
            if self.lost == 1:
                self._on_first_loss(
                    f"{self.path.name}: {error.strerror or error}; the run goes on without these records"
                )
            return False
        return True

    def _write(self, line: bytes) -> None:
        if self._file is None:
            self._file = self.path.open("a+b", buffering=0)
            self._torn = _ends_inside_a_line(self._file)
        data = b"\n" + line if self._torn else line
        # Pessimistic until the whole line is out: a full disk writes a part of it, or raises.
        self._torn = True
        written = self._file.write(data)
        if written != len(data):
            raise OSError(f"wrote {written} of {len(data)} bytes")
        self._torn = False


def _ends_inside_a_line(file: BinaryIO) -> bool:
    if file.seek(0, os.SEEK_END) == 0:
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"
