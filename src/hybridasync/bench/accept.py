"""Thresholds as people write them: `optimized/zero_kl >= 1.05`, `staged.pause_ms <= 10`."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hybridasync.errors import ConfigError

DEFAULT_MEASURE = "response_tok_s"
_OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_TERM = r"(?P<{0}>[A-Za-z][\w-]*)(?:\.(?P<{0}_measure>\w+))?"
_EXPRESSION = re.compile(
    rf"\s*{_TERM.format('first')}\s*(?:/\s*{_TERM.format('second')})?\s*(?P<operator>>=|<=|>|<)\s*(?P<threshold>\S+)\s*"
)


@dataclass(frozen=True, slots=True)
class Condition:
    """`first.measure`, divided by `second.measure` where there is one, compared with a threshold; for every pair."""

    text: str
    first: str
    second: str | None
    measure: str
    operator: str
    threshold: float

    def holds(self, value: float) -> bool:
        return _OPERATORS[self.operator](value, self.threshold)


def parse(text: str, *, variants: Sequence[str], measures: Sequence[str]) -> Condition:
    """Raises ConfigError that says what is wrong with the expression and what would do."""
    match = _EXPRESSION.fullmatch(text)
    if match is None:
        raise _wrong(text, "wants VARIANT[.MEASURE][/VARIANT] OPERATOR NUMBER with one of >= <= > <")
    first, second = match["first"], match["second"]
    for name in (first, second):
        if name is not None and name not in variants:
            raise _wrong(text, f"{name!r} doesn't take part; variants are {', '.join(variants)}")
    measure = match["first_measure"] or match["second_measure"] or DEFAULT_MEASURE
    if match["second_measure"] not in (None, measure):
        raise _wrong(text, f"compares {measure} with {match['second_measure']}; both sides need the same measure")
    if measure not in measures:
        raise _wrong(text, f"no measure {measure!r}; there are {', '.join(measures)}")
    try:
        threshold = float(match["threshold"])
    except ValueError:
        threshold = math.nan
    if not math.isfinite(threshold):
        raise _wrong(text, f"{match['threshold']!r} is no number")
    return Condition(text.strip(), first, second, measure, match["operator"], threshold)


def _wrong(text: str, what: str) -> ConfigError:
    return ConfigError(f"{text!r}: {what}. For example 'optimized/zero_kl >= 1.05'", setting="--accept")
