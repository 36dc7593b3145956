"""Tables, comparisons and verdicts, made of readings alone: `bench verify` makes them again."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from hybridasync.bench.accept import Condition, parse
from hybridasync.bench.manifest import inequalities
from hybridasync.bench.measures import COLUMNS, MEASURES, Measure
from hybridasync.bench.plan import Job
from hybridasync.bench.readings import Reading, Readings
from hybridasync.bench.stats import Comparison, Interval, compare
from hybridasync.bench.variants import compared_with

COMPARED: Mapping[str, Comparison] = {
    "response_tok_s": "ratio",
    "step_s": "ratio",
    "publish_share": "difference",
    "pause_ms": "difference",
    "train_wait_s": "difference",
    "engine_idle_s": "difference",
    "version_lag_mean": "difference",
    "publication_lag": "difference",
    "trainer_peak_mib": "difference",
    "rollout_peak_mib": "difference",
}

Decision = Literal["accepted", "not accepted", "undecided"]


@dataclass(frozen=True, slots=True)
class Compared:
    """A variant against another, on one measure."""

    variant: str
    against: str
    measure: Measure
    kind: Comparison
    interval: Interval


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one condition. It has to hold in every trial (R124); without all trials it is undecided."""

    condition: Condition
    decision: Decision
    values: Mapping[int, float]  # trial → value
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Results:
    """What the report says. `unequal` lists what differs although it must not: then nothing is comparable."""

    readings: Readings
    compared: tuple[Compared, ...]
    verdicts: tuple[Verdict, ...]
    unequal: tuple[str, ...]
    problems: tuple[str, ...] = field(default=())

    @property
    def sound(self) -> bool:
        """Every trial complete, nothing lost, no error, nothing that isn't finite, no difference undeclared."""
        return not self.unequal and not self.problems

    @property
    def passed(self) -> bool:
        return self.sound and all(verdict.decision == "accepted" for verdict in self.verdicts)


def evaluate(readings: Readings) -> Results:
    plan = readings.plan
    conditions = [parse(text, variants=plan.variants, measures=tuple(MEASURES)) for text in plan.accept]
    return Results(
        readings=readings,
        compared=tuple(_all_compared(readings)),
        verdicts=tuple(verdict(readings, condition) for condition in conditions),
        unequal=tuple(inequalities([dict(one.manifest) for one in readings.trials if one.manifest])),
        problems=tuple(_problems(readings)),
    )


def verdict(readings: Readings, condition: Condition) -> Verdict:
    """Raises nothing: what can't be decided is undecided, with the reason."""
    measure = MEASURES[condition.measure]
    sides = [name for name in (condition.first, condition.second) if name is not None]
    missing = [f"{one.job.name}: {one.ended.status}" for name in sides for one in readings.of(name) if not one.complete]
    values = {}
    for trial in range(readings.plan.trials):
        found = [one for name in sides for one in readings.complete(name) if one.job.trial == trial]
        if len(found) == len(sides):
            own = [measure.value(one.window()) for one in found]
            values[trial] = _divided(own) if len(own) == 2 else own[0]
    if missing or any(math.isnan(value) for value in values.values()):
        return Verdict(condition, "undecided", values, "; ".join(missing) or f"{measure.name} is 0 in a trial")
    holds = all(condition.holds(value) for value in values.values())
    return Verdict(condition, "accepted" if holds else "not accepted", values)


def _divided(values: Sequence[float]) -> float:
    above, below = values
    return above / below if below else math.nan


def _all_compared(readings: Readings) -> Iterable[Compared]:
    against = compared_with(readings.plan.variants)
    others = [name for name in readings.plan.variants if name != against]
    pairs = [(name, against) for name in others]
    if "staged" in others and "optimized" in others:
        pairs.append(("staged", "optimized"))
    for name, second in pairs:
        matched = _matched(readings, name, second)
        for measure_name, kind in COMPARED.items():
            measure = MEASURES[measure_name]
            arms = [(measure.arm(one.window()), measure.arm(other.window())) for one, other in matched]
            positive = all(arm.value > 0 for pair in arms for arm in pair)
            if arms and (kind == "difference" or positive):
                yield Compared(name, second, measure, kind, compare(arms, kind))


