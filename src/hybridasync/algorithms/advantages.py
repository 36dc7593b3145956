"""Group-relative advantages: a sample's reward against those of the other samples of the same prompt.

Groups are told apart by an explicit id, never by position or by the text of the prompt.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

AdvantageKind = Literal["grpo", "dr_grpo"]

STD_EPSILON = 1e-6
# Keeps the quotient finite where all rewards are equal up to rounding; those groups come out as (nearly) zero.


@dataclass(frozen=True, slots=True)
class ScoredMember:
    """One member of a group. `counted` False: masked or failed; it leaves the baseline and has no advantage."""

    group: Hashable
    reward: float
    counted: bool = True


def group_relative_advantages(rewards: Sequence[float], kind: AdvantageKind) -> list[float]:
    """Advantages of the counted members of one group.

    `grpo`: (r - mean) / (std + 1e-6), with the sample standard deviation (divisor n - 1), as the common GRPO
    implementations have it (Shao et al. 2024, DeepSeekMath, https://arxiv.org/abs/2402.03300, leave it open).
    `dr_grpo`: r - mean (Liu et al. 2025, https://arxiv.org/abs/2503.20783).
    A group of one has nothing to compare with: its advantage is exactly 0.
    """
    if len(rewards) < 2:
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if kind == "dr_grpo":
        return centred
    std = math.sqrt(math.fsum(value * value for value in centred) / (len(rewards) - 1))
    return [value / (std + STD_EPSILON) for value in centred]


def compute_advantages(members: Sequence[ScoredMember], kind: AdvantageKind) -> list[float]:
    """The advantage of each member, in the order given; members of a group may stand anywhere in the sequence."""
    positions: dict[Hashable, list[int]] = defaultdict(list)
    for position, member in enumerate(members):
        if member.counted:
            positions[member.group].append(position)
    advantages = [0.0] * len(members)
    for indices in positions.values():
        values = group_relative_advantages([members[index].reward for index in indices], kind)
        for index, value in zip(indices, values, strict=True):
            advantages[index] = value
    return advantages
