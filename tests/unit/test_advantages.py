"""Advantages, the zero-variance filter, overlong shaping, and the assembly of train samples."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from hybridasync.algorithms.advantages import ScoredMember, compute_advantages, group_relative_advantages
from hybridasync.algorithms.assembly import advantages_of, to_train_samples
from hybridasync.algorithms.filters import has_signal, zero_variance
from hybridasync.algorithms.shaping import soft_overlong_penalty
from hybridasync.config.models import Config
from hybridasync.errors import DataError
from hybridasync.types import Completion, FinishReason, Group, Prompt, Sample, VersionSpan


def make_config(*, reward: dict[str, Any] | None = None, algorithm: dict[str, Any] | None = None) -> Config:
    return Config.model_validate(
        {
            "model": {"hf_checkpoint": "none"},
            "rollout": {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "max_response_tokens": 10},
            "reward": reward or {},
            "algorithm": algorithm or {"advantage": "dr_grpo"},
        }
    )


def make_sample(reward: float, *, tokens: int = 3, finish: FinishReason = "stop", masked: bool = False) -> Sample:
    completion = Completion(
        output_ids=tuple(range(tokens)),
        logprobs=(-1.0,) * tokens,
        spans=(VersionSpan(4, 0, tokens),) if tokens else (),
        finish_reason=finish,
        engine="engine-0",
    )
    return Sample(completion, text="", reward=reward, correct=reward > 0, masked=masked)


def make_group(uid: int, samples: list[Sample], *, text: str = "question") -> Group:
    prompt = Prompt(uid=uid, row=uid, epoch=0, source="test", input_ids=(7, 8), text=text, label="")
    return Group(prompt, tuple(samples), partition=0)


def test_c39_members_are_grouped_by_id_in_every_order() -> None:
    """However completions are interleaved, each is compared with those of its own prompt alone."""
    expected = {("p1", 1.0): 0.5, ("p1", 0.0): -0.5, ("p2", 1.0): 0.0}
    members = [ScoredMember("p1", 1.0), ScoredMember("p2", 1.0), ScoredMember("p1", 0.0), ScoredMember("p2", 1.0)]
    for seed in range(20):
        random.Random(seed).shuffle(members)
        values = compute_advantages(members, "dr_grpo")
        assert values == [expected[(str(m.group), m.reward)] for m in members]


def test_c39_prompts_of_the_same_text_are_two_groups() -> None:
    """Two rows with identical text and different answers have a baseline each."""
    groups = [make_group(1, [make_sample(1), make_sample(0)]), make_group(2, [make_sample(1), make_sample(1)])]
    assert advantages_of(groups, make_config()) == [(0.5, -0.5), (0.0, 0.0)]


def test_c39_a_failed_member_leaves_the_baseline() -> None:
    """Rewards 1, 0, failed: the baseline is over two, and the failed one is masked with advantage 0."""
    group = make_group(1, [make_sample(1), make_sample(0), make_sample(5, masked=True)])
    samples = to_train_samples([group], make_config())
    assert [s.advantage for s in samples] == [0.5, -0.5, 0.0]
    assert [s.masked for s in samples] == [False, False, True]


def test_c39_reference_values_pin_the_standard_deviation() -> None:
    """grpo divides by the sample standard deviation (n - 1): 1.5 and -0.5 for [1, 0, 0, 0], not 1.732 and -0.577."""
    assert group_relative_advantages([1, 0, 0, 0], "dr_grpo") == [0.75, -0.25, -0.25, -0.25]
    assert group_relative_advantages([1, 0, 0, 0], "grpo") == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo"])
def test_c41_a_group_of_one_has_advantage_exactly_zero(kind: Any) -> None:
    """One sample has nothing to compare with: 0.0, never NaN."""
    assert group_relative_advantages([1.0], kind) == [0.0]
    assert group_relative_advantages([], kind) == []


def test_c41_a_group_left_with_one_counted_member_has_advantage_zero() -> None:
    """Masking all but one leaves no comparison either."""
    members = [ScoredMember(1, 1.0), ScoredMember(1, 0.0, counted=False)]
    assert compute_advantages(members, "grpo") == [0.0, 0.0]


def test_c22_no_signal_is_judged_by_spread_with_a_tolerance() -> None:
    """Equal fractional rewards and float noise are no signal; a spread outside 0..1 is one."""
    noisy = [0.3, 0.1 + 0.2, 0.3, 0.1 + 0.2]
    assert zero_variance([0.5] * 4)
    assert not zero_variance([1.2, 0.8])
    assert not zero_variance([1, 1, 0, 0])
    assert zero_variance(noisy)
    assert max(map(abs, group_relative_advantages(noisy, "grpo"))) < 1e-9


def test_c22_a_masked_member_gives_no_signal() -> None:
    """A group differs only where members that carry loss differ."""
    config = make_config(reward={"mask_truncated": True})
    assert not has_signal(make_group(1, [make_sample(1), make_sample(1), make_sample(0, finish="length")]), config)
    assert has_signal(make_group(1, [make_sample(1), make_sample(0)]), config)
    assert not has_signal(make_group(1, [make_sample(1, masked=True)]), config)


def test_soft_overlong_penalty_follows_dapo() -> None:
    """Nothing up to cap - buffer, linear within the buffer, the whole factor at the cap and beyond."""
    lengths = [0, 6, 7, 8, 10, 12]
    values = [soft_overlong_penalty(n, cap=10, buffer=4, factor=2.0) for n in lengths]
    assert values == [0.0, 0.0, -0.5, -1.0, -2.0, -2.0]
    assert soft_overlong_penalty(12, cap=10, buffer=0) == 0.0


def test_the_overlong_penalty_enters_advantage_and_filter() -> None:
    """Two right answers of which one runs into the buffer differ by the penalty."""
    config = make_config(reward={"overlong_buffer_tokens": 5})
    group = make_group(1, [make_sample(1, tokens=4), make_sample(1, tokens=10)])
    assert advantages_of([group], config) == [(0.5, -0.5)]
    assert has_signal(group, config)
    assert not has_signal(group, make_config())


def test_c42_truncated_samples_are_masked_only_when_asked() -> None:
    """Overlong filtering takes samples cut by the cap out of baseline and loss; without it they count."""
    group = make_group(1, [make_sample(1), make_sample(0), make_sample(0, finish="length")])
    filtered = to_train_samples([group], make_config(reward={"mask_truncated": True}))
    kept = to_train_samples([group], make_config())
    assert [(s.advantage, s.masked) for s in filtered] == [(0.5, False), (-0.5, False), (0.0, True)]
    assert [s.masked for s in kept] == [False] * 3
    assert math.isclose(sum(s.advantage for s in kept), 0.0, abs_tol=1e-12)


def test_an_empty_response_counts_in_the_baseline_and_carries_no_loss() -> None:
    """No tokens, reward 0: the other sample still learns from the comparison."""
    samples = to_train_samples([make_group(1, [make_sample(1), make_sample(0, tokens=0)])], make_config())
    assert [(s.advantage, s.masked) for s in samples] == [(0.5, False), (-0.5, True)]
    assert samples[1].input_ids == (7, 8)


def test_train_samples_carry_tokens_logprobs_and_version_unchanged() -> None:
    """Ids and log-probs are passed on as the engine sent them, with the oldest version."""
    (sample, _) = to_train_samples([make_group(3, [make_sample(1), make_sample(0)])], make_config())
    assert (sample.group, sample.input_ids, sample.response_start) == (3, (7, 8, 0, 1, 2), 2)
    assert (sample.rollout_logprobs, sample.oldest_version) == ((-1.0,) * 3, 4)


def test_c45_unequal_lengths_are_refused() -> None:
    """A log-prob too many is an error that names both counts, not a truncating zip."""
    bad = Completion((1, 2), (-1.0, -1.0, -1.0), (VersionSpan(0, 0, 2),), "stop", "engine-0")
    with pytest.raises(DataError, match="2 tokens with 3 log-probs"):
        to_train_samples([make_group(1, [Sample(bad, "", 1.0, True)])], make_config())
