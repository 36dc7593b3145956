"""The report's curves: a line for each variant, its trials' mean at each step, with the range of the trials behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hybridasync.bench.readings import Reading, Readings
from hybridasync.observability.charts import BLUE, GREEN, GREY, INK, ORANGE, STYLE, Chart, bare_svg

_COLOURS = (GREY, INK, BLUE, GREEN, ORANGE, "#8a4fbf")

CHARTS: Mapping[str, tuple[str, str, str, str]] = {
    "throughput": ("Response throughput", "response_tok_s", "tokens / s", "By end-to-end step time. Higher is better."),
    "step-time": ("Step time", "step_s", "seconds", "End to end, with waiting and publication."),
    "publication": (
        "Publication",
        "publish_s",
        "seconds",
        "How long the training loop was held up after a step; 0 where nothing was published.",
    ),
    "pause": ("Standstill of the engines", "pause_ms", "milliseconds", "Of the slowest engine; 0 where none was due."),
    "weight-age": (
        "Weight age",
        "version_lag_mean",
        "versions",
        "Weight versions between a sample's oldest token and the update: the price of publishing less often.",
    ),
    "trainer-wait": ("Waiting for data", "train_wait_s", "seconds", "The trainer waited for samples."),
    "engine-idle": ("Idle engines", "engine_idle_s", "seconds", "The engines had no request."),
    "processor": ("Processor use", "cpu_percent", "% of all cores", "Of the machine, idle samples included."),
    "memory": ("Trainer memory", "trainer_rss_mib", "MiB", "Resident memory of the worker processes."),
}
"""File name → title, column, axis, caption."""


def draw(readings: Readings) -> dict[str, Chart]:
    """File name without its suffix → chart."""
    drawn = {}
    for number, (name, (title, column, unit, caption)) in enumerate(CHARTS.items()):
        with matplotlib.rc_context(STYLE | {"svg.hashsalt": f"bench-{number}"}):
            figure = Figure(figsize=(6.0, 2.9), layout="constrained")
            axes = figure.add_subplot()
            axes.axvspan(readings.plan.first - 0.5, readings.plan.last + 0.5, color="#f0f3f7", zorder=0, linewidth=0)
            for index, variant in enumerate(readings.plan.variants):
                _line(axes, readings.complete(variant), column, label=variant, colour=_COLOURS[index % len(_COLOURS)])
            axes.set_xlabel("step (shaded: the window that is compared)")
            axes.set_ylabel(unit)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
            axes.margins(x=0.02)
            axes.set_ylim(0, _top(readings, column))
            if axes.lines:
                axes.legend(loc="upper right", ncols=3)
            drawn[name] = Chart(title, caption, bare_svg(figure, number))
    return drawn


def standalone(chart: Chart) -> str:
    """The chart as a file of its own."""
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return f'<?xml version="1.0" encoding="utf-8"?>\n{chart.svg.replace("<svg", f"<svg {names}", 1)}\n'


def _line(axes: Axes, trials: Sequence[Reading], column: str, *, label: str, colour: str) -> None:
    rows = [[step[column] for step in one.steps] for one in trials]
    columns = list(zip(*rows, strict=True))
    if columns:
        x = list(range(len(columns)))
        axes.fill_between(
            x, [min(c) for c in columns], [max(c) for c in columns], color=colour, alpha=0.12, linewidth=0
        )
        axes.plot(x, [sum(c) / len(c) for c in columns], color=colour, label=label, linewidth=1.5)


def _top(readings: Readings, column: str) -> float:
    """Room for the legend; a slow first step (cold caches) must not flatten the rest."""
    shown = [step[column] for one in readings.trials for step in one.steps if step["step"] >= 1]
    return 1.45 * max(shown, default=1.0) or 1.0
