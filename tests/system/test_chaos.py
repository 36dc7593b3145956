"""Processes of a whole run killed and stopped at exact moments of a publication.

tests/tools/chaos_matrix.py has the whole matrix; here are some of its cells, other ones each time.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from tests.system.chaos import LEASE_S, PHASES, SIGNALS, WHO, Cell, World, strike
from tests.system.rollout_side import TOKEN
from tests.system.whole_run import ENVIRONMENT, HYBRIDASYNC

from hybridasync.observability.process import ProcessId
from hybridasync.protocol.debts import Debts
from hybridasync.transport.journal import JournalFile

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SEED = int(os.environ.get("CHAOS_SEED", str(time.time_ns() % 10**6)))
"""Chooses the cells; printed with a failure."""

HOUR_S = 3600.0


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with World(tmp_path_factory.mktemp("chaos")) as found:
        yield found


def some_cells() -> list[Cell]:
    """One for each process, and all phases and both signals among them."""
    rng = random.Random(SEED)
    phases, signals = rng.sample(list(PHASES), len(WHO)), [*SIGNALS, *SIGNALS, rng.choice(list(SIGNALS))]
    rng.shuffle(signals)
    return [Cell(who, phase, name) for who, phase, name in zip(WHO, phases, signals, strict=True)]


@pytest.mark.parametrize("cell", some_cells(), ids=str)
def test_c33_engines_serve_again_and_the_run_goes_on_exactly(world: World, cell: Cell) -> None:
    """No engine stays paused, nothing is left behind, and the run, resumed or not, trains on each prompt once."""
    verdict = strike(world, cell)
    print(f"CHAOS_SEED={SEED}\n{verdict}")
    assert not verdict.problem


def resume_rollout(world: World, *arguments: str) -> tuple[int, list[dict[str, object]]]:
    done = subprocess.run(
        [HYBRIDASYNC, "resume-rollout", "--run-dir", str(world.run_dir), "--json", *arguments],
        env=ENVIRONMENT | {"HYBRIDASYNC_TOKEN": TOKEN},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, json.loads(done.stdout)


def engine_urls(world: World) -> list[str]:
    return [engine[0] for engine in world.side.engines if engine is not None]


def paused(world: World) -> list[bool]:
    """Of each engine, by its own word."""
    return [httpx.get(f"{url}/ready", trust_env=False).status_code == 503 for url in engine_urls(world)]


def until(condition: Callable[[], bool], limit_s: float) -> float:
    """Seconds until it holds."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < limit_s
        time.sleep(0.02)
    return time.monotonic() - started


def kill_the_controller_while_all_are_paused(world: World) -> None:
    """With one engine's load held back, every engine is paused by the same publication."""
    hold = world.reach("paused")
    until(lambda: all(paused(world)), 10)
    os.kill(world.pid("rank0"), signal.SIGKILL)
    world.gate.release(hold)


def test_c33_engines_of_a_killed_controller_serve_again_by_their_lease_alone(world: World) -> None:
    """SIGKILL of rank 0 with both engines paused: their sidecars end the pause within lease_s + 1 s, by themselves."""
    world.trains(1)
    kill_the_controller_while_all_are_paused(world)
    took = until(lambda: not any(paused(world)), 60)
    print(f"{took:.2f} s")
    assert took <= LEASE_S + 1.0
    assert world.ended() == 1 and world.left_behind() == set()
    assert [node.status()["torn"] for node in world.side.nodes] == [True, True]


def test_r104_with_a_lease_of_an_hour_resume_rollout_ends_it_at_once(tmp_path: Path) -> None:
    """It leaves a live run alone, and ends what the dead one owes: exit 0, nothing is owed any more, engines serve."""
    with World(tmp_path, engines=1) as world:
        world.start(publication={"lease_s": HOUR_S})
        world.trains(1)
        hold = world.reach("paused")
        code, (row,) = resume_rollout(world)
        assert (code, row["done"]) == (3, [f"left: the run is alive (process {world.pid('rank0')})"])
        assert paused(world) == [True]
        os.kill(world.pid("rank0"), signal.SIGKILL)
        world.gate.release(hold)
        assert world.ended() == 1 and world.left_behind() == set()
        assert paused(world) == [True]
        code, (row,) = resume_rollout(world)
        assert (code, row["done"], paused(world)) == (0, ["ended"], [False])
        assert Debts.replay(JournalFile(world.run_dir / "journal.jsonl").replay()).open == ()


@pytest.mark.parametrize("name", list(SIGNALS))
def test_u01_a_sidecar_that_is_dead_or_hangs_when_its_end_is_due_is_replaced(tmp_path: Path, name: str) -> None:
    """Its engine can be neither resumed nor fenced through it: both are ended and started anew, and the run goes on."""
    with World(tmp_path, engines=0) as world:
        world.trains(1)
        before = {who: ProcessId.of(world.pid(who)) for who in ("sidecar", "engine")}
        journal = world.run_dir / "journal.jsonl"
        until(lambda: b"pause_incurred" in journal.read_bytes().rstrip().rpartition(b"\n")[2], 60)
        os.kill(before["sidecar"].pid, SIGNALS[name])
        until(lambda: not any(process.alive() for process in before.values()), 60)
        world.trains()
        events = [row["event"] for row in world.rows("events")]
        assert "fence_failed" in events and "engine_recovered" in events
        assert world.pid("engine") != before["engine"].pid
        world.check_exact()
