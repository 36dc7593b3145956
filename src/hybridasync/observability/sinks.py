"""Where a run's numbers go: the files of the run directory. Implements `ports.MetricSink`.

metrics.jsonl       one row a training step; `step` is strictly increasing over the whole file, resumes included
evaluations.jsonl   one row an evaluation, by completed steps
samples.jsonl       some samples of each step, with reward, advantage and weight versions
groups.jsonl        every group of the rollout at each of its states; append-only, with a row for each start
events.jsonl        everything that happened (logs.py)
metrics.prom        the last step in Prometheus' text format, for node_exporter's textfile collector
tensorboard/        the same numbers for TensorBoard
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Protocol

from hybridasync.observability import names
from hybridasync.observability.jsonl import JsonLines, complain, read, replace_atomically
from hybridasync.observability.logs import NON_FINITE, EventLog, count_errors
from hybridasync.observability.tensorboard import TensorBoardFile
from hybridasync.types import EvalResult, Group, GroupState, PublicationResult, Sample


class SinkSettings(Protocol):
    """The `observability` section of a recipe, as far as it concerns files."""

    @property
    def tensorboard(self) -> bool: ...
    @property
    def log_level(self) -> str: ...
    @property
    def samples_per_step(self) -> int: ...


class SinkConfig(Protocol):
    """A recipe (config.models.Config)."""

    @property
    def observability(self) -> SinkSettings: ...


class RunSinks:
    """Writes to `run_dir`. Nothing here raises OSError; losses are counted in `lost` and said once for each file.

    Warnings go to `echo` too: give it the progress display's `note`, so that they don't tear the display.
    """

    def __init__(self, run_dir: Path, config: SinkConfig, *, echo: Callable[[str], None] = complain) -> None:
        settings = config.observability
        self.log = EventLog(run_dir / "events.jsonl", level=settings.log_level, echo=echo)
        self._run_dir = run_dir
        self._samples_per_step = settings.samples_per_step
        self._metrics = JsonLines(run_dir / "metrics.jsonl", on_first_loss=self._lost)
        self._evaluations = JsonLines(run_dir / "evaluations.jsonl", on_first_loss=self._lost)
        self._samples = JsonLines(run_dir / "samples.jsonl", on_first_loss=self._lost)
        self._groups = JsonLines(run_dir / "groups.jsonl", on_first_loss=self._lost)
        self._board = TensorBoardFile(run_dir / "tensorboard", on_loss=self._lost) if settings.tensorboard else None
        self._prometheus_lost = 0
        self._last_step = _largest(run_dir / "metrics.jsonl", "step")
        self._last_evaluation = _largest(run_dir / "evaluations.jsonl", "step")
        self._last_sampled = _largest(run_dir / "samples.jsonl", "step")  # written before the row of its step
        self.errors = _errors_so_far(run_dir / "events.jsonl")
        self.non_finite = max(0, _largest(run_dir / "metrics.jsonl", names.NAN_INF))

    @property
    def lost(self) -> int:
        """Records that couldn't be written."""
        return self.log.lost + sum(file.lost for file in self._files) + self._prometheus_lost

    @property
    def _files(self) -> tuple[JsonLines, ...]:
        return self._metrics, self._evaluations, self._samples, self._groups

    def rewind(self, completed: int) -> None:
        """After a resume at `completed` steps: forget the steps and evaluations after it, they are run again."""
        if max(self._last_step, self._last_sampled) >= completed or self._last_evaluation > completed:
            self._metrics.rewind("step", completed)
            self._samples.rewind("step", completed)
            self._evaluations.rewind("step", completed + 1)
            self._last_step = min(self._last_step, completed - 1)
            self._last_sampled = min(self._last_sampled, completed - 1)
            self._last_evaluation = min(self._last_evaluation, completed)
            self.event("metrics.rewound", completed=completed)
            if self._board is not None:
                self._board.rewind(completed)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """`step` is 0-based. Values that aren't finite are written as null, named in `non_finite`, and counted.

        The counts of errors and of such values are added to the row.
        """
        if step <= self._last_step:
            self.rewind(step)
        finite = {name: number for name, value in metrics.items() if (number := _finite(value)) is not None}
        bad = sorted(metrics.keys() - finite.keys())
        self.non_finite += len(bad)
        finite = {names.ERRORS: self.errors, names.NAN_INF: self.non_finite} | finite
        row = {"step": step, "time": _now(), **finite, **dict.fromkeys(bad)}
        if bad:
            row["non_finite"] = bad
            self.log.event(NON_FINITE, level="warning", step=step, names=bad)
        self._metrics.append(row)
        self._last_step = step
        self._scalars(step, {names.tag(name): value for name, value in finite.items()})
        self._prometheus(step, finite)

    def publication(self, result: PublicationResult) -> None:
        level = "warning" if result.degraded else "info"
        self.event("publication.completed", level=level, **_fields(result))
        times = {"pause_ms": 1000 * result.pause_s, "prepare_s": result.prepare_s, "transfer_s": result.transfer_s}
        self._scalars(result.version, {f"publication/{name}": value for name, value in times.items()})

    def evaluation(self, result: EvalResult) -> None:
        """Filed under the completed steps; a later one of the same weights replaces an earlier one."""
        row = _fields(result)
        completed = result.version if result.step is None else result.step
        row["step"] = completed
        if self._last_evaluation >= completed:
            self._evaluations.rewind("step", completed)
        self._evaluations.append({"time": _now(), **row})
        self._last_evaluation = completed
        self.event("evaluation.completed", **row)
        numbers = {name: value for name, value in row.items() if isinstance(value, float) and math.isfinite(value)}
        self._scalars(completed, {f"eval/{name}": value for name, value in numbers.items()})

    def samples(self, step: int, groups: Sequence[Group], advantages: Mapping[int, Sequence[float]]) -> None:
        """The first sample of each group, then the second, up to `observability.samples_per_step`."""
        pairs = [(group, index) for group in groups for index in range(len(group.samples))]
        pairs.sort(key=lambda pair: pair[1])
        for group, index in islice(pairs, self._samples_per_step):
            of_group = advantages.get(group.prompt.uid, ())
            advantage = of_group[index] if index < len(of_group) else None
            self._samples.append(_sample_row(step, group, group.samples[index]) | {"advantage": advantage})
            self._last_sampled = step

    def group(self, uid: int, state: GroupState, **fields: object) -> None:
        """The last row of a group says what became of it; one that was trained on after the checkpoint comes again."""
        self._groups.append({"uid": uid, "state": state, **fields})

    def begin_at(self, completed: int) -> None:
        """A start after `completed` steps. Groups without an end, and those trained on later, are made again now."""
        self.rewind(completed)
        self._groups.append({"completed": completed})

    def event(self, name: str, /, **fields: object) -> None:
        """Write an event. Those of level warning and error count as errors of the run."""
        if fields.get("level") in ("warning", "error"):
            self.errors += 1
        self.log.event(name, **fields)

    def sync(self) -> None:
        """The rows of steps, evaluations, samples and groups are on disk."""
        for file in self._files:
            file.sync()

    def close(self) -> None:
        for file in self._files:
            file.close()
        if self._board is not None:
            self._board.close()
        self.log.close()

    def _lost(self, message: str) -> None:
        self.log.echo(message)
        self.log.event("records.lost", level="error", message=message)

    def _scalars(self, step: int, values: Mapping[str, float]) -> None:
        if self._board is not None and values:
            self._board.scalars(step, values)

    def _prometheus(self, step: int, values: Mapping[str, float]) -> None:
        try:
            text = prometheus_text({"step": float(step), **values})
            replace_atomically(self._run_dir / "metrics.prom", text.encode(), durable=False)
        except OSError as error:
            self._prometheus_lost += 1
            if self._prometheus_lost == 1:
                self._lost(f"metrics.prom: {error.strerror or error}")


