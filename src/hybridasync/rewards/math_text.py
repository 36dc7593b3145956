"""Where the answer is in a mathematical text, and how it is written for the parser. Text only; no algebra."""

from __future__ import annotations

import re

from hybridasync.rewards import gsm8k

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_ANCHOR = re.compile(r"(?i)####|\banswer\s*(?:is|:|=)\s*:?")
_MATH = re.compile(r"(?s)\$\$(.+?)\$\$|(?<!\\)\$([^$\n]+?)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]")
_CURRENCY = re.compile(r"\\\$|\$(?=\s*-?[\d.])")
_AMOUNT_IN_PROSE = re.compile(r"-?[\d,.]+\s+[A-Za-z]{2,}")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_SPACING = re.compile(r"\\[,!;:]|\\ |~|\\left(?![A-Za-z])|\\right(?![A-Za-z])")
_FUNCTIONS = frozenset({"sqrt", "pi", "sin", "cos", "tan", "log", "ln", "exp"})
_PERCENT = re.compile(r"(.+?)\s*\\?%")


def find_answer(text: str) -> str | None:
    """The answer of a response, or None.

    The last box counts; one that isn't closed is no answer. Else what follows the last "answer is" or "####", else the
    last formula, else the whole text if it is an expression, else its last number.
    """
    boxes = list(_BOX.finditer(text))
    if boxes:
        return _boxed(text, boxes[-1].end())
    plain = text.replace("**", "").strip()
    anchors = list(_ANCHOR.finditer(plain))
    if anchors:
        tail = plain[anchors[-1].end() :].strip().split("\n", 1)[0]
        formulas = _formulas(tail)
        return formulas[0] if formulas else _from_prose(tail)
    formulas = _formulas(plain)
    return formulas[-1] if formulas else _from_prose(plain)


def gold_answer(label: str) -> str:
    """The gold answer: that of a whole solution (with a box or "####"), else the label, delimiters taken off."""
    if _BOX.search(label) or gsm8k.MARKER in label:
        return find_answer(label) or ""
    formula = _MATH.fullmatch(label.strip())
    return next(group for group in formula.groups() if group is not None) if formula else label.strip()


def normalise(expression: str) -> str:
    """An expression without spacing commands, currency, bold marks and a full stop: fewer spellings of one answer."""
    text = _SPACING.sub("", expression.replace("**", "").replace("\u2212", "-").replace("{,}", ","))
    text = _CURRENCY.sub("", text).strip()
    whole = _TEXT.fullmatch(text)
    text = whole[1] if whole else text
    text = re.sub(r"(?<!\\)\bsqrt\(([^()]*)\)", r"\\sqrt{\1}", text)
    return re.sub(r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi", text).strip().rstrip(".").strip()


def percentage(expression: str) -> str | None:
    """The number before a closing percent sign, or None."""
    match = _PERCENT.fullmatch(expression)
    return match[1] if match else None


def _boxed(text: str, start: int) -> str | None:
    if not text.startswith("{", start):
        bare = re.match(r"[^\s$]+", text[start:])
        return bare[0] if bare else None
    depth = 0
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start + 1 : position].strip() or None
    return None


def _formulas(text: str) -> list[str]:
    found = [next(group for group in match.groups() if group is not None) for match in _MATH.finditer(text)]
    # "$5 and then $7" is money, not a formula between dollar signs.
    return [formula.strip() for formula in found if not _AMOUNT_IN_PROSE.match(formula)]


def _from_prose(text: str) -> str | None:
    words = [word for word in _WORD.findall(_TEXT.sub("", text)) if word not in _FUNCTIONS]
    if not words or len(text.split()) == 1:
        return text or None
    number = gsm8k.answer(text)
    return str(number) if number is not None else text
