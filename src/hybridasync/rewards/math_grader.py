"""Whether two mathematical answers are equal: Math-Verify, with guards where it says yes or no too easily.

Math-Verify (github.com/huggingface/Math-Verify) parses LaTeX with SymPy and compares. Left alone it rounds tiny numbers
to equality, merges several boxes into a set and needs delimiters; its signal-based timeouts work in a main thread only.
Everything here runs in any thread, without a deadline: the caller has one. A percentage equals its number and its
hundredth (50 % is 50 and 0.5).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import sympy
from math_verify import parse, verify

from hybridasync.errors import RewardError
from hybridasync.rewards.math_text import find_answer, gold_answer, normalise, percentage

EXACT_TOLERANCE = 1e-12
"""Relative. Two exact numbers that differ by more than evaluation to 30 digits can explain aren't equal."""
DECIMAL_TOLERANCE = 1e-4
"""Relative, when one of the two is a decimal: 0.333333 is 1/3, and 0.0000001 isn't 0.0000002."""
_PROBES = ("0.7390851", "1.3247180", "0.5671433", "1.9021605", "0.8346268")

# Both warn once that no timeout is set, which is how they are meant to be used here.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def score(text: str, label: str) -> float:
    """1.0 if the answer of the response `text` equals that of `label`, else 0.0.

    Raises RewardError if it is the gold answer that can't be graded.
    """
    gold = _gold(label)
    found = find_answer(text)
    if found is None:
        return 0.0
    try:
        return float(_equal(gold, normalise(found)))
    except Exception as error:  # noqa: BLE001 - SymPy raises anything at what a policy writes: then the answer is wrong,
        check_label(label, error)  # unless the gold answer fails as well
        return 0.0


def check_label(label: str, cause: BaseException | None = None) -> None:
    """Raise RewardError unless the gold answer equals itself: parsed and compared, not by its text alone."""
    gold = _gold(label)
    try:
        parsed = _parse(gold)
        usable = not parsed or verify(list(parsed), list(parsed), timeout_seconds=None, raise_on_error=True)
        # The same text is equal at once; another number makes it be evaluated, which is what may hang.
        verify(list(parsed), [sympy.Integer(1)], timeout_seconds=None, raise_on_error=True)
    except Exception as error:
        raise RewardError(f"math_verify: the gold answer {gold!r} can't be graded: {error}") from error
    if not usable:
        raise RewardError(f"math_verify: the gold answer {gold!r} doesn't equal itself") from cause


def _gold(label: str) -> str:
    gold = normalise(gold_answer(label))
    if not gold:
        raise RewardError(f"math_verify: the gold answer {label!r} is empty")
    return gold


def _equal(gold: str, answer: str) -> bool:
    gold_percent, answer_percent = percentage(gold), percentage(answer)
    if (gold_percent is None) != (answer_percent is None):
        number, other = (gold_percent, answer) if gold_percent is not None else (answer_percent, gold)
        return _same(number or "", other) or _same(rf"\frac{{{number}}}{{100}}", other)
    if gold_percent is not None and answer_percent is not None:
        return _same(gold_percent, answer_percent)
    return _same(gold, answer)


def _same(gold: str, answer: str) -> bool:
    if "".join(gold.split()) == "".join(answer.split()):
        return True
    golds, answers = _parse(gold), _parse(answer)
    if not golds or not answers:
        return False
    if not verify(list(golds), list(answers), timeout_seconds=None, raise_on_error=True):
        return False
    expressions = [_expression(golds), _expression(answers)]
    return None in expressions or _really_equal(*expressions)


@lru_cache(maxsize=1024)
def _parse(expression: str) -> Sequence[Any]:
    return tuple(parse(f"${expression}$", parsing_timeout=None, raise_on_error=False))


def _expression(parsed: Sequence[Any]) -> sympy.Basic | None:
    return next((item for item in parsed if isinstance(item, sympy.Basic)), None)


def _really_equal(gold: Any, answer: Any) -> bool:
    """Second opinion on a yes. Only differences that it is sure of turn it into a no."""
    if isinstance(gold, sympy.Eq) and isinstance(answer, sympy.Eq):
        same_side = gold.lhs == answer.lhs and isinstance(gold.lhs, sympy.Symbol)
        return _really_equal(gold.rhs, answer.rhs) if same_side else True
    gold = gold.rhs if isinstance(gold, sympy.Eq) else gold
    answer = answer.rhs if isinstance(answer, sympy.Eq) else answer
    if isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr):
        return not _differ(gold, answer)
    if isinstance(gold, sympy.FiniteSet) and isinstance(answer, sympy.FiniteSet):
        return all(any(_really_equal(mine, theirs) for theirs in answer) for mine in gold)
    if type(gold) is type(answer) and isinstance(gold, sympy.Tuple | sympy.Interval):
        pairs = zip(gold.args, answer.args, strict=False)
        return all(_really_equal(mine, theirs) for mine, theirs in pairs)
    return True


def _differ(gold: Any, answer: Any) -> bool:
    """Whether two expressions differ, seen relative to their size, at one point for their symbols."""
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    point = {symbol: sympy.Rational(value) for symbol, value in zip(symbols, _PROBES, strict=False)}
    left, right = (sympy.N(expression.subs(point).doit(), 30) for expression in (gold, answer))
    if not (left.is_number and right.is_number and left.is_finite and right.is_finite):
        return False
    size = max(abs(left), abs(right))
    decimal = gold.has(sympy.Float) or answer.has(sympy.Float)
    if size == 0 or abs(left - right) <= size * (DECIMAL_TOLERANCE if decimal else EXACT_TOLERANCE):
        return False
    # Where terms cancel, what is left is rounding: then only algebra can tell.
    return decimal or gold.doit().equals(answer.doit()) is not True
