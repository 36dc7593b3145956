"""The dashed options of `train`, made from the settings: one table of names, types and texts from the models."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from hybridasync.config.describe import core_type, short_type
from hybridasync.config.names import STACK_NAMES, settings

_PANELS: Mapping[str, str] = {
    "": "Run",
    "run": "Run",
    "model": "Model and layout",
    "parallel": "Model and layout",
    "data": "Data and rollout",
    "rollout": "Data and rollout",
    "reward": "Data and rollout",
    "algorithm": "Loss and off-policy correction",
    "optimizer": "Optimizer",
    "publication": "Publication of weights",
    "eval": "Evaluation and checkpoints",
    "checkpoint": "Evaluation and checkpoints",
    "engine": "Engines and network",
    "network": "Engines and network",
    "observability": "Run",
}


def with_setting_options(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command that takes `**options` one option for each name of `STACK_NAMES`."""
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    own = [parameter for parameter in parameters if parameter.kind is not inspect.Parameter.VAR_KEYWORD]
    made = [_parameter(name, setting) for name, setting in STACK_NAMES.items()]
    signature = inspect.Signature([*own, *made])
    annotations = {p.name: p.annotation for p in signature.parameters.values()}
    function.__signature__ = signature  # type: ignore[attr-defined]
    function.__annotations__ = annotations
    return function


def overrides_of(options: Mapping[str, Any]) -> list[str]:
    """Overrides `section.key=value` of the options that were given."""
    found = []
    for name, setting in STACK_NAMES.items():
        value = options.get(_identifier(name))
        if value is not None:
            text = str(value).lower() if isinstance(value, bool) else str(value)
            found.append(f"{setting}={text}")
    return found


def _parameter(name: str, setting: str) -> inspect.Parameter:
    field = settings()[setting]
    section = setting.rpartition(".")[0]
    text = f"{field.description} ({setting})"
    flag = core_type(field) is bool
    # Values stay text until the models read them, so that a mistake gets the same message here as in a recipe.
    option = typer.Option(
        f"--{name}/--no-{name}" if flag else f"--{name}",
        help=text[0].upper() + text[1:],
        metavar=None if flag else short_type(field).upper() if "|" not in short_type(field) else short_type(field),
        show_default=False,
        rich_help_panel=_PANELS[section],
    )
    kind = bool | None if flag else str | None
    return inspect.Parameter(
        _identifier(name), inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option]
    )


def _identifier(name: str) -> str:
    return name.replace("-", "_")
