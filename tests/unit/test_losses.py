"""The loss functions, each against values worked out by hand."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import pytest
import torch

from hybridasync.config.models import AlgorithmSection
from hybridasync.worker.logprobs import token_logprobs
from hybridasync.worker.losses import (
    ImportanceWeights,
    LossSettings,
    PolicyTokens,
    clip_active,
    clipped_surrogate,
    effective_sample_size,
    importance_ratio,
    importance_weights,
    kl_k3,
    policy_metrics,
    policy_ratio,
    policy_token_losses,
    sft_token_losses,
    token_weights,
)

PLAIN = LossSettings(clip_low=0.2, clip_high=0.28)


def tokens_of(
    logprobs: list[float],
    *,
    advantages: list[float] | None = None,
    samples: list[int] | None = None,
    **other: list[float],
) -> PolicyTokens:
    """Tokens whose other policies equal the current one unless said otherwise."""
    current = torch.tensor(logprobs)
    return PolicyTokens(
        logprobs=current,
        entropy=torch.tensor(other.get("entropy", [0.5] * len(logprobs))),
        old=torch.tensor(other.get("old", logprobs)),
        rollout=torch.tensor(other.get("rollout", logprobs)),
        advantages=torch.tensor(advantages or [1.0] * len(logprobs)),
        samples=torch.tensor(samples or [0] * len(logprobs)),
        reference=torch.tensor(other["reference"]) if "reference" in other else None,
    )


def test_the_surrogate_clips_only_where_it_would_gain() -> None:
    """Ratios 1.5 and 0.5 with both signs of the advantage: clip-higher holds at 1.28, the lower clip at 0.8."""
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 2.0])
    losses = clipped_surrogate(ratio, advantages, PLAIN)
    torch.testing.assert_close(losses, torch.tensor([-1.28, 1.5, -0.5, 0.8, -2.2]))
    assert clip_active(ratio, advantages, PLAIN).tolist() == [True, False, False, True, False]


def test_a_clipped_token_has_no_gradient() -> None:
    """Beyond the clip range the gradient is 0; within it is -ratio * advantage."""
    logprobs = torch.tensor([math.log(1.5), math.log(1.1)], requires_grad=True)
    losses = clipped_surrogate(importance_ratio(logprobs, torch.zeros(2)), torch.ones(2), PLAIN)
    losses.sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([0.0, -1.1]))


def test_an_impossible_token_gives_no_nan() -> None:
    """A log-prob of -1e9 under the old policy leaves loss and gradient finite."""
    logprobs = torch.zeros(2, requires_grad=True)
    losses = clipped_surrogate(importance_ratio(logprobs, torch.full((2,), -1e9)), torch.tensor([1.0, -1.0]), PLAIN)
    losses.sum().backward()
    assert torch.isfinite(losses).all()
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()


def test_the_three_aggregations_differ_as_their_papers_say() -> None:
    """Token losses 1 (x4) and 6 (x1): token mean 2.0, mean of means 3.5, constant 10 / (2 * 8)."""
    lengths, losses = torch.tensor([4, 1]), torch.tensor([1.0, 1.0, 1.0, 1.0, 6.0])
    expected = {"token_mean": 2.0, "sequence_mean": 3.5, "constant": 10 / 16}
    for aggregation, value in expected.items():
        weights = token_weights(lengths, aggregation, max_response_tokens=8)  # type: ignore[arg-type]
        assert float((weights * losses).sum()) == pytest.approx(value)


def test_c42_a_masked_sample_never_enters_the_normaliser() -> None:
    """Sample A has 4 tokens of loss 1 and B is masked: 1.0 (not 0.8); with nothing left there are no weights at all."""
    weights = token_weights(torch.tensor([4]), "token_mean", max_response_tokens=8)
    assert float((weights * torch.ones(4)).sum()) == 1.0
    assert token_weights(torch.zeros(0, dtype=torch.long), "token_mean", max_response_tokens=8).shape == (0,)


def test_c42_micro_batches_and_ranks_add_up_to_the_token_mean() -> None:
    """The parts of (4x1 + 1x6) / 5, computed apart, sum to 2.0 and not to (1 + 6) / 2."""
    weights = token_weights(torch.tensor([4, 1]), "token_mean", max_response_tokens=8)
    first, second = (weights[:4] * 1.0).sum(), (weights[4:] * 6.0).sum()
    assert float(first + second) == pytest.approx(2.0)


def test_k3_is_zero_for_equal_policies_and_positive_otherwise() -> None:
    """log r = log 2: 2 - 1 - log 2; its gradient in the policy's log-prob is 1 - r."""
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    values = kl_k3(logprobs, torch.tensor([-1.0, -1.0 + math.log(2)]))
    values.sum().backward()
    torch.testing.assert_close(values.detach(), torch.tensor([0.0, 1 - math.log(2)]))
    torch.testing.assert_close(logprobs.grad, torch.tensor([0.0, -1.0]))


