"""What people read on the terminal: errors in one line, the resolved configuration, the table of changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hybridasync.config.pipeline import Bounds, Resolved
from hybridasync.config.resolved import to_toml
from hybridasync.errors import ConfigError, HybridAsyncError

_BOUND_TEXTS = {
    "samples_per_step": "samples of a step",
    "updates_per_step": "optimizer updates of a step",
    "data_parallel_size": "data parallel size",
    "slots": "slots: groups admitted and not yet trained on, (max_staleness + 1) × rollout_batch_size",
    "max_partition_lag": "most steps that generation runs ahead (partition lag)",
    "max_version_lag": "most weight versions between sampling and training",
    "steps": "training steps",
    "publications": "publications, the initial one included",
    "evaluations": "evaluations, the initial one included",
    "samples": "samples of the run",
}


@contextmanager
def errors_as_lines(*, logs: Path | None = None) -> Iterator[None]:
    """A mistake or a failure becomes a message on stderr and the exit code of its class: no traceback."""
    try:
        yield
    except ConfigError as error:
        say_error(str(error))
        raise typer.Exit(error.exit_code) from error
    except HybridAsyncError as error:
        say_error(f"{error}{f' (logs: {logs})' if logs else ''}")
        raise typer.Exit(error.exit_code) from error
    except KeyboardInterrupt as error:
        say_error("interrupted")
        raise typer.Exit(130) from error


def say_error(message: str) -> None:
    """One message on stderr, never wrapped so that it can be searched for."""
    _say("error", "bold red", message)


def say_warning(message: str) -> None:
    """One message on stderr."""
    _say("warning", "bold yellow", message)


def say_note(message: str) -> None:
    """One message on stderr."""
    _say("note", "bold cyan", message)


def show_resolved(resolved: Resolved) -> None:
    """The configuration as TOML, a recipe by itself, with the derived bounds as its last comment."""
    lines = [to_toml(resolved.config).rstrip(), "", "# Derived bounds"]
    for field in fields(Bounds):
        value = getattr(resolved.bounds, field.name)
        shown = "known once the data set is read" if value is None else str(value)
        lines.append(f"# {field.name} = {shown}  ({_BOUND_TEXTS[field.name]})")
    typer.echo("\n".join(lines))


def say_changes(resolved: Resolved) -> None:
    """What runs otherwise than it was written, and what is probably not meant; a line each on stderr."""
    for change in resolved.changes:
        if not change.filled_in:
            say_note(f"{change.setting}: {_shown(change.wrote)} → {_shown(change.runs)}: {change.why}")
    for warning in resolved.warnings:
        say_warning(warning)


def show_changes(resolved: Resolved) -> None:
    """A table: you wrote → what runs → why."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("setting", style="cyan", no_wrap=True)
    for heading in ("you wrote", "what runs", "why"):
        table.add_column(heading, overflow="fold")
    for change in sorted(resolved.changes, key=lambda one: one.filled_in):
        wrote = "(nothing)" if change.wrote is None else _shown(change.wrote)
        table.add_row(change.setting, wrote, _shown(change.runs), change.why)
    console = Console()
    if resolved.changes:
        console.print(table)
    else:
        console.print("What you wrote is what runs.")
    for warning in resolved.warnings:
        say_warning(warning)


def _shown(value: Any) -> str:
    if value is None:
        return "(none)"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _say(kind: str, style: str, message: str) -> None:
    Console(stderr=True).print(Text(f"{kind}: ", style=style) + Text(message, style="default"), soft_wrap=True)
