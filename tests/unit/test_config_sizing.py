"""Steps and epochs are computed once, in one place, and the numbers are the promised ones (R37-R47, C30)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridasync.config.load import validate
from hybridasync.config.models import Config
from hybridasync.config.sizing import resolve_sizing, sizing_line, sizing_warnings, with_sizing
from hybridasync.errors import ConfigError


def config(batch: int, *, sections: dict[str, dict[str, Any]] | None = None, **rollout: Any) -> Config:
    """A configuration with `batch` prompts a step."""
    values: dict[str, Any] = {
        "model": {"hf_checkpoint": "model"},
        "data": {"prompt_data": "train.jsonl"},
        "rollout": {"rollout_batch_size": batch, "n_samples_per_prompt": 2, "max_response_tokens": 8, **rollout},
    }
    return validate({**values, **(sections or {})}, source="test")


def refusal(given_: Config, size: int, *, loaded: int | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_sizing(given_, size, loaded=loaded)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


def test_the_smaller_of_steps_and_epochs_counts() -> None:
    """R41: 64 prompts by 16, three epochs, 20 steps asked for: an epoch is 4 steps, the run 12."""
    sizing = resolve_sizing(config(16, num_epoch=3, num_rollout=20), 64)
    assert (sizing.num_rollout, sizing.steps_per_epoch) == (12, 4)
    assert sizing.reason == "the smaller of num_rollout 20 and num_epoch 3 × 4 steps = 12"


def test_one_of_the_two_lengths_will_do() -> None:
    """R42: epochs alone or steps alone make the length; neither is an error that says how long an epoch is."""
    assert resolve_sizing(config(16, num_epoch=3), 64)[:2] == (12, 4)
    assert resolve_sizing(config(16, num_rollout=20), 64)[:2] == (20, 4)
    assert "4 steps make an epoch" in refusal(config(16), 64)


def test_c30_small_data_sets_remainders_and_clamps() -> None:
    """C30 (a)-(d), (f), R40: each number is the promised one, each error shows the numbers behind it."""
    assert resolve_sizing(config(4, num_rollout=5), 3)[:2] == (5, None)
    assert "3 < 4" in refusal(config(4, num_epoch=2), 3)
    assert resolve_sizing(config(4, num_epoch=2, num_rollout=3), 10)[:2] == (3, 2)
    assert "has no prompts" in refusal(config(4, num_rollout=5), 0)
    assert resolve_sizing(config(3, num_epoch=2), 12)[:2] == (8, 4)


def test_c30_the_message_counts_what_the_filter_left() -> None:
    """C30 (g): six prompts of which two are left tell so, instead of a bare comparison."""
    message = refusal(config(4, num_epoch=1), 2, loaded=6)
    assert "6 prompts loaded, 4 filtered, 2 left" in message and "2 < 4" in message
    assert "6 prompts loaded, 6 filtered, 0 left" in refusal(config(4, num_rollout=1), 0, loaded=6)


def test_a_small_data_set_is_fine_with_a_number_of_steps() -> None:
    """R43: eight prompts by 16 make no epoch that ends at a step; the steps asked for are kept."""
    given_ = config(16, num_rollout=20)
    sizing = resolve_sizing(given_, 8)
    assert sizing[:2] == (20, None)
    assert refusal(config(16, num_epoch=1, num_rollout=20), 8)
    assert refusal(config(16), 8)


def test_r39_without_a_global_data_set_nobody_asks_for_its_size() -> None:
    """R39: no epochs, num_rollout alone makes the length, and the size isn't looked at, whatever it is."""
    given_ = config(4, rollout_global_dataset=False, num_rollout=5)
    for size in (None, 0, 3):
        assert resolve_sizing(given_, size)[:2] == (5, None)
    with_epochs = config(4, rollout_global_dataset=False, num_rollout=5, num_epoch=1)
    assert "num_epoch requires rollout_global_dataset" in refusal(with_epochs, 100)
    assert "num_rollout must be positive" in refusal(config(4, rollout_global_dataset=False), 100)


def test_u5_a_tail_is_named_or_refused() -> None:
    """U5, R46: prompts that don't fill an epoch's last step are named in one warning, or refused with strict_epochs."""
    given_ = config(4, num_epoch=2)
    sizing = resolve_sizing(given_, 10)
    (warning,) = sizing_warnings(given_, sizing, 10)
    assert "the last 2 of 10" in warning
    assert "2 would be left out" in refusal(config(4, num_epoch=2, strict_epochs=True), 10)
    assert resolve_sizing(config(5, num_epoch=2, strict_epochs=True), 10)[:2] == (4, 2)
    assert sizing_warnings(config(4, num_rollout=3), resolve_sizing(config(4, num_rollout=3), 10), 10) == ()


def test_r14_an_epoch_shorter_than_the_interval_is_warned_of_once() -> None:
    """R14: epoch ends publish because they evaluate; said here only where the pipeline couldn't know it."""
    sections = {"publication": {"update_weights_interval": 5}}
    evaluated = {**sections, "eval": {"eval_interval": 10, "eval_prompt_data": "e.jsonl"}}
    given_ = config(4, num_rollout=20, sections=evaluated)
    (warning,) = sizing_warnings(given_, resolve_sizing(given_, 16), 16)
    assert "5 is above the 4 steps of an epoch" in warning
    already_said = {**sections, "eval": {"eval_interval": 3, "eval_prompt_data": "e.jsonl"}}
    for quiet in (config(4, num_rollout=20, sections=sections), config(4, num_rollout=20, sections=already_said)):
        assert sizing_warnings(quiet, resolve_sizing(quiet, 16), 16) == ()


def test_training_alone_has_no_rl_steps() -> None:
    """R38: without engines the data set's size isn't looked at."""
    assert resolve_sizing(config(4, sections={"run": {"debug_train_only": True}}), 0)[:2] == (0, None)


def test_the_resolved_numbers_are_one_line() -> None:
    """R47: size, batch, epoch, steps and the reason."""
    given_ = config(16, num_epoch=3, num_rollout=20)
    line = sizing_line(given_, resolve_sizing(given_, 64), 64)
    assert line.startswith("64 prompts, 16 a step: 4 steps an epoch, 12 steps (the smaller of")


@settings(max_examples=200, deadline=None)
@given(
    size=st.integers(0, 60),
    batch=st.integers(1, 20),
    steps=st.none() | st.integers(1, 50),
    epochs=st.none() | st.integers(1, 5),
)
def test_r45_sizing_twice_changes_nothing(size: int, batch: int, steps: int | None, epochs: int | None) -> None:
    """R45, U4: the resolved numbers resolve to themselves, and never exceed a cap that the user gave."""
    given_ = config(batch, num_rollout=steps, num_epoch=epochs)
    try:
        first = resolve_sizing(given_, size)
    except ConfigError:
        return
    second = resolve_sizing(with_sizing(given_, first), size)
    assert second[:2] == first[:2]
    assert steps is None or first.num_rollout <= steps
    assert epochs is None or first.num_rollout <= epochs * (size // batch)


def test_r44_the_checks_hold_under_python_o() -> None:
    """R44, C30, C37: with assertions switched off every check of the configuration still refuses."""
    here = Path(__file__).parent
    files = [str(here / f"test_config_{name}.py") for name in ("sizing", "pipeline", "load")]
    chosen = ["-k", "c30 or c37 or c38 or small or off_policy or must_be_positive"]
    command = [sys.executable, "-O", "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, *chosen]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=here.parent.parent)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
