import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridasync.config.models import RewardSection
from hybridasync.errors import ConfigError, RewardError
from hybridasync.rewards import exact_match, gsm8k, last_number
from hybridasync.rewards.registry import load_reward
from hybridasync.types import Completion, FinishReason, Prompt

GOLD_SOLUTION = "He spent 80000+50000=$<<80000+50000=130000>>130,000.\nSo he made $70,000.\n#### 70000"
TALKING = "2+40=42\n#### 42\n" + " (so the computation shown before is right and needs no change)" * 8


def prompt(label: str) -> Prompt:
    return Prompt(uid=0, row=0, epoch=0, source="toy", input_ids=(1,), text="question", label=label)


def completion(finish_reason: FinishReason = "stop") -> Completion:
    return Completion((5,), (-0.1,), (), finish_reason, "engine-0")


@pytest.mark.parametrize(
    ("text", "gold", "expected"),
    [
        (TALKING, "42", 1.0),
        ("In all she pays $29.00.", "29", 1.0),
        ("That leaves a profit of $70,000", "70000", 1.0),
        ("By night it is at -3.", "-3", 1.0),
        ("By night it is at -3.", "#### -3", 1.0),
        ("By night it is at -3.", "3", 0.0),
        ("#### -1,234.5", "-1234.5", 1.0),
        ("Answer: m+n = 256+37 = 293", "293", 1.0),
        ("Answer: a+b+c = 12+25+25 = 62", "62", 1.0),
        ("Final answer: 082", "82", 1.0),
        ("#### 5 apples", "5", 1.0),
        ("#### 41 ... correction #### 42", "42", 1.0),
        ("#### 41 ... correction #### 42", "41", 0.0),
        ("I do not know", "0", 0.0),
        ("", "0", 0.0),
        ("So it is 70000.", GOLD_SOLUTION, 1.0),
        ("So it is 130000.", GOLD_SOLUTION, 0.0),
    ],
)
def test_c47_gsm8k_rows(text: str, gold: str, expected: float) -> None:
    """Each row of the case: markers, currency, decimals, signs, running arithmetic, no default zero."""
    assert gsm8k.score(text, gold) == expected


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("12-3", "3"),
        ("(12)-3", "3"),
        ("-$3", "-3"),
        ("$-3", "-3"),
        ("\u22123", "-3"),
        ("1,234,567", "1234567"),
        ("1,2345", "2345"),
        ("about .5", "0.5"),
        ("#### 2 + 3 = 5", "5"),
        ("#### $1,000 each\nnext 7", "1000"),
        ("**42**", "42"),
        ("#### none", None),
        ("##### 7", "7"),
    ],
)
def test_c47_further_spellings(text: str, number: str | None) -> None:
    """A minus is a sign only where nothing can be subtracted from; commas group only thousands."""
    found = gsm8k.answer(text)
    assert (None if found is None else format(found, "f")) == number


@given(st.decimals(allow_nan=False, allow_infinity=False, places=2, min_value=-(10**9), max_value=10**9), st.text())
def test_c47_a_marked_number_is_found_whatever_stands_before(value: object, noise: str) -> None:
    """The last marker wins over any text before it, with and without thousands separators."""
    for written in (f"{value}", f"{value:,}"):
        assert gsm8k.score(f"{noise}\n#### {written}", str(value)) == 1.0


def test_a_gold_answer_without_number_is_an_error() -> None:
    """That is a fault of the data: not a wrong answer."""
    with pytest.raises(RewardError, match="gold answer 'none' has no number"):
        gsm8k.score("5", "none")


def test_exact_match_wants_the_text_and_the_end() -> None:
    """White space around doesn't count; a response cut by the cap isn't right."""
    assert exact_match.score(" 1259\n", "1259", "stop") == 1.0
    assert exact_match.score("1259", "1259", "length") == 0.0
    assert exact_match.score("1295", "1259", "stop") == 0.0


def test_c54_a_truncated_answer_is_wrong_and_no_error() -> None:
    """Without an answer a cut response earns 0 from every built-in reward."""
    assert gsm8k.score("First we add", "5") == 0.0
    assert last_number.score("It is 5", "5", "length") == 0.0
    assert last_number.score("It is 5.", "5", "stop") == 1.0


async def test_built_in_rewards_are_called_by_name() -> None:
    """One float for each completion, in order."""
    exact = load_reward(RewardSection(function="exact_match"))
    assert await exact(prompt("7"), ["7", "8", "7"], [completion(), completion(), completion("length")]) == [1, 0, 0]
    grade = load_reward(RewardSection(function="gsm8k"))
    assert await grade(prompt("#### 7"), ["it is 7", "no"], [completion(), completion()]) == [1, 0]


def test_an_unknown_name_lists_what_there_is() -> None:
    """A misspelt reward function is the user's mistake."""
    with pytest.raises(ConfigError, match=r"reward\.function: unknown .*'exactmatch'.*exact_match, gsm8k, math_verify"):
        load_reward(RewardSection(function="exactmatch"))


def test_scoring_is_a_pure_function_of_text_and_label() -> None:
    """The same texts in another order earn the same."""
    texts = ["#### 1", "2", "#### 3 #### 1", "one"]
    order = random.Random(0).sample(range(4), 4)
    assert [gsm8k.score(texts[i], "1") for i in order] == [[1.0, 0.0, 1.0, 0.0][i] for i in order]
