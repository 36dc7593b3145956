"""Whole runs that are killed: nothing is left of them, the end says what died, and --resume loses no prompt."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from whole_run import ENVIRONMENT, HYBRIDASYNC, overrides, rows

from hybridasync.observability.process import ProcessId, descendants, wait_ended
from hybridasync.transport.weights import _places

pytestmark = pytest.mark.slow

BATCH = 4
SETTINGS = {
    "prepare.args.digits": 3,
    "prepare.args.warm_start_rows": 512,
    "warm_start.steps": 10,
    "warm_start.batch_size": 32,
    "rollout.num_rollout": 500,  # never reached
    "rollout.rollout_batch_size": BATCH,
    "rollout.n_samples_per_prompt": 4,
    "algorithm.filter_zero_variance": False,  # so that samples.jsonl has every prompt that was taken
    "observability.samples_per_step": BATCH,
    "checkpoint.save_interval": 1,
    "checkpoint.export_hf": False,
    "eval.max_prompts": 4,
}
PROGRAMS = {
    "agent": ("hybridasync.runtime.agent", None),
    "controller": ("hybridasync.runtime.rank", "0"),
    "worker": ("hybridasync.runtime.rank", "1"),
    "sidecar": ("hybridasync.sidecar", None),
    "engine": ("hybridasync.engine", None),
}
"""Module and RANK in the environment."""

CODES = {"failed": 1, "interrupted": 143}
NOTHING_LEFT_AFTER_S = 30.0
SEED = int(os.environ.get("KILL_SEED", str(time.time_ns() % 10**6)))
"""Chooses when each run is killed; printed with a failure."""


class Train:
    """`hybridasync train` in the background, in `folder / run`."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.run_dir = folder / "run"
        self.started = time.time()
        self.newest = ""  # weights that were written, when looked last
        self.process = subprocess.Popen(
            [HYBRIDASYNC, "train", *arguments],
            cwd=folder,
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.launcher = ProcessId.of(self.process.pid)

    @classmethod
    def new(cls, folder: Path) -> Train:
        return cls(folder, "quickstart-fast", "--run-dir", str(folder / "run"), *overrides(SETTINGS))

    @classmethod
    def resumed(cls, folder: Path, steps: int) -> Train:
        return cls(folder, "--resume", str(folder / "run"), "--num-rollout", str(steps))

    def reach(self, phase: str, who: str, limit_s: float = 120) -> int:
        """Wait until the phase, and until the process is there; answers its id."""
        deadline = time.monotonic() + limit_s
        while not (PHASES[phase](self) and (pid := self.pid(who))):
            if self.process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"{phase} and {who} never came:\n{self.end()[1]}")
            time.sleep(0.002)
        return pid

    def pid(self, who: str) -> int | None:
        if who == "launcher":
            return self.process.pid
        module, rank = PROGRAMS[who]
        for process in self.processes():
            try:
                if module in process.cmdline() and rank in (None, process.environ().get("RANK")):
                    return process.pid
            except psutil.Error:
                continue
        return None

    def processes(self) -> list[psutil.Process]:
        """Every process with a path of the run in its command, parent or not; all programs of a run have one."""
        found = []
        for process in psutil.process_iter():
            try:
                words = process.cmdline()
            except psutil.Error:
                continue
            if process.pid == self.process.pid or any(str(self.run_dir) in word for word in words):
                found.append(process)
        return found

    def end(self, limit_s: float = 90) -> tuple[int, str]:
        """Exit code and output. Whatever is left after NOTHING_LEFT_AFTER_S fails the test."""
        members = descendants(self.process.pid) | {self.launcher}
        try:
            output, _ = self.process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            output = f"{self.process.communicate()[0]}\nit didn't end within {limit_s:g} s"
        for process in self.processes():
            with suppress(psutil.Error):  # it has ended since
                members.add(ProcessId(process.pid, process.create_time()))
        left = wait_ended(members, NOTHING_LEFT_AFTER_S)
        assert not left, f"left behind: {[p.find() for p in left]}\n{output}"
        return self.process.returncode, output

    def failed_or_recovered(self, limit_s: float = 60) -> str:
        """Wait until it ends, or is known to go on with a new engine; that one is stopped. Answers the status."""
        deadline = time.monotonic() + limit_s
        while self.process.poll() is None and time.monotonic() < deadline:
            if any(row["event"] == "engine_recovered" for row in self.rows("events")):
                self.process.send_signal(signal.SIGTERM)
                return "interrupted"
            time.sleep(0.1)
        return "failed"

    def rows(self, name: str) -> list[dict[str, Any]]:
        return rows(self.run_dir / f"{name}.jsonl")

    @property
    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text())
        return found

    def saved(self) -> int:
        """Steps of the last checkpoint."""
        return int((self.run_dir / "checkpoints" / "latest").read_text().removeprefix("step_"))


