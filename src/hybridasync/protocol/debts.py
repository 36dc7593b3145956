"""Who is owed a resume. Incurred before the pause is sent, struck off only when its undoing is acknowledged.

The ledger answers each change with the record that the journal must hold; `replay` builds the ledger from such records.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

INCURRED = "pause_incurred"
SETTLED = "pause_settled"


@dataclass(frozen=True, slots=True)
class Debt:
    """`engine` may be paused on behalf of `txn`, and has to be ended with the same id."""

    engine: str
    txn: str


class Debts:
    """The open debts, in the order in which they were incurred."""

    def __init__(self) -> None:
        self._open: dict[Debt, None] = {}

    @classmethod
    def replay(cls, records: Iterable[Mapping[str, Any]]) -> Self:
        """The debts that a journal leaves open. Records of other kinds, or damaged ones, are passed over."""
        ledger = cls()
        for record in records:
            engine, txn = record.get("engine"), record.get("txn")
            if isinstance(engine, str) and isinstance(txn, str):
                if record.get("event") == INCURRED:
                    ledger.incur(engine, txn)
                elif record.get("event") == SETTLED:
                    ledger.settle(engine, txn, "replayed")
        return ledger

    def incur(self, engine: str, txn: str) -> dict[str, str]:
        """To be called, and its record put on disk, before the first byte of the pause leaves."""
        self._open[Debt(engine, txn)] = None
        return {"event": INCURRED, "engine": engine, "txn": txn}

    def settle(self, engine: str, txn: str, how: str) -> dict[str, str]:
        """`how`: "ended", "fenced", or "not sent". Idempotent: compensation must never fail on its own bookkeeping."""
        self._open.pop(Debt(engine, txn), None)
        return {"event": SETTLED, "engine": engine, "txn": txn, "how": how}

    def owed(self, txn: str | None = None) -> frozenset[str]:
        """Engines with an open debt of `txn`; None: of any transaction."""
        return frozenset(debt.engine for debt in self._open if txn is None or debt.txn == txn)

    @property
    def open(self) -> tuple[Debt, ...]:
        return tuple(self._open)


def must_be_durable(record: Mapping[str, Any]) -> bool:
    """Whether nothing may go on without this record. A lost settlement costs one idempotent end at the next start."""
    return record.get("event") != SETTLED
