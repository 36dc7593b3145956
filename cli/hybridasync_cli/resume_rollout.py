"""`hybridasync resume-rollout`: which engines are paused, by whom, and the end of it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import anyio
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from hybridasync.errors import ConfigError
from hybridasync_cli.show import errors_as_lines

if TYPE_CHECKING:
    from hybridasync.drivers.resume_rollout import Report

STILL_PAUSED = 3

LOG_WIDTH = 180
"""In a pipe there is no width to fit into: a transaction id stays in one piece, so that it can be searched for."""


def resume_rollout(
    *,
    run_dir: Annotated[
        Path | None,
        typer.Option("--run-dir", help="A run: its engines, and what its journal says it owes."),
    ] = None,
    sidecar: Annotated[
        list[str] | None,
        typer.Option("--sidecar", metavar="URL", help="A sidecar, whoever paused its engine; may be repeated."),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="File with the sidecars' token. Default: HYBRIDASYNC_TOKEN.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show, and change nothing.")] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="End pauses of others and of a run that is alive too; kill and restart an engine that won't resume.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Resume engines that a run left paused. It may be dead; one that is alive is only looked at.

    \b
    hybridasync resume-rollout --run-dir runs/mine --dry-run
    hybridasync resume-rollout --sidecar http://10.0.0.2:31000 --token-file token

    Exit code: 0 nothing is paused any more, 3 something is, or may be.
    """
    with errors_as_lines():
        if (run_dir is None) == (not sidecar):
            raise ConfigError("give --run-dir DIR or --sidecar URL, one of the two")
        from hybridasync.runtime.resume_rollout import Request, resume_run, resume_sidecars

        request = Request(dry_run, force, _read(token_file))
        if run_dir is not None:
            reports = anyio.run(resume_run, run_dir, request)
        else:
            reports = anyio.run(resume_sidecars, sidecar or [], request)
    if as_json:
        typer.echo(json.dumps([_row(report) for report in reports], indent=1))
    else:
        _show(reports)
    raise typer.Exit(STILL_PAUSED if any(report.paused for report in reports) else 0)


def _read(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't read {path}: {error}", setting="--token-file") from error
    if not token:
        raise ConfigError(f"{path} is empty", setting="--token-file")
    return token


def _row(report: Report) -> dict[str, object]:
    """`found` and `left` are statuses as the sidecar reports them; None where there was no answer."""
    return {
        "engine": report.engine,
        "paused": report.paused,
        "done": report.done,
        "detail": report.detail,
        "found": asdict(report.before) if report.before else None,
        "left": asdict(report.after) if report.after else None,
    }


def _who(report: Report) -> str:
    found = report.before
    if found is None or not (found.holder or found.state == "paused"):
        return "-"
    if found.txn in report.owed:
        return "this run"
    if found.holder is None:
        return "nobody known"
    return "a plain client" if found.txn is None else f"controller {found.holder[:8]}"


def _show(reports: Sequence[Report]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("engine", "found", "paused by", "transaction", "since", "lease left", "weights"):
        table.add_column(heading, overflow="fold")
    table.add_column("done", overflow="fold", style="cyan")
    table.add_column("left", overflow="fold")
    for report in reports:
        found, left = report.before, report.after
        left_state = left.state if left else "unknown"
        style = "bold red" if report.paused else "green"
        table.add_row(
            report.engine,
            found.state if found else "no answer",
            _who(report),
            (found and found.txn) or "-",
            time.strftime("%H:%M:%S", time.localtime(found.since)) if found and found.since else "-",
            f"{found.lease_left_s:.0f} s" if found and found.lease_left_s is not None else "-",
            ((found and found.weight_version) or "-") + (" (torn)" if found and found.torn else ""),
            ", ".join(report.done),
            f"[{style}]{left_state}[/]",
        )
    console = Console()
    if not console.is_terminal:
        console = Console(width=LOG_WIDTH)
    console.print(table)
    for report in reports:
        if report.paused and report.detail:
            console.print(f"{report.engine}: {report.detail}", soft_wrap=True, markup=False)