def _training(train: Train) -> bool:
    return (train.run_dir / "checkpoints" / "step_000002").is_dir()


def _saving(train: Train) -> bool:
    return _training(train) and any((train.run_dir / "checkpoints").glob("step_*.partial"))


def _publishing(train: Train) -> bool:
    """Weights have just been written."""
    if not _training(train):
        return False
    found = [path.name for place in _places(train.run_dir.resolve(), None) for path in place.glob("version-*")]
    before, train.newest = train.newest, max(found, default="")
    return "" < before < train.newest


PHASES: dict[str, Callable[[Train], bool]] = {
    "start": lambda train: (train.run_dir / "prepared").is_dir(),
    "warm start": lambda train: any(row["event"] == "trainer_ready" for row in train.rows("events")),
    "training": _training,
    "checkpoint": _saving,
    "publication": _publishing,
}
TRAINED = ("training", "checkpoint", "publication")


def moment(who: str, phases: tuple[str, ...] = tuple(PHASES)) -> str:
    return random.Random(f"{SEED}:{who}").choice(phases)


def check_clean(train: Train, output: str, status: str) -> None:
    """What a user sees, and what lies about."""
    assert "Traceback" not in output
    assert train.summary["status"] == status, output
    assert not _places(train.run_dir.resolve(), None)[0].exists()
    assert not [path for path in train.run_dir.rglob("*") if path.name.endswith((".partial", ".part"))]


@pytest.mark.parametrize(("numbers", "code"), [((signal.SIGTERM,), 143), ((signal.SIGINT, signal.SIGINT), 130)])
def test_c33_a_signal_to_the_launcher_ends_everything(
    tmp_path: Path, numbers: tuple[signal.Signals, ...], code: int
) -> None:
    """SIGTERM, and Ctrl-C twice, at any moment: the code of the signal, one word of it, and nothing is left."""
    phase = moment(str(code))
    train = Train.new(tmp_path)
    train.reach(phase, "launcher")
    for number in numbers:
        train.process.send_signal(number)
        time.sleep(0.3)
    returned, output = train.end()
    print(f"seed {SEED}: {phase}\n{output}")
    assert returned == code
    assert f"stopped by {numbers[0].name}" in output
    check_clean(train, output, "interrupted")


@pytest.mark.parametrize(("who", "status"), [("launcher", "interrupted"), ("agent", "failed"), ("sidecar", "failed")])
def test_c33_sigkill_at_any_moment_leaves_nothing(tmp_path: Path, who: str, status: str) -> None:
    """SIGKILL of the launcher, of torchrun, of a sidecar: the rest ends in order and says why, or goes on without."""
    phase = moment(who)
    train = Train.new(tmp_path)
    os.kill(train.reach(phase, who), signal.SIGKILL)
    if who == "sidecar":
        status = train.failed_or_recovered()
    returned, output = train.end()
    print(f"seed {SEED}: {who} while {phase}\n{output}")
    assert returned == (-signal.SIGKILL if who == "launcher" else CODES[status])
    said = {
        "launcher": ("stopped by SIGTERM",),
        # The kernel ends the workers with torchrun, and a controller may see that first.
        "agent": ("torchrun was ended by SIGKILL", "worker rank 1"),
        "sidecar": ("engine-0",),
    }
    assert any(words in output for words in said[who])
    check_clean(train, output, status)


@pytest.mark.parametrize("who", ["controller", "worker", "engine"])
def test_c33_resume_after_sigkill_goes_on_at_the_last_checkpoint(tmp_path: Path, who: str) -> None:
    """SIGKILL of rank 0, of a worker, of the engine: a clean end, then --resume trains on each prompt exactly once."""
    phase = moment(who, TRAINED)
    train = Train.new(tmp_path)
    os.kill(train.reach(phase, who), signal.SIGKILL)
    status = train.failed_or_recovered()
    returned, output = train.end()
    print(f"seed {SEED}: {who} while {phase}\n{output}")
    assert returned == CODES[status]
    assert {"controller": "the controller ended", "worker": "worker rank 1", "engine": "engine-0"}[who] in output
    check_clean(train, output, status)
    saved = train.saved()
    again = Train.resumed(tmp_path, saved + 3)
    returned, output = again.end(120)
    print(output)
    assert returned == 0
    check_clean(again, output, "completed")
    assert [row["step"] for row in again.rows("events") if row["event"] == "resumed"] == [saved]
    assert [row["step"] for row in again.rows("metrics")] == list(range(saved + 3))
    trained = sorted(row["uid"] for row in again.rows("samples"))
    assert trained == list(range((saved + 3) * BATCH))
