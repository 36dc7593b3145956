"""The mutation gate: each wrong version of the code is found within 500 seeds, or by the exhaustive search."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from hybridasync.sim.exhaustive import QUICK, SCOPES, Search
from hybridasync.sim.mutations import MUTATIONS, mutated
from hybridasync.sim.scenario import play

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SEEDS = 500

EXHAUSTIVE = {"no_tombstone": QUICK[0], "no_watermark": QUICK[0], "end_under_way_not_noted": QUICK[0]}
EXHAUSTIVE |= {"failed_resume_believed": QUICK[2]}

# Where to begin, so that the gate is quick: the scenario (None: all faults) and the first seed; then on to the last.
BEGIN: dict[str, tuple[str | None, int]] = {
    "verify_nothing": ("updates", 0),
    "torn_goes_on": ("updates", 0),
    "quarantine_routes": ("updates", 0),
    "answers_of_doubtful_engines": ("updates", 250),
    "rollback_skipped": ("controller", 0),
    "lease_ignored": ("controller", 0),
    "older_end_resumes_newer": ("network", 20),
    "readmit_late": ("engines", 300),
}


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.getLogger("hybridasync.sidecar").setLevel(logging.CRITICAL)


@pytest.mark.parametrize("name", [name for name in MUTATIONS if name not in EXHAUSTIVE])
def test_a_seed_finds_wrong_code(name: str, figure: Callable[[str], None]) -> None:
    """Pause before try, unshielded resume, abandoned pause and their kin: each breaks a promise that is checked."""
    scenario, first = BEGIN.get(name, (None, 0))
    with mutated(name):
        found = next((seed for seed in range(first, SEEDS) if play(seed, scenario).violations), None)
    assert found is not None
    figure(f"wrong code, {name}: found at seed {found}{f' of scenario {scenario}' if scenario else ''}")


@pytest.mark.parametrize("name", list(EXHAUSTIVE))
def test_the_search_finds_a_wrong_machine(name: str, figure: Callable[[str], None]) -> None:
    """R74, R76 to R79, R85: a machine without one of its precautions breaks a promise, and the search says how."""
    with mutated(name):
        found = Search(SCOPES[EXHAUSTIVE[name]]).run()
    assert found.violation is not None and found.trace
    figure(f"wrong code, {name}: found by the exhaustive search after {found.states} states")
