"""`hybridasync bench overlap`, `engine` and `control`: measurements of one part, each with its figures as JSON."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from hybridasync.errors import ConfigError
from hybridasync_cli.show import errors_as_lines

Out = Annotated[
    Path | None, typer.Option("--out", help="File for the figures, JSON; docs/performance.md is made of it.")
]
Rounds = Annotated[int, typer.Option("--rounds", min=1, help="Repetitions whose medians are compared.")]
RECIPE = "bench-publication"


def overlap(
    *,
    recipe: Annotated[str, typer.Option("--recipe", help="What is trained: name or path of a recipe.")] = RECIPE,
    modes: Annotated[str, typer.Option("--modes", help="hybrid, fully_async, or both.")] = "hybrid,fully_async",
    rounds: Rounds = 4,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps of each phase in a round.")] = 10,
    pin: Annotated[bool, typer.Option("--pin/--no-pin", help="Trainer and engine to a core each.")] = False,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Any setting; may be repeated.")
    ] = None,
    out: Out = None,
) -> None:
    """How much of a step is left over when training and generation run at once.

    Each round measures the same work three times: generation alone, training alone, and the pipeline with both and a
    publication after each step. Overlap efficiency is the larger half by the step; 1 is perfect. What is lost is told
    by cause. Two CPU cores take about a minute a mode.

    \b
    hybridasync bench overlap --pin --out overlap.json
    hybridasync bench overlap --recipe quickstart --set publication.staged=false
    """
    with errors_as_lines():
        from hybridasync.bench import overlap as benchmark

        _check_out(out)
        cores = _two_cores() if pin else ()
        configurations = [
            benchmark.configuration(recipe, mode, set_ or ()) for mode in modes.replace(" ", "").split(",")
        ]
        from hybridasync.main import launch

        async def work() -> None:
            results = []
            for config in configurations:
                found = await benchmark.measure(config, rounds=rounds, steps=steps, cores=cores)
                results.append({"recipe": recipe, **found})
                _show_overlap(results[-1])
                _write(out, "overlap", results)

        launch(work, configurations[0])


def engine(
    *,
    shapes: Annotated[
        str,
        typer.Option(
            "--shapes", help="Sizes with commas between them: quickstart, larger, tiny (shows only that it works)."
        ),
    ] = "quickstart,larger",
    rounds: Rounds = 5,
    out: Out = None,
) -> None:
    """Response tokens per CPU-second of the embedded engine against `transformers` generate, on the same groups.

    In process and over HTTP, log-probs included; `transformers` isn't asked for log-probs. Takes about two minutes.

    hybridasync bench engine --out engine.json
    """
    _one_thread()
    with errors_as_lines():
        from hybridasync.bench import engine as benchmark

        names = [name for name in shapes.replace(" ", "").split(",") if name]
        unknown = [name for name in names if name not in benchmark.SHAPES]
        if unknown or not names:
            what, known = ", ".join(unknown) or repr(shapes), ", ".join(benchmark.SHAPES)
            raise ConfigError(f"unknown: {what}; there are {known}", setting="--shapes")
        _check_out(out)
        results = []
        for name in names:
            results.append(benchmark.measure(name, benchmark.SHAPES[name], rounds))
            _show_engine(results[-1])
            _write(out, "engine", results)


def control(
    *,
    idle_s: Annotated[float, typer.Option("--idle-s", min=0.5, help="How long idle use is watched, seconds.")] = 10.0,
    engines: Annotated[str, typer.Option("--engines", help="Numbers of engines to publish to.")] = "2,64,1024",
    requests: Annotated[int, typer.Option("--requests", min=2, help="Requests open at once.")] = 10_000,
    steps: Annotated[int, typer.Option("--steps", min=10, help="Steps of the run whose memory is watched.")] = 10_000,
    out: Out = None,
) -> None:
    """What the control plane costs by itself: no model, no training, engines that are stubs.

    \b
    * start to first call, processes, memory and processor use when idle, latency of calls, what a SIGKILL leaves
    * a publication to 2, 64 and 1024 engines
    * how late the event loop is with 10,000 requests open
    * memory of the controller over 10,000 steps

    hybridasync bench control --out control.json

    Takes two to three minutes.
    """
    _one_thread()
    with errors_as_lines():
        counts = _counts(engines)
        _check_out(out)
        import anyio

        from hybridasync.bench import control as benchmark

        found: dict[str, Any] = {"control_plane": benchmark.control_plane(idle_s)}
        _show_rows("control plane", found["control_plane"])
        found["fan_out"] = anyio.run(benchmark.fan_out, counts, 3)
        for row in found["fan_out"]:
            _show_rows("publication to many engines", row)
        found["open_requests"] = anyio.run(benchmark.open_requests, requests)
        _show_rows("open requests", found["open_requests"])
        found["many_steps"] = anyio.run(benchmark.many_steps, steps)
        _show_rows("many steps", found["many_steps"])
        _write(out, "control", [found])


def _check_out(out: Path | None) -> None:
    """Before minutes of measuring, not after them: the file of figures can be written. Raises ConfigError."""
    if out is None:
        return
    if out.is_dir():
        raise ConfigError(f"{out} is a directory; name a file", setting="--out")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out.parent):
            pass
    except OSError as error:
        raise ConfigError(f"can't write {out}: {error.strerror}", setting="--out") from error


def _counts(text: str) -> list[int]:
    parts = [part for part in text.replace(" ", "").split(",") if part]
    if not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"wants numbers above 0 with commas between them, got {text!r}", setting="--engines")
    return [int(part) for part in parts]


def _two_cores() -> tuple[int, int]:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ConfigError(f"needs two cores, this process may use {len(cores)}", setting="--pin")
    return cores[0], cores[1]


def _one_thread() -> None:
    """As in a run; before torch is imported."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def _write(out: Path | None, name: str, results: Sequence[Mapping[str, Any]]) -> None:
    if out is not None:
        from hybridasync.bench.measure import write_results

        write_results(out, name, results)


def _show_overlap(result: Mapping[str, Any]) -> None:
    from hybridasync.bench.measure import Spread

    rounds = result["rounds"]
    pinned = ", trainer and engine on a core each" if result["pinned"] else ""
    typer.echo(f"{result['mode']}: {result['work']}, {len(rounds)} rounds of {result['steps_per_round']} steps{pinned}")
    rows = [(name, str(Spread.of(one[name] for one in rounds))) for name in ("generation_s", "training_s", "step_s")]
    rows += [(f"lost: {name}", str(Spread.of(one["loss"][name] for one in rounds))) for name in rounds[0]["loss"]]
    _table(("per step, seconds", "median (least to largest)"), rows)
    typer.echo(
        f"overlap efficiency: {result['efficiency']}; processor time of others: {result['foreign_cpu_share']:.0%}"
    )


def _show_engine(result: Mapping[str, Any]) -> None:
    typer.echo(f"{result['shape']}: {result['work']}; {len(result['rounds'])} rounds")
    ratios = result["ratio"]
    rates = result["tokens_per_cpu_s"]
    rows = [(name, f"{rate.median:,.0f}", str(ratios.get(name, "1"))) for name, rate in rates.items()]
    _table(("system", "response tokens per CPU-second", "ratio, median (least to largest)"), rows)
    typer.echo(f"processor time of others: {result['foreign_cpu_share']:.0%}")


def _show_rows(title: str, found: Mapping[str, Any]) -> None:
    rows = [(name, f"{value:.4g}" if isinstance(value, float) else str(value)) for name, value in found.items()]
    _table((title, ""), rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(*header, box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    Console().print(table)
