"""`train --resume` where there is little or nothing left to do."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from hybridasync.config.load import load
from hybridasync.config.pipeline import resolve
from hybridasync.config.resolved import write_resolved
from hybridasync.transport.checkpoints import CheckpointFolders
from hybridasync_cli.main import app


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A launcher that only notes that it was asked, and whether to resume."""
    calls: list[bool] = []

    def launch(_resolved: object, *, run_dir: Path, resume: bool) -> int:
        calls.append(resume)
        return 0

    module = ModuleType("hybridasync.runtime.launcher")
    module.launch = launch  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hybridasync.runtime.launcher", module)
    return calls


def run_at(directory: Path, step: int, *, exported: bool, length: str = "rollout.num_rollout=10") -> Path:
    """A run of 10 steps whose last checkpoint is of `step`."""
    directory.mkdir()
    write_resolved(resolve(load("quickstart", ["rollout.num_rollout=none", length])).config, directory)
    (directory / "checkpoints").mkdir()
    store = CheckpointFolders(directory / "checkpoints", keep=1)
    store.begin(step)
    store.commit(step, {"step": step, "num_rollout": 10})
    if exported:
        (directory / "hf").mkdir()
    return directory


@pytest.mark.parametrize("step", [10, 12])
def test_c28_nothing_is_started_for_a_run_that_is_at_its_end(tmp_path: Path, launched: list[bool], step: int) -> None:
    """C28: checkpoint at 10 or 12 of 10 steps: exit code 0 at once, and a warning with both numbers."""
    done = CliRunner().invoke(app, ["train", f"--resume={run_at(tmp_path / 'run', step, exported=True)}"])
    assert (done.exit_code, launched) == (0, [])
    told = " ".join(done.output.split())
    assert "nothing to do" in told and f"at step {step}" in told and "num_rollout is 10" in told


def test_c28_a_run_that_counts_epochs_knows_its_end_too(tmp_path: Path, launched: list[bool]) -> None:
    """C28: two epochs were found to be 10 steps: nothing is started; with a third one, or another batch, it goes on."""
    directory = run_at(tmp_path / "run", 10, exported=True, length="rollout.num_epoch=2")
    done = CliRunner().invoke(app, ["train", f"--resume={directory}"])
    assert (done.exit_code, launched) == (0, []), done.output
    assert "num_rollout is 10" in " ".join(done.output.split())
    for change in ("rollout.num_epoch=3", "rollout.rollout_batch_size=64"):
        done = CliRunner().invoke(app, ["train", f"--resume={directory}", "--set", change])
        assert done.exit_code == 0, done.output
    assert launched == [True, True]


@pytest.mark.parametrize(("step", "exported"), [(8, True), (10, False)])
def test_a_run_that_lacks_steps_or_its_export_goes_on(
    tmp_path: Path, launched: list[bool], step: int, exported: bool
) -> None:
    """A run ended between its last checkpoint and its export is started again, as one that lacks steps is."""
    done = CliRunner().invoke(app, ["train", f"--resume={run_at(tmp_path / 'run', step, exported=exported)}"])
    assert (done.exit_code, launched) == (0, [True]), done.output


def test_c28_a_higher_target_goes_on(tmp_path: Path, launched: list[bool]) -> None:
    """C28: at step 10 with num_rollout raised to 20 the run goes on, and the change is told."""
    directory = run_at(tmp_path / "run", 10, exported=True)
    done = CliRunner().invoke(app, ["train", f"--resume={directory}", "--num-rollout", "20"])
    assert (done.exit_code, launched) == (0, [True]), done.output
    assert "10 before, 20 now" in " ".join(done.output.split())
