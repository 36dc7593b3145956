"""The command line: parse, call, print, exit code. Heavy modules are imported by the command that needs them."""

from __future__ import annotations

import importlib
from importlib.metadata import version as version_of
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from hybridasync.config.recipes import recipe_directory, shipped_recipes
from hybridasync_cli.bench import bench
from hybridasync_cli.resume_rollout import resume_rollout
from hybridasync_cli.serve_rollout import serve_rollout
from hybridasync_cli.sglang import sglang
from hybridasync_cli.show import errors_as_lines
from hybridasync_cli.sim import sim
from hybridasync_cli.train import TrainCommand, train

app = typer.Typer(
    name="hybridasync",
    help="RL post-training with Megatron-core and SGLang, controlled by one asyncio event loop.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
_PASS_ON: dict[str, Any] = {
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    "add_help_option": False,
}

app.command("train", cls=TrainCommand)(train)
app.command("resume-rollout")(resume_rollout)
app.command("serve-rollout")(serve_rollout)
app.command("sim")(sim)
app.add_typer(bench)
app.add_typer(sglang)


@app.command()
def recipes() -> None:
    """List the recipes that ship."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for recipe in shipped_recipes():
        table.add_row(recipe.name, recipe.summary)
    console = Console()
    console.print(table)
    console.print(f"\nFiles: {recipe_directory()}. Run one: hybridasync train NAME", soft_wrap=True)


@app.command(**_PASS_ON)
def engine(ctx: typer.Context) -> None:
    """Run the embedded engine by hand: hybridasync engine --model-path DIR --port P (--help for all options)."""
    _pass_on("hybridasync.engine.server", ctx.args)


@app.command(**_PASS_ON)
def sidecar(ctx: typer.Context) -> None:
    """Run a sidecar by hand beside any SGLang server: hybridasync sidecar --engine-url URL --port P."""
    _pass_on("hybridasync.sidecar.__main__", ctx.args)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(version_of("hybridasync"))


def _pass_on(module: str, arguments: list[str]) -> None:
    """Call `main(arguments)` of a module, which has an argument parser of its own."""
    with errors_as_lines():
        code = importlib.import_module(module).main(arguments)
    raise typer.Exit(code or 0)
