"""Reward functions of the user: `module:function`, plain or async, one sample or a whole group at a time.

A plain function runs in a thread, so that it never blocks the controller's loop. Whatever goes wrong in it becomes a
RewardError that keeps the original as its cause.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from hybridasync.config.models import RewardSection
from hybridasync.errors import ConfigError, RewardError
from hybridasync.rewards.values import reward_value, reward_values
from hybridasync.types import Completion, Prompt

UserFunction = Callable[..., Any]
MAX_THREADS = 8  # plain functions at once; more would only wait for each other's GIL


def resolve_function(spec: str, *, setting: str) -> UserFunction:
    """The function that "module:function" names. The working directory is searched too. Raises ConfigError."""
    module_name, separator, attribute = spec.partition(":")
    if not separator or not module_name or not attribute:
        raise ConfigError(f"expected module:function, got {spec!r}", setting=setting)
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)  # console scripts don't have it, and people keep reward files beside their recipes
    try:
        target: Any = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"module {module_name!r} can't be imported: {type(error).__name__}: {error}", setting=setting
        ) from error
    for part in attribute.split("."):
        if not hasattr(target, part):
            raise ConfigError(f"module {module_name!r} has no attribute {attribute!r}", setting=setting)
        target = getattr(target, part)
    if not callable(target):
        raise ConfigError(f"{spec} isn't callable, it is a {type(target).__name__}", setting=setting)
    function: UserFunction = target
    return function


class UserReward:
    """`ports.RewardFn` around a user's function.

    One sample: `f(response, label, prompt, finish_reason, **fields)` answers a number. Batched:
    `f(responses, labels, prompts, finish_reasons, rows)` answers as many numbers as it got responses. Arguments go by
    keyword, and only those that the function takes; `fields` and `rows` are the remaining fields of the data row.
    """

    def __init__(self, section: RewardSection) -> None:
        self._function = resolve_function(section.function, setting="reward.function")
        self._name = section.function
        self._batched = section.batched
        self._timeout_s = section.timeout_s
        self._is_async = _is_async(self._function)
        self._accepts = _accepted(self._function, section)
        self._threads: anyio.CapacityLimiter | None = None

    async def __call__(self, prompt: Prompt, texts: Sequence[str], completions: Sequence[Completion]) -> list[float]:
        if self._batched:
            arguments = {
                "responses": list(texts),
                "labels": [prompt.label] * len(texts),
                "prompts": [prompt.text] * len(texts),
                "finish_reasons": [made.finish_reason for made in completions],
                "rows": [dict(prompt.extra) for _ in texts],
            }
            answer = await self._call(arguments)
            return reward_values(answer, len(texts), function=self._name)
        return await self._each(prompt, texts, completions)

    async def aclose(self) -> None:
        """Nothing is held open."""

    async def _each(self, prompt: Prompt, texts: Sequence[str], completions: Sequence[Completion]) -> list[float]:
        """One call for each text, at the same time; each result has its own place, whichever call ends first."""
        results: list[float | RewardError] = [RewardError(f"{self._name}: not called")] * len(texts)

        async def one(index: int, text: str, made: Completion) -> None:
            reserved = {
                "response": text,
                "label": prompt.label,
                "prompt": prompt.text,
                "finish_reason": made.finish_reason,
            }
            try:
                answer = await self._call({**prompt.extra, **reserved})
                results[index] = reward_value(answer, function=self._name)
            except RewardError as error:
                results[index] = error

        async with anyio.create_task_group() as group:
            for index, (text, made) in enumerate(zip(texts, completions, strict=True)):
                group.start_soon(one, index, text, made)
        values: list[float] = []
        for result in results:
            if isinstance(result, RewardError):
                raise result
            values.append(result)
        return values

    async def _call(self, arguments: Mapping[str, object]) -> object:
        accepted = arguments if self._accepts is None else {k: v for k, v in arguments.items() if k in self._accepts}
        outcome = await (self._call_async(accepted) if self._is_async else self._call_thread(accepted))
        if inspect.isawaitable(outcome):
            outcome = await self._within_deadline(outcome)  # a plain callable around a coroutine function
        if isinstance(outcome, _Raised):
            error = outcome.error
            raise RewardError(f"{self._name} raised {type(error).__name__}: {error}") from error
        return outcome

    async def _call_async(self, arguments: Mapping[str, object]) -> object:
        try:
            answer = self._function(**arguments)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's function may raise anything
            return _Raised(error)
        return await self._within_deadline(answer)

    async def _within_deadline(self, answer: Awaitable[object]) -> object:
        with anyio.move_on_after(self._timeout_s):
            try:
                return await answer
            except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's function may raise anything
                return _Raised(error)
        raise self._late()

    async def _call_thread(self, arguments: Mapping[str, object]) -> object:
        if self._threads is None:
            self._threads = anyio.CapacityLimiter(MAX_THREADS)
        async with self._threads:
            with anyio.move_on_after(self._timeout_s):
                # A thread can't be ended: past its deadline it is left to itself, and it counts no longer.
                return await anyio.to_thread.run_sync(
                    _run_plain, self._function, arguments, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1)
                )
        raise self._late()

    def _late(self) -> RewardError:
        return RewardError(f"{self._name}: no answer after {self._timeout_s:g} s (reward.timeout_s)")


class _Raised:
    """An exception as a value: some kinds (StopIteration, SystemExit) must not travel through a future."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def _run_plain(function: UserFunction, arguments: Mapping[str, object]) -> object:
    try:
        answer = function(**arguments)
        # A generator would otherwise run in the loop's thread.
        return list(answer) if inspect.isgenerator(answer) else answer
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's function may raise anything
        return _Raised(error)


def _is_async(function: UserFunction) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _accepted(function: UserFunction, section: RewardSection) -> frozenset[str] | None:
    """Names of the arguments that the function takes; None = any. Raises ConfigError if it can't be called our way."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    batched = "responses, labels, prompts, finish_reasons, rows"
    needed = batched if section.batched else "response, label, prompt, finish_reason, or fields of the data"
    first = needed.split(",", 1)[0]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    by_keyword = frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    if first not in by_keyword:
        raise ConfigError(
            f"{section.function} must take arguments named {needed} (as many of them as it needs, {first} at least); "
            f"it takes {', '.join(p.name for p in parameters) or 'none'}",
            setting="reward.function",
        )
    return by_keyword
