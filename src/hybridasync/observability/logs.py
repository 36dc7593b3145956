"""The event log: one JSON object a line in events.jsonl, and what matters of it for people.

Event names are fixed dotted words ("publication.completed"), never sentences with values in them, so that grep and jq
find all of a kind.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import structlog

from hybridasync.observability.jsonl import JsonLines, complain, read

LEVELS: Mapping[str, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
NON_FINITE = "metrics.non_finite"
FOREIGN = "log"  # a record of another library
_MAX_FIELD = 200  # characters of one field on the console; the file has all of it


class EventLog:
    """Events of one process. Never raises: a full disk or odd bytes cost the record, not the run.

    Events of level warning and above are also given to `echo` as one line of text.
    """

    def __init__(self, path: Path, *, level: str = "info", echo: Callable[[str], None] = complain) -> None:
        self.echo = echo
        self._lines = JsonLines(path, on_first_loss=lambda message: self.echo(message))
        self._logger = structlog.wrap_logger(
            _Outlet(self._lines),
            processors=[
                structlog.stdlib.add_log_level,
                structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
                structlog.processors.format_exc_info,
                self._echo_warnings,
                _as_argument,
            ],
            wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
            cache_logger_on_first_use=True,
        )
        self._bridge: _StdlibBridge | None = None

    @property
    def lost(self) -> int:
        """Events that couldn't be written."""
        return self._lines.lost

    def event(self, name: str, /, **fields: object) -> None:
        """Write an event. A field `level` (debug, info, warning, error) is its level, info by default."""
        level = str(fields.pop("level", "info"))
        for reserved in ("event", "time"):
            if reserved in fields:
                fields[f"{reserved}_"] = fields.pop(reserved)
        self._logger.log(LEVELS.get(level, logging.INFO), name, **fields)

    def capture_stdlib(self, level: str = "warning") -> None:
        """Also take the records of the standard library's logging (httpx, uvicorn, torch) and Python's warnings."""
        if self._bridge is None:
            self._bridge = _StdlibBridge(self, LEVELS[level])
            logging.getLogger().addHandler(self._bridge)
            logging.captureWarnings(True)

    def close(self) -> None:
        if self._bridge is not None:
            logging.getLogger().removeHandler(self._bridge)
            logging.captureWarnings(False)
            self._bridge = None
        self._lines.close()

    def _echo_warnings(self, _logger: object, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        if LEVELS.get(method, logging.INFO) >= logging.WARNING:
            self.echo(human_line(event))
        return event


def count_errors(path: Path) -> int:
    """Events of level warning or error in a file, except what has a count of its own or comes from other libraries.

    Raises OSError for a file that is there and can't be read.
    """
    apart = (NON_FINITE, FOREIGN)
    return sum(1 for row in read(path) if row.get("level") in ("warning", "error") and row.get("event") not in apart)


def human_line(event: Mapping[str, object]) -> str:
    """`warning engine.lost engine=engine-0 detail=…`: one line whatever the fields hold."""
    fields = " ".join(
        f"{key}={_shorten(str(value))}" for key, value in event.items() if key not in ("event", "level", "time")
    )
    return f"{event.get('level', 'info')} {event.get('event', '')} {fields}".strip()


def _shorten(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= _MAX_FIELD else flat[: _MAX_FIELD - 1] + "…"


def _as_argument(
    _logger: object, _method: str, event: MutableMapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    first = {key: event.pop(key) for key in ("time", "level", "event") if key in event}
    return ({**first, **event},), {}


class _Outlet:
    """What structlog calls with a finished event."""

    def __init__(self, lines: JsonLines) -> None:
        self._lines = lines

    def _append(self, event: Mapping[str, object]) -> None:
        self._lines.append(event)

    debug = info = warning = error = critical = _append


class _StdlibBridge(logging.Handler):
    def __init__(self, log: EventLog, level: int) -> None:
        super().__init__(level)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = record.getMessage()
        except (TypeError, ValueError):
            message = str(record.msg)  # a foreign library's format and arguments don't match
        names = {number: name for name, number in LEVELS.items()}
        level = names.get(min(record.levelno, logging.ERROR), "info")
        extra = {"exception": logging.Formatter().formatException(record.exc_info)} if record.exc_info else {}
        self._log.event(FOREIGN, level=level, logger=record.name, message=message, **extra)
