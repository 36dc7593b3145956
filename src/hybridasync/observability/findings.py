"""What to look at first: a run's numbers turned into sentences, worst first. Pure; the report prints them."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from hybridasync.observability import names
from hybridasync.observability.jsonl import Row
from hybridasync.observability.summary import RunRecords

Level = Literal["bad", "warn", "info", "good"]
_ORDER: tuple[Level, ...] = ("bad", "warn", "info", "good")

WAIT_SHARE = 0.3  # of the step time: from here on one side waiting is worth a sentence
PUBLISH_SHARE = 0.15
TRUNCATED_SHARE = 0.2
CLIPPED_SHARE = 0.3
TIS_CUT_SHARE = 0.1
FP32_GAP_NATS = 1e-3  # a hundred times what fp32 rounding makes of equal weights
ENTROPY_LEFT = 0.05  # of the entropy at the start
FEW_EFFECTIVE = 0.5
EVAL_NOISE = 0.02


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    text: str


def findings(records: RunRecords) -> list[Finding]:
    """Sentences about a run. Shares and means are over the second half of its steps, when it has settled."""
    settled = records.metrics[len(records.metrics) // 2 :]
    found = [
        *_ending(records),
        *_accuracy(records),
        *_logprob_gap(records),
        *_waiting(settled),
        *_learning(records.metrics, settled),
    ]
    return sorted(found, key=lambda finding: _ORDER.index(finding.level))


def _ending(records: RunRecords) -> Iterator[Finding]:
    summary = records.summary
    status = str(summary.get("status", "completed"))
    if status != "completed":
        reason = f": {summary['error']}" if summary.get("error") else ""
        yield Finding("warn" if status in ("running", "interrupted") else "bad", f"The run is {status}{reason}.")
    if not records.metrics:
        yield Finding("warn", "No training step was completed.")
    if nan_inf := records.latest(names.NAN_INF):
        yield Finding("bad", f"{nan_inf:.0f} values were not finite; events.jsonl names them (metrics.non_finite).")
    if errors := max(records.errors, records.latest(names.ERRORS) or 0):
        yield Finding("warn", f"{errors:.0f} warnings and errors were logged; events.jsonl has them.")


def _accuracy(records: RunRecords) -> Iterator[Finding]:
    if len(records.evaluations) < 2:
        yield Finding("info", "There are fewer than two evaluations, so nothing shows how far the policy came.")
        return
    first, last = records.evaluations[0], records.evaluations[-1]
    before, after = _number(first, "accuracy"), _number(last, "accuracy")
    if before is None or after is None:
        return
    text = f"Held-out accuracy (greedy) went from {before:.1%} to {after:.1%} over {last['step']} steps"
    sampled = _number(last, "sampled_accuracy")
    text += f"; at the sampling temperature it is {sampled:.1%}." if sampled is not None else "."
    level: Level = "good" if after > before + EVAL_NOISE else "warn" if after < before - EVAL_NOISE else "info"
    yield Finding(level, text)


def _logprob_gap(records: RunRecords) -> Iterator[Finding]:
    gaps = [gap for row in records.evaluations if (gap := _number(row, "logprob_gap_max")) is not None]
    if not gaps:
        return
    text = f"For the same weights, trainer and engine log-probs differ by at most {max(gaps):.1e} nats"
    if _dtype(records) != "fp32":
        yield Finding("info", f"{text}.")
    elif max(gaps) > FP32_GAP_NATS:
        yield Finding("bad", f"{text}. In fp32 that is too much: the two sides don't compute the same model.")
    else:
        yield Finding("good", f"{text}: both sides compute the same model.")


def _waiting(settled: tuple[Row, ...]) -> Iterator[Finding]:
    wait, idle = _share(settled, names.TRAIN_WAIT_S), _share(settled, names.ENGINE_IDLE_S)
    if wait is not None and wait >= WAIT_SHARE and wait >= (idle or 0.0):
        yield Finding(
            "warn",
            f"The workers waited for samples {wait:.0%} of the time: generation is the bottleneck. "
            "More engines, a higher rollout.max_staleness or shorter responses would help.",
        )
    elif idle is not None and idle >= WAIT_SHARE:
        yield Finding(
            "info",
            f"The engines were idle {idle:.0%} of the time: training is the bottleneck. "
            "More workers, or larger groups for the same time, would use them.",
        )
    elif wait is not None and idle is not None:
        yield Finding("good", f"Trainer and engines kept each other busy (waiting {wait:.0%}, idle {idle:.0%}).")
    publish = _share(settled, names.PUBLISH_S)
    if publish is not None and publish >= PUBLISH_SHARE:
        yield Finding(
            "warn",
            f"Publications took {publish:.0%} of the time; publication.update_weights_interval = 2 halves that.",
        )


def _learning(steps: tuple[Row, ...], settled: tuple[Row, ...]) -> Iterator[Finding]:
    truncated = _mean(settled, names.TRUNCATED_FRACTION)
    if truncated is not None and truncated > TRUNCATED_SHARE:
        yield Finding(
            "warn",
            f"{truncated:.0%} of the responses were cut by the cap: raise rollout.max_response_tokens, "
            "or use reward.overlong_buffer_tokens.",
        )
    clipped = _mean(settled, names.CLIP_FRACTION)
    if clipped is not None and clipped > CLIPPED_SHARE:
        yield Finding(
            "warn", f"{clipped:.0%} of the tokens were clipped: the updates are too large for the clip range."
        )
    cut = _mean(settled, names.TIS_CLIP_FRACTION)
    if cut is not None and cut > TIS_CUT_SHARE:
        yield Finding("warn", f"{cut:.0%} of the importance weights were cut: the samples are very stale.")
    effective = _mean(settled, names.EFFECTIVE_SAMPLE_SIZE)
    if effective is not None and effective < FEW_EFFECTIVE:
        yield Finding("warn", f"The effective sample size is {effective:.0%}: a few samples carry the gradient.")
    filtered = _mean(settled, names.GROUPS_FILTERED)
    if filtered:
        yield Finding("info", f"{filtered:.1f} groups a step were dropped because all their samples earned the same.")
    yield from _entropy(steps)


def _entropy(steps: tuple[Row, ...]) -> Iterator[Finding]:
    values = [value for row in steps if (value := _number(row, names.ENTROPY)) is not None]
    if len(values) >= 10 and values[-1] < ENTROPY_LEFT * values[0]:
        yield Finding(
            "info",
            f"Entropy fell from {values[0]:.3f} to {values[-1]:.3f} nats: the policy is nearly deterministic "
            "and has little left to explore.",
        )


def _dtype(records: RunRecords) -> str:
    try:
        model = tomllib.loads(records.config_toml).get("model", {})
    except tomllib.TOMLDecodeError:
        return "unknown"
    return str(model.get("dtype", "unknown")) if isinstance(model, dict) else "unknown"


def _number(row: Row, name: str) -> float | None:
    value = row.get(name)
    return float(value) if isinstance(value, (int, float)) else None


def _mean(rows: tuple[Row, ...], name: str) -> float | None:
    values = [value for row in rows if (value := _number(row, name)) is not None]
    return sum(values) / len(values) if values else None


def _share(rows: tuple[Row, ...], name: str) -> float | None:
    """Of the end-to-end time of those steps that say both."""
    pairs = [(_number(row, name), _number(row, names.STEP_S)) for row in rows]
    known = [(part, step) for part, step in pairs if part is not None and step is not None]
    total = sum(step for _, step in known)
    return min(1.0, sum(part for part, _ in known) / total) if total > 0 else None
