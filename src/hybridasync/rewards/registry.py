"""Reward functions by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from hybridasync.config.models import RewardSection
from hybridasync.errors import ConfigError
from hybridasync.ports import RewardFn
from hybridasync.rewards import exact_match, gsm8k
from hybridasync.rewards.functions import UserReward
from hybridasync.types import Completion, Prompt


class Reward(RewardFn, Protocol):
    """A reward function that may hold something open."""

    async def aclose(self) -> None: ...


Scorer = Callable[[str, Prompt, Completion], float]


class QuickReward:
    """A built-in reward that takes microseconds: it runs where it is called."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer

    async def __call__(self, prompt: Prompt, texts: Sequence[str], completions: Sequence[Completion]) -> list[float]:
        return [self._scorer(text, prompt, made) for text, made in zip(texts, completions, strict=True)]

    async def aclose(self) -> None:
        """Nothing is held open."""


_QUICK: Mapping[str, Scorer] = {
    "exact_match": lambda text, prompt, made: exact_match.score(text, prompt.label, made.finish_reason),
    "gsm8k": lambda text, prompt, made: gsm8k.score(text, prompt.label),
}
BUILT_IN = (*_QUICK, "math_verify")


def load_reward(section: RewardSection) -> Reward:
    """The reward function of a recipe; it is imported now, so that a mistake shows before anything starts.

    Raises ConfigError: unknown name, module or attribute that isn't there, import error, wrong arguments.
    """
    if section.function in _QUICK:
        return QuickReward(_QUICK[section.function])
    if section.function == "math_verify":
        from hybridasync.rewards.math_reward import MathReward

        return MathReward(timeout_s=section.timeout_s)
    if ":" not in section.function:
        raise ConfigError(
            f"unknown reward function {section.function!r}; give {', '.join(BUILT_IN)}, or module:function",
            setting="reward.function",
        )
    return UserReward(section)
