"""JSON lines and the event log on bad days: full disks, odd bytes, torn lines."""

from __future__ import annotations

import json
import logging
import resource
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridasync.observability.jsonl import JsonLines, encode, plain, read, replace_atomically
from hybridasync.observability.logs import EventLog


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


def test_a_value_without_json_form_is_written_as_text() -> None:
    """Whatever a caller hands in becomes a line: arrays' scalars as numbers, odd keys and objects as text."""
    row = {"scalar": np.float32(0.5), "nan": float("nan"), "set": {3}, ("a", 1): ValueError("bad"), "path": Path("x")}
    assert plain(row) == {"scalar": 0.5, "nan": None, "set": [3], "('a', 1)": "bad", "path": "x"}


def test_a_circular_value_ends() -> None:
    """A structure that contains itself is cut at a depth, not followed for ever."""
    circle: list[object] = []
    circle.append(circle)
    assert "…" in encode({"circle": circle}).decode()


@pytest.mark.parametrize("text", ["\ud800", "a\u2028b\u2029c\x85d", "日本\U0001f600", "\x00\x0c\n"])
def test_c52_a_row_is_one_line_that_gives_its_text_back(text: str) -> None:
    """Lone surrogates and Unicode line breaks neither raise nor cut a line, and are read back unchanged."""
    line = encode({"text": text})
    assert line.count(b"\n") == 1
    assert len(line.decode("utf-8").splitlines()) == 1
    assert json.loads(line) == {"text": text}


def test_a_full_disk_costs_the_record_and_says_so_once(tmp_path: Path) -> None:
    """ENOSPC is counted for each record and told once; nothing is raised."""
    (tmp_path / "full.jsonl").symlink_to("/dev/full")
    said: list[str] = []
    lines = JsonLines(tmp_path / "full.jsonl", on_first_loss=said.append)
    assert [lines.append({"n": n}) for n in range(3)] == [False] * 3
    assert lines.lost == 3
    assert len(said) == 1
    assert "full.jsonl" in said[0]
    assert "No space left" in said[0]


def test_a_line_cut_by_a_full_disk_harms_no_later_line(tmp_path: Path) -> None:
    """After a partial write the next row starts on a line of its own, and the torn one is passed over."""
    path = tmp_path / "rows.jsonl"
    lines = JsonLines(path, on_first_loss=lambda _: None)
    lines.append({"n": 0})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 4, hard))
    try:
        assert not lines.append({"n": 1})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert lines.append({"n": 2})
    assert [row["n"] for row in read(path)] == [0, 2]


def test_a_line_torn_by_a_crash_is_closed_on_reopening(tmp_path: Path) -> None:
    """A process that starts on a file whose last line was cut doesn't write into that line."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"n": 0}\n{"n": 1')
    JsonLines(path).append({"n": 2})
    assert [row["n"] for row in read(path)] == [0, 2]


def test_a_directory_that_appears_later_is_used(tmp_path: Path) -> None:
    """A file that can't be opened is tried again with the next row."""
    lines = JsonLines(tmp_path / "later" / "rows.jsonl", on_first_loss=lambda _: None)
    assert not lines.append({"n": 0})
    (tmp_path / "later").mkdir()
    assert lines.append({"n": 1})


def test_replacing_leaves_the_old_file_when_it_fails(tmp_path: Path) -> None:
    """A file that can't be replaced keeps its content, and no temporary file stays."""
    target = tmp_path / "folder"
    target.mkdir()
    with pytest.raises(OSError, match="folder"):
        replace_atomically(target, b"new")
    assert list(tmp_path.iterdir()) == [target]


def test_events_are_lines_with_time_level_and_name(tmp_path: Path) -> None:
    """One event a line: UTC time, level, name first, then the fields; lower levels than asked for are left out."""
    log = EventLog(tmp_path / "events.jsonl", level="info", echo=lambda _: None)
    log.event("engine.started", engine="engine-0", name="free to use", time="too", event="also")
    log.event("engine.noise", level="debug")
    log.close()
    (row,) = rows(tmp_path / "events.jsonl")
    assert list(row)[:3] == ["time", "level", "event"]
    assert row["time"].endswith("Z")
    assert row["event"] == "engine.started"
    assert (row["name"], row["time_"], row["event_"]) == ("free to use", "too", "also")


def test_warnings_are_echoed_as_one_line(tmp_path: Path) -> None:
    """Warnings and errors reach the person, in one line even if a field holds many; other events don't."""
    echoed: list[str] = []
    log = EventLog(tmp_path / "events.jsonl", echo=echoed.append)
    log.event("quiet")
    log.event("engine.lost", level="warning", detail="first\nsecond", long="x" * 1000)
    assert len(echoed) == 1
    assert echoed[0].startswith("warning engine.lost detail=first second long=xxx")
    assert len(echoed[0]) < 300


def test_an_exception_is_written_with_its_traceback(tmp_path: Path) -> None:
    """`exc_info` puts the traceback into the file as text."""
    log = EventLog(tmp_path / "events.jsonl", echo=lambda _: None)
    try:
        raise KeyError("missing")
    except KeyError as error:
        log.event("task.failed", level="error", exc_info=error)
    (row,) = rows(tmp_path / "events.jsonl")
    assert "KeyError: 'missing'" in row["exception"]


def test_records_of_other_libraries_become_events(tmp_path: Path) -> None:
    """Warnings of the standard library's logging and of Python are captured, badly formatted ones too."""
    log = EventLog(tmp_path / "events.jsonl", echo=lambda _: None)
    log.capture_stdlib()
    try:
        logging.getLogger("httpx").warning("odd %s")
        bridge = logging.getLogger().handlers[-1]  # alone, because pytest's own handler raises on such a record
        bridge.handle(logging.LogRecord("httpx", logging.WARNING, __file__, 1, "%d", ("not a number",), None))
        logging.getLogger("httpx").info("left out")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("careful", UserWarning, stacklevel=1)
    finally:
        log.close()
    messages = [row["message"] for row in rows(tmp_path / "events.jsonl")]
    assert messages[:2] == ["odd %s", "%d"]
    assert any("careful" in message for message in messages)
    assert not any("left out" in message for message in messages)


def test_a_full_disk_never_stops_the_event_log(tmp_path: Path) -> None:
    """Events lost to a full disk are counted and said once."""
    (tmp_path / "events.jsonl").symlink_to("/dev/full")
    echoed: list[str] = []
    log = EventLog(tmp_path / "events.jsonl", echo=echoed.append)
    for number in range(5):
        log.event("tick", number=number)
    assert log.lost == 5
    assert len(echoed) == 1
