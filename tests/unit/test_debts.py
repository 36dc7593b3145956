"""Debts: law 3, debt before act."""

from __future__ import annotations

import json

from hybridasync.protocol.debts import Debt, Debts, must_be_durable

TXN = "ha1:" + "a" * 32 + ":"


def test_a_debt_stays_until_it_is_settled() -> None:
    """Two engines of one transaction: settling one leaves the other owed."""
    debts = Debts()
    debts.incur("engine-0", TXN + "0")
    debts.incur("engine-1", TXN + "0")
    assert debts.owed(TXN + "0") == {"engine-0", "engine-1"}
    debts.settle("engine-0", TXN + "0", "ended")
    assert debts.owed(TXN + "0") == debts.owed() == {"engine-1"}
    assert debts.owed(TXN + "1") == frozenset()


def test_settling_is_idempotent() -> None:
    """Compensation never fails on its own bookkeeping."""
    debts = Debts()
    debts.settle("engine-0", TXN + "0", "ended")
    debts.incur("engine-0", TXN + "0")
    debts.settle("engine-0", TXN + "0", "ended")
    debts.settle("engine-0", TXN + "0", "fenced")
    assert debts.open == ()


def test_a_newer_transaction_is_a_debt_of_its_own() -> None:
    """Settling transaction 1 doesn't strike off transaction 0 of the same engine."""
    debts = Debts()
    debts.incur("engine-0", TXN + "0")
    debts.incur("engine-0", TXN + "1")
    debts.settle("engine-0", TXN + "1", "ended")
    assert debts.open == (Debt("engine-0", TXN + "0"),)


def test_the_journal_of_a_killed_controller_gives_back_what_it_owed() -> None:
    """Replayed through JSON: exactly the open debts, oldest first; strange records are passed over."""
    debts = Debts()
    records = [
        debts.incur("engine-0", TXN + "0"),
        debts.incur("engine-1", TXN + "0"),
        debts.settle("engine-0", TXN + "0", "ended"),
        debts.incur("engine-0", TXN + "1"),
    ]
    read = [{**json.loads(json.dumps(record)), "at": 1.0} for record in records]
    strange: list[dict[str, object]] = [{}, {"event": "pause_incurred"}, {"event": "x", "engine": "e", "txn": "t"}]
    assert Debts.replay([*strange, *read]).open == debts.open
    assert debts.open == (Debt("engine-1", TXN + "0"), Debt("engine-0", TXN + "1"))


def test_only_a_settlement_may_be_lost() -> None:
    """A debt that isn't on disk must not be incurred; a lost settlement costs an idempotent end."""
    debts = Debts()
    assert must_be_durable(debts.incur("e", TXN + "0"))
    assert not must_be_durable(debts.settle("e", TXN + "0", "ended"))
