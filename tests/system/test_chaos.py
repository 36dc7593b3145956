"""Processes of a whole run killed and stopped at exact moments of a publication.

tests/tools/chaos_matrix.py has the whole matrix; here are some of its cells, other ones each time.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator

import pytest
from tests.system.chaos import END, LEASE_S, LOAD, PAUSE, WHO, World, strike
from tests.system.chaos_kit import SEED, paused, some_cell, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with World(tmp_path_factory.mktemp("chaos")) as found:
        yield found


def test_c06_no_request_reaches_an_engine_between_its_pause_and_its_end(world: World) -> None:
    """Over all publications of a run that goes well: pause, load, end, never twice, never without the others."""
    world.trains(15)
    letters = dict.fromkeys(PAUSE, "P") | dict.fromkeys(LOAD, "U") | dict.fromkeys(END, "E") | {"/generate": "g"}
    for engine in range(len(world.side.nodes)):
        # A pause holds from its answer on, and until its end is sent.
        history = "".join(
            letters.get(passed.path, "")
            for passed in tuple(world.gate.log)
            if passed.engine == engine and passed.answer == (passed.path in PAUSE)
        )
        assert re.fullmatch("(g*PUE)+g*(P|PU)?", history), history
        assert history.count("PUE") > 10 and history.count("g") > 10


@pytest.mark.parametrize("who", WHO)
def test_c33_engines_serve_again_and_the_run_goes_on_exactly(world: World, who: str) -> None:
    """No engine stays paused (R65, R110), nothing is left, and the run, resumed or not, trains on each prompt once."""
    verdict = strike(world, some_cell(who))
    print(f"CHAOS_SEED={SEED}\n{verdict}")
    assert not verdict.problem


def kill_the_controller_while_all_are_paused(world: World) -> None:
    """With one engine's load held back, every engine is paused by the same publication."""
    hold = world.reach("paused")
    until(lambda: all(paused(world)), 10)
    os.kill(world.pid("rank0"), signal.SIGKILL)
    world.let_go_on(hold)


def settled(world: World) -> list[str]:
    """Engines whose debts a start of the run settled, since the beginning."""
    return [str(row["engine"]) for row in world.rows("events") if row["event"] == "debts_settled"]


def test_c33_engines_of_a_killed_controller_serve_again_by_their_lease_alone(world: World) -> None:
    """SIGKILL of rank 0 with both engines paused: their sidecars end the pause within lease_s + 1 s, by themselves.

    What is owed all the same is settled at the start of the next run, before anything else (R104).
    """
    world.trains(1)
    before = len(settled(world))  # by what struck the run before
    kill_the_controller_while_all_are_paused(world)
    took = until(lambda: not any(paused(world)), 60)
    print(f"{took:.2f} s")
    assert took <= LEASE_S + 1.0
    assert world.ended() == 1 and world.left_behind() == set()
    assert [node.status()["torn"] for node in world.side.nodes] == [True, True]
    world.trains()
    assert sorted(settled(world)[before:]) == ["engine-0", "engine-1"]
    world.check_exact()
    world.check_settled()
