"""The folder that a recipe's `prepare` function fills, and the placeholder by which paths name it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hybridasync.config.models import Config
from hybridasync.config.names import settings, value_of
from hybridasync.config.pipeline import replace

PLACEHOLDER = "{prepared}"
FOLDER = "prepared"


def prepared_paths(config: Config) -> Mapping[str, str]:
    """Setting and value of every path that lies in the prepared folder."""
    values = {setting: value_of(config, setting) for setting in settings()}
    return {setting: value for setting, value in values.items() if isinstance(value, str) and PLACEHOLDER in value}


def with_prepared(config: Config, run_dir: Path) -> Config:
    """The configuration with `{prepared}` replaced by the run's prepared folder."""
    folder = str((run_dir / FOLDER).resolve())
    return replace(config, {s: value.replace(PLACEHOLDER, folder) for s, value in prepared_paths(config).items()})
