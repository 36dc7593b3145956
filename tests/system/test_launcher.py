"""runtime/launcher.py, agent.py and rank.py: torchrun jobs, real signals, and no process left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from job import PROGRAM, Job, config, wait_for
from tests.system.gate import free_port

from hybridasync.config.resolved import to_toml
from hybridasync.observability.process import ProcessId, descendants, wait_ended
from hybridasync.runtime import lock

pytestmark = pytest.mark.slow

WAIT = {"SCENARIO": "wait", "GRANDCHILD": "1"}


def test_failure_restarts_from_the_checkpoint_and_runs_to_its_end(tmp_path: Path) -> None:
    """A failed job starts again on the checkpoint that it left. At the end: exit code 0, output in logs/, lock free."""
    job = Job(tmp_path, environment={"SCENARIO": "fail-once"}, run={"max_restarts": 2})
    returned, errors = job.finish(90)
    assert (returned, errors) == (0, "error: the first start fails\nhybridasync: restart 1 of 2\n")
    logs = {path.name for path in (job.run_dir / "logs").iterdir()}
    assert {"torchrun.log", "worker-1.log", "worker-2.log"} <= logs
    assert lock.holder(job.run_dir) is None


def test_mistake_s_exit_code_survives_torchrun(tmp_path: Path) -> None:
    """A mistake that the controller finds is exit code 2 and one line, and isn't tried again."""
    job = Job(tmp_path, environment={"SCENARIO": "mistake"}, run={"max_restarts": 1})
    assert job.finish() == (2, "error: model.dtype: no such thing\n")


def test_c33_second_ctrl_c_spares_the_compensation(tmp_path: Path) -> None:
    """Ctrl-C twice, with a worker that obeys no signal: the compensation completes, and nothing is left afterwards."""
    job = Job(tmp_path, environment=WAIT)
    os.kill(job.wait_until_up()[2], signal.SIGSTOP)
    sent = time.monotonic()
    job.process.send_signal(signal.SIGINT)
    time.sleep(0.4)
    job.process.send_signal(signal.SIGINT)
    assert job.finish(30) == (130, "hybridasync: stopping already: engines are being resumed\n")
    assert (job.run_dir / "resumed").exists()
    assert time.monotonic() - sent < 30


@pytest.mark.parametrize("victim", ["launcher", "agent", "controller", "worker"])
def test_c33_kill_leaves_no_process(tmp_path: Path, victim: str) -> None:
    """SIGKILL of any process of the job ends all others in time; the controller compensates unless it was the one."""
    job = Job(tmp_path, environment=WAIT)
    pids = job.wait_until_up()
    agent = next(
        process.pid for process in job.members if process.pid != job.process.pid and _parent(process) == job.process.pid
    )
    target = {"launcher": job.process.pid, "agent": agent, "controller": pids[0], "worker": pids[2]}[victim]
    sent = time.monotonic()
    os.kill(target, signal.SIGKILL)
    returned, errors = job.finish(60)
    assert time.monotonic() - sent < 30  # which torchrun alone would wait; some seconds on an idle machine
    assert returned == {"launcher": -signal.SIGKILL}.get(victim, 1)
    assert (job.run_dir / "resumed").exists() == (victim != "controller")
    # Told by the controller, or by the launcher where torchrun stops a controller that hasn't seen it yet.
    said = {
        "worker": ("error: worker rank 2 is lost", "worker rank 2 ended with SIGKILL"),
        "controller": ("the controller ended without a word",),
    }
    assert any(words in errors for words in said.get(victim, ("",)))


def test_c34_worker_that_ends_before_it_joins(tmp_path: Path) -> None:
    """A rank that exits with 0, which torchrun doesn't mind, is named when start_timeout_s is over."""
    job = Job(tmp_path, environment={"ABSENT": "2"}, network={"start_timeout_s": 12.0})
    returned, errors = job.finish()
    assert returned == 1
    assert "worker rank 2 is lost: didn't start within 12 s (missing ranks: 2)" in errors


@pytest.mark.parametrize(("code", "end"), [(7, "exit code 7"), (-signal.SIGKILL, "SIGKILL")])
def test_c34_worker_that_fails_before_it_joins(tmp_path: Path, code: int, end: str) -> None:
    """torchrun notices, and stops a controller that doesn't know why: the launcher names the worker and its end."""
    job = Job(tmp_path, environment={"ABSENT": "2", "ABSENT_CODE": str(int(code))})
    returned, errors = job.finish()
    assert returned == 1
    assert f"worker rank 2 ended with {end}, and torchrun stopped the job" in errors


def test_c33_sigterm_and_mistakes_found_before_anything_starts(tmp_path: Path) -> None:
    """A live run's directory and a port that is taken name themselves; the live run ends by SIGTERM alone."""
    first = Job(tmp_path, environment={"SCENARIO": "wait"})
    pids = first.wait_until_up()
    second = Job(tmp_path)
    returned, errors = second.finish(30)
    assert returned != 0 and f"belongs to a live run (process {pids[0]}" in errors
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        (tmp_path / "third").mkdir()
        returned, errors = Job(tmp_path / "third", network={"master_port": port}).finish(30)
    assert returned != 0 and f"network.master_port: can't listen on 127.0.0.1:{port}" in errors
    assert first.process.poll() is None
    first.process.send_signal(signal.SIGTERM)
    assert first.finish(30)[0] == 143
    assert (first.run_dir / "resumed").exists()


def test_two_agents_with_static_rendezvous(tmp_path: Path) -> None:
    """2 + 1 ranks under two torchruns started by hand: node 0 has the controller, and local ranks are right on both."""
    port = free_port()
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(to_toml(config()))
    run_dir = tmp_path / "run"
    agents = []
    for node, ranks in ((0, 2), (1, 1)):
        place = ["--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", str(ranks)]
        meeting = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
        job = [PROGRAM, str(recipe), "--run-dir", str(run_dir)]
        agents.append(
            subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *place, *meeting, *job],
                env=os.environ | {"SCENARIO": "local-ranks"},
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    wait_for((run_dir / "pids").exists, 90)
    members = {ProcessId.of(agent.pid) for agent in agents} | {p for agent in agents for p in descendants(agent.pid)}
    outcomes = [(agent.communicate(timeout=60)[1], agent.returncode) for agent in agents]
    assert [code for _, code in outcomes] == [0, 0], outcomes
    assert json.loads((run_dir / "local_ranks").read_text()) == ["0", "0"]
    assert not wait_ended(members, 5)


def _parent(process: ProcessId) -> int:
    found = process.find()
    return found.ppid() if found else 0
