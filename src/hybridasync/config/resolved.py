"""The configuration of a run on disk, and what a resumed run may change of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from hybridasync.config.findings import Refuse, refuse
from hybridasync.config.load import read_toml, validate
from hybridasync.config.models import Config
from hybridasync.config.names import settings, value_of

FILE_NAME = "config.resolved.toml"

_POSITION = "the saved data position counts these prompts"
_PREPARED = "it made the model and the data of this run"

# What a checkpoint is tied to, and why. Everything else may change from one start to the next.
TIED_TO_CHECKPOINT: Mapping[str, str] = {
    "seed": "data order and sampling go on from it",
    "model.hf_checkpoint": "the checkpoint holds this model",
    "model.dtype": "the checkpoint holds parameters of this type",
    "prepare.function": _PREPARED,
    "prepare.args": _PREPARED,
    "parallel.use_distributed_optimizer": "the checkpoint holds the optimizer's state in this form",
    "data.prompt_data": _POSITION,
    "data.extra_prompt_data": _POSITION,
    "data.weights": _POSITION,
    "data.prompt_function": _POSITION,
    "rollout.rollout_global_dataset": _POSITION,
    "data.prompt_key": _POSITION,
    "data.prompt_template": _POSITION,
    "data.apply_chat_template": _POSITION,
    "data.max_prompt_tokens": _POSITION,
    "data.shuffle": _POSITION,
}


@dataclass(frozen=True, slots=True)
class Difference:
    """A setting that a resumed run has otherwise. `tied` says why the checkpoint can't go with it, if so."""

    setting: str
    before: Any
    now: Any
    tied: str | None

    def __str__(self) -> str:
        return f"{self.setting}: {_shown(self.before)} before, {_shown(self.now)} now"


def to_toml(config: Config) -> str:
    """The configuration as a recipe that says everything; settings without a value are left out."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True), multiline_strings=False)


def write_resolved(config: Config, run_dir: Path) -> Path:
    """Write `config.resolved.toml`, complete or not at all. Raises OSError."""
    path = run_dir / FILE_NAME
    part = path.with_suffix(".part")
    part.write_text(to_toml(config), encoding="utf-8")
    return part.replace(path)


def read_resolved(run_dir: Path) -> Config:
    """The configuration that a run wrote. Raises: ConfigError: no such file, or not readable as a configuration."""
    return validate(read_toml(run_dir / FILE_NAME), source=str(run_dir / FILE_NAME))


def differences(before: Config, now: Config) -> tuple[Difference, ...]:
    """What changed between two configurations. A length that the data set's size decides doesn't count."""
    found = []
    for setting in settings():
        old, new = value_of(before, setting), value_of(now, setting)
        if old != new and not (setting == "rollout.num_rollout" and new is None):
            found.append(Difference(setting, old, new, TIED_TO_CHECKPOINT.get(setting)))
    return tuple(found)


def check_resume(found: Iterable[Difference]) -> tuple[Difference, ...]:
    """The differences that a resumed run can go on with.

    Raises: ConfigError that names every setting that the checkpoint is tied to and that changed.
    """
    allowed, refused = [], []
    for one in found:
        if one.tied is None:
            allowed.append(one)
        else:
            message = f"was {_shown(one.before)} when the run began and is {_shown(one.now)} now: {one.tied}"
            refused.append(Refuse(one.setting, f"{message}; set it back, or start a new run"))
    refuse(refused, source="the resumed configuration")
    return tuple(allowed)


def _shown(value: Any) -> str:
    if value is None:
        return "not set"
    return str(value).lower() if isinstance(value, bool) else str(value)
