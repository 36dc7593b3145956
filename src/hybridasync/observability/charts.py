"""The report's curves as SVG text, drawn by matplotlib without a display.

matplotlib takes a second to import, so this module is imported only when a report is written.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hybridasync.observability import names
from hybridasync.observability.jsonl import Row

BLUE, ORANGE, GREEN, GREY, INK = "#2563c9", "#d9722b", "#23936a", "#9aa3ae", "#3b4350"
_PART_COLOURS = (BLUE, ORANGE, GREEN, "#d5dae1")
Series = tuple[list[float], list[float]]  # x and y

MAX_POINTS = 400  # of one curve; more are averaged, so that a report of a long run stays small
# Any, because the stubs of newer matplotlib releases list the legal keys and those of older ones do not.
STYLE: Any = {
    "font.size": 9.5,
    "axes.edgecolor": "#c9ced6",
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#e8ebef",
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.8,
    "svg.fonttype": "path",
}


@dataclass(frozen=True, slots=True)
class Chart:
    """`caption` says what the curve means and what to expect of it."""

    title: str
    caption: str
    svg: str


@dataclass(frozen=True, slots=True)
class Curves:
    """Rows of metrics and evaluations; the x axis of all charts is completed steps, so that the two line up."""

    steps: Sequence[Row]
    evaluations: Sequence[Row]

    def series(self, name: str) -> Series:
        return _series(self.steps, name, offset=1)

    def evaluated(self, name: str) -> Series:
        return _series(self.evaluations, name, offset=0)


def draw_all(steps: Sequence[Row], evaluations: Sequence[Row]) -> list[Chart]:
    """The charts for which there is data, in the order in which one reads them."""
    curves = Curves(thin(steps), evaluations)
    drawn = []
    for number, (title, caption, draw) in enumerate(_CHARTS):
        with matplotlib.rc_context(STYLE | {"svg.hashsalt": f"chart-{number}"}):
            figure = Figure(figsize=(6.0, 2.7), layout="constrained")
            axes = figure.add_subplot()
            if draw(axes, curves):
                axes.set_xlabel("completed training steps")
                axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
                axes.margins(x=0.02)
                if axes.get_xlim()[1] - axes.get_xlim()[0] < 1:
                    axes.set_xlim(0, 2)  # one step only
                drawn.append(Chart(title, caption, bare_svg(figure, number)))
    return drawn


def thin(rows: Sequence[Row], limit: int = MAX_POINTS) -> list[Row]:
    """At most `limit` rows: runs of neighbours become one, the mean of each number (the largest, for `*_max`)."""
    width = -(-len(rows) // limit) if rows else 1
    if width == 1:
        return list(rows)
    return [_merge(rows[start : start + width]) for start in range(0, len(rows), width)]


def _merge(rows: Sequence[Row]) -> Row:
    merged: Row = {}
    for name in {name for row in rows for name in row}:
        values = [value for row in rows if isinstance(value := row.get(name), (int, float))]
        if values:
            merged[name] = max(values) if name.endswith("_max") else sum(values) / len(values)
    return merged


def _series(rows: Sequence[Row], name: str, *, offset: int) -> Series:
    points = [
        (float(at) + offset, float(value))
        for row in rows
        if isinstance(at := row.get("step"), (int, float)) and isinstance(value := row.get(name), (int, float))
    ]
    return [x for x, _ in points], [y for _, y in points]


def _smooth(values: Sequence[float]) -> list[float]:
    """Centred moving mean over about a tenth of the curve."""
    half = len(values) // 20
    windows = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def _noisy(axes: Axes, series: Series, colour: str, *, label: str = "") -> bool:
    x, y = series
    if not y:
        return False
    if len(y) < 20:
        axes.plot(x, y, color=colour, label=label or None, marker="o", markersize=3)
        return True
    axes.plot(x, y, color=colour, alpha=0.28, linewidth=1.0)
    axes.plot(x, _smooth(y), color=colour, label=label or None)
    return True


def _reward(axes: Axes, curves: Curves) -> bool:
    axes.set_ylabel("mean reward")
    return _noisy(axes, curves.series(names.REWARD_MEAN), BLUE)


def _accuracy(axes: Axes, curves: Curves) -> bool:
    shown = _noisy(axes, curves.series(names.ACCURACY), GREY, label="training prompts")
    for name, colour, marker, label in (
        ("accuracy", BLUE, "o", "held out, greedy"),
        ("sampled_accuracy", ORANGE, "s", "held out, sampled"),
    ):
        x, y = curves.evaluated(name)
        if y:
            shape = marker if len(y) <= 40 else None
            axes.plot(x, y, color=colour, marker=shape, markersize=4.5, linewidth=1.2, label=label)
            shown = True
    axes.set_ylim(-0.03, 1.03)
    axes.set_ylabel("share correct")
    if shown:
        axes.legend(loc="best")
    return shown


def _throughput(axes: Axes, curves: Curves) -> bool:
    axes.set_ylabel("response tokens / s")
    return _noisy(axes, curves.series(names.RESPONSE_TOK_S), GREEN) and _from_zero(axes)


def _step_time(axes: Axes, curves: Curves) -> bool:
    rows = [row for row in curves.steps if isinstance(row.get(names.STEP_S), (int, float))]
    if not rows:
        return False
    parts = (names.TRAIN_S, names.TRAIN_WAIT_S, names.PUBLISH_S)
    x = [_value(row, "step") + 1 for row in rows]
    stacked = [[_value(row, name) for row in rows] for name in parts]
    stacked.append([max(0.0, _value(row, names.STEP_S) - sum(_value(row, name) for name in parts)) for row in rows])
    parts_shown = zip(stacked, ("training", "waiting for samples", "publication", "other"), _PART_COLOURS, strict=True)
    width = (x[-1] - x[0]) / max(1, len(x) - 1) or 1.0
    edges = [x[0] - width / 2 + width * index for index in range(len(x) + 1)]
    below = [0.0] * len(rows)
    for heights, label, colour in parts_shown:
        top = [low + height for low, height in zip(below, heights, strict=True)]
        axes.stairs(top, edges, baseline=below, fill=True, label=label, color=colour, linewidth=0)
        below = top
    axes.set_ylabel("seconds")
    axes.legend(loc="upper right", ncols=2)
    # A slow first step (compilation, cold caches) must not flatten the rest, and the legend needs room.
    axes.set_ylim(0, 1.6 * sorted(below)[int(0.97 * (len(below) - 1))] or 1.0)
    return True


def _staleness(axes: Axes, curves: Curves) -> bool:
    x, y = curves.series(names.VERSION_LAG_MAX)
    if y:
        axes.fill_between(x, y, step="mid", color=ORANGE, alpha=0.18, linewidth=0, label="largest")
    shown = _noisy(axes, curves.series(names.VERSION_LAG_MEAN), ORANGE, label="mean")
    axes.set_ylabel("weight versions")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    if shown or y:
        axes.legend(loc="upper right")
    return (shown or bool(y)) and _from_zero(axes)


def _gap(axes: Axes, curves: Curves) -> bool:
    shown = False
    for name, colour, label in (
        (names.LOGPROB_GAP_MEAN, BLUE, "trained tokens, mean"),
        (names.LOGPROB_GAP_P99, ORANGE, "trained tokens, 99th percentile"),
    ):
        x, y = curves.series(name)
        if any(value > 0 for value in y):
            axes.plot(x, y, color=colour, label=label, linewidth=1.4)
            shown = True
    x, y = curves.evaluated("logprob_gap_max")
    if any(value > 0 for value in y):
        axes.plot(x, y, color=GREEN, marker="o", markersize=4.5, linestyle="none", label="same weights, largest")
        shown = True
    if shown:
        axes.set_yscale("log")
        axes.set_ylabel("nats")
        low, high = axes.get_ylim()
        axes.set_ylim(low, high * (high / low) ** 0.45)
        axes.legend(loc="upper right", ncols=2)
    return shown


def _length(axes: Axes, curves: Curves) -> bool:
    axes.set_ylabel("tokens")
    return _noisy(axes, curves.series(names.RESPONSE_TOKENS), BLUE) and _from_zero(axes)


def _entropy(axes: Axes, curves: Curves) -> bool:
    axes.set_ylabel("nats")
    return _noisy(axes, curves.series(names.ENTROPY), GREEN) and _from_zero(axes)


def _from_zero(axes: Axes) -> bool:
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1] or 1.0)
    return True


def _value(row: Row, name: str) -> float:
    value = row.get(name)
    return float(value) if isinstance(value, (int, float)) else 0.0


_CHARTS: tuple[tuple[str, str, Callable[[Axes, Curves], bool]], ...] = (
    ("Reward", "Mean reward of the samples trained on. Noise is normal; the bold line is a moving mean.", _reward),
    ("Accuracy", "Held-out prompts are never trained on. Greedy and sampled should rise together.", _accuracy),
    ("Throughput", "Response tokens by end-to-end time: publications and waiting count.", _throughput),
    ("Step time", "Where the workers' time went. Much orange: generation is the bottleneck.", _step_time),
    ("Staleness", "How many weight versions lie between a trained sample's oldest token and the update.", _staleness),
    (
        "Log-prob gap",
        "Trainer against engine. Stale samples (lines) differ by what training changed; equal weights (dots) agree.",
        _gap,
    ),
    ("Response length", "Mean length of a response. A rise to the cap means truncation.", _length),
    ("Entropy", "Of the next-token distribution. A fall to nearly zero ends exploration.", _entropy),
)


def bare_svg(figure: Figure, number: int) -> str:
    """The bare <svg> element, without prologue and metadata; ids are made unique within the page."""
    buffer = io.BytesIO()
    metadata = {"Creator": None, "Date": None, "Format": None, "Type": None}
    figure.savefig(buffer, format="svg", metadata=metadata)
    text = buffer.getvalue().decode("utf-8")
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\sxmlns(:xlink)?="[^"]*"', "", text)
    text = re.sub(r'\s(width|height)="[\d.]+pt"', "", text, count=2)
    return re.sub(r'(id="|href="#|url\(#)', rf"\1c{number}-", text)
