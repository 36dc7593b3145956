"""The reward math_verify: its guards, and that it works wherever it is called."""

import os
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import anyio
import anyio.to_thread
import psutil
import pytest

from hybridasync.config.models import RewardSection
from hybridasync.errors import ConfigError, RewardError
from hybridasync.rewards import math_grader
from hybridasync.rewards.math_grader import score
from hybridasync.rewards.math_reward import MathReward
from hybridasync.rewards.registry import load_reward
from hybridasync.types import Prompt

HANGS = r"\boxed{9^{9^{9}}}"
THREE = [("$2$", "$2$"), (r"$\frac{1}{3}$", r"\boxed{\frac{1}{3}}"), ("$2$", "$3$")]


def prompt(label: str) -> Prompt:
    return Prompt(uid=0, row=0, epoch=0, source="toy", input_ids=(1,), text="question", label=label)


def score_three() -> list[float]:
    return [score(response, gold) for gold, response in THREE]


@pytest.mark.parametrize(
    ("gold", "response", "expected"),
    [
        # a to c: not equal, though Math-Verify says so
        ("1/2^99", "1/2^98", 0.0),
        (r"\frac{1}{2^{99}}", r"\boxed{\frac{1}{2^{98}}}", 0.0),
        ("1/2004!", "1/2006!", 0.0),
        ("3*x-1*y+13=0", "3x + 4y + 14=0", 0.0),
        # d to g: equal, though it says no
        (r"\dfrac{9}{7}", r"\boxed{\dfrac{9}{7}}", 1.0),
        ("5", r"\boxed{4} hmm wait, actually \boxed{5}", 1.0),
        ("4", r"\boxed{4} hmm wait, actually \boxed{5}", 0.0),
        ("1000", r"\boxed{1\,000}", 1.0),
        ("1000", r"\boxed{1{,}000}", 1.0),
        ("29", r"cost is \$29.00.", 1.0),
        # h: a percentage is its number and its hundredth
        (r"50\%", "50", 1.0),
        (r"50\%", "0.5", 1.0),
        ("50%", r"\boxed{50\%}", 1.0),
        ("0.5", "50%", 1.0),
        ("50%", "5", 0.0),
        # i: a box that isn't closed is no answer
        ("3", r"\boxed{3", 0.0),
        # further
        ("1/2", r"\frac12", 1.0),
        ("13", r"\text{13}", 1.0),
        ("18", r"18\text{ dollars}", 1.0),
        ("6", "x=6", 1.0),
        ("73", "Final Answer: **73**", 1.0),
        ("4", r"4\sqrt{2}", 0.0),
        (r"4\sqrt{2}", "4", 0.0),
        ("(0,1)", "(0,1.5)", 0.0),
        ("2021", r"\pm 2021", 0.0),
        (r"\pm 2021", "2021", 0.0),
    ],
)
def test_c49_rows(gold: str, response: str, expected: float) -> None:
    """Each row of the case, with the product's expected value."""
    assert score(response, gold) == expected


@pytest.mark.parametrize(
    ("gold", "response", "expected"),
    [
        ("1/2^99", "$1/2^{99}$", 1.0),
        ("0.333333", "1/3", 1.0),
        ("0.0000001", "0.0000002", 0.0),
        ("(1/2^99,1)", "(1/2^98,1)", 0.0),
        (r"\{1,2\}", r"$\{2,1\}$", 1.0),
        ("x/2^99", "x/2^98", 0.0),
        ("x^2-1", "$(x-1)(x+1)$", 1.0),
        ("0", r"$\sqrt{2}^2-2$", 1.0),
        ("10^{100}", "10^{101}", 0.0),
        ("y=2x+3", "$y = 3+2x$", 1.0),
        (r"\frac{\pi}{2}", "pi/2", 1.0),
        (r"2\sqrt{3}", "2*sqrt(3)", 1.0),
        ("5", "He paid $3 and then $5", 1.0),
        ("10", r"so $x = 5 \cdot 2 = 10$.", 1.0),
        ("Tuesday", "The answer is Tuesday.", 1.0),
        ("Tuesday", "The answer is Monday.", 0.0),
        (r"\text{(B)}", r"\boxed{B}", 1.0),
        (r"We get \boxed{\frac{3}{4}}", "0.75", 1.0),
        ("48/2 = <<48/2=24>>24\n#### 72", "She sold 48+24 = 72 clips.", 1.0),
        ("72", "48/2 = $<<48/2=24>>24, so 72\n#### 72", 1.0),
        ("5", "", 0.0),
        ("5", "\x00\\frac{}{}{", 0.0),
        ("5", r"\boxed{}", 0.0),
        ("5", r"\boxed{\frac{1}{0}}", 0.0),
        ("5", r"$$\begin{matrix} 1 & 2 \\ 3 & 4 \end{matrix}$$", 0.0),
    ],
)
def test_c49_further_spellings(gold: str, response: str, expected: float) -> None:
    """Tiny numbers, cancelling terms, sets, texts, whole solutions as gold, and nonsense, which raises nothing."""
    assert score(response, gold) == expected


