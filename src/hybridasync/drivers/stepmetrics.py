"""Numbers of one step's batch. Every mean says of which samples it is: those that were trained on (C53)."""

from __future__ import annotations

from collections.abc import Sequence

from hybridasync.types import Group, PublicationResult

_NONE = PublicationResult(0, None, (), *(0.0,) * 7, bytes=0)


def batch_metrics(step: int, groups: Sequence[Group], trained: Sequence[Group]) -> dict[str, float]:
    """`groups` are all that the step consumed, `trained` those not filtered; lags are in steps and versions."""
    samples = [sample for group in groups for sample in group.samples]
    used = [sample for group in trained for sample in group.samples]
    lengths = [len(sample.completion.output_ids) for sample in samples]
    partition_lags = [step - group.partition for group in groups]
    version_lags = [step - version for group in groups if (version := group.oldest_version) is not None]
    group_means = [_mean([sample.reward for sample in group.samples]) for group in trained]
    return {
        "reward_mean": _mean([sample.reward for sample in used]),
        "reward_group_mean": _mean(group_means),
        "reward_generated_mean": _mean([sample.reward for sample in samples]),
        "accuracy": _mean([float(sample.correct) for sample in samples]),
        "samples": float(len(samples)),
        "response_tokens": _mean([float(length) for length in lengths]),
        "response_tokens_sum": float(sum(lengths)),
        "truncated_fraction": _mean([float(sample.truncated) for sample in samples]),
        "partition_lag_mean": _mean([float(lag) for lag in partition_lags]),
        "partition_lag_max": float(max(partition_lags, default=0)),
        "version_lag_mean": _mean([float(lag) for lag in version_lags]),
        "version_lag_max": float(max(version_lags, default=0)),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def publication_metrics(publication: PublicationResult | None) -> dict[str, float]:
    """The parts of a publication, in the row of the step that caused it; zeros where none was due."""
    publication = publication or _NONE
    return {
        "publish_s": publication.prepare_s + publication.pause_s,
        "pause_ms": 1000 * publication.pause_s,
        "publish_export_s": publication.export_s,
        "publish_stage_s": publication.stage_s,
        "publish_drain_s": publication.drain_s,
        "publish_wait_s": publication.wait_s,
        "publish_transfer_s": publication.transfer_s,
        "publish_verify_s": publication.verify_s,
        "publish_resume_s": publication.resume_s,
        "publish_bytes": float(publication.bytes),
        "publish_full_bytes": float(publication.full_bytes),
        "publish_delta": float(publication.kind == "delta"),
    }
