"""`hybridasync serve-rollout`: the engines of a recipe on a node of their own."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated

import anyio
import typer

from hybridasync.config.load import load
from hybridasync.config.pipeline import resolve
from hybridasync.config.prepared import with_prepared
from hybridasync.config.recipes import recipe_name
from hybridasync.errors import ConfigError
from hybridasync_cli.show import errors_as_lines, say_changes, say_note

OF_THE_WHOLE_JOB = ("eval.eval_engines=shared", "engine.min_healthy_engines=1")
"""What a recipe says of all nodes' engines together, and one node can't meet."""


def serve_rollout(
    recipe: Annotated[str, typer.Argument(help="Name or path of the recipe.", metavar="RECIPE")],
    *,
    host: Annotated[
        str, typer.Option("--host", help="This node's address, as the controller reaches it: a private one.")
    ],
    folder: Annotated[
        Path | None, typer.Option("--folder", help="For logs. Default: rollout/RECIPE-HOST-TIME, here.")
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option("--run-dir", help="The run's directory, where a recipe has {prepared} in the model's path."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="As of train: engine.num_engines=4, say."),
    ] = None,
) -> None:
    """Run a recipe's engines and sidecars on this node, until Ctrl-C, for a controller on another one.

    \b
    export HYBRIDASYNC_TOKEN=secret            # the same on all nodes
    hybridasync serve-rollout recipe.toml --host 10.0.0.3 --set engine.sidecar_port=31000

    It prints the engine.sidecar_url for the controller's recipe. What ends is started anew; runs may come and go.
    SGLang's API has no authentication, and nothing is encrypted: a private network only.
    """
    with errors_as_lines():
        from hybridasync.runtime.preflight import check_sglang
        from hybridasync.runtime.serve_rollout import address, check, serve
        from hybridasync.runtime.token import TOKEN_VARIABLE

        resolved = resolve(load(recipe, [*(set_ or ()), *OF_THE_WHOLE_JOB]))
        say_changes(resolved)
        config = with_prepared(resolved.config, run_dir) if run_dir else resolved.config
        check(config)
        where = address(host, public=config.network.allow_public_address)
        check_sglang(config)
        if not Path(config.model.hf_checkpoint).is_dir():
            raise ConfigError(
                f"{config.model.hf_checkpoint} isn't a directory on this node; --run-dir says where {{prepared}} is",
                setting="model.hf_checkpoint",
            )
        token = os.environ.get(TOKEN_VARIABLE, "").strip()
        if not token:
            raise ConfigError("set it to a secret, the same one here and for the controller", setting=TOKEN_VARIABLE)
        place = folder or Path("rollout") / f"{recipe_name(recipe)}-{where}-{time.strftime('%Y%m%d-%H%M%S')}"
        say_note(f"logs: {place / 'logs'}")
        anyio.run(partial(serve, config, place, host=where, token=token, say=_say))


def _say(text: str) -> None:
    with suppress(OSError):  # whoever read it has gone: no reason to end the engines
        typer.echo(text)
