"""Reward 1 for a response that is the gold answer and ended by itself."""

from __future__ import annotations

from hybridasync.types import FinishReason


def score(text: str, label: str, finish_reason: FinishReason) -> float:
    """1.0 if the stripped texts are equal and the policy stopped; else 0.0.

    A response cut by the cap isn't right even when its text is: the policy has to learn to end.
    """
    return float(finish_reason == "stop" and text.strip() == label.strip())
