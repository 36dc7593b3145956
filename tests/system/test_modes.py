"""The modes are bounds on one pipeline: where the bounds are equal, so are the runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from whole_run import SHORT, Run, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

REWARD = """def score(response, label):
    return sum(map(ord, response)) % 7 / 6
"""

WITHOUT_LEAD = {
    "reward.function": "rewards:score",
    "rollout.num_rollout": 3,
    "rollout.max_staleness": 0,
    "rollout.deterministic": True,
    "algorithm.filter_zero_variance": False,
    "observability.samples_per_step": 16,
    "eval.eval_interval": 1,
    "checkpoint.export_hf": False,
}
TRAINED_ON = ("step", "uid", "row", "response", "reward", "advantage", "versions", "partition")


def samples(run: Run) -> list[list[object]]:
    return [[row[name] for name in TRAINED_ON] for row in run.rows("samples")]


def test_the_modes_at_staleness_zero_have_the_same_losses(tmp_path: Path) -> None:
    """sync, hybrid and fully_async at max_staleness 0: sample by sample the same, losses and gradients to 1e-6.

    Evaluations share the engines, so that batches there differ from run to run.
    """
    runs = {}
    for mode in ("sync", "hybrid", "fully_async"):
        (tmp_path / mode).mkdir()
        (tmp_path / mode / "rewards.py").write_text(REWARD)
        run = train(tmp_path / mode, SHORT | WITHOUT_LEAD | {"mode": mode})
        assert run.returncode == 0, run.explain()
        assert run.column("version_lag_max") == run.column("partition_lag_max") == [0, 0, 0]
        runs[mode] = run
    sync = runs.pop("sync")
    assert len({str(row[3]) for row in samples(sync)}) > 10
    assert all(sync.column("grad_norm"))
    for run in runs.values():
        assert samples(run) == samples(sync)
        for name in ("loss", "grad_norm"):
            assert run.column(name) == pytest.approx(sync.column(name), abs=1e-6)


def test_r15_training_alone_has_rows_and_no_engine(tmp_path: Path) -> None:
    """R15, R18: debug_train_only: three supervised steps, each with its row; changed settings are logged."""
    alone = {"run.debug_train_only": True, "warm_start.steps": 3, "warm_start.batch_size": 32}
    zero_kl = {"algorithm.use_kl_loss": True, "algorithm.kl_loss_coef": 0.0, "model.ref_load": "missing"}
    run = train(tmp_path, alone | zero_kl)
    assert run.returncode == 0, run.explain()
    assert run.column("step") == [0, 1, 2] and all(loss > 0 for loss in run.column("loss"))
    assert not run.events("publication.completed") and not list(run.directory.glob("logs/engine*"))
    changed = {row["setting"]: (row["wrote"], row["runs"]) for row in run.events("setting_changed")}
    assert changed["algorithm.use_kl_loss"] == (True, False)
    assert changed["model.ref_load"] == ("missing", None)
    assert "algorithm.use_kl_loss: true → false" in run.output
