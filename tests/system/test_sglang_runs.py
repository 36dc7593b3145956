"""Whole runs with real SGLang servers, struck while they train: by the rules of publication the run goes on.

A quarter of an hour on two cores, where servers that start beside a run take a minute or two each: so they run only
when asked for, LONG=1 bash tests/sglang.sh -k sglang_runs
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.system.whole_run import ENVIRONMENT, HYBRIDASYNC, overrides, rows

from hybridasync.observability.process import descendants, wait_ended

PYTHON = os.environ.get("HYBRIDASYNC_SGLANG_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.sglang,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not PYTHON, reason="no real SGLang: set HYBRIDASYNC_SGLANG_PYTHON (tests/run.sh does)"),
    pytest.mark.skipif(not os.environ.get("LONG"), reason="takes a quarter of an hour: set LONG=1"),
]
START_S, RECOVERY_S, STEP_S, ENDS_S = 600.0, 600.0, 180.0, 90.0
STOPPED_S = 10.0

SETTINGS = {
    "engine.python": PYTHON,
    "engine.num_engines": 2,
    "engine.use_fault_tolerance": True,
    "engine.health_interval_s": 1.0,
    "rollout.num_rollout": 100_000,  # never reached
    "rollout.rollout_batch_size": 8,
    "rollout.n_samples_per_prompt": 8,
    "rollout.max_retries": 5,
    "rollout.request_timeout_s": 120.0,
    "warm_start.steps": 20,
    "eval.eval_interval": "none",
    "eval.eval_at_end": False,
    "checkpoint.save_interval": "none",
    "observability.tensorboard": False,
    "algorithm.filter_zero_variance": False,
    "observability.samples_per_step": 1000,
}


class Training:
    """`hybridasync train quickstart-sglang` in the background."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self.run_dir = folder / "run"
        given = {name: value for name, value in (SETTINGS | settings).items() if value != "none"}
        nothing = [f"{name}=none" for name, value in SETTINGS.items() if value == "none"]
        arguments = [part for name in nothing for part in ("--set", name)] + overrides(given)
        with (folder / "output.txt").open("wb") as output:
            self.process = subprocess.Popen(
                [HYBRIDASYNC, "train", "quickstart-sglang", "--run-dir", str(self.run_dir), *arguments],
                cwd=folder,
                env=ENVIRONMENT,
                stdout=output,
                stderr=output,
            )
        self.output = folder / "output.txt"

    def rows(self, name: str) -> list[dict[str, Any]]:
        return rows(self.run_dir / f"{name}.jsonl")

    def events(self, name: str) -> list[dict[str, Any]]:
        return [row for row in self.rows("events") if row["event"] == name]

    def steps(self) -> int:
        return len(self.rows("metrics"))

    def until(self, condition: Callable[[], bool], limit_s: float, what: str) -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            ended = self.process.poll()
            if ended is not None or time.monotonic() > deadline:
                events = "\n".join(json.dumps(row) for row in self.rows("events")[-15:])
                pytest.fail(f"{what}: {ended=}\n{self.output.read_text()[-2000:]}\n{events}")
            time.sleep(0.1)

    def more_steps(self, count: int) -> None:
        wanted = self.steps() + count
        self.until(lambda: self.steps() >= wanted, STEP_S, f"{count} more steps")

    def server(self, index: int) -> psutil.Process:
        """The HTTP process of an engine: it was started by the sidecar of that name."""
        for member in descendants(self.process.pid):
            with suppress(psutil.Error):
                process = psutil.Process(member.pid)
                parent = process.parent()
                if "sglang.launch_server" in process.cmdline() and parent and f"engine-{index}" in parent.cmdline():
                    return process
        pytest.fail(f"no server of engine-{index}")

    def recovered(self) -> int:
        return len(self.events("engine_recovered"))

    def check_samples(self) -> None:
        """What was trained on came from published versions alone, none newer than its step, none too old."""
        rows = self.rows("samples")
        assert rows
        for sample in rows:
            oldest, newest = sample["versions"]
            assert 0 <= oldest <= newest <= sample["step"]
            assert sample["step"] - oldest <= 1
        assert [row["step"] for row in self.rows("metrics")] == list(range(self.steps()))

    def throughput(self, begin: str, end: str) -> float:
        """Response tokens a second, of the steps that ended between two moments; median."""
        inside = [
            row["response_tok_s"] for row in self.rows("metrics") if moment(begin) < moment(row["time"]) < moment(end)
        ]
        return statistics.median(inside) if inside else 0.0


