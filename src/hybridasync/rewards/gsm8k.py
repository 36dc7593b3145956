"""Reward of a GSM8K answer: the last "#### number", else the last number, equal to the gold number.

Cobbe et al. 2021, "Training Verifiers to Solve Math Word Problems": gold solutions end in "#### <number>".
"""

from __future__ import annotations

import re
from decimal import Decimal

from hybridasync.errors import RewardError

MARKER = "####"
# A minus counts as a sign unless something stands right before it that it could be subtracted from.
_NUMBER = re.compile(
    r"(?:(?<![\w)\]}])(?P<sign>[-\u2212]))?[$€£]?(?P<late_sign>(?<=[$€£])[-\u2212])?"
    r"(?P<digits>\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)",
    re.ASCII,
)


def score(text: str, label: str) -> float:
    """1.0 if the response's answer equals that of `label` (a number, or a whole gold solution), else 0.0.

    Raises RewardError when `label` has no number: that is the data's fault, not the response's.
    """
    gold = answer(label)
    if gold is None:
        raise RewardError(f"gsm8k: the gold answer {label!r} has no number")
    return float(answer(text) == gold)


def answer(text: str) -> Decimal | None:
    """The number that a text answers with, or None.

    Behind the last marker it is the first number of the line, after its last "=" if it has one ("#### 5 apples",
    "#### 2 + 3 = 5"). Without a marker it is the last number of the text ("a + b = 12 + 25 = 37", "$29.00.").
    """
    _, marker, tail = text.rpartition(MARKER)
    if not marker:
        numbers = list(_NUMBER.finditer(text))
        return _value(numbers[-1]) if numbers else None
    line = tail.strip().split("\n", 1)[0].rpartition("=")[2]
    number = _NUMBER.search(line)
    return _value(number) if number else None


def _value(match: re.Match[str]) -> Decimal:
    value = Decimal(match["digits"].replace(",", ""))
    return -value if match["sign"] or match["late_sign"] else value
