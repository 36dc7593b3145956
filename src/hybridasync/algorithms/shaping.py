"""Reward shaping that needs nothing but the length of a response."""

from __future__ import annotations

from hybridasync.config.models import Config
from hybridasync.types import Sample


def soft_overlong_penalty(length: int, *, cap: int, buffer: int, factor: float = 1.0) -> float:
    """Soft overlong punishment of DAPO: what is added to the reward of a response of `length` tokens (0 or less).

    Zero up to cap - buffer tokens, then falling linearly to -factor at the cap. `buffer` 0 turns it off.
    Source: Yu et al. 2025, DAPO, equation 13, https://arxiv.org/abs/2503.14476.
    """
    if buffer <= 0:
        return 0.0
    excess = length - (cap - buffer)
    if excess <= 0:
        return 0.0
    return -factor * min(excess / buffer, 1.0)


def shaped_reward(sample: Sample, config: Config) -> float:
    """The reward that the advantage is computed from: the verifier's, the overlong penalty and the KL penalty.

    KL penalty: -kl_coef * (log pi_rollout(y) - log pi_ref(y)), the single-sample estimate of the response's KL (Ziegler
    et al. 2019, equation 2, https://arxiv.org/abs/1909.08593).
    """
    return (
        sample.reward
        - config.algorithm.kl_coef * sample.kl
        + soft_overlong_penalty(
            len(sample.completion.output_ids),
            cap=config.rollout.max_response_tokens,
            buffer=config.reward.overlong_buffer_tokens,
            factor=config.reward.overlong_penalty_factor,
        )
    )