def moment(text: str) -> datetime:
    return datetime.fromisoformat(text)


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    run = Training(tmp_path)
    try:
        run.until(lambda: run.steps() >= 2, START_S, "two steps")
        yield run
    finally:
        members = descendants(run.process.pid)
        run.process.send_signal(signal.SIGTERM)
        try:
            run.process.wait(ENDS_S)
        finally:
            run.process.kill()
        assert not wait_ended(members, 30)


def test_two_servers_stopped_and_killed_while_they_train(training: Training) -> None:
    """SIGSTOP for 10 s, SIGKILL of the HTTP process, SIGKILL of the scheduler: steps are completed on the other server.

    What was killed comes back at the current version; nothing of an unverified server is trained on.
    """
    frozen = training.server(0)
    group = [frozen, *frozen.children(recursive=True)]
    for process in group:
        process.suspend()
    time.sleep(STOPPED_S)
    for process in group:
        with suppress(psutil.Error):
            process.resume()
    training.until(
        lambda: training.recovered() == len(training.events("engine_recovery")), RECOVERY_S, "both servers are back"
    )
    training.more_steps(2)

    before = training.recovered()
    began = datetime.now().astimezone().isoformat()
    training.server(1).kill()
    training.more_steps(2)
    assert training.recovered() == before, "the step was to be completed on the other server"
    training.until(lambda: training.recovered() > before, RECOVERY_S, "the killed server is back")
    back = training.events("engine_recovered")[-1]
    assert back["engine"] == "engine-1"
    training.more_steps(4)
    now = datetime.now().astimezone().isoformat()
    published = [row for row in training.events("publication.completed") if moment(row["time"]) > moment(back["time"])]
    assert set(published[-1]["engines"]) == {"engine-0", "engine-1"}
    assert back["version"] >= training.events("engine_recovery")[-1].get("version", 0)
    print(
        f"response tokens a second with one server: {training.throughput(began, back['time']):.0f}, "
        f"with both again: {training.throughput(back['time'], now):.0f}; it was away for {back['took_s']:.0f} s"
    )

    before = training.recovered()
    scheduler = next(p for p in training.server(0).children(recursive=True) if "scheduler" in " ".join(p.cmdline()))
    scheduler.kill()
    training.until(lambda: training.recovered() > before, RECOVERY_S, "the server is back after its scheduler died")
    training.more_steps(2)
    training.check_samples()


@pytest.mark.parametrize("mode", ["hybrid", "fully_async"])
@pytest.mark.parametrize("transport", ["collective", "tensor"])
def test_weights_are_sent_in_both_modes(tmp_path: Path, mode: str, transport: str) -> None:
    """A short run to its end: every publication verified, log-probs of the trainer and the server agree to 1e-4."""
    short = {
        "mode": mode,
        "publication.transport": transport,
        "publication.bucket_mib": 0.5,
        "engine.num_engines": 1,
        "engine.use_fault_tolerance": False,
        "rollout.num_rollout": 3,
        "rollout.max_staleness": 1,
        "eval.eval_interval": 3,
        "eval.max_prompts": 16,
        "optimizer.lr_warmup_steps": 0,
    }
    run = Training(tmp_path, **short)
    assert run.process.wait(START_S) == 0, run.output.read_text()
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["publications"] == 4
    assert summary["logprob_gap_max"] <= 1e-4
    run.check_samples()
