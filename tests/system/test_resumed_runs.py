"""Whole runs that are killed and resumed, and one that goes on from another's checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.system.whole_run import rows
from tests.tools.killed_runs import command, run, trained, wait_for_the_end_of

pytestmark = pytest.mark.slow

TOOL = Path(__file__).parents[1] / "tools" / "killed_runs.py"


def metrics(directory: Path) -> list[dict[str, Any]]:
    return rows(directory / "metrics.jsonl")


def test_r116_a_killed_run_is_trained_on_the_same_prompts(tmp_path: Path) -> None:
    """R116, R115, C28: a SIGKILL at a random moment: prompts, sizes, versions and lags as without them."""
    chosen = ["--runs", "1", "--kills", "1", "--seed", "3", "--folder", str(tmp_path / "killed")]
    smaller = ["--set", "rollout.num_rollout=4"]
    done = subprocess.run(
        [sys.executable, str(TOOL), *chosen, *smaller], capture_output=True, text=True, check=False, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 runs equal" in done.stdout


def test_c53_a_run_killed_before_its_first_checkpoint_records_each_step_once(tmp_path: Path) -> None:
    """C53, R116: steps that were on record when the run died are made again, and stand there once, samples included."""
    directory, log = tmp_path / "run", tmp_path / "log"
    steps = 16  # so many that it isn't over before a busy machine has killed it
    settings = [f"rollout.num_rollout={steps}", "checkpoint.save_interval=100"]
    with log.open("ab") as output:
        killed = subprocess.Popen(
            command("quickstart-fast", directory, settings, resume=False), stdout=output, stderr=output
        )
        try:
            deadline = time.monotonic() + 240
            while time.monotonic() < deadline and killed.poll() is None:
                if (directory / "metrics.jsonl").is_file() and metrics(directory):
                    break
                time.sleep(0.02)
        finally:
            killed.kill()
            killed.wait()
    wait_for_the_end_of(directory)
    assert 0 < len(metrics(directory)) < steps, log.read_text()
    run(command("quickstart-fast", directory, settings, resume=True), log)
    assert [row["step"] for row in metrics(directory)] == list(range(steps))
    found = trained(directory)
    assert found.per_step == dict.fromkeys(range(steps), 24)
    assert sorted(found.prompts) == list(range(6 * steps))


MADE = """
import random

def prompt(index, seed):
    digits = "".join(random.Random(f"{seed}:{index}").choices("0123456789", k=4))
    return {"prompt": f"sort {digits}=", "label": "".join(sorted(digits))}
"""


def test_r39_prompts_of_a_function_are_trained_on_exactly_once_too(tmp_path: Path) -> None:
    """R39, R116: no data set, no length asked for; killed and resumed, the run has the same prompts and versions."""
    (tmp_path / "made.py").write_text(MADE)
    chosen = ["--runs", "1", "--kills", "1", "--seed", "7", "--folder", str(tmp_path / "killed")]
    settings = [
        "rollout.rollout_global_dataset=false",
        "data.prompt_function=made:prompt",
        "data.prompt_data=none",
        "rollout.num_rollout=4",
        "checkpoint.save_interval=1",
    ]
    flags = [flag for setting in settings for flag in ("--set", setting)]
    done = subprocess.run(
        [sys.executable, str(TOOL), *chosen, *flags],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 runs equal" in done.stdout and ": 1 kills" in done.stdout
    rows = [json.loads(line) for line in (tmp_path / "killed" / "run-000" / "samples.jsonl").read_text().splitlines()]
    assert {row["uid"] for row in rows} == set(range(24))
    assert {row["source"] for row in rows} == {"made:prompt"}


def test_r30_kept_weights_and_a_start_from_another_runs_checkpoint(tmp_path: Path) -> None:
    """R30, R34: interval 2 with keep_old_actor and a KL penalty trains; another run goes on at its last step."""
    first = [
        "rollout.num_rollout=2",
        "rollout.max_staleness=0",
        "publication.update_weights_interval=2",
        "algorithm.use_tis=false",
        "algorithm.keep_old_actor=true",
        "algorithm.kl_coef=0.05",
        "model.ref_load={prepared}/model",
    ]
    run(command("quickstart-fast", tmp_path / "first", first, resume=False), tmp_path / "first.log")
    rows = metrics(tmp_path / "first")
    assert [row["ratio_max"] == 1.0 for row in rows] == [True, False]
    assert [row["has_reference_forward"] for row in rows] == [1.0, 1.0]
    second = ["rollout.num_rollout=3", f"model.load={tmp_path / 'first' / 'checkpoints'}"]
    run(command("quickstart-fast", tmp_path / "second", second, resume=False), tmp_path / "second.log")
    assert [(row["step"], row["weight_version"]) for row in metrics(tmp_path / "second")] == [(2, 3.0)]
