"""Every number of a step says of which samples it is."""

from __future__ import annotations

from hybridasync.drivers.stepmetrics import batch_metrics
from hybridasync.types import Completion, Group, Prompt, Sample, VersionSpan


def group(uid: int, *rewards: float, partition: int = 0, versions: tuple[int, ...] = (0,)) -> Group:
    """A group whose samples have two tokens of each version."""
    spans = tuple(VersionSpan(version, 2 * n, 2 * n + 2) for n, version in enumerate(versions))
    tokens = 2 * len(versions)
    completion = Completion((1,) * tokens, (-0.5,) * tokens, spans, "stop", "engine-0")
    samples = tuple(Sample(completion, "t", reward, reward >= 0.5) for reward in rewards)
    return Group(Prompt(uid, uid, 0, "d", (1,), "p", "l"), samples, partition)


def test_c53_means_over_samples_and_over_groups_have_names_of_their_own() -> None:
    """C53: groups (1, 1) and (0, 0, 0, 0): 2/6 of the samples, 0.5 of the groups; an accuracy is a share."""
    groups = [group(0, 1.0, 1.0), group(1, 0.0, 0.0, 0.0, 0.0)]
    metrics = batch_metrics(0, groups, groups)
    assert (metrics["reward_mean"], metrics["reward_group_mean"]) == (2 / 6, 0.5)
    assert (metrics["samples"], metrics["accuracy"]) == (6.0, 2 / 6)


def test_c53_what_was_filtered_is_in_no_trained_mean() -> None:
    """C53: of three groups one is filtered: the trained mean is over two, the generated one over three."""
    groups = [group(0, 1.0, 0.0), group(1, 1.0, 1.0), group(2, 0.0, 0.0)]
    metrics = batch_metrics(0, groups, [groups[0], groups[2]])
    assert (metrics["reward_mean"], metrics["reward_generated_mean"]) == (1 / 4, 3 / 6)


def test_r114_u8_both_lags() -> None:
    """R114, U8: step 7 minus partitions 6 and 5; minus the oldest version of any token, 4 and 6."""
    groups = [group(0, 1.0, 0.0, partition=6, versions=(4, 7)), group(1, 1.0, 0.0, partition=5, versions=(6,))]
    metrics = batch_metrics(7, groups, groups)
    assert (metrics["partition_lag_mean"], metrics["partition_lag_max"]) == (1.5, 2.0)
    assert (metrics["version_lag_mean"], metrics["version_lag_max"]) == (2.0, 3.0)
