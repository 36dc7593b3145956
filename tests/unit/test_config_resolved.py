"""A run's configuration goes to disk and comes back, and a resumed run may change only what the checkpoint allows."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridasync.config.load import load
from hybridasync.config.pipeline import resolve
from hybridasync.config.prepared import prepared_paths, with_prepared
from hybridasync.config.recipes import shipped_recipes
from hybridasync.config.resolved import check_resume, differences, read_resolved, to_toml, write_resolved
from hybridasync.config.sizing import Sizing, with_sizing
from hybridasync.errors import ConfigError


@pytest.mark.parametrize("name", [one.name for one in shipped_recipes()])
def test_the_resolved_configuration_is_a_recipe(name: str, tmp_path: Path) -> None:
    """What is written reads back equal, resolves to itself, and leaves no half file."""
    config = resolve(load(name)).config
    assert write_resolved(config, tmp_path) == tmp_path / "config.resolved.toml"
    assert read_resolved(tmp_path) == config
    assert load(str(tmp_path / "config.resolved.toml")) == config
    assert resolve(read_resolved(tmp_path)).changes == ()
    assert [path.name for path in tmp_path.iterdir()] == ["config.resolved.toml"]


def test_settings_without_a_value_are_left_out() -> None:
    """TOML has no null: what isn't set isn't written."""
    assert "num_epoch" not in to_toml(resolve(load("quickstart")).config)


def test_reading_without_a_run_says_so(tmp_path: Path) -> None:
    """A directory without a run is a clear error that names the file."""
    with pytest.raises(ConfigError, match=r"config\.resolved\.toml"):
        read_resolved(tmp_path)


def test_a_resumed_run_may_change_what_the_checkpoint_is_not_tied_to() -> None:
    """Length, learning rate and intervals may change, and are listed; a length that the data decides doesn't count."""
    before = resolve(load("quickstart")).config
    now = resolve(load("quickstart", ["optimizer.lr=5e-4", "rollout.num_rollout=200"])).config
    changed = check_resume(differences(before, now))
    assert [str(one) for one in changed] == [
        "rollout.num_rollout: 100 before, 200 now",
        "optimizer.lr: 0.001 before, 0.0005 now",
    ]
    by_epochs = resolve(load("quickstart", ["rollout.num_rollout=none", "rollout.num_epoch=1"])).config
    assert differences(with_sizing(by_epochs, Sizing(281, 281, "")), by_epochs) == ()


def test_a_resumed_run_may_not_change_model_or_data() -> None:
    """Every setting that the checkpoint is tied to is named, with both values and the reason; the layout is none."""
    before = resolve(load("quickstart")).config
    now = resolve(
        load(
            "quickstart",
            ["seed=1", "data.shuffle=false", "parallel.use_distributed_optimizer=true", "parallel.num_workers=2"],
        )
    ).config
    with pytest.raises(ConfigError) as caught:
        check_resume(differences(before, now))
    message = str(caught.value)
    assert "has 3 errors" in message
    assert "seed: was 0 when the run began and is 1 now: data order and sampling go on from it" in message
    assert "data.shuffle: was true when the run began and is false now" in message
    assert "parallel.use_distributed_optimizer: was false" in message


def test_the_prepared_folder_is_put_into_paths(tmp_path: Path) -> None:
    """`{prepared}` in any setting becomes the run's own folder."""
    config = resolve(load("quickstart")).config
    assert set(prepared_paths(config)) == {
        "model.hf_checkpoint",
        "data.prompt_data",
        "warm_start.data",
        "eval.eval_prompt_data",
    }
    made = with_prepared(config, tmp_path)
    assert made.model.hf_checkpoint == str(tmp_path / "prepared" / "model")
    assert prepared_paths(made) == {}
