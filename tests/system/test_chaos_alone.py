"""Runs that are struck in ways of their own: another lease, another sidecar, an engine that somebody else started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from tests.system.chaos import SIGNALS, World
from tests.system.chaos_kit import paused, resume_rollout, until

from hybridasync.observability.process import ProcessId, child_environment
from hybridasync.protocol.debts import Debts
from hybridasync.transport.journal import JournalFile

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HOUR_S = 3600.0


def test_r104_with_a_lease_of_an_hour_resume_rollout_ends_it_at_once(tmp_path: Path) -> None:
    """It leaves a live run alone, and ends what the dead one owes: exit 0, nothing is owed any more, engines serve."""
    with World(tmp_path, engines=1) as world:
        # The command starts and looks while a load is held: longer than that load's usual deadline, now and then.
        world.start(publication={"lease_s": HOUR_S, "rollout_http_timeout": 60.0})
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
        # Who replaces it first is a race: the saga, which finds no way to fence, or recovery. Either ends what is owed.
        assert all(world.pid(who) != process.pid for who, process in before.items())
        world.check_settled()
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
