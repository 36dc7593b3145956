"""Where recipes are: by name among those that ship, or by path."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from hybridasync.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe that ships; `summary` is the first comment line of its file."""

    name: str
    path: Path
    summary: str


def recipe_directory() -> Path:
    """The folder of the recipes that ship: in an installed wheel inside the package, else in the source checkout."""
    installed = _PACKAGE / "_recipes"
    return installed if installed.is_dir() else _PACKAGE.parent.parent / "recipes"


def shipped_recipes() -> tuple[Recipe, ...]:
    """All recipes that ship, by name."""
    return tuple(Recipe(path.stem, path, _summary(path)) for path in sorted(recipe_directory().glob("*.toml")))


def find_recipe(recipe: str) -> Path:
    """The file of a recipe given by name or by path.

    Raises: ConfigError, which lists the recipes that there are and the nearest name.
    """
    if not recipe.strip():
        raise ConfigError(f"no recipe given.\n{_listing()}")
    by_name = {one.name: one.path for one in shipped_recipes()}
    if recipe in by_name:
        return by_name[recipe]
    path = Path(recipe).expanduser()
    if path.is_dir():
        raise ConfigError(f"{path} is a directory; a recipe is a TOML file or one of these.\n{_listing()}")
    if path.is_file():
        return path
    kind = "file" if path.suffix == ".toml" or path.name != recipe else "recipe"
    match = difflib.get_close_matches(path.stem, list(by_name), n=1, cutoff=0.5)
    hint = f" Did you mean {match[0]}?" if match else ""
    raise ConfigError(f"no {kind} {recipe!r}.{hint}\n{_listing()}")


def recipe_name(recipe: str) -> str:
    """Short name of a recipe, for run directories."""
    return Path(recipe).stem


def _listing() -> str:
    found = shipped_recipes()
    if not found:
        return f"No recipes ship with this installation ({recipe_directory()}); give the path of a TOML file."
    width = max(len(one.name) for one in found)
    lines = "\n".join(f"  {one.name:<{width}}  {one.summary}" for one in found)
    return f"Recipes that ship (a path of a TOML file will do too):\n{lines}"


def _summary(path: Path) -> str:
    with path.open(encoding="utf-8") as file:
        first = file.readline()
    return first.lstrip("# ").strip() if first.startswith("#") else ""
