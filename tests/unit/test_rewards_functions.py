"""Reward functions of the user, loaded by module:function from a file in the working directory."""

import itertools
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import numpy as np
import pytest

from hybridasync.config.models import RewardSection
from hybridasync.errors import ConfigError, RewardError
from hybridasync.rewards.registry import Reward, load_reward
from hybridasync.rewards.values import reward_values
from hybridasync.types import Completion, Prompt

PROMPT = Prompt(
    uid=4, row=2, epoch=0, source="toy", input_ids=(1,), text="what?", label="42", extra={"level": 3, "response": "row"}
)
DONE = Completion((5,), (-0.1,), (), "stop", "engine-0")
CUT = Completion((5,), (-0.1,), (), "length", "engine-0")
NUMBERS = itertools.count()

Load = Callable[..., Reward]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Writes source as a module of its own beside the recipe and loads its function f."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    modules: list[str] = []

    def make(source: str, *, attribute: str = "f", batched: bool = False, timeout_s: float = 20.0) -> Reward:
        modules.append(f"user_reward_{next(NUMBERS)}")
        (tmp_path / f"{modules[-1]}.py").write_text(textwrap.dedent(source))
        section = RewardSection(function=f"{modules[-1]}:{attribute}", batched=batched, timeout_s=timeout_s)
        return load_reward(section)

    yield make
    for name in modules:
        sys.modules.pop(name, None)


async def score(reward: Reward, texts: list[str]) -> list[float]:
    return await reward(PROMPT, texts, [DONE] * len(texts))


@pytest.mark.parametrize(
    "source",
    [
        "def f(response, label): return response == label",
        "async def f(response, label): return response == label",
        "def f(*, label, response, prompt): return int(response == label and prompt == 'what?')",
        "def f(response, **fields): return float(response == fields['label'] and fields['level'] == 3)",
        "def f(response, label, level): return response == label and level == 3",
        "import functools\ndef g(x, response, label): return response == label\nf = functools.partial(g, 1)",
        "class F:\n    async def __call__(self, response, label): return response == label\nf = F()",
        "async def g(response, label): return response == label\nf = lambda response, label: g(response, label)",
        "import numpy\ndef f(response, label): return numpy.float32(response == label)",
        "import numpy\ndef f(response, label): return numpy.array([response == label])",
    ],
)
async def test_one_sample_at_a_time(load: Load, source: str) -> None:
    """Plain or async, whatever part of the arguments it takes, numbers of any kind; a row's field hides no argument."""
    values = await score(load(source), ["42", "7", "42"])
    assert values == [1.0, 0.0, 1.0]
    assert all(type(value) is float for value in values)


@pytest.mark.parametrize(
    "source",
    [
        "def f(responses, labels): return [r == l for r, l in zip(responses, labels)]",
        "async def f(responses, labels, prompts, rows): return [r == l for r, l in zip(responses, labels)]",
        "def f(responses, rows): return tuple(r == '42' and w['level'] == 3 for r, w in zip(responses, rows))",
        "import numpy\ndef f(responses, labels): return numpy.array(responses) == numpy.array(labels)",
        "def f(responses, labels): return (r == l for r, l in zip(responses, labels))",
        "def f(responses, labels):\n    for r, l in zip(responses, labels): yield r == l",
    ],
)
async def test_a_group_at_a_time(load: Load, source: str) -> None:
    """Batched functions answer any sequence of numbers, in order."""
    assert await score(load(source, batched=True), ["42", "7", "42"]) == [1.0, 0.0, 1.0]


async def test_functions_see_how_a_completion_ended(load: Load) -> None:
    """finish_reason is an argument like the others."""
    one = load("def f(response, finish_reason): return finish_reason == 'stop'")
    assert await one(PROMPT, ["a", "b"], [DONE, CUT]) == [1.0, 0.0]
    group = load("def f(responses, finish_reasons): return [r == 'stop' for r in finish_reasons]", batched=True)
    assert await group(PROMPT, ["a", "b"], [DONE, CUT]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("[1.0]", "expected 4 rewards, one for each completion, got 1"),
        ("[1.0] * 5", "expected 4 rewards, one for each completion, got 5"),
        ("[]", "got 0"),
        ("1.0", "expected a list of 4 rewards, got float"),
        ("None", "expected a list of 4 rewards, got NoneType"),
        ("'1011'", "expected a list of 4 rewards, got str"),
        ("{1, 2, 3, 4}", "expected a list of 4 rewards, got set"),
        ("[1, 0, None, 1]", "a reward must be a number, got None"),
        ("[1, 0, '1', 1]", "a reward must be a number, got '1'"),
        ("[1, 0, [1, 2], 1]", r"a reward must be a number, got \[1, 2\]"),
        ("[1, 0, 1j, 1]", "a reward must be a number"),
        ("[1, 0, float('nan'), 1]", "a reward must be finite, got nan"),
        ("[1, 0, float('-inf'), 1]", "a reward must be finite, got -inf"),
    ],
)
async def test_c41_anything_but_one_number_each_is_an_error(load: Load, answer: str, says: str) -> None:
    """Nothing is broadcast, cut or defaulted: the message has what was expected and what came."""
    reward = load(f"def f(responses): return {answer}", batched=True)
    with pytest.raises(RewardError, match=says):
        await score(reward, ["a", "b", "c", "d"])