def prometheus_text(values: Mapping[str, float]) -> str:
    """Gauges in Prometheus' text exposition format, version 0.0.4."""
    lines = []
    for name, value in values.items():
        full = f"hybridasync_{name}"
        if (metric := names.METRICS.get(name)) is not None:
            unit = f" [{metric.unit}]" if metric.unit else ""
            lines.append(f"# HELP {full} {metric.meaning}{unit}")
        lines.append(f"# TYPE {full} gauge\n{full} {value!r}")
    stamp = "hybridasync_last_step_timestamp_seconds"
    lines.append(f"# TYPE {stamp} gauge\n{stamp} {time.time():.3f}")
    return "\n".join(lines) + "\n"


def _sample_row(step: int, group: Group, sample: Sample) -> dict[str, object]:
    completion = sample.completion
    versions = [span.version for span in completion.spans]
    return {
        "step": step,
        "uid": group.prompt.uid,
        "source": group.prompt.source,
        "row": group.prompt.row,
        "epoch": group.prompt.epoch,
        "partition": group.partition,
        "prompt": group.prompt.text,
        "response": sample.text,
        "label": group.prompt.label,
        "reward": sample.reward,
        "correct": sample.correct,
        "masked": sample.masked,
        "finish_reason": completion.finish_reason,
        "response_tokens": len(completion.output_ids),
        "versions": [min(versions), max(versions)] if versions else [],
        "engine": completion.engine,
    }


def _fields(result: EvalResult | PublicationResult) -> dict[str, object]:
    return asdict(result)


def _finite(value: object) -> float | None:
    if isinstance(value, int):
        return int(value)
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _errors_so_far(path: Path) -> int:
    try:
        return count_errors(path)
    except OSError:
        return 0


def _largest(path: Path, key: str) -> int:
    """The largest `key` in the file, -1 if there is none."""
    try:
        return max((at for row in read(path) if isinstance(at := row.get(key), int)), default=-1)
    except OSError:
        return -1


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