def _matched(readings: Readings, first: str, second: str) -> list[tuple[Reading, Reading]]:
    by_trial = {one.job.trial: one for one in readings.complete(second)}
    pairs = [(one, by_trial[one.job.trial]) for one in readings.complete(first) if one.job.trial in by_trial]
    return [pair for pair in pairs if all(one.window() for one in pair)]


def _problems(readings: Readings) -> Iterable[str]:
    for one in readings.trials:
        checks = (
            (one.ended.status == "infrastructure", f"failed to start: {one.ended.reason}"),
            (one.ended.status == "failed", f"failed: {one.ended.reason}"),
            (one.complete and one.lost != 0, f"{one.lost} of {one.expected} samples are missing"),
            (one.last("errors") > 0, f"{one.last('errors'):.0f} warnings or errors, see its events.jsonl"),
            (one.last("nan_inf") > 0, f"{one.last('nan_inf'):.0f} values weren't finite"),
            (any(step["has_reference_forward"] for step in one.steps), "computed a reference model"),
        )
        yield from (f"{one.job.name}: {text}" for wrong, text in checks if wrong)


def summary_csv(results: Results) -> str:
    """A row for each trial, and one for each variant over its complete trials (means, and sums of the counts)."""
    header = ["variant", "trial", "seed", "status", "attempts", "wall_s", "start_s", "steps", *_COUNTS, *MEASURES]
    rows = []
    for variant in results.readings.plan.variants:
        own = sorted(results.readings.of(variant), key=_trial)
        rows += [_summary_row(one) for one in own]
        complete = [one for one in own if one.complete]
        state = f"{len(complete)} of {len(own)} complete"
        counts = [sum(int(count(one)) for one in own) for count in _COUNTS.values()]
        values = [_average([m.value(one.window()) for one in complete]) for m in MEASURES.values()]
        walls = [_average([one.ended.wall_s for one in complete]), _average([one.ended.start_s for one in complete])]
        steps = sum(len(one.steps) for one in own)
        rows.append(
            [variant, "all", "", state, sum(one.ended.attempts for one in own), *walls, steps, *counts, *values]
        )
    return to_csv(header, rows)


_COUNTS: Mapping[str, Callable[[Reading], float]] = {
    "samples": lambda one: one.samples,
    "samples_lost": lambda one: one.lost,
    "publications_total": lambda one: sum(step["published"] for step in one.steps),
    "errors": lambda one: one.last("errors"),
    "nan_inf": lambda one: one.last("nan_inf"),
    "reference_forwards": lambda one: sum(step["has_reference_forward"] for step in one.steps),
}


def _trial(reading: Reading) -> int:
    return reading.job.trial


def _summary_row(one: Reading) -> list[object]:
    job, ended = one.job, one.ended
    head = [job.variant, job.trial, job.seed, ended.status, ended.attempts, ended.wall_s, ended.start_s, len(one.steps)]
    counts = [int(count(one)) for count in _COUNTS.values()]
    return [*head, *counts, *(measure.value(one.window()) for measure in MEASURES.values())]


def step_metrics_csv(results: Results) -> str:
    """A row for each step of each trial."""
    rows = [
        [*_named(one.job), *(step[name] for name in COLUMNS)] for one in results.readings.trials for step in one.steps
    ]
    return to_csv(["variant", "trial", "seed", *COLUMNS], rows)


def _named(job: Job) -> list[object]:
    return [job.variant, job.trial, job.seed]


def paired_csv(results: Results) -> str:
    """The comparisons: estimate, interval, and each pair's value."""
    trials = range(results.readings.plan.trials)
    rows = []
    for one in results.compared:
        pairs = [*one.interval.pairs, *[""] * (len(trials) - len(one.interval.pairs))]
        own = [one.interval.estimate, one.interval.low, one.interval.high]
        rows.append([one.variant, one.against, one.measure.name, one.kind, *own, *pairs])
    header = ["variant", "against", "measure", "kind", "estimate", "low_95", "high_95"]
    return to_csv([*header, *(f"pair_{trial}" for trial in trials)], rows)


def to_csv(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Six significant digits."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([f"{cell:.6g}" if isinstance(cell, float) else cell for cell in row] for row in rows)
    return text.getvalue()


def _average(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