async def test_c41_rewards_stay_with_their_responses(load: Load) -> None:
    """A grader whose optional step fails for response 2 still gives [1, 1, 0, 1], in whatever order calls end."""
    reward = load(
        """
        import anyio

        async def f(response, label):
            await anyio.sleep(0.02 * (4 - int(response[0])))
            value = float(response.endswith("right"))
            try:
                {}["extracted answer of 2" if response[0] == "2" else None]
            except KeyError:
                pass
            return value
        """
    )
    assert await score(reward, ["1 right", "2 right", "3 wrong", "4 right"]) == [1.0, 1.0, 0.0, 1.0]


async def test_c50_a_raising_grader_is_not_a_wrong_answer(load: Load) -> None:
    """What it raised, plain or async, is in the message and is the cause; one bad sample spoils the group's reward."""
    for kind in ("def", "async def"):
        reward = load(f"{kind} f(response): return 1 / (response != 'bad')")
        assert await score(reward, ["good"]) == [1.0]
        with pytest.raises(
            RewardError, match=r"user_reward_\d+:f raised ZeroDivisionError: division by zero"
        ) as caught:
            await score(reward, ["good", "bad", "good"])
        assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("raised", ["StopIteration()", "SystemExit(3)", "TimeoutError('judge')", "KeyError('x')"])
@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_awkward_exceptions_become_reward_errors(load: Load, kind: str, raised: str) -> None:
    """Whatever a function raises stays in its reward: neither the loop nor the process ends."""
    with pytest.raises(RewardError, match=f"raised (RuntimeError|{raised.split('(')[0]})"):
        await score(load(f"{kind} f(response): raise {raised}"), ["a"])


@pytest.mark.parametrize("source", ["async def f(response): await anyio.sleep(9)", "def f(response): EVENT.wait(9)"])
async def test_a_late_answer_is_an_error(load: Load, source: str) -> None:
    """After reward.timeout_s the reward failed; a plain function is left to itself, the loop goes on."""
    reward = load(f"import anyio, threading\nEVENT = threading.Event()\n{source}", timeout_s=0.2)
    with pytest.raises(RewardError, match=r"no answer after 0\.2 s \(reward\.timeout_s\)"):
        await score(reward, ["a"])
    for name, module in list(sys.modules.items()):
        if name.startswith("user_reward_"):
            module.EVENT.set()


async def test_plain_functions_do_not_block_the_loop(load: Load) -> None:
    """While a plain function waits, other tasks run, and it isn't in their thread."""
    source = "def f(response): assert EVENT.wait(60); return threading.get_ident()"
    reward = load(f"import threading\nEVENT = threading.Event()\n{source}", timeout_s=90.0)
    (module,) = (module for name, module in sys.modules.items() if name.startswith("user_reward_"))
    async with anyio.create_task_group() as group:

        async def tick() -> None:
            for _ in range(3):
                await anyio.sleep(0.01)
            module.EVENT.set()  # which the function waits for: it would be in vain if the loop stood still meanwhile

        group.start_soon(tick)
        (ident,) = await score(reward, ["a"])
    assert ident != threading.get_ident()


async def test_cancellation_is_not_an_error(load: Load) -> None:
    """A cancelled reward call ends while its function still waits, and raises nothing of ours."""
    reward = load("import threading\nEVENT = threading.Event()\ndef f(response): return EVENT.wait(60)")
    (module,) = (module for name, module in sys.modules.items() if name.startswith("user_reward_"))
    try:
        with anyio.move_on_after(0.1) as scope:
            await score(reward, ["a", "b"])
        assert scope.cancelled_caught and not module.EVENT.is_set()
    finally:
        module.EVENT.set()


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("no_such_module_here:f", "module 'no_such_module_here' can't be imported: ModuleNotFoundError"),
        ("json:no_such_attribute", "module 'json' has no attribute 'no_such_attribute'"),
        ("json:__name__", "isn't callable, it is a str"),
        ("json:", "expected module:function"),
        (":f", "expected module:function"),
        ("textwrap:indent", "must take arguments named response, label, prompt"),
    ],
)
def test_what_cannot_be_loaded_is_refused_at_once(function: str, says: str) -> None:
    """The user's mistake shows before anything starts, with the setting's name."""
    with pytest.raises(ConfigError, match=f"reward.function: .*{says}"):
        load_reward(RewardSection(function=function))


@pytest.mark.parametrize("source", ["def f(:", "raise RuntimeError('half written')", "import no_such_package_here"])
def test_an_import_error_is_shown(load: Load, source: str) -> None:
    """What the module raised is in the message and is the cause."""
    with pytest.raises(
        ConfigError, match=r"can't be imported: (SyntaxError|RuntimeError|ModuleNotFoundError): "
    ) as caught:
        load(source)
    assert caught.value.__cause__ is not None


def test_arrays_count_as_lists() -> None:
    """Arrays of one dimension are rewards; a scalar array is not a list."""
    assert reward_values(np.array([1, 0]), 2, function="f") == [1.0, 0.0]
    with pytest.raises(RewardError, match="expected a list of 2 rewards"):
        reward_values(np.array(1.0), 2, function="f")
