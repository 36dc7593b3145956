"""`hybridasync train`: parse, check, launch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from hybridasync.config.load import apply_override, load, read_toml, validate
from hybridasync.config.models import Config
from hybridasync.config.pipeline import Resolved, resolve
from hybridasync.config.recipes import shipped_recipes
from hybridasync.config.resolved import FILE_NAME, check_resume, differences, read_resolved
from hybridasync_cli.options import overrides_of, with_setting_options
from hybridasync_cli.rundir import finished, make_run_dir, new_run_dir, run_dir_to_resume
from hybridasync_cli.show import errors_as_lines, say_changes, say_note, say_warning, show_changes, show_resolved

LATEST = "latest"


class TrainCommand(TyperCommand):
    """`--resume` may stand alone: then it means the latest run of the recipe."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, name_latest(args))


def name_latest(args: Sequence[str]) -> list[str]:
    """Arguments in which a `--resume` without a directory has the value `latest`."""
    recipes = {recipe.name for recipe in shipped_recipes()}
    named: list[str] = []
    for index, argument in enumerate(args):
        named.append(argument)
        following = args[index + 1] if index + 1 < len(args) else "-"
        alone = following.startswith("-") or following in recipes or following.endswith(".toml")
        if argument == "--resume" and alone:
            named[-1] = f"--resume={LATEST}"
    return named


@with_setting_options
def train(
    recipe: Annotated[
        str | None,
        typer.Argument(
            help="Name of a recipe that ships (hybridasync recipes) or path of a TOML file.", metavar="RECIPE"
        ),
    ] = None,
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved configuration (a recipe by itself) and its bounds.")
    ] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Print: you wrote → what runs → why.")] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="SECTION.KEY=VALUE",
            help="Any setting of docs/configuration.md; may be repeated. KEY=none leaves a setting out.",
        ),
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="New directory of the run. Default: runs/RECIPE-TIME.")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            metavar="[DIR]",
            help="Go on at the last checkpoint of the run in DIR. Without DIR: the latest run of the recipe.",
        ),
    ] = None,
    **options: Any,
) -> None:
    """Train as a recipe says.

    Start with: hybridasync train quickstart

    Look before you run: --dry-run prints what would run, --explain says why.

    Options override --set, and --set overrides the recipe. Each option names its setting in parentheses.
    """
    overrides = [*(set_ or ()), *overrides_of(options)]
    with errors_as_lines():
        going_on = run_dir_to_resume(recipe, _directory(resume, run_dir)) if resume else None
        resolved = resolve(_configuration(recipe, overrides, going_on))
        _notes_of_resume(resolved.config, going_on)
        if dry_run or explain:
            if explain:
                show_changes(resolved)
            else:
                say_changes(resolved)
            if dry_run:
                show_resolved(resolved)
            return
        say_changes(resolved)
        directory = going_on or new_run_dir(recipe or "", resolved.config, run_dir)
    raise typer.Exit(_launch(resolved, directory, going_on is not None))


def _directory(resume: str | None, run_dir: Path | None) -> Path | None:
    return run_dir if resume in (None, LATEST) else Path(resume)


def _configuration(recipe: str | None, overrides: Sequence[str], going_on: Path | None) -> Config:
    if recipe is not None or going_on is None:
        return load(recipe or "", overrides)
    values = read_toml(going_on / FILE_NAME)
    for override in overrides:
        apply_override(values, override)
    return validate(values, source=str(going_on))


def _notes_of_resume(config: Config, going_on: Path | None) -> None:
    if going_on is not None:
        for difference in check_resume(differences(read_resolved(going_on), config)):
            say_note(f"resumed with a change: {difference}")


def _launch(resolved: Resolved, directory: Path, going_on: bool) -> int:
    """Everything heavy is imported from here on, so that a mistake is told at once."""
    with errors_as_lines(logs=directory / "logs"):
        from hybridasync.runtime.preflight import preflight

        if going_on and (done := finished(resolved.config, directory)):
            say_warning(done)
            return 0
        preflight(resolved.config)
        make_run_dir(directory)
        from hybridasync.runtime.launcher import launch

        return launch(resolved, run_dir=directory, resume=going_on)
