"""The reference of all settings, `docs/configuration.md`, made from the models.

`python -m hybridasync.config.reference` writes it anew; a test fails while the file and the models differ.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hybridasync.config.describe import core_type, optional, short_type
from hybridasync.config.models import Config
from hybridasync.config.names import STACK_NAMES, section_models, settings
from hybridasync.config.pipeline import RULES

_HEAD = """# Configuration

<!-- Made by `python -m hybridasync.config.reference`: edit the models, not this file. -->

A recipe is a TOML file with these sections. Keys that aren't known are refused. Required settings have no default; a
default of – means that the setting may be left out, and its meaning says what happens then. Relative paths are relative
to the working directory, and `{prepared}` in a path is the folder that `prepare.function` filled.

On the command line `--set section.key=value` sets any of them (value in TOML syntax, a bare string will do), and
`--set section.key=none` leaves one out: TOML has no null, so that is also how to switch off an interval (0 and -1 are
refused). Settings that people of Megatron and SGLang stacks know have an option of their own, named below. Options
override `--set`, and `--set` overrides the recipe.
"""

_RULES_HEAD = """## Normalisations and checks

After the recipe is read these rules run, in this order. A rule sets a value, refuses one, or warns;
`hybridasync train RECIPE --explain` shows what they did. All refusals are reported at once.

| rule | reason |
|---|---|
"""


def render() -> str:
    """The whole document."""
    sections = dict(section_models())
    top = {name: field for name, field in settings().items() if "." not in name}
    parts = [_HEAD, "## Top level\n", _table("", top)]
    for name, model in sections.items():
        parts += [f"## [{name}]\n", f"{_text(model)}\n", _table(name, model.model_fields)]
    parts.append(_RULES_HEAD + "".join(_rule_lines()))
    return "\n".join(parts)


def document() -> Path:
    """Where the reference lies in a source checkout."""
    return Path(__file__).resolve().parents[3] / "docs" / "configuration.md"


def _table(section: str, fields: dict[str, FieldInfo]) -> str:
    options = {setting: name for name, setting in STACK_NAMES.items()}
    lines = ["| setting | type | default | meaning | option |", "|---|---|---|---|---|"]
    for name, field in fields.items():
        option = options.get(f"{section}.{name}" if section else name)
        flag = core_type(field) is bool
        shown = "" if option is None else f"`--{option}`" + (f", `--no-{option}`" if flag else "")
        cells = (f"`{name}`", _cell(short_type(field)), _default(field), _cell(field.description or ""), shown)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    value: Any = field.get_default(call_default_factory=True)
    if value is None and optional(field):
        return "–"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, (tuple, dict)) and not value:
        return "empty"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value:g}`"


def _rule_lines() -> Iterator[str]:
    for rule in RULES:
        yield f"| `{rule.__name__}` | {_cell(' '.join(inspect.getdoc(rule).split()))} |\n"  # type: ignore[union-attr]


def _text(model: type[BaseModel]) -> str:
    return _cell(inspect.cleandoc(model.__doc__ or ""))


def _cell(text: str) -> str:
    """Text as Markdown takes it; the numbers of requirements are for readers of the code."""
    return re.sub(r" \((?:[RUC]\d+[-, ]*)+\)", "", text).replace("|", "\\|").replace("<", "&lt;")


def main() -> None:
    """Write the document."""
    document().write_text(render(), encoding="utf-8")
    sys.stdout.write(f"{document()}: {len(settings())} settings of {Config.__name__}\n")


if __name__ == "__main__":
    main()
