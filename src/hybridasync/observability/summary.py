"""summary.json: how a run ended, made of what it wrote.

It is built from the files of the run directory, so that whoever outlives the controller can write one too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hybridasync.observability import names
from hybridasync.observability.jsonl import Row, complain, plain, read, replace_atomically
from hybridasync.observability.logs import count_errors

Status = Literal["running", "completed", "failed", "interrupted"]


@dataclass(frozen=True, slots=True)
class RunRecords:
    """What the run directory holds, in the order of steps. Files that aren't there are empty."""

    metrics: tuple[Row, ...]
    evaluations: tuple[Row, ...]
    summary: Row
    config_toml: str
    errors: int = 0  # events of level warning or error, those of other libraries not counted

    def latest(self, name: str) -> float | None:
        """The last number under `name`; of a counter that is the total."""
        values = (value for row in reversed(self.metrics) if isinstance(value := row.get(name), (int, float)))
        return next(values, None)


def read_run(run_dir: Path) -> RunRecords:
    """Raises OSError for a file that is there and can't be read."""
    return RunRecords(
        metrics=tuple(row for row in read(run_dir / "metrics.jsonl") if isinstance(row.get("step"), int)),
        evaluations=tuple(row for row in read(run_dir / "evaluations.jsonl") if isinstance(row.get("step"), int)),
        summary=_read_object(run_dir / "summary.json"),
        config_toml=_read_text(run_dir / "config.resolved.toml"),
        errors=count_errors(run_dir / "events.jsonl"),
    )


def summarize(records: RunRecords, *, status: Status, wall_s: float) -> Row:
    """The fields of summary.json. `wall_s` is of this start, what went before a resume not included.

    `eval.initial` is the evaluation of the initial weights (null if there was none), `eval.final` the last one after
    training began, filed under its own step and weight version: with `eval_at_end` off it may be older than the end.
    `logprob_gap_max` is the largest difference between trainer and engine for the same weights, over all evaluations.
    """
    initial = next((row for row in records.evaluations if row["step"] == 0), None)
    later = [row for row in records.evaluations if row["step"] != 0]
    gaps = [gap for row in records.evaluations if isinstance(gap := row.get("logprob_gap_max"), (int, float))]
    steps = _whole(records.metrics[-1]["step"]) + 1 if records.metrics else 0
    return {
        "status": status,
        "steps": steps,
        "weight_version": _whole(records.latest(names.WEIGHT_VERSION)),
        "publications": _whole(records.latest(names.PUBLICATIONS)),
        "samples_trained": _whole(records.latest(names.SAMPLES_TRAINED)),
        "eval": {"initial": _evaluation(initial), "final": _evaluation(later[-1] if later else None)},
        "logprob_gap_max": max(gaps, default=None),
        "reward_mean": records.latest(names.REWARD_MEAN),
        "response_tok_s": _mean(records.metrics, names.RESPONSE_TOK_S),
        "step_s": _mean(records.metrics, names.STEP_S),
        "wall_s": round(wall_s, 3),
        "errors": max(records.errors, _whole(records.latest(names.ERRORS))),
        "nan_inf": _whole(records.latest(names.NAN_INF)),
    }


def write_summary(run_dir: Path, *, status: Status, wall_s: float, extra: Mapping[str, object] | None = None) -> Row:
    """Write summary.json atomically and return it.

    `extra` is laid over what the files say (counters, `error`, `exit_code`).
    Never raises OSError: the end of a run must not fail for its summary; the loss is said on stderr.
    """
    try:
        records = read_run(run_dir)
    except OSError as error:
        complain(f"summary.json: {error}")
        records = RunRecords(metrics=(), evaluations=(), summary={}, config_toml="")
    summary = summarize(records, status=status, wall_s=wall_s) | dict(extra or {})
    try:
        text = json.dumps(plain(summary), indent=2, allow_nan=False)
        replace_atomically(run_dir / "summary.json", text.encode() + b"\n")
    except OSError as error:
        complain(f"summary.json: {error}")
    return summary


def _evaluation(row: Row | None) -> Row | None:
    if row is None:
        return None
    kept = ("step", "version", "accuracy", "sampled_accuracy", "prompts", "mean_response_tokens", "truncated_fraction")
    return {name: row.get(name) for name in kept}


def _mean(rows: tuple[Row, ...], name: str) -> float | None:
    values = [value for row in rows if isinstance(value := row.get(name), (int, float))]
    return round(sum(values) / len(values), 4) if values else None


def _whole(value: object) -> int:
    return int(value) if isinstance(value, (int, float)) else 0


def _read_object(path: Path) -> Row:
    try:
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
