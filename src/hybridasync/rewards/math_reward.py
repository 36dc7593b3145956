"""The reward `math_verify`: answers compared by algebra, in processes that can be ended.

SymPy may take for ever over what a policy writes (9^9^9^9), and a thread can't be ended. So the grader is a process
beside the controller: past its deadline it is killed, and only the answer that hung it pays.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import anyio
import anyio.abc
from anyio.streams.buffered import BufferedByteReceiveStream

from hybridasync.errors import ConfigError, RewardError
from hybridasync.observability.process import child_environment
from hybridasync.types import Completion, Prompt

ANSWER_DEADLINE_S = 5.0
"""Comparing takes milliseconds; what isn't done after seconds never is."""
START_DEADLINE_S = 120.0
"""Importing SymPy on a machine whose cores are all taken."""
MAX_LINE = 1 << 20


class GraderHungError(Exception):
    """The grader didn't answer in time, and was killed."""


class MathReward:
    """`ports.RewardFn`. Processes start when they are first needed, as many as there is work for at once."""

    def __init__(self, *, timeout_s: float, processes: int | None = None) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError("math_verify needs the package math-verify: pip install math-verify", setting="reward")
        self._deadline_s = min(timeout_s, ANSWER_DEADLINE_S)
        self._limit = processes if processes is not None else min(4, os.cpu_count() or 1)
        self._slots: anyio.CapacityLimiter | None = None
        self._idle: list[_Grader] = []

    async def __call__(self, prompt: Prompt, texts: Sequence[str], completions: Sequence[Completion]) -> list[float]:
        if self._slots is None:
            self._slots = anyio.CapacityLimiter(self._limit)
        async with self._slots:
            return [await self._score(text, prompt.label) for text in texts]

    async def aclose(self) -> None:
        """End the processes."""
        while self._idle:
            await self._idle.pop().kill()

    async def _score(self, text: str, label: str) -> float:
        try:
            return await self._ask(text, label)
        except GraderHungError:
            pass
        try:
            await self._ask(None, label)
        except GraderHungError as error:
            raise RewardError(
                f"math_verify: the gold answer {label!r} can't be graded in {self._deadline_s:g} s"
            ) from error
        return 0.0  # the gold answer is fine, so it was the response that can't be compared

    async def _ask(self, text: str | None, label: str) -> float:
        grader = self._idle.pop() if self._idle else await _Grader.start()
        try:
            answer = await grader.ask({"label": label, "text": text}, self._deadline_s)
        except BaseException:  # cancelled, or broken: its next answer would belong to this question
            await grader.kill()
            raise
        self._idle.append(grader)
        if "score" in answer:
            return float(answer["score"])
        raise RewardError(str(answer.get("error")))


class _Grader:
    """One grading process."""

    def __init__(self, process: anyio.abc.Process) -> None:
        if process.stdin is None or process.stdout is None:
            raise RewardError("math_verify: the grading process has no pipes")
        self._process = process
        self._requests = process.stdin
        self._answers = BufferedByteReceiveStream(process.stdout)

    @classmethod
    async def start(cls) -> _Grader:
        command = [sys.executable, "-m", "hybridasync.rewards.math_worker"]
        try:
            process = await anyio.open_process(command, stderr=None, env=child_environment())
        except OSError as error:
            raise RewardError(f"math_verify: the grading process can't be started: {error}") from error
        grader = cls(process)
        try:
            first = await grader._receive(START_DEADLINE_S)
            if first.get("score") != 1.0:
                raise RewardError(f"math_verify doesn't work here: it can't tell that 0.5 is a half ({first})")
        except GraderHungError as error:
            await grader.kill()
            raise RewardError(f"math_verify: the grading process isn't up after {START_DEADLINE_S:g} s") from error
        except BaseException:
            await grader.kill()
            raise
        return grader

    async def ask(self, request: dict[str, object], deadline_s: float) -> dict[str, Any]:
        """Raises GraderHungError after the deadline, RewardError when the process is gone."""
        try:
            await self._requests.send(json.dumps(request).encode() + b"\n")
        except (anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
            raise RewardError(f"math_verify: the grading process ended ({self._process.returncode})") from error
        return await self._receive(deadline_s)

    async def _receive(self, deadline_s: float) -> dict[str, Any]:
        with anyio.move_on_after(deadline_s):
            try:
                line = await self._answers.receive_until(b"\n", MAX_LINE)
            except (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError) as error:
                raise RewardError(f"math_verify: the grading process ended ({self._process.returncode})") from error
            answer: dict[str, Any] = json.loads(line)
            return answer
        raise GraderHungError

    async def kill(self) -> None:
        # A cancelled caller must not leave a process behind that no one reads from.
        with anyio.CancelScope(shield=True):
            if self._process.returncode is None:
                self._process.kill()
            await self._process.aclose()
