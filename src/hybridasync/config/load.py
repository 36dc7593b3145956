"""From a recipe and overrides to a `Config`: all errors at once, each with its setting and with what would do."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from hybridasync.config.describe import core_type, optional, wanted
from hybridasync.config.findings import Refuse, refuse
from hybridasync.config.models import Config
from hybridasync.config.names import nearest, section_models, settings
from hybridasync.config.recipes import find_recipe
from hybridasync.errors import ConfigError

UNSET = "none"  # `--set eval.eval_interval=none` takes the setting out of the recipe: TOML has no null

# What to add to a refusal where the reason isn't plain from the limits.
_HINTS: Mapping[str, str] = {
    "rollout.temperature": "greedy rollouts have no distribution to learn from; evaluation is greedy by itself",
    "rollout.top_p": "a truncated distribution has other log-probs than the trainer's; use 1",
    "eval.eval_interval": "to switch evaluation off leave the setting out (or --set eval.eval_interval=none)",
    "checkpoint.save_interval": "to save only after the last step leave the setting out",
    "publication.update_weights_interval": "1 publishes after every step",
    "optimizer.global_batch_size": "left out, all samples of a step make one update",
}


def load(recipe: str, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a recipe (name or path), with overrides `section.key=value` applied in order.

    Raises: ConfigError: no such recipe, not TOML (with the line), or settings that are unknown, missing or wrong (all
    of them in one message).
    """
    path = find_recipe(recipe)
    values = read_toml(path)
    for override in overrides:
        apply_override(values, override)
    return validate(values, source=str(recipe))


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as a dictionary.

    Raises: ConfigError: unreadable, not UTF-8, or a syntax error, with line and column.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} isn't UTF-8 text: {error.reason} at byte {error.start}") from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} isn't valid TOML: {error}") from error


def apply_override(values: dict[str, Any], override: str) -> None:
    """Put `section.key=value` into `values`. The value is TOML; what isn't valid TOML is taken as a string.

    Raises: ConfigError: no `=` or no key.
    """
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"--set wants section.key=value (for example optimizer.lr=1e-5), got {override!r}")
    *path, leaf = parts
    table = values
    for part in path:
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {override}: {part} isn't a section", setting=key.strip())
        table = inner
    value = parse_value(text.strip(), setting=key.strip())
    if value is None:
        table.pop(leaf, None)
    else:
        table[leaf] = value


def parse_value(text: str, *, setting: str) -> Any:
    """A value in TOML syntax, or the text itself; None for `none` where a setting may be left out."""
    field = settings().get(setting)
    kind = core_type(field) if field else None
    if text == UNSET and (field is None or optional(field)):
        return None
    if kind is str and text[:1] not in ("'", '"'):
        return text
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        # --set engine.url=http://… : one string is a list of one
        return [text] if get_origin(kind) is tuple and text[:1] != "[" else text
    return parsed["value"] if parsed.keys() == {"value"} else text


def validate(values: Mapping[str, Any], *, source: str) -> Config:
    """A `Config` of plain values.

    Raises: ConfigError that names every setting that is unknown, missing or wrong.
    """
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        # A setting that takes one of several types is refused once for each of them.
        refuse(dict.fromkeys(_refusal(detail) for detail in error.errors()), source=source)
        raise ConfigError(f"{source}: {error}") from error


def _refusal(detail: ErrorDetails) -> Refuse:
    path = ".".join(str(part) for part in detail["loc"])
    kind, given = detail["type"], detail["input"]
    if kind == "extra_forbidden":
        return _unknown(path)
    setting, field = _known(detail["loc"])
    if kind == "missing":
        about = f": {field.description} ({wanted(field)})" if field else ""
        noun = "setting" if field else "section"
        return Refuse(f"[{path}]" if noun == "section" else path, f"this {noun} is required{about}")
    if field is None:
        sections = dict(section_models())
        what = f"is a section: write [{path}] and its settings below" if path in sections else detail["msg"]
        return Refuse(path, f"{what}; got {given!r}")
    hint = f" ({_HINTS[setting]})" if setting in _HINTS else ""
    if setting == "publication.update_weights_interval" and isinstance(given, int):
        return Refuse(setting, f"must be positive, got {_shown(given)}; it wants {wanted(field)}{hint}")
    listed = get_origin(core_type(field)) in (tuple, dict)
    inner = f" in {path.removeprefix(setting).lstrip('.')!r}" if path != setting and listed else ""
    return Refuse(setting, f"wants {wanted(field)}, got {_shown(given)}{inner}{hint}")


def _known(location: Sequence[int | str]) -> tuple[str, Any]:
    """The setting that an error lies in: its location may go on into a list or a table."""
    for length in (2, 1):
        setting = ".".join(str(part) for part in location[:length])
        if setting in settings():
            return setting, settings()[setting]
    return "", None


def _unknown(path: str) -> Refuse:
    match = nearest(path)
    section = path.rpartition(".")[0]
    sections = [name for name, _ in section_models()]
    if match:
        hint = f"did you mean {match}?"
    elif section:
        keys = [s.rpartition(".")[2] for s in settings() if s.rpartition(".")[0] == section]
        hint = f"[{section}] has {', '.join(keys)}"
    else:
        hint = f"the sections are {', '.join(sections)}"
    return Refuse(path, f"unknown setting; {hint}")


def _shown(value: Any) -> str:
    """A value as a recipe would write it, with its type where that is the mistake."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}" (a string)'
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    return repr(value)
