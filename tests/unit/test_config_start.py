"""Where the first weights come from (R33-R36), decided on folders alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybridasync.config.load import validate
from hybridasync.config.models import Config
from hybridasync.config.pipeline import resolve
from hybridasync.config.start import MARKER, Start, checkpoint_folder, reference_folder, resolve_start, with_start
from hybridasync.errors import CheckpointError, ConfigError
from hybridasync.transport.checkpoints import CheckpointFolders


def config(**model: Any) -> Config:
    values = {
        "model": {"hf_checkpoint": "hf", **model},
        "data": {"prompt_data": "train.jsonl"},
        "rollout": {"num_rollout": 4, "rollout_batch_size": 2, "n_samples_per_prompt": 2, "max_response_tokens": 8},
    }
    return validate(values, source="test")


def start(**model: Any) -> Start:
    return resolve_start(config(**model).model)


def megatron(root: Path, *steps: int, layout: str = "step_{:06d}/model") -> str:
    """A Megatron checkpoint with these steps, the last one its newest."""
    for step in steps:
        (root / layout.format(step)).mkdir(parents=True)
    (root / MARKER).write_text(f"{steps[-1]}\n")
    return str(root)


def test_r34_bridge_goes_on_at_a_megatron_checkpoint(tmp_path: Path) -> None:
    """R34: `load` is a Megatron checkpoint: kept, and gone on with at its step; ref_load changes nothing."""
    saved = megatron(tmp_path / "saved", 5, 20)
    for mode in ("bridge", "raw"):
        for ref_load in (None, "ref"):
            found = start(load=saved, ref_load=ref_load, megatron_to_hf_mode=mode)
            folder = tmp_path / "saved" / "step_000020"
            assert found == Start(str(folder / "model"), folder, "model.load")


@pytest.mark.parametrize(
    ("model", "load", "setting"),
    [
        ({"load": "other-hf", "ref_load": "ref"}, "other-hf", "model.load"),
        ({"ref_load": "ref"}, "ref", "model.ref_load"),
        ({}, "hf", "model.hf_checkpoint"),
    ],
)
def test_r34_bridge_falls_back_to_ref_load_and_hf_checkpoint(model: dict[str, str], load: str, setting: str) -> None:
    """R34: load, else ref_load, else hf_checkpoint; weights alone, from step 0."""
    assert start(**model, megatron_to_hf_mode="bridge") == Start(load, None, setting)


def test_r35_raw_begins_with_the_weights_of_ref_load(tmp_path: Path) -> None:
    """R35: no usable `load`: the weights of ref_load's newest step, or of ref_ckpt_step 7, alone, from step 0."""
    ref = megatron(tmp_path / "ref", 7, 9)
    empty = tmp_path / "empty"
    empty.mkdir()
    for load in (None, str(tmp_path / "missing"), str(empty)):
        newest = start(load=load, ref_load=ref, megatron_to_hf_mode="raw")
        assert newest == Start(f"{ref}/step_000009/model", None, "model.ref_load")
        chosen = start(load=load, ref_load=ref, ref_ckpt_step=7, megatron_to_hf_mode="raw")
        assert chosen == Start(f"{ref}/step_000007/model", None, "model.ref_load")


@pytest.mark.parametrize("model", [{}, {"load": "missing"}, {"ref_load": "hf"}, {"load": "x", "ref_load": "y"}])
def test_r36_raw_without_a_megatron_checkpoint_is_refused(model: dict[str, str]) -> None:
    """R36: neither usable: an error that says what is required, before anything is loaded."""
    with pytest.raises(ConfigError, match="requires an existing Megatron checkpoint") as caught:
        start(**model, megatron_to_hf_mode="raw")
    assert isinstance(caught.value, ValueError)


