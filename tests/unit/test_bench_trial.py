"""One trial of a benchmark around its process: how its end is judged, what is kept, what it used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import bench_kit
import pytest

from hybridasync.bench import trial
from hybridasync.bench.manifest import environment, flat
from hybridasync.bench.usage import Usage, mean
from hybridasync.observability.process import descendants, wait_ended

STEPS = "import json,pathlib,sys; d=pathlib.Path({run!r}); d.mkdir(); "
STEPS += "(d/'metrics.jsonl').write_text(''.join(json.dumps({{'step':n}})+'\\n' for n in range({steps}))); "
STEPS += "(d/'.token').write_text('secret'); sys.exit({code})"


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, steps: int, code: int) -> trial.Ended:
    """A trial whose process writes so many rows and exits; each attempt anew."""
    program = STEPS.format(run=str(tmp_path / "job" / "run"), steps=steps, code=code)
    monkeypatch.setattr(trial, "_command", lambda *_: [sys.executable, "-c", program])
    plan = bench_kit.plan()
    return trial.run_job(plan, plan.jobs()[0], tmp_path / "job")


def test_a_run_with_all_steps_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its outcome can be read back, and the token of its engines isn't evidence."""
    ended = run(tmp_path, monkeypatch, steps=4, code=0)
    assert (ended.status, ended.attempts) == ("complete", 1)
    assert trial.already_done(tmp_path / "job") == ended
    assert not (tmp_path / "job" / "run" / ".token").exists()


@pytest.mark.parametrize(("steps", "code"), [(2, 1), (3, 0)])
def test_a_run_that_ends_after_its_first_step_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, code: int
) -> None:
    """It isn't tried again: what happens in the middle of a run is a result."""
    ended = run(tmp_path, monkeypatch, steps=steps, code=code)
    assert (ended.status, ended.attempts) == ("failed", 1)
    assert f"exit code {code} after {steps} steps" in ended.reason


def test_r112_a_failed_start_is_tried_once_more_and_kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R112: before the first step it is the infrastructure; the first attempt lies beside the second."""
    ended = run(tmp_path, monkeypatch, steps=0, code=1)
    assert (ended.status, ended.attempts) == ("infrastructure", 2)
    aside = trial.already_done(tmp_path / "job-attempt-1")
    assert aside is not None
    assert aside.attempts == 1


def test_use_is_sampled_by_role() -> None:
    """This process is its own controller; percent and MiB are plausible, idle times included."""
    usage = Usage(os.getpid(), Path("nowhere"))
    usage.sample()
    until = time.process_time() + 0.1
    while time.process_time() < until:
        pass
    row = usage.sample()
    assert row["controller_cpu_percent"] > 1
    assert row["controller_rss_mib"] > 10
    assert row["controller_peak_mib"] >= row["controller_rss_mib"] * 0.5
    assert row["trainer_rss_mib"] == row["engine_rss_mib"] == 0
    assert mean([{"a": 1.0}, {"a": 3.0}, {}], "a") == 2
    assert mean([], "a") == 0


def test_a_manifest_has_settings_by_path_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that is one setting's value stays whole; variables that smell of a secret are left out."""
    assert flat({"seed": 1, "optimizer": {"lr": 2}, "prepare": {"args": {"a": 1}}}) == {
        "seed": 1,
        "optimizer.lr": 2,
        "prepare.args": {"a": 1},
    }
    monkeypatch.setenv("HYBRIDASYNC_TOKEN", "secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert environment()["OMP_NUM_THREADS"] == "1"
    assert "secret" not in json.dumps(environment())


def test_a_stopped_benchmark_ends_its_run_and_goes_on_later(tmp_path: Path) -> None:
    """SIGTERM ends the run under way; nothing is left running, and the same command goes on."""
    program = tmp_path / "slow.py"
    program.write_text(
        "import sys, time, pathlib\n"
        "from hybridasync.bench import publication, trial\n"
        "import bench_kit\n"
        "trial._command = lambda *_: [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        "publication.run(bench_kit.plan(), pathlib.Path(sys.argv[1]), tell=print)\n"
    )
    out = tmp_path / "out"
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(program), str(out)]
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, stderr=subprocess.PIPE) as process:
        log = out / "work" / "trials" / "00-zero_kl" / "output.log"
        usage = log.with_name("usage.jsonl")  # the first sample of it: the run is watched
        while not (usage.exists() and usage.stat().st_size) and process.poll() is None:
            time.sleep(0.05)
        members = descendants(process.pid)
        process.terminate()
        _, said = process.communicate(timeout=60)
    assert members
    assert wait_ended(members, 30) == set()
    assert b"goes on with what is missing" in said
    assert trial.already_done(log.parent) is None
