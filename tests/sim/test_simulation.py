"""The virtual world: no promise is broken in correct code, and wrong code is found."""

from __future__ import annotations

import logging

import pytest
from typer.testing import CliRunner

from hybridasync.sim.record import Bounds, Record
from hybridasync.sim.scenario import SCENARIOS, play
from hybridasync_cli.main import app

pytestmark = pytest.mark.slow

SEEDS = 24


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.getLogger("hybridasync.sidecar").setLevel(logging.CRITICAL)


def test_no_seed_breaks_a_promise() -> None:
    """Storms of faults, deaths, interruptions: every run finishes, pays its debts and trains on sound data."""
    broken = {seed: outcome.violations for seed in range(SEEDS) if (outcome := play(seed)).violations}
    assert not broken


@pytest.mark.parametrize("scenario", list(SCENARIOS))
def test_each_kind_of_fault_alone(scenario: str) -> None:
    """The scenarios of --scenario, some seeds of each."""
    assert [play(seed, scenario).violations for seed in range(3)] == [()] * 3


def test_the_same_seed_gives_the_same_history() -> None:
    """Played twice, also after other seeds: equal traces, so that a failing seed can be replayed."""
    first = play(3)
    play(4)
    assert play(3).trace == first.trace
    assert play(4).digest != first.digest


def test_the_command_prints_the_seed_and_exits_1() -> None:
    """--mutate in the command: exit 1, the seed to replay; without it exit 0; --list-mutations names them."""
    runner = CliRunner()
    assert runner.invoke(app, ["sim", "--seed", "2"]).exit_code == 0
    wrong = runner.invoke(app, ["sim", "--seeds", "8", "--mutate", "journal_forgotten"])
    assert wrong.exit_code == 1 and "hybridasync sim --seed " in " ".join(wrong.output.split())
    assert "resume_unshielded" in runner.invoke(app, ["sim", "--list-mutations"]).output
    refused = runner.invoke(app, ["sim", "--exhaustive", "--seeds", "5"])
    assert refused.exit_code == 2 and "it plays no seeds" in refused.output
    assert runner.invoke(app, ["sim", "--scenario", "nonsense"]).exit_code == 2


def test_a_group_that_vanishes_or_comes_twice_is_noticed() -> None:
    """What was admitted is trained, dropped, filtered or holds a slot; there are (S+1)*P slots and no more."""
    record = Record(Bounds(1, 1, 0, longest_pause_s=1.0, resume_budget_s=1.0))
    for state in ("in_flight", "complete", "trained"):
        record.group(1, state)
    assert record.violations == []
    record.group(1, "trained")
    record.group(2, "in_flight")
    record.group(3, "in_flight")
    assert record.violations == ["group 1 is trained after it was nothing", "2 groups in 1 slots"]
