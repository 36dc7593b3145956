"""What a person watching the run sees: a live display on a terminal, a line now and then elsewhere, or nothing.

One interface for the three. Nothing here raises: a terminal that goes away must not end a run.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import Literal, Protocol, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from hybridasync.observability import names

Mode = Literal["auto", "rich", "plain", "off"]
Clock = Callable[[], float]
PLAIN_EVERY_S = 2.0  # plain lines are for logs and CI: at most one in so many seconds


class Progress(Protocol):
    """The display. Phases follow each other; a phase without a total is one whose end isn't known (start-up)."""

    def phase(self, name: str, total: int | None = None, *, completed: int = 0, waiting_for: str = "") -> None:
        """Begin a phase, and with it end the one before. `completed` is not 0 after a resume."""
        ...

    def waiting_for(self, what: str) -> None:
        """Say what the present phase waits for, e.g. "engine-0 to load the model"; "" for nothing."""
        ...

    def advance(self, metrics: Mapping[str, float]) -> None:
        """One step of the phase is done; `metrics` are named as in names.py, any of them may be absent."""
        ...

    def note(self, text: str) -> None:
        """Show a line that stays: an evaluation, a warning, the path of a file."""
        ...

    def close(self) -> None:
        """End the display and give the terminal back. May be called again."""
        ...


def make_progress(mode: Mode = "auto", *, stream: TextIO | None = None, clock: Clock = time.monotonic) -> Progress:
    """The display for `mode`, on stderr by default. `auto` is rich on a terminal, else plain lines."""
    stream = sys.stderr if stream is None else stream
    if mode == "off":
        return NoProgress()
    if mode == "plain" or (mode == "auto" and not _is_terminal(stream)):
        return PlainProgress(stream, clock=clock)
    return RichProgress(stream, force_terminal=True if mode == "rich" else None)


class NoProgress:
    """Shows nothing."""

    def phase(self, name: str, total: int | None = None, *, completed: int = 0, waiting_for: str = "") -> None: ...

    def waiting_for(self, what: str) -> None: ...

    def advance(self, metrics: Mapping[str, float]) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


class PlainProgress:
    """One line every few seconds, and always for the first and the last step of a phase."""

    def __init__(self, stream: TextIO, *, clock: Clock = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._name = ""
        self._total: int | None = None
        self._done = 0
        self._begun = self._said = clock()
        self._completed_at_begin = 0

    def phase(self, name: str, total: int | None = None, *, completed: int = 0, waiting_for: str = "") -> None:
        self._name, self._total, self._done = name, total, completed
        self._completed_at_begin = completed
        self._begun = self._clock()
        self._said = -float("inf")
        steps = f", {total} steps" if total is not None else ""
        resumed = f", from step {completed}" if completed else ""
        self._say(f"{name}{steps}{resumed}{_until(waiting_for)}")

    def waiting_for(self, what: str) -> None:
        if what:
            self._say(f"{self._name}{_until(what)}")

    def advance(self, metrics: Mapping[str, float]) -> None:
        self._done += 1
        now = self._clock()
        if now - self._said >= PLAIN_EVERY_S or self._done == self._total:
            self._said = now
            of_total = f"/{self._total}" if self._total is not None else ""
            parts = [f"{self._name} {self._done}{of_total}", *(f"{label} {value}" for label, value in figures(metrics))]
            self._say(" · ".join([*parts, *self._eta(now), *filter(None, [who_waits(metrics)])]))

    def note(self, text: str) -> None:
        self._say(text)

    def close(self) -> None: ...

    def _eta(self, now: float) -> list[str]:
        done_here = self._done - self._completed_at_begin
        if self._total is None or done_here <= 0 or self._done >= self._total:
            return []
        return [f"{duration((now - self._begun) / done_here * (self._total - self._done))} left"]

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(_writable(f"{time.strftime('%H:%M:%S')} {text}\n", self._stream))
            self._stream.flush()


class RichProgress:
    """Bars for the phases, a table of the latest figures under them."""

    def __init__(self, stream: TextIO, *, force_terminal: bool | None = None) -> None:
        self._console = Console(file=stream, force_terminal=force_terminal, highlight=False)
        self._bars = Bars(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=32),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[waiting]}", style="dim", markup=False),
            console=self._console,
        )
        self._task: TaskID | None = None
        self._metrics: dict[str, float] = {}
        self._live: Live | None = None

    def phase(self, name: str, total: int | None = None, *, completed: int = 0, waiting_for: str = "") -> None:
        self._finish_task(reached_its_end=True)
        waiting = _until(waiting_for).lstrip(", ")
        self._task = self._bars.add_task(name, total=total, completed=completed, waiting=waiting)
        self._metrics.clear()
        if self._live is None:
            self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=4, transient=False)
            with _unharmed():
                self._live.start()
        self._refresh()

    def waiting_for(self, what: str) -> None:
        if self._task is not None:
            self._bars.update(self._task, waiting=_until(what).lstrip(", "))
            self._refresh()

    def advance(self, metrics: Mapping[str, float]) -> None:
        paused = metrics.get(names.PAUSE_MS, 0.0) > 0  # steps without a publication don't hide the last one's pause
        self._metrics.update({name: value for name, value in metrics.items() if paused or name != names.PAUSE_MS})
        if self._task is not None:
            self._bars.update(self._task, advance=1, waiting="")
        self._refresh()

    def note(self, text: str) -> None:
        with _unharmed():
            self._console.print(Text(_writable(text, self._console.file)))

    def close(self) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            self._finish_task(reached_its_end=False)
            with _unharmed():
                live.stop()

    def _finish_task(self, *, reached_its_end: bool) -> None:
        if self._task is not None:
            if reached_its_end and self._bars.tasks[self._task].total is None:
                self._bars.update(self._task, total=1, completed=1)
            self._bars.update(self._task, waiting="")
            self._bars.stop_task(self._task)
            self._task = None

    def _refresh(self) -> None:
        if self._live is not None:
            with _unharmed():
                self._live.refresh()

    def _render(self) -> Group:
        if not self._metrics:
            return Group(self._bars.get_renderable())
        table = Table.grid(padding=(0, 2))
        shown = figures(self._metrics)
        for row in range(0, len(shown), 4):
            cells = [Text.assemble((f"{label} ", "dim"), (value, "bold")) for label, value in shown[row : row + 4]]
            table.add_row("  ", *cells)
        waits = Text(f"    {who_waits(self._metrics)}", style="cyan")
        return Group(self._bars.get_renderable(), table, waits)


