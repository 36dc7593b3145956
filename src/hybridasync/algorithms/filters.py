"""Which groups have nothing to teach."""

from __future__ import annotations

from collections.abc import Sequence

from hybridasync.algorithms.assembly import carries_loss
from hybridasync.algorithms.shaping import shaped_reward
from hybridasync.config.models import Config
from hybridasync.types import Group

REWARD_EPSILON = 1e-6
# Rewards are compared with a tolerance: 0.1 + 0.2 and 0.3 are the same reward (C22).


def zero_variance(rewards: Sequence[float], epsilon: float = REWARD_EPSILON) -> bool:
    """Whether the rewards of a group differ by no more than `epsilon`, so that every advantage is zero.

    Says nothing about the range: fractional and negative rewards are as good as 0 and 1.
    """
    return not rewards or max(rewards) - min(rewards) <= epsilon


def has_signal(group: Group, config: Config) -> bool:
    """Whether a group can move the policy (DAPO's dynamic sampling, https://arxiv.org/abs/2503.14476, section 3.2).

    Judged on what the advantages come from: shaped rewards of the samples that carry loss.
    """
    return not zero_variance([shaped_reward(s, config) for s in group.samples if carries_loss(s, config)])