async def test_c50_the_same_rewards_in_every_place() -> None:
    """[1, 1, 0] in the main thread, in a thread, in a process pool, and through the reward of a recipe."""
    assert score_three() == [1.0, 1.0, 0.0]
    assert await anyio.to_thread.run_sync(score_three) == [1.0, 1.0, 0.0]
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        assert await anyio.to_thread.run_sync(pool.submit(score_three).result) == [1.0, 1.0, 0.0]
    reward = load_reward(RewardSection(function="math_verify"))
    try:
        assert [(await reward(prompt(gold), [response], []))[0] for gold, response in THREE] == [1.0, 1.0, 0.0]
    finally:
        await reward.aclose()


def test_c50_a_failing_grader_is_not_a_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the library raises for the gold answer too, that is an error: not a reward of 0."""

    def broken(*args: object, **kwargs: object) -> bool:
        raise ValueError("signal only works in main thread of the main interpreter")

    monkeypatch.setattr(math_grader, "verify", broken)
    with pytest.raises(RewardError, match="can't be graded: signal only works in main thread"):
        score("0.25", "1/4")


def test_an_empty_gold_answer_is_an_error() -> None:
    """A fault of the data, not of the response."""
    with pytest.raises(RewardError, match="the gold answer '' is empty"):
        score("5", "")


@pytest.fixture
async def reward() -> AsyncIterator[MathReward]:
    made = MathReward(timeout_s=5.0, processes=1)
    yield made
    await made.aclose()
    assert graders() == []


def graders() -> list[psutil.Process]:
    def command(process: psutil.Process) -> list[str]:
        try:
            return process.cmdline()
        except psutil.Error:
            return []

    children = psutil.Process(os.getpid()).children()
    return [child for child in children if "hybridasync.rewards.math_worker" in command(child)]


async def test_an_answer_that_cannot_be_compared_costs_only_itself(reward: MathReward) -> None:
    """9^9^9 hangs SymPy: it earns 0 after the deadline, the others earn what they deserve."""
    assert await reward(prompt("1/2"), ["0.5", HANGS, "$\\frac12$", "3"], []) == [1.0, 0.0, 1.0, 0.0]


async def test_a_gold_answer_that_hangs_is_an_error(reward: MathReward) -> None:
    """It would make every response wrong."""
    with pytest.raises(RewardError, match=r"gold answer .* can't be graded in 5 s"):
        await reward(prompt("9^{9^{9}}"), ["5"], [])


async def test_a_grader_that_dies_is_an_error_and_is_replaced(reward: MathReward) -> None:
    """A killed process fails its call; the next call has a new one."""
    assert await reward(prompt("5"), ["5"], []) == [1.0]
    (process,) = graders()
    process.kill()
    process.wait(10)
    with pytest.raises(RewardError, match="the grading process ended"):
        await reward(prompt("5"), ["5"], [])
    assert await reward(prompt("5"), ["5", "6"], []) == [1.0, 0.0]


async def test_a_cancelled_call_leaves_no_process_behind(reward: MathReward) -> None:
    """Cancelled in the middle of a comparison, the process is ended: its answer would be taken for another's."""
    assert await reward(prompt("5"), ["5"], []) == [1.0]
    with anyio.move_on_after(0.3) as scope:
        await reward(prompt("5"), [HANGS], [])
    assert scope.cancelled_caught and graders() == []
    assert await reward(prompt("5"), ["5"], []) == [1.0]


def test_without_the_package_the_recipe_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """At load, with what to install."""
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ConfigError, match="pip install math-verify"):
        load_reward(RewardSection(function="math_verify"))
