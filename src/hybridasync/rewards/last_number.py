"""Reward of short arithmetic: the response ended by itself, and its last number is the gold one."""

from __future__ import annotations

from hybridasync.rewards import gsm8k


def score(response: str, label: str, finish_reason: str) -> float:
    """1.0 or 0.0. In a recipe: `function = "hybridasync.rewards.last_number:score"`."""
    return gsm8k.score(response, label) if finish_reason == "stop" else 0.0
