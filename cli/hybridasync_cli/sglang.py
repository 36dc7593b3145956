"""`hybridasync sglang`: SGLang's own environment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hybridasync_cli.show import errors_as_lines

sglang = typer.Typer(name="sglang", help="SGLang's own environment, on a machine without a GPU.", no_args_is_help=True)


@sglang.callback()
def group() -> None:
    """SGLang's own environment, on a machine without a GPU."""


@sglang.command()
def setup(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to make it: a new directory, 2.4 GB.")],
) -> None:
    """Make and verify a virtual environment with SGLang for the CPU. Safe to repeat.

    hybridasync sglang setup sglang-env

    On a machine with a GPU install the published package instead, see docs/sglang.md.
    """
    with errors_as_lines():
        from hybridasync.runtime.sglang_setup import setup_sglang

        made = setup_sglang(directory, say=typer.echo)
    versions = made.versions
    typer.echo(
        f"SGLang {versions['sglang']} with torch {versions['torch']}, Python {versions['python']} is ready.\n\n"
        f'In a recipe:    [engine]\n                kind = "sglang"\n                python = "{made.python}"\n'
        f"A first run:    hybridasync train quickstart-sglang --set engine.python={made.python}"
    )
