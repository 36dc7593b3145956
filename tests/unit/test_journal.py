"""The journal file: on disk before it returns, and readable after any crash."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hybridasync.protocol.debts import Debts
from hybridasync.transport.journal import JournalError, JournalFile

TXN = "ha1:" + "a" * 32 + ":0"


def test_records_come_back_in_order_with_their_time(tmp_path: Path) -> None:
    """Also from a second journal of the same file."""
    journal = JournalFile(tmp_path / "journal.jsonl")
    assert journal.replay() == []
    for number in range(3):
        journal.append({"number": number})
    records = JournalFile(tmp_path / "journal.jsonl").replay()
    assert [record["number"] for record in records] == [0, 1, 2]
    assert all(record["at"] > 1.6e9 for record in records)


@pytest.mark.parametrize("cut", [1, 5, 12])
def test_a_torn_last_line_costs_that_record_alone(tmp_path: Path, cut: int) -> None:
    """The records before it survive, and those that are appended later too."""
    path = tmp_path / "journal.jsonl"
    journal = JournalFile(path)
    journal.append({"number": 0})
    journal.append({"number": 1})
    journal.close()
    path.write_bytes(path.read_bytes()[:-cut])
    again = JournalFile(path)
    again.append({"number": 2})
    kept = [record["number"] for record in again.replay()]
    assert kept == ([0, 1, 2] if cut == 1 else [0, 2])


def test_a_debt_is_synced_before_append_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fsync comes after each was written, and once for the new file's folder; a settlement waits for no disk."""
    path = tmp_path / "journal.jsonl"
    seen: list[bytes] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: seen.append(path.read_bytes()))
    journal = JournalFile(path)
    debts = Debts()
    journal.append(debts.incur("engine-0", TXN))
    journal.append(debts.settle("engine-0", TXN, "ended"))
    assert [content.count(b"\n") for content in seen] == [0, 1]
    journal.append(debts.incur("engine-0", TXN))
    assert [content.count(b"\n") for content in seen] == [0, 1, 3]


def test_a_debt_that_cannot_be_recorded_is_refused_a_settlement_is_not(tmp_path: Path) -> None:
    """With a full disk no pause may be sent, but no resume may be held up either."""
    full = JournalFile(Path("/dev/full"))
    debts = Debts()
    with pytest.raises(JournalError, match="/dev/full"):
        full.append(debts.incur("engine-0", TXN))
    full.append(debts.settle("engine-0", TXN, "ended"))


KILLED = """
import os, signal, sys
from pathlib import Path
from hybridasync.protocol.debts import Debts
from hybridasync.transport.journal import JournalFile
journal = JournalFile(Path(sys.argv[1]))
journal.append(Debts().incur("engine-0", sys.argv[2]))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_its_debt_behind(tmp_path: Path) -> None:
    """SIGKILL right after `append`: the next start finds who is owed a resume."""
    path = tmp_path / "journal.jsonl"
    killed = subprocess.run([sys.executable, "-c", KILLED, str(path), TXN], timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert Debts.replay(JournalFile(path).replay()).owed() == {"engine-0"}
