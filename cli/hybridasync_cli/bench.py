"""`hybridasync bench`: paired trials of publication, and what overlap, engine and control plane cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from hybridasync.errors import ConfigError
from hybridasync_cli.bench_parts import control, engine, overlap
from hybridasync_cli.show import errors_as_lines, say_error, say_note

if TYPE_CHECKING:
    from hybridasync.bench.results import Results

bench = typer.Typer(
    name="bench",
    help="Benchmarks with evidence that others can check. Start with: hybridasync bench publication --out bench-run",
    no_args_is_help=True,
)

bench.command("overlap")(overlap)
bench.command("engine")(engine)
bench.command("control")(control)

RECIPE = "bench-publication"
LEAST_WIDTH = 110
"""Of the table with all variants; in a pipe rich takes 80, and cuts names."""

Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Any setting, for all variants alike; may be repeated."),
]


Variants = Annotated[
    str, typer.Option("--variants", help="Names with commas between them. Default: all of them.", show_default=False)
]
Window = Annotated[
    str | None,
    typer.Option("--window", metavar="FIRST:LAST", help="Steps compared (0-based). Default: the middle half."),
]
Blocking = Annotated[
    bool,
    typer.Option(
        "--blocking",
        help="baseline, zero_kl and optimized publish the reference's way: drain, pause, whole transfer, resume.",
    ),
]
Accept = Annotated[
    list[str] | None,
    typer.Option(
        "--accept",
        metavar="CONDITION",
        help="A threshold that must hold in every trial, like 'optimized/zero_kl >= 1.05' or 'staged.pause_ms <= 10'; "
        "may be repeated.",
    ),
]


@bench.command("publication")
def publication(
    *,
    out: Annotated[Path, typer.Option("--out", help="New directory of report and evidence.")],
    trials: Annotated[int, typer.Option("--trials", min=1, help="Trials of each variant; one seed each.")] = 3,
    steps: Annotated[int, typer.Option("--steps", min=2, help="Training steps of a trial.")] = 20,
    variants: Variants = "",
    window: Window = None,
    blocking: Blocking = False,
    accept: Accept = None,
    recipe: Annotated[str, typer.Option("--recipe", help="What is trained: name or path of a recipe.")] = RECIPE,
    set_: Overrides = None,
) -> None:
    """Compare ways of publishing weights: the same training, a few trials of each way, in rotated order.

    \b
    baseline      after every step; a KL loss of weight zero is asked for, which the code switches off
    zero_kl       after every step; no KL loss is asked for
    optimized     after every second step
    staged        after every step, prepared while the engines generate
    staged-delta  the same, and only what changed
    adaptive      staged, after every step or every second, whatever the measured cost asks for

    Each trial is a real run in processes of its own. Two CPU cores take about half a minute for one of 20 steps.
    A benchmark that was stopped goes on when the same command is given again.

    \b
    hybridasync bench publication --out bench-run --blocking --accept "optimized/zero_kl >= 1.05"
    hybridasync bench publication --out gpu-run --recipe gsm8k-qwen3-0.6b-2gpu
    hybridasync bench verify bench-run

    Exit code: 0 all trials complete and every threshold holds, 1 otherwise, 2 for a mistake in the options.
    """
    with errors_as_lines(logs=out / "work"):
        from hybridasync.bench import publication as benchmark
        from hybridasync.bench.accept import parse
        from hybridasync.bench.measures import MEASURES
        from hybridasync.bench.plan import Plan
        from hybridasync.bench.plan import window as window_of
        from hybridasync.bench.variants import chosen

        names = chosen([name for name in variants.replace(" ", "").split(",") if name])
        first, last = window_of(steps, window)
        conditions = [parse(text, variants=names, measures=tuple(MEASURES)).text for text in accept or ()]
        plan = Plan(
            recipe, tuple(set_ or ()), names, trials, steps, first, last, blocking=blocking, accept=tuple(conditions)
        )
        results = benchmark.run(plan, out, tell=typer.echo)
        _show(results)
        say_note(f"report: {out / 'report.html'}; check it with: hybridasync bench verify {out}")
    raise typer.Exit(0 if results.passed else 1)


@bench.command("verify")
def verify(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="What `bench publication --out` wrote.")],
) -> None:
    """Check the evidence of a benchmark: every byte of every file, and the tables anew from the raw logs.

    hybridasync bench verify bench-run

    Exit code: 0 all is as it was written, 1 something isn't (the file is named), 2 there is no such directory.
    """
    with errors_as_lines():
        if not directory.is_dir():
            raise ConfigError(f"no directory {directory}", setting="DIR")
        from hybridasync.bench import evidence

        results = evidence.verify(directory)
        _show(results)
        typer.echo(f"{directory}: every file is as it was written, and the tables follow from the raw logs")


def _show(results: Results) -> None:
    """The table of main figures, then what was decided and what is wrong."""
    from hybridasync.bench.report import MAIN, headline, measures_table, verdict_text

    typer.echo(headline(results).replace("`", ""))
    _, rows = measures_table(results, MAIN)
    table = Table("", *(row[0] for row in rows), box=box.SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(MAIN, start=1):
        table.add_row(name, *(row[number] for row in rows))
    Console(width=max(Console().width, LEAST_WIDTH)).print(table)
    for verdict in results.verdicts:
        typer.echo(verdict_text(verdict))
    for problem in (*results.unequal, *results.problems):
        say_error(problem)
