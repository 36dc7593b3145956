"""Processes of a whole run killed and stopped at exact moments of a publication.

tests/tools/chaos_matrix.py has the whole matrix; here are some of its cells, other ones each time.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from tests.system.chaos import END, LEASE_S, LOAD, PAUSE, PHASES, SIGNALS, SWITCHING, WHO, Cell, World, strike
from tests.system.gate import Point
from tests.system.rollout_side import TOKEN
from tests.system.whole_run import ENVIRONMENT, HYBRIDASYNC

from hybridasync.observability.process import ProcessId, child_environment
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


@pytest.fixture(scope="module")
def switching(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with World(tmp_path_factory.mktemp("switching"), staged=True) as found:
        yield found


def some_cell(who: str, among: Mapping[str, Point] = PHASES) -> Cell:
    """All phases (of a pause: but one) and both signals are among those of one seed."""
    rng = random.Random(SEED)
    phases = rng.sample([*among] * (1 if len(among) >= len(WHO) else 2), len(WHO))
    signals = [*SIGNALS, *SIGNALS, rng.choice(list(SIGNALS))]
    rng.shuffle(signals)
    index = WHO.index(who)
    return Cell(who, phases[index], signals[index])


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


@pytest.mark.parametrize("who", WHO)
def test_c33_a_switch_that_is_struck_leaves_no_engine_in_doubt(switching: World, who: str) -> None:
    """The same where nothing is paused: at the staging, before the switch, while its answer is on the way."""
    verdict = strike(switching, some_cell(who, SWITCHING))
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
        world.let_go_on(hold)
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
        assert "engine_recovered" in events
        # Dead before the pause reached it, it owes nothing and is replaced all the same.
        assert ("fence_failed" in events) == ("resume_failed" in events)
        assert world.pid("engine") != before["engine"].pid
        world.check_exact()


def test_c33_an_attached_engine_is_never_left_paused(tmp_path: Path) -> None:
    """It outlives its sidecar, whose successor resumes it, and then the controller, whose dying sidecar resumes it."""
    with World(tmp_path, engines=0) as world, an_engine(world) as url:
        world.start(engine={"kind": "attach", "url": [url]})
        world.trains(1)
        world.reach("paused")
        os.kill(world.pid("sidecar"), signal.SIGKILL)
        world.trains()
        world.check_exact()
        world.reach("paused")
        os.kill(world.pid("rank0"), signal.SIGKILL)
        until(lambda: httpx.get(f"{url}/ready", trust_env=False).status_code == 200, 10)
        assert world.ended() == 1 and world.left_behind() == set()
        assert httpx.get(f"{url}/ready", trust_env=False).status_code == 200


@contextmanager
def an_engine(world: World) -> Iterator[str]:
    """One that somebody else started."""
    announce = world.folder / "engine.json"
    command = [sys.executable, "-m", "hybridasync.engine", "--model-path", str(world.side.task / "model")]
    with subprocess.Popen(
        [*command, "--device", "cpu", "--port", "0", "--announce", str(announce)], env=child_environment()
    ) as process:
        try:
            until(announce.exists, 60)
            yield json.loads(announce.read_text())["url"]
        finally:
            process.kill()


def test_c01_c_an_end_that_nobody_acknowledges_stops_the_run_with_code_3(tmp_path: Path) -> None:
    """R65, R99: a sidecar elsewhere hangs with its engine paused, and can't be fenced. The last line is the way out."""
    with World(tmp_path, engines=1) as world:
        world.start(publication={"resume_budget_s": 3.0, "rollout_http_timeout": 2.0})
        world.trains(1)
        hold, sidecar = world.reach("paused"), world.pid("sidecar")
        os.kill(sidecar, signal.SIGSTOP)
        world.let_go_on(hold)
        assert (world.ended(), world.left_behind()) == (3, set())
        *_, what, way_out = world.output.read_text().strip().splitlines()
        assert what == "error: Failed to resume rollout on: engine-0"
        assert way_out.endswith(f"hybridasync resume-rollout --run-dir {world.run_dir}")
        assert paused(world) == [True]
        os.kill(sidecar, signal.SIGCONT)  # it finds the fence that it was asked for, too
        assert resume_rollout(world)[0] == 0
        world.side.nodes[0].wait_ready()
        world.trains()
        world.check_exact()
