import codecs
import datetime
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybridasync.data.jsonl import read_rows
from hybridasync.errors import ConfigError

SETTING = "data.prompt_data"
# U+2028 and U+0085 raw inside a string; an emoji as a pair of escapes beside CJK; e + combining accent.
RECORDS = [
    '{"prompt": "a\u2028b\u0085c", "label": "1"}',
    '{"prompt": "\\ud83d\\ude00 \u6f22\u5b57", "label": "2"}',
    '{"prompt": "e\u0301", "label": "3"}',
]
TEXTS = ["a\u2028b\u0085c", "\U0001f600 \u6f22\u5b57", "e\u0301"]
ENCODINGS = {
    "plain": "\n".join(RECORDS).encode() + b"\n",
    "bom": codecs.BOM_UTF8 + "\n".join(RECORDS).encode() + b"\n",
    "crlf": "\r\n".join(RECORDS).encode() + b"\r\n",
    "no_final_newline": "\n".join(RECORDS).encode(),
    "blank_lines": "\n\n".join(RECORDS).encode() + b"\n \n",
}


def write(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_c52_unicode_line_ends_inside_strings_do_not_split_records(tmp_path: Path, encoding: str) -> None:
    """Three records stay three, and their texts the same to the byte, however the file is written."""
    rows = read_rows(write(tmp_path, ENCODINGS[encoding]), setting=SETTING)
    assert [row.fields["prompt"] for row in rows] == TEXTS


def test_c52_the_locale_changes_nothing(tmp_path: Path) -> None:
    """Under LC_ALL=C and without UTF-8 mode the texts are the same, and so are their ids."""
    path = write(tmp_path, ENCODINGS["bom"])
    program = (
        "import sys, json; from hybridasync.data.jsonl import read_rows\n"
        "print(json.dumps([r.fields['prompt'] for r in read_rows(sys.argv[1], setting='x')]))"
    )
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], env=environment, capture_output=True, check=True, timeout=60
    )
    assert json.loads(done.stdout) == TEXTS


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"prompt": "x', "not JSON"),
        (b"[1, 2]", "a JSON object is needed, got list"),
        (b'{"prompt": "\\ud83d"}', "surrogates not allowed"),
        (b"[" * 200_000, "not usable JSON"),
        (b'{"n": ' + b"9" * 5000 + b"}", "not usable JSON"),
    ],
    ids=["cut", "list", "half a surrogate pair", "nested", "huge number"],
)
def test_c52_a_malformed_line_is_named(tmp_path: Path, line: bytes, says: str) -> None:
    """The error says file and line 2."""
    path = write(tmp_path, b'{"prompt": "ok"}\n' + line + b'\n{"prompt": "ok"}\n')
    with pytest.raises(ConfigError, match=f"{path}, line 2: .*{says}"):
        read_rows(path, setting=SETTING)


def test_wrong_encoding_names_the_byte(tmp_path: Path) -> None:
    """A Latin-1 byte is reported with its offset in the file, a BOM counted."""
    path = write(tmp_path, codecs.BOM_UTF8 + b'{"a": 1}\n{"a": "\xe9"}\n')
    with pytest.raises(ConfigError, match=r"line 2: not UTF-8 \(byte 0xe9 at offset 19\)"):
        read_rows(path, setting=SETTING)
    assert path.read_bytes()[19] == 0xE9


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (codecs.BOM_UTF8, "is empty"),
        ('{"a": 1}'.encode("utf-16"), "the file is UTF-16"),
    ],
)
def test_files_without_records_are_refused(tmp_path: Path, content: bytes, says: str) -> None:
    """A file that holds nothing, or holds it in UTF-16, is the user's mistake."""
    with pytest.raises(ConfigError, match=says):
        read_rows(write(tmp_path, content), setting=SETTING)


def test_missing_file_and_directory_are_refused(tmp_path: Path) -> None:
    """The message names the setting and the path."""
    with pytest.raises(ConfigError, match=f"{SETTING}: data file .*none.jsonl doesn't exist"):
        read_rows(tmp_path / "none.jsonl", setting=SETTING)
    with pytest.raises(ConfigError, match="is a directory"):
        read_rows(tmp_path, setting=SETTING)


def test_parquet_rows_are_read(tmp_path: Path) -> None:
    """A Parquet file gives the same rows as the JSONL file, and a broken one is the user's mistake."""
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra parquet")
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra parquet")
    path = tmp_path / "data.parquet"
    days = [datetime.date(2026, 1, day) for day in (1, 2, 3)]
    parquet.write_table(pyarrow.table({"prompt": TEXTS, "label": ["1", "2", "3"], "day": days}), path)
    rows = read_rows(path, setting=SETTING)
    assert [row.fields["prompt"] for row in rows] == TEXTS
    assert rows[1].place == f"{path}, row 2"
    assert json.loads(json.dumps(rows[1].fields))["day"] == "2026-01-02"
    path.write_bytes(b"PAR1 not really")
    with pytest.raises(ConfigError, match="isn't a readable Parquet file"):
        read_rows(path, setting=SETTING)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra the message has the command."""
    path = tmp_path / "data.parquet"
    path.write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError, match=r"pip install 'hybridasync\[parquet\]'"):
        read_rows(path, setting=SETTING)
