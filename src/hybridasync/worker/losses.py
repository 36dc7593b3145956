"""The tensor maths of the losses, on response tokens alone.

Every function takes flat tensors with one entry for each response token of the samples that carry loss ([N]); masked
samples are never part of them. The loss of a step is sum(weights * token losses), where the weights hold the whole
normaliser: it is therefore the same number however tokens are spread over micro-batches and data-parallel ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hybridasync.config.models import AlgorithmSection

Aggregation = Literal["token_mean", "sequence_mean", "constant"]
RatioLevel = Literal["token", "sequence"]
WeightLevel = Literal["token", "sequence", "geometric"]

LOG_RATIO_LIMIT = 20.0
# exp(20) = 5e8: far outside of every clip range, but finite. Without the limit a token that one policy calls
# impossible makes inf * 0 = NaN in the backward pass of a branch that the clip had discarded.


@dataclass(frozen=True, slots=True)
class ImportanceWeights:
    """How the loss is weighted for tokens that another policy sampled: pi_old / pi_rollout, at `level`, in a range.

    Outside of [low, high] a weight is cut to the range, or with `mask` it is 0.
    """

    low: float
    high: float
    level: WeightLevel = "token"
    mask: bool = False


@dataclass(frozen=True, slots=True)
class LossSettings:
    """Coefficients of the policy loss. A coefficient of 0 means that its term isn't computed."""

    clip_low: float
    clip_high: float
    dual_clip: float | None = None
    ratio_level: RatioLevel = "token"
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    tis: ImportanceWeights | None = None

    @classmethod
    def from_config(cls, algorithm: AlgorithmSection) -> LossSettings:
        weights = ImportanceWeights(
            algorithm.tis_clip_low, algorithm.tis_clip, algorithm.tis_level, mask=algorithm.tis_mode == "mask"
        )
        return cls(
            clip_low=algorithm.eps_clip,
            clip_high=algorithm.eps_clip if algorithm.eps_clip_high is None else algorithm.eps_clip_high,
            dual_clip=algorithm.eps_clip_c,
            ratio_level=algorithm.importance_sampling_level,
            entropy_coef=algorithm.entropy_coef,
            kl_coef=algorithm.kl_loss_coef if algorithm.use_kl_loss else 0.0,
            tis=weights if algorithm.use_tis else None,
        )


@dataclass(frozen=True, slots=True)
class PolicyTokens:
    """What the policy loss needs of N response tokens; each [N], fp32, natural logarithms at the sampling temperature.

    `logprobs` and `entropy` are of the policy in training and may carry a gradient; `old` is the policy at the start of
    the step, `rollout` the engine that sampled the tokens, `reference` the frozen model of the KL term. `samples` (int)
    says to which sample each token belongs: all the tokens of a sample are there, or none.
    """

    logprobs: Tensor
    entropy: Tensor
    old: Tensor
    rollout: Tensor
    advantages: Tensor
    samples: Tensor
    reference: Tensor | None = None


def token_weights(lengths: Tensor, aggregation: Aggregation, *, max_response_tokens: int) -> Tensor:
    """The weight of each response token in the loss.

    `lengths` [S]: response tokens of each sample of the global batch that carries loss (all data-parallel ranks, all
    micro-batches). Returns [N], N = sum(lengths), in the order of the samples.
    `token_mean`: 1 / N (DAPO, Yu et al. 2025, https://arxiv.org/abs/2503.14476, section 3.3).
    `sequence_mean`: 1 / (S * own length) (GRPO, Shao et al. 2024, https://arxiv.org/abs/2402.03300, equation 3).
    `constant`: 1 / (S * max_response_tokens) (Dr.GRPO, Liu et al. 2025, https://arxiv.org/abs/2503.20783).
    """
    samples = lengths.numel()
    total = int(lengths.sum())
    if total == 0:
        return torch.zeros(0, device=lengths.device)
    if aggregation == "token_mean":
        return torch.full((total,), 1.0 / total, device=lengths.device)
    if aggregation == "constant":
        return torch.full((total,), 1.0 / (samples * max_response_tokens), device=lengths.device)
    return (1.0 / (samples * lengths.clamp(min=1).float())).repeat_interleave(lengths)


def importance_ratio(logprobs: Tensor, old: Tensor) -> Tensor:
    """pi / pi_old for each token, kept finite. [N]"""
    return _exp(logprobs - old)


def policy_ratio(tokens: PolicyTokens, level: RatioLevel) -> Tensor:
    """pi / pi_old of each token, or for all tokens of a sample its geometric mean over them. [N]

    Source of `sequence`: Zheng et al. 2025, GSPO, equation 7, https://arxiv.org/abs/2507.18071.
    """
    log_ratio = tokens.logprobs - tokens.old
    return _exp(log_ratio if level == "token" else _sample_means(log_ratio, tokens.samples)[0])


def clipped_surrogate(ratio: Tensor, advantages: Tensor, settings: LossSettings) -> Tensor:
    """-min(ratio * A, clip(ratio, 1 - low, 1 + high) * A) for each token. [N]

    Source: Schulman et al. 2017, PPO, equation 7, https://arxiv.org/abs/1707.06347; the asymmetric range is DAPO's
    clip-higher (https://arxiv.org/abs/2503.14476, equation 10). `dual_clip` bounds the loss where A < 0 by -c * A: Ye
    et al. 2020, equation 5, https://arxiv.org/abs/1912.09729.
    """
    clipped = ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    losses = -torch.min(ratio * advantages, clipped * advantages)
    if settings.dual_clip is None:
        return losses
    return torch.where(advantages < 0, torch.min(losses, -settings.dual_clip * advantages), losses)