def test_r36_bridge_is_the_default_where_nothing_is_named() -> None:
    """R36: without load and mode training starts from hf_checkpoint; a written raw stays raw."""
    assert resolve(config()).config.model.megatron_to_hf_mode == "bridge"
    assert resolve(config(megatron_to_hf_mode="raw")).config.model.megatron_to_hf_mode == "raw"
    assert resolve(config(load="x")).config.model.megatron_to_hf_mode == "raw"


def test_r33_the_reference_is_overridden_only_by_ref_load(tmp_path: Path) -> None:
    """R33: without ref_load nothing overrides; a Megatron ref_load names one checkpoint, of ref_ckpt_step if set."""
    ref = megatron(tmp_path / "ref", 7, 9)
    assert reference_folder(config().model) is None
    assert reference_folder(config(ref_load="hf-ref").model) == "hf-ref"
    assert reference_folder(config(ref_load=ref).model) == f"{ref}/step_000009/model"
    assert reference_folder(config(ref_load=ref, ref_ckpt_step=7).model) == f"{ref}/step_000007/model"


def test_r35_zero_kl_leaves_what_the_actor_loads_alone(tmp_path: Path) -> None:
    """R35, C38: after zero-KL has dropped ref_load the actor's checkpoint and its step are kept."""
    saved = megatron(tmp_path / "saved", 20)
    written = validate(
        {
            "model": {"hf_checkpoint": "hf", "load": saved, "ref_load": "missing"},
            "data": {"prompt_data": "train.jsonl"},
            "rollout": {"num_rollout": 4, "rollout_batch_size": 2, "n_samples_per_prompt": 2, "max_response_tokens": 8},
            "algorithm": {"use_kl_loss": True, "kl_loss_coef": 0.0},
        },
        source="test",
    )
    resolved = resolve(written).config
    assert (resolved.model.load, resolved.model.ref_load) == (saved, None)
    found = resolve_start(resolved.model)
    assert found.resumes == tmp_path / "saved" / "step_000020"
    assert with_start(resolved, found).model.load is None


def test_workers_get_one_folder_each(tmp_path: Path) -> None:
    """Weights alone: `load` and `ref_load` become the folders that are loaded; hf_checkpoint needs no `load`."""
    ref = megatron(tmp_path / "ref", 3, layout="iter_{:07d}")
    given = config(ref_load=ref, megatron_to_hf_mode="bridge")
    model = with_start(given, resolve_start(given.model)).model
    assert (model.load, model.ref_load) == (f"{ref}/iter_0000003", f"{ref}/iter_0000003")
    plain = config(megatron_to_hf_mode="bridge")
    assert with_start(plain, resolve_start(plain.model)).model.load is None


def test_a_checkpoint_that_is_named_must_be_there(tmp_path: Path) -> None:
    """A step without a folder and a marker that is no number are errors that name them."""
    ref = megatron(tmp_path / "ref", 7)
    with pytest.raises(ConfigError, match="no checkpoint of step 8"):
        checkpoint_folder(ref, step=8, setting="model.ref_load")
    (tmp_path / "ref" / MARKER).write_text("release")
    with pytest.raises(ConfigError, match="holds 'release', not the step"):
        checkpoint_folder(ref, setting="model.ref_load")


def test_the_checkpoints_of_a_run_are_a_megatron_checkpoint(tmp_path: Path) -> None:
    """What a run saves can be the `load` of another: the marker names the newest step."""
    store = CheckpointFolders(tmp_path, keep=2)
    for step in (4, 8):
        store.begin(step)
        store.commit(step, {"step": step})
    found = start(load=str(tmp_path))
    assert found.resumes == tmp_path / "step_000008"
    assert found.load == str(tmp_path / "step_000008" / "model")


def test_r117_checkpoints_that_are_gone_are_an_error(tmp_path: Path) -> None:
    """R117: a run that never saved has none; one whose saved folders are missing says so and what to do."""
    store = CheckpointFolders(tmp_path, keep=2)
    assert store.latest() is None
    store.begin(4)
    store.commit(4, {"step": 4}).rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"names step_000004, but .* put it back"):
        store.latest()
