"""Rows of a data file, each with the number that people find it by (line of a JSONL file, row of a Parquet file)."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridasync.errors import ConfigError

_WRONG_BOMS = {codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"}


@dataclass(frozen=True, slots=True)
class Row:
    """One record. `number` is 1-based; `place` is "<file>, line 3", for messages."""

    number: int
    place: str
    fields: dict[str, Any]


def read_rows(path: str | Path, *, setting: str) -> list[Row]:
    """All rows of a JSONL or Parquet file. Raises ConfigError that names file and line; an empty file is an error."""
    file = Path(path)
    if file.is_dir() or not file.exists():
        what = "is a directory" if file.is_dir() else "doesn't exist"
        raise ConfigError(f"data file {file} {what}", setting=setting)
    try:
        reader = _read_parquet if file.suffix == ".parquet" else _read_jsonl
        rows = list(reader(file, setting))
    except OSError as error:
        raise ConfigError(f"data file {file} can't be read: {error.strerror or error}", setting=setting) from error
    if not rows:
        raise ConfigError(f"data file {file} is empty", setting=setting)
    return rows


def _read_jsonl(file: Path, setting: str) -> Iterator[Row]:
    offset = 0
    with file.open("rb") as stream:
        # Bytes, not text: text files also end lines at U+2028, U+0085 and others that JSON strings may contain.
        for number, line in enumerate(stream, start=1):
            place = f"{file}, line {number}"
            start, body = offset, line
            offset += len(line)
            if number == 1:
                if (encoding := _WRONG_BOMS.get(line[:2])) is not None:
                    raise ConfigError(f"{place}: the file is {encoding}; convert it to UTF-8", setting=setting)
                body = line.removeprefix(codecs.BOM_UTF8)
                start += len(line) - len(body)
            if body.strip():
                yield Row(number, place, _parse(body, place, setting=setting, start=start))


def _parse(line: bytes, place: str, *, setting: str, start: int) -> dict[str, Any]:
    """`start` is the offset of `line` in the file."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        position = start + error.start
        raise ConfigError(
            f"{place}: not UTF-8 (byte 0x{line[error.start]:02x} at offset {position}); convert the file to UTF-8",
            setting=setting,
        ) from error
    try:
        fields = json.loads(text)
        # Half of a surrogate pair parses, but can neither be tokenized nor logged.
        if "\\ud" in text.lower():
            json.dumps(fields, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        raise ConfigError(f"{place}: not JSON: {error.msg} at column {error.colno}", setting=setting) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: not usable JSON: {error}", setting=setting) from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{place}: a JSON object is needed, got {type(fields).__name__}", setting=setting)
    return fields


def _read_parquet(file: Path, setting: str) -> Iterator[Row]:
    try:
        import pyarrow.lib
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            f"{file} needs pyarrow: pip install 'hybridasync[parquet]', or give a JSONL file", setting=setting
        ) from error
    try:
        records = pyarrow.parquet.read_table(file).to_pylist()
    except pyarrow.lib.ArrowException as error:
        raise ConfigError(f"{file} isn't a readable Parquet file: {error}", setting=setting) from error
    for number, fields in enumerate(records, start=1):
        # Checkpoints hold rows as JSON, so times and decimals of a table become text here, as JSONL would have them.
        yield Row(number, f"{file}, row {number}", json.loads(json.dumps(fields, default=str)))