def figures(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Label and value of what a person wants to see of a step, in order; what is absent is left out."""
    lag = names.VERSION_LAG_MEAN
    rows: list[tuple[str, str, Callable[[float], str]]] = [
        (names.LOSS, "loss", lambda value: f"{value:.4f}"),
        (names.REWARD_MEAN, "reward", lambda value: f"{value:.3f}"),
        (names.ACCURACY, "accuracy", lambda value: f"{value:.3f}"),
        (names.RESPONSE_TOK_S, "tok/s", lambda value: f"{value:,.0f}"),
        (names.STEP_S, "step", lambda value: f"{value:.2f} s"),
        (lag, "staleness", lambda value: f"{value:.1f} (max {metrics.get(names.VERSION_LAG_MAX, value):.0f})"),
        (names.RESPONSE_TOKENS, "length", lambda value: f"{value:.0f} tok"),
        (names.PAUSE_MS, "last pause", lambda value: f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"),
        (names.WEIGHT_VERSION, "version", lambda value: f"{value:.0f}"),
    ]
    if names.REWARD_MEAN in metrics:
        rows = rows[1:]  # the loss of a policy-gradient step says nothing to a person
    return [(label, shown(metrics[name])) for name, label, shown in rows if name in metrics]


def who_waits(metrics: Mapping[str, float]) -> str:
    """Which side held the other up in this step: "the trainer waits for samples 61 % of the step"; "" if unknown."""
    step, wait, idle = (metrics.get(name) for name in (names.STEP_S, names.TRAIN_WAIT_S, names.ENGINE_IDLE_S))
    if not step or wait is None or idle is None:
        return ""
    if max(wait, idle) < 0.1 * step:
        return "trainer and engines keep each other busy"
    if wait >= idle:
        return f"the trainer waits for samples {min(1.0, wait / step):.0%} of the step"
    return f"the engines are idle {min(1.0, idle / step):.0%} of the step"


def duration(seconds: float) -> str:
    """`45 s`, `3 min 20 s`, `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _until(what: str) -> str:
    return f", waiting for {what}" if what else ""


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except ValueError:
        return False


def _writable(text: str, stream: object) -> str:
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)


def _unharmed() -> contextlib.suppress:
    """A closed pipe or terminal, or one that can't show a character, costs the display and nothing else."""
    return contextlib.suppress(OSError, ValueError)
