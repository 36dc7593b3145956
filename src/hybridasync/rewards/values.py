"""What a reward function answers has to be one finite number for each completion: nothing else is let through."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real

from hybridasync.errors import RewardError


def reward_value(value: object, *, function: str) -> float:
    """One reward as a float. Booleans, integers and one-element arrays count as numbers. Raises RewardError."""
    if not isinstance(value, Real):
        try:
            value = value.item()  # type: ignore[attr-defined] # arrays and tensors of one element
        except (AttributeError, ValueError, RuntimeError, TypeError) as error:
            raise RewardError(f"{function}: a reward must be a number, got {value!r}") from error
    if not isinstance(value, Real):
        raise RewardError(f"{function}: a reward must be a number, got {value!r}")
    number = float(value)
    if not math.isfinite(number):
        raise RewardError(f"{function}: a reward must be finite, got {number}")
    return number


def reward_values(values: object, expected: int, *, function: str) -> list[float]:
    """The rewards of a group, in order. Raises RewardError unless there are exactly `expected` numbers (C41)."""
    if isinstance(values, str | bytes | dict | set | frozenset) or not isinstance(values, Iterable):
        raise RewardError(f"{function}: expected a list of {expected} rewards, got {type(values).__name__}")
    try:
        listed = list(values)
    except TypeError as error:  # a scalar array has __iter__, and refuses
        raise RewardError(f"{function}: expected a list of {expected} rewards, got {values!r}") from error
    if len(listed) != expected:
        raise RewardError(f"{function}: expected {expected} rewards, one for each completion, got {len(listed)}")
    return [reward_value(value, function=function) for value in listed]
