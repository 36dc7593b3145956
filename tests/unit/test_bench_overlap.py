"""What overlap loses, by cause."""

from __future__ import annotations

import pytest

from hybridasync.bench.overlap import configuration, loss
from hybridasync.errors import ConfigError


def test_the_loss_of_a_trainer_bound_step_adds_up() -> None:
    """Waiting, publication with its draining, slower training and the controller's work make the whole."""
    row = {"step_s": 1.3, "train_s": 1.05, "train_wait_s": 0.07, "publish_drain_wait_s": 0.02, "publish_s": 0.1}
    found = loss([row, row], generation_s=0.5, training_s=1.0)
    expected = {"publication_s": 0.12, "waiting_s": 0.05, "slower_half_s": 0.05, "controller_s": 0.08, "total_s": 0.3}
    assert found == pytest.approx(expected)


def test_the_loss_of_an_engine_bound_step_adds_up() -> None:
    """Pauses and idle engines make it, and generation that takes longer than alone."""
    row = {"step_s": 1.3, "pause_ms": 50.0, "engine_idle_s": 0.2}
    found = loss([row], generation_s=1.0, training_s=0.5)
    total = found.pop("total_s")
    assert total == pytest.approx(0.3)
    assert sum(found.values()) == pytest.approx(total)
    assert found["publication_s"] == pytest.approx(0.05)


def test_a_warm_start_is_kept_short_and_only_where_there_is_one() -> None:
    """Both recipes resolve in both modes; another mode is refused."""
    assert configuration("quickstart", "fully_async", ()).warm_start.steps == 60
    assert configuration("bench-publication", "hybrid", ()).warm_start.steps == 0
    with pytest.raises(ConfigError, match="there are hybrid, fully_async"):
        configuration("quickstart", "sync", ())
    with pytest.raises(ConfigError, match="mode: can't be given with --set: --modes sets it"):
        configuration("quickstart", "hybrid", ("mode=sync",))