def clip_active(ratio: Tensor, advantages: Tensor, settings: LossSettings) -> Tensor:
    """Where the clip holds the gradient back. Boolean [N]"""
    above = (ratio > 1.0 + settings.clip_high) & (advantages > 0)
    below = (ratio < 1.0 - settings.clip_low) & (advantages < 0)
    if settings.dual_clip is not None:
        below = below | ((ratio > settings.dual_clip) & (advantages < 0))
    return above | below


def kl_k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """r - 1 - log r with r = pi_ref / pi: an unbiased, never negative estimate of KL(pi || pi_ref). [N]

    Source: Schulman 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html (k3).
    """
    log_ratio = (reference - logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return log_ratio.exp() - log_ratio - 1.0


@torch.no_grad()
def importance_weights(tokens: PolicyTokens, settings: ImportanceWeights) -> tuple[Tensor, Tensor]:
    """pi_old / pi_rollout, kept in the range, and where it lay outside; both [N], without gradient.

    With `old` of the policy at the start of the step this is decoupled PPO: the clip works against the proximal policy
    `old`, the weight corrects for the behaviour policy `rollout` (Hilton et al. 2021, https://arxiv.org/abs/2110.00641,
    equation 4; Fu et al. 2025, AReaL, https://arxiv.org/abs/2505.24298, equation 5). Truncated weights: Espeholt et al.
    2018, IMPALA, https://arxiv.org/abs/1802.01561, per token as in Yao et al. 2025, "Your efficient RL framework
    secretly brings you off-policy RL training". Masked ones: Ling team 2025, IcePop,
    https://arxiv.org/abs/2510.18855; of whole responses and by their geometric mean: Liu et al. 2025, "When speed kills
    stability". What is masked still counts in the normaliser, as in these.
    """
    log_ratio = tokens.old - tokens.rollout
    if settings.level != "token":
        means, counts = _sample_means(log_ratio, tokens.samples)
        log_ratio = means if settings.level == "geometric" else means * counts
    ratio = _exp(log_ratio)
    outside = (ratio < settings.low) | (ratio > settings.high)
    if settings.mask:
        return ratio.masked_fill(outside, 0.0), outside
    return ratio.clamp(settings.low, settings.high), outside


def policy_token_losses(tokens: PolicyTokens, settings: LossSettings) -> Tensor:
    """Loss of each token: surrogate (times its importance weight) + kl_coef * KL - entropy_coef * entropy. [N]"""
    losses = clipped_surrogate(policy_ratio(tokens, settings.ratio_level), tokens.advantages, settings)
    if settings.tis is not None:
        losses = losses * importance_weights(tokens, settings.tis)[0]
    if settings.kl_coef and tokens.reference is not None:
        losses = losses + settings.kl_coef * kl_k3(tokens.logprobs, tokens.reference)
    if settings.entropy_coef:
        losses = losses - settings.entropy_coef * tokens.entropy
    return losses


def sft_token_losses(logprobs: Tensor) -> Tensor:
    """Negative log-likelihood of each token. [N]"""
    return -logprobs


def effective_sample_size(weights: Tensor) -> Tensor:
    """(sum w)^2 / (N * sum w^2): 1 when all importance weights are equal, 1/N when one has it all.

    Source: Kong 1992, "A note on importance sampling using standardized weights". A fraction of the tokens.
    """
    return weights.sum().square() / (weights.numel() * weights.square().sum())


@torch.no_grad()
def policy_metrics(tokens: PolicyTokens, settings: LossSettings) -> dict[str, float]:
    """What a step reports of its tokens, one value for the global batch. Needs N >= 1.

    Ratio and clip fraction compare the policy with `old`; gaps, `approx_kl` (k3 of KL(old || rollout)) and
    `effective_sample_size` compare `old`, the policy before the step, with the engine's `rollout`, unclipped.
    """
    ratio = policy_ratio(tokens, settings.ratio_level)
    gap = (tokens.old - tokens.rollout).abs()
    behaviour = importance_ratio(tokens.old, tokens.rollout)
    values = {
        "ratio_mean": ratio.mean(),
        "ratio_max": ratio.max(),
        "clip_fraction": clip_active(ratio, tokens.advantages, settings).float().mean(),
        "logprob_gap_mean": gap.mean(),
        "logprob_gap_p99": gap.kthvalue(max(1, math.ceil(0.99 * gap.numel()))).values,
        "logprob_gap_max": gap.max(),
        "approx_kl": kl_k3(tokens.old, tokens.rollout).mean(),
        "effective_sample_size": effective_sample_size(behaviour),
        "entropy": tokens.entropy.mean(),
    }
    if settings.tis is not None:
        weights, outside = importance_weights(tokens, settings.tis)
        values["tis_mean"] = weights.mean()
        values["tis_clip_fraction"] = outside.float().mean()
    if tokens.reference is not None:
        values["kl"] = kl_k3(tokens.logprobs, tokens.reference).mean()
    return dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True))


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _sample_means(values: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
    """Mean over the tokens of a sample and their number, at each of its tokens. Both [N]."""
    _, places, counts = torch.unique(samples, return_inverse=True, return_counts=True)
    sums = torch.zeros(counts.numel(), dtype=values.dtype, device=values.device).index_add(0, places, values)
    return (sums / counts)[places], counts[places]
