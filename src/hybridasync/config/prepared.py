"""The folder that a recipe's `prepare` function fills, and the placeholder by which paths name it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridasync.config.models import Config
from hybridasync.config.names import settings, value_of
from hybridasync.config.pipeline import replace

PLACEHOLDER = "{prepared}"
FOLDER = "prepared"


def prepared_paths(config: Config) -> Mapping[str, str]:
    """Setting and value of every path that lies in the prepared folder."""
    values = {setting: value_of(config, setting) for setting in settings()}
    return {setting: value for setting, value in values.items() if isinstance(value, str) and PLACEHOLDER in value}


def _filled(value: Any, folder: str) -> Any:
    if isinstance(value, tuple):
        return tuple(_filled(part, folder) for part in value)
    return value.replace(PLACEHOLDER, folder) if isinstance(value, str) else value


def with_prepared(config: Config, run_dir: Path) -> Config:
    """The configuration with `{prepared}` replaced by the run's prepared folder."""
    folder = str((run_dir / FOLDER).resolve())
    named = {*prepared_paths(config), "data.extra_prompt_data"}
    return replace(config, {setting: _filled(value_of(config, setting), folder) for setting in named})