def test_tis_weights_are_truncated_and_carry_no_gradient() -> None:
    """Ratios 4, 1 and 0.1 with the range 0.5..2 become 2, 1 and 0.5."""
    old = torch.tensor([math.log(4), 0.0, math.log(0.1)], requires_grad=True)
    tokens = dataclasses.replace(tokens_of([0.0] * 3), old=old)
    weights, outside = importance_weights(tokens, ImportanceWeights(0.5, 2.0))
    torch.testing.assert_close(weights, torch.tensor([2.0, 1.0, 0.5]))
    assert outside.tolist() == [True, False, True]
    assert not weights.requires_grad


# Sample 0 has tokens with ratios 2 and 8, sample 1 one with 0.25: old against the engine, or the policy against old.
LOGS = [math.log(2), math.log(8), math.log(0.25)]
SAMPLES = [0, 0, 1]


@pytest.mark.parametrize(
    ("level", "mask", "expected"),
    [
        ("token", False, [2.0, 4.0, 0.5]),
        ("token", True, [2.0, 0.0, 0.0]),
        ("sequence", False, [4.0, 4.0, 0.5]),  # products 16 and 0.25
        ("sequence", True, [0.0, 0.0, 0.0]),
        ("geometric", False, [4.0, 4.0, 0.5]),  # roots: 16 ** (1/2) = 4, and 0.25
        ("geometric", True, [4.0, 4.0, 0.0]),
    ],
)
def test_importance_weights_at_every_level_truncated_or_masked(
    level: Literal["token", "sequence", "geometric"], mask: bool, expected: list[float]
) -> None:
    """Range 0.5..4.0001: by token, product or geometric mean; outside of it cut, or masked and so without loss."""
    tokens = tokens_of([0.0] * 3, samples=SAMPLES, old=LOGS, rollout=[0.0] * 3)
    weights, _ = importance_weights(tokens, ImportanceWeights(0.5, 4.0001, level, mask=mask))
    torch.testing.assert_close(weights, torch.tensor(expected), atol=2e-4, rtol=0)
    settings = LossSettings(0.2, 0.2, tis=ImportanceWeights(0.5, 4.0001, level, mask=mask))
    still = tokens_of([0.0] * 3, samples=SAMPLES, old=[0.0] * 3, rollout=[-value for value in LOGS])
    torch.testing.assert_close(policy_token_losses(still, settings), -torch.tensor(expected), atol=2e-4, rtol=0)


def test_gspo_has_one_ratio_for_a_response_and_its_gradient_is_shared() -> None:
    """Ratios 2 and 8: both tokens have 4; with weights 1/2 the gradient is -4 A / 2 at both (GSPO, equation 10)."""
    logprobs = torch.tensor(LOGS, requires_grad=True)
    tokens = dataclasses.replace(tokens_of([0.0] * 3, samples=SAMPLES), logprobs=logprobs)
    ratio = policy_ratio(tokens, "sequence")
    torch.testing.assert_close(ratio.detach(), torch.tensor([4.0, 4.0, 0.25]))
    weights = token_weights(torch.tensor([2]), "sequence_mean", max_response_tokens=8)
    (weights * -ratio[:2]).sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([-2.0, -2.0, 0.0]))
    settings = LossSettings(0.5, 0.5, ratio_level="sequence")
    torch.testing.assert_close(policy_token_losses(tokens, settings).detach(), torch.tensor([-1.5, -1.5, -0.25]))
    assert policy_metrics(tokens, settings)["ratio_max"] == pytest.approx(4.0)


