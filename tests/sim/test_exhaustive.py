"""The exhaustive search of the transaction protocol: it visits all of its space, and finds wrong machines."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from typer.testing import CliRunner

from hybridasync.protocol.transactions import TransactionMachine
from hybridasync.sim.exhaustive import QUICK, SCOPES, Search
from hybridasync.sim.machine_table import MachineTable
from hybridasync.sim.protocol_state import Limits, Scope
from hybridasync_cli.main import app

pytestmark = pytest.mark.slow

AT_LEAST = dict(zip(QUICK, (70_000, 45_000, 150_000), strict=True))
"""A search that visits far fewer has lost a kind of event."""


@pytest.mark.parametrize("name", QUICK)
def test_no_order_of_events_breaks_the_protocol(name: str, figure: Callable[[str], None]) -> None:
    """R71 to R97, C01: lost, late, doubled messages, clients that leave, deaths of either side: no state is wrong."""
    found = Search(SCOPES[name]).run()
    figure(f"exhaustive search, {name}: {found.states} states, {found.transitions} transitions, 0 violations")
    assert found.violation is None, found.trace
    assert found.states > AT_LEAST[name]


def test_the_table_answers_as_the_machine_does() -> None:
    """A history played on the machine itself and on the table: equal answers, though the table forgets nothing else."""
    first, second = (f"ha1:{'a' * 32}:{number}" for number in range(2))
    machine, table, state = TransactionMachine(), MachineTable(), 0
    events = [("pause", first), ("ready", first), ("end", second), ("pause sent", first), ("rolled back", first)]
    answers = []
    for event, txn in events:
        state, outcome = table.move(state, event, txn)
        answers.append(outcome)
    assert answers == ["check", "send_pause", "done", "send_resume", "no"]
    machine.request_pause(first, 0.0)
    machine.checked(first, True)
    machine.request_end(second, 0.0)
    machine.pause_sent(first, 0.0, 1.0)
    machine.rolled_back(first)
    assert table.held(state) == (machine.state, None)
    assert table.move(state, "pause", first)[1] == table.move(state, "pause", second)[1] == "ended"


def test_the_command_says_what_leads_to_a_violation() -> None:
    """--exhaustive with a wrong machine: exit 1, the number of states, and the events that lead to it."""
    wrong = CliRunner().invoke(app, ["sim", "--exhaustive", "--mutate", "no_tombstone"])
    assert wrong.exit_code == 1
    assert "states in all: 9 scopes with a violation" in wrong.output
    assert "pause 0 given up" in wrong.output


def test_a_fence_is_an_end_too() -> None:
    """U1: a machine that forgets what was fenced lets a late pause freeze the new engine; the search says how."""
    search = Search(Scope(((0, 0),), Limits()))
    move = search.table.move
    search.table.move = lambda state, event, txn: (state, "done") if event == "end" else move(state, event, txn)  # type: ignore[method-assign]
    assert search.run().violation is not None
