"""Where the first weights come from (R33-R36): decided once, before anything is loaded.

A *Megatron checkpoint* is a folder with `latest_checkpointed_iteration.txt`, such as the `checkpoints` folder of a run.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from hybridasync.config.models import Config, ModelSection
from hybridasync.config.pipeline import replace
from hybridasync.errors import ConfigError

MARKER = "latest_checkpointed_iteration.txt"
"""Megatron's pointer: the step of the newest complete checkpoint, in decimal digits."""


class Start(NamedTuple):
    """The outcome. Exactly one of the two forms of a start: go on at a checkpoint, or begin with weights alone."""

    load: str  # folder that the weights come from: Hugging Face, or the `model` folder of one checkpoint
    resumes: Path | None  # checkpoint to go on at: optimizer, data position and step too; None: start at step 0
    setting: str  # the setting that named it


def is_megatron(path: str | None) -> bool:
    """Whether `path` is an existing Megatron checkpoint."""
    return path is not None and (Path(path) / MARKER).is_file()


def resolve_start(model: ModelSection) -> Start:
    """Where training starts.

    A Megatron checkpoint at `load` is gone on with, at its step (R34, R35). Otherwise the weights are loaded alone and
    the first step is 0. Mode bridge: from `load`, else `ref_load`, else `hf_checkpoint`. Mode raw: from the Megatron
    checkpoint at `ref_load`, of step `ref_ckpt_step` if that is set.

    Raises ConfigError: mode raw without a Megatron checkpoint at `load` or `ref_load` (R36), or one that has no
    checkpoint of the step.
    """
    if model.load is not None and is_megatron(model.load):
        folder = checkpoint_folder(model.load, setting="model.load")
        return Start(model_folder(folder), folder, "model.load")
    if model.megatron_to_hf_mode == "raw":
        if not is_megatron(model.ref_load):
            given = f"load is {model.load!r}, ref_load is {model.ref_load!r}"
            raise ConfigError(
                f"megatron_to_hf_mode raw requires an existing Megatron checkpoint (a folder with {MARKER}): {given}; "
                "name one, or set megatron_to_hf_mode = bridge to start from a Hugging Face directory",
                setting="model.load",
            )
        return Start(reference_folder(model) or "", None, "model.ref_load")
    if model.load is not None:
        return Start(model.load, None, "model.load")
    if model.ref_load is not None:
        return Start(reference_folder(model) or "", None, "model.ref_load")
    return Start(model.hf_checkpoint, None, "model.hf_checkpoint")


def with_start(config: Config, start: Start) -> Config:
    """The configuration with the folders that workers load: of one checkpoint each, or of Hugging Face weights."""
    alone = start.resumes is None and start.load != config.model.hf_checkpoint
    return replace(
        config,
        {"model.load": start.load if alone else None, "model.ref_load": reference_folder(config.model)},
    )


def reference_folder(model: ModelSection) -> str | None:
    """The folder that the reference model is loaded from (R33); None: nothing overrides what the actor loads.

    Raises ConfigError: no checkpoint of the step `ref_ckpt_step`.
    """
    if model.ref_load is None or not is_megatron(model.ref_load):
        return model.ref_load
    return model_folder(checkpoint_folder(model.ref_load, step=model.ref_ckpt_step, setting="model.ref_load"))


def checkpoint_folder(root: str, *, step: int | None = None, setting: str) -> Path:
    """The checkpoint of a step (default: the one that the marker names), of a run of ours or in Megatron's layout.

    Raises ConfigError: the marker isn't a number, or there is no such checkpoint.
    """
    if step is None:
        text = (Path(root) / MARKER).read_text(encoding="utf-8", errors="replace").strip()
        if not text.isascii() or not text.isdigit():
            raise ConfigError(
                f"{Path(root) / MARKER} holds {text[:40]!r}, not the step of a checkpoint", setting=setting
            )
        step = int(text)
    for name in (f"step_{step:06d}", f"iter_{step:07d}"):
        if (Path(root) / name).is_dir():
            return Path(root) / name
    raise ConfigError(f"{root} has no checkpoint of step {step}", setting=setting)


def model_folder(checkpoint: Path) -> str:
    """Where a checkpoint's weights lie: beside the run's state in ours, in the folder itself in Megatron's."""
    ours = checkpoint / "model"
    return str(ours if ours.is_dir() else checkpoint)