def test_decoupled_ppo_clips_against_the_proximal_and_weighs_against_the_behaviour_policy() -> None:
    """pi = 0.5, pi_prox = 0.25, pi_behave = 0.2, A = 1, clip 0.2: -(0.25 / 0.2) * min(2, 1.2) = -1.5."""
    settings = LossSettings(0.2, 0.2, tis=ImportanceWeights(0.0, 10.0))
    tokens = tokens_of([math.log(0.5)], old=[math.log(0.25)], rollout=[math.log(0.2)])
    assert float(policy_token_losses(tokens, settings)) == pytest.approx(-1.5)


def test_the_dual_clip_bounds_what_a_bad_token_may_cost() -> None:
    """Ratio 10 with A = -1 costs 10, with c = 3 only 3 and no gradient; A = 1 is as without it."""
    settings = LossSettings(0.2, 0.2, dual_clip=3.0)
    ratio, advantages = torch.tensor([10.0, 10.0, 2.0]), torch.tensor([-1.0, 1.0, -1.0])
    torch.testing.assert_close(clipped_surrogate(ratio, advantages, settings), torch.tensor([3.0, -1.2, 2.0]))
    assert clip_active(ratio, advantages, settings).tolist() == [True, True, False]


def test_settings_reach_the_loss() -> None:
    """Each setting of clip and correction is what the loss works with."""
    algorithm = AlgorithmSection(
        use_tis=True,
        tis_mode="mask",
        tis_level="geometric",
        tis_clip=1.5,
        tis_clip_low=0.5,
        eps_clip_c=3.0,
        importance_sampling_level="sequence",
    )
    settings = LossSettings.from_config(algorithm)
    assert settings.tis == ImportanceWeights(0.5, 1.5, "geometric", mask=True)
    assert (settings.dual_clip, settings.ratio_level) == (3.0, "sequence")
    assert LossSettings.from_config(AlgorithmSection(tis_mode="mask")).tis is None


def test_tis_multiplies_the_surrogate_but_not_kl_or_entropy() -> None:
    """surrogate -1 * weight 2 + 0.1 * k3 - 0.01 * entropy 0.5."""
    settings = LossSettings(0.2, 0.2, entropy_coef=0.01, kl_coef=0.1, tis=ImportanceWeights(0.0, 2.0))
    tokens = tokens_of([-1.0], rollout=[-1.0 - math.log(4)], reference=[-1.0 + math.log(2)])
    assert float(policy_token_losses(tokens, settings)) == pytest.approx(-2.0 + 0.1 * (1 - math.log(2)) - 0.005)


def test_r22_kl_off_and_coefficient_zero_are_the_same_loss() -> None:
    """use_kl_loss with coefficient 0 needs no reference and changes nothing."""
    off = LossSettings.from_config(AlgorithmSection(use_kl_loss=False))
    zero = LossSettings.from_config(AlgorithmSection(use_kl_loss=True, kl_loss_coef=0.0))
    on = LossSettings.from_config(AlgorithmSection(use_kl_loss=True, kl_loss_coef=0.01))
    assert off == zero
    assert (off.kl_coef, on.kl_coef) == (0.0, 0.01)


def test_the_upper_clip_defaults_to_the_lower_one() -> None:
    """eps_clip_high None means symmetric."""
    assert LossSettings.from_config(AlgorithmSection(eps_clip=0.1)).clip_high == 0.1
    assert LossSettings.from_config(AlgorithmSection(eps_clip_high=0.28)).clip_high == 0.28


def test_sft_loss_is_the_negative_log_likelihood() -> None:
    """-log p, token by token."""
    assert sft_token_losses(torch.tensor([-0.5, -2.0])).tolist() == [0.5, 2.0]


def test_effective_sample_size_is_a_fraction_of_the_tokens() -> None:
    """1 for equal weights; 1/4 when one of four has all the weight."""
    assert float(effective_sample_size(torch.full((4,), 3.0))) == pytest.approx(1.0)
    assert float(effective_sample_size(torch.tensor([1.0, 0.0, 0.0, 0.0]))) == pytest.approx(0.25)


