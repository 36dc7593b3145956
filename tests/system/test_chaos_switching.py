"""Processes of a whole run killed and stopped where engines switch to new weights, and are never paused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.system.chaos import SWITCHING, WHO, World, strike
from tests.system.chaos_kit import SEED, some_cell

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def switching(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with World(tmp_path_factory.mktemp("switching"), staged=True) as found:
        yield found


@pytest.mark.parametrize("who", WHO)
def test_c33_a_switch_that_is_struck_leaves_no_engine_in_doubt(switching: World, who: str) -> None:
    """At the staging, before the switch, while its answer is on the way."""
    verdict = strike(switching, some_cell(who, SWITCHING))
    print(f"CHAOS_SEED={SEED}\n{verdict}")
    assert not verdict.problem
