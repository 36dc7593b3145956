"""From what a trial left on disk to its steps: the only reader of the raw evidence, `bench verify`'s too."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridasync.bench import manifest, trial
from hybridasync.bench.measures import COLUMNS
from hybridasync.bench.plan import Job, Plan, read_plan
from hybridasync.bench.trial import Ended, epoch_s
from hybridasync.bench.usage import mean
from hybridasync.errors import OperatingError
from hybridasync.observability.jsonl import Row, read

TRIALS = "trials"

_OF_PUBLICATIONS = ("prepare_s", "export_s", "stage_s", "drain_s", "wait_s", "transfer_s", "verify_s", "resume_s")
_NO_IMPORTANCE = 1.0
"""Of `ratio_mean` and `tis_mean` in a step that computed none."""


class EvidenceError(OperatingError):
    """The evidence isn't what it should be; the message names the file."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A trial: how it ended, its steps, and its counts. `expected` samples were to be trained on."""

    job: Job
    ended: Ended
    steps: tuple[Mapping[str, float], ...]
    expected: int
    manifest: Mapping[str, Any]

    @property
    def complete(self) -> bool:
        return self.ended.status == "complete"

    @property
    def samples(self) -> int:
        return int(sum(step["samples"] for step in self.steps))

    @property
    def lost(self) -> int:
        return self.expected - self.samples

    def window(self) -> list[Mapping[str, float]]:
        return [step for step in self.steps if step["in_window"]]

    def last(self, name: str) -> float:
        """Of a counter: the total."""
        return self.steps[-1][name] if self.steps else 0.0


@dataclass(frozen=True, slots=True)
class Readings:
    """All trials of a benchmark, in the order in which they ran, and failed starts that were repeated."""

    plan: Plan
    trials: tuple[Reading, ...]
    repeated: tuple[Ended, ...]

    def of(self, variant: str) -> list[Reading]:
        return [reading for reading in self.trials if reading.job.variant == variant]

    def complete(self, variant: str) -> list[Reading]:
        return [reading for reading in self.of(variant) if reading.complete]


def read_all(folder: Path) -> Readings:
    """Everything under `folder`: plan.json and trials/. Raises EvidenceError for what is missing or unreadable."""
    try:
        plan = read_plan(folder)
    except (OSError, ValueError) as error:
        raise EvidenceError(f"plan.json: {error}") from error
    trials = tuple(read_trial(plan, job, folder / TRIALS / job.name) for job in plan.jobs())
    aside = sorted((folder / TRIALS).glob(f"*-attempt-*/{trial.FILE_NAME}"))
    repeated = tuple(ended for path in aside if (ended := trial.already_done(path.parent)) is not None)
    return Readings(plan, trials, repeated)


def read_trial(plan: Plan, job: Job, folder: Path) -> Reading:
    """Raises EvidenceError."""
    ended = trial.already_done(folder)
    if ended is None:
        raise EvidenceError(f"{folder.name}/{trial.FILE_NAME} is missing or unreadable")
    if ended.status == "infrastructure":
        return Reading(job, ended, (), 0, {})
    try:
        about: Any = json.loads((folder / manifest.FILE_NAME).read_text(encoding="utf-8"))
        config = about["config"]
        size = int(config["rollout.rollout_batch_size"]) * int(config["rollout.n_samples_per_prompt"])
        rows = [row for row in read(folder / trial.RUN / "metrics.jsonl") if isinstance(row.get("step"), int)]
        publications = publications_by_step(read(folder / trial.RUN / "events.jsonl"))
        usage = list(read(folder / "usage.jsonl"))
        steps = _steps(plan, rows, publications, usage=usage)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EvidenceError(f"{folder.name}: {type(error).__name__}: {error}") from error
    return Reading(job, ended, steps, size * plan.steps, about)


def publications_by_step(events: Iterable[Row]) -> dict[int, list[Row]]:
    """Publications under the step whose weights they brought, whenever they ended (R122)."""
    found: dict[int, list[Row]] = {}
    for event in events:
        step = event.get("step")
        if event.get("event") == "publication.completed" and isinstance(step, int):
            found.setdefault(step, []).append(event)
    return found


def _steps(
    plan: Plan, rows: Sequence[Row], publications: Mapping[int, Sequence[Row]], *, usage: Sequence[Row]
) -> tuple[Mapping[str, float], ...]:
    found = []
    ended_at = epoch_s(str(rows[0]["time"])) - _number(rows[0], "step_s") if rows else 0.0
    peaks = {"trainer_peak_mib": 0.0, "rollout_peak_mib": 0.0}
    for row in rows:
        began_at, ended_at = ended_at, epoch_s(str(row["time"]))
        during = [_numbers(one) for one in usage if began_at < _number(one, "time") <= ended_at]
        number = int(_number(row, "step"))
        values = dict.fromkeys(COLUMNS, 0.0) | {name: _number(row, name) for name in COLUMNS if name in row}
        for name in ("ratio_mean", "tis_mean"):
            values[name] = values[name] or _NO_IMPORTANCE
        values |= {"step": float(number), "in_window": float(plan.first <= number <= plan.last)}
        # A publication waits for requests in flight, not the trainer for data: booked to what caused it.
        drain_s = _number(row, "publish_drain_wait_s")
        values["publish_s"] += drain_s
        values["train_wait_s"] = max(0.0, values["train_wait_s"] - drain_s)
        values["publication_lag"] = values["version_lag_mean"] - values["partition_lag_mean"]
        values |= _published(publications.get(number, ()))
        if during:  # else the run's own figure of the machine stays
            values |= _used(during)
        for name, source in (("trainer_peak_mib", "trainer_peak_mib"), ("rollout_peak_mib", "engine_peak_mib")):
            peaks[name] = max([peaks[name], *(one.get(source, 0.0) for one in during)])
        found.append(values | peaks)
    return tuple(found)


def _published(events: Sequence[Row]) -> dict[str, float]:
    """Sums over the publications of a step, of which there is one at the most unless a user made more."""
    values = {name: sum(_number(event, name) for event in events) for name in _OF_PUBLICATIONS}
    return values | {
        "published": float(len(events)),
        "pause_ms": 1000 * sum(_number(event, "pause_s") for event in events),
        "published_mib": sum(_number(event, "bytes") for event in events) / 2**20,
    }


def _used(during: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means of the samples taken during a step."""
    controllers = mean(during, "controller_cpu_percent") + mean(during, "sidecar_cpu_percent")
    same = ("cpu_percent", "others_percent", "trainer_cpu_percent", "engine_cpu_percent", "gpu_percent")
    values = {name: mean(during, name) for name in same}
    used = max((one.get("gpu_used_mib", 0.0) for one in during), default=0.0)
    return values | {"controller_cpu_percent": controllers, "gpu_used_mib": used}


def _number(row: Mapping[str, object], name: str) -> float:
    value = row.get(name)
    return float(value) if isinstance(value, (int, float)) else 0.0


def _numbers(row: Row) -> dict[str, float]:
    return {name: float(value) for name, value in row.items() if isinstance(value, (int, float))}