def test_metrics_describe_the_policy_against_old_and_engine() -> None:
    """Ratio and clip are against old; gaps and TIS are old against the engine; optional terms only where they apply."""
    tokens = tokens_of(
        [math.log(1.5), 0.0], old=[0.0, 0.0], rollout=[math.log(0.25), 0.0], reference=[math.log(1.5), 0.0]
    )
    metrics = policy_metrics(tokens, LossSettings(0.2, 0.2, tis=ImportanceWeights(0.0, 2.0)))
    assert metrics["ratio_mean"] == pytest.approx(1.25)
    assert metrics["clip_fraction"] == 0.5
    assert metrics["logprob_gap_max"] == metrics["logprob_gap_p99"] == pytest.approx(math.log(4))
    assert metrics["logprob_gap_mean"] == pytest.approx(math.log(4) / 2)
    assert metrics["tis_mean"] == pytest.approx(1.5)
    assert metrics["tis_clip_fraction"] == 0.5
    assert metrics["effective_sample_size"] == pytest.approx(25 / (2 * 17))
    assert metrics["kl"] == 0.0
    assert {"tis_mean", "kl"}.isdisjoint(policy_metrics(tokens_of([-1.0]), PLAIN))


def test_c43_log_probs_are_at_the_sampling_temperature() -> None:
    """Logits (2, 0): at T = 0.5 -0.018150 and -4.018150, at T = 1 -0.126928 and -2.126928."""
    logits = torch.tensor([[2.0, 0.0], [2.0, 0.0]])
    half, _ = token_logprobs(logits, torch.tensor([0, 1]), temperature=0.5)
    one, _ = token_logprobs(logits, torch.tensor([0, 1]), temperature=1.0)
    torch.testing.assert_close(half, torch.tensor([-0.018150, -4.018150]), atol=1e-6, rtol=0)
    torch.testing.assert_close(one, torch.tensor([-0.126928, -2.126928]), atol=1e-6, rtol=0)
    assert logits.tolist() == [[2.0, 0.0], [2.0, 0.0]]


def test_c44_padded_vocabulary_has_no_probability() -> None:
    """Ten real tokens in sixteen columns, all logits equal: -ln 10, not -ln 16; the entropy is ln 10."""
    logits = torch.zeros(3, 16, requires_grad=True)
    masked = logits.masked_fill(torch.arange(16) >= 10, -1e9)
    logprobs, entropy = token_logprobs(masked, torch.tensor([0, 5, 9]), temperature=1.0)
    (logprobs.sum() + entropy.sum()).backward()
    torch.testing.assert_close(logprobs.detach(), torch.full((3,), -math.log(10)))
    torch.testing.assert_close(entropy.detach(), torch.full((3,), math.log(10)))
    assert logits.grad is not None
    assert float(logits.grad[:, 10:].abs().max()) == 0.0


def test_log_prob_and_entropy_have_the_gradients_of_plain_torch() -> None:
    """The fused function agrees with log_softmax in values and in both gradients, bf16 logits included."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(7, 11, generator=generator) * 3
    targets = torch.randint(0, 11, (7,), generator=generator)
    weights = torch.randn(2, 7, generator=generator)
    mine, plain = base.clone().requires_grad_(), base.clone().requires_grad_()
    logprobs, entropy = token_logprobs(mine, targets, temperature=0.7)
    full = (plain / 0.7).log_softmax(-1)
    expected = full.gather(1, targets[:, None])[:, 0], -(full.exp() * full).sum(-1)
    torch.testing.assert_close(logprobs, expected[0])
    torch.testing.assert_close(entropy, expected[1])
    (weights[0] * logprobs + weights[1] * entropy).sum().backward()
    (weights[0] * expected[0] + weights[1] * expected[1]).sum().backward()
    torch.testing.assert_close(mine.grad, plain.grad)
    coarse, _ = token_logprobs(base.bfloat16(), targets, temperature=0.7)
    assert coarse.dtype == torch.float32
