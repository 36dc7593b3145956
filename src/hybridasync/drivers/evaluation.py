"""Evaluation on held-out prompts, with the weights that were just published.

The engines are shared with the rollout (U9): evaluation requests are sent before sampling goes on. Greedy accuracy
says what the policy knows, sampled accuracy what it does at the training temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import anyio
import anyio.lowlevel
from anyio.abc import TaskStatus

from hybridasync.algorithms.seeds import sample_seeds
from hybridasync.config.models import Config
from hybridasync.drivers.fleet import Fleet
from hybridasync.drivers.generation import GroupRequest, Limits, generate_group
from hybridasync.errors import EngineError, RewardError
from hybridasync.ports import MetricSink, RewardFn, Tokenizer, Trainer
from hybridasync.types import CORRECT, Completion, EvalResult, Prompt, SamplingParams, TrainSample


@dataclass(frozen=True, slots=True)
class EvaluationParts:
    """What an evaluation works with; all of it is owned by `app.py`."""

    fleet: Fleet
    trainer: Trainer
    reward: RewardFn
    tokenizer: Tokenizer
    sink: MetricSink
    limits: Limits
    prompts: Sequence[Prompt]


@dataclass(frozen=True, slots=True)
class _Scored:
    completion: Completion
    reward: float


class Evaluation:
    """Results are filed under the weight version that the engines really served (R55, U13)."""

    def __init__(self, config: Config, parts: EvaluationParts) -> None:
        self._config = config
        self._parts = parts

    async def run(
        self,
        completed: int,
        *,
        compared: anyio.Event | None = None,
        task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
    ) -> EvalResult | None:
        """One evaluation after `completed` steps; None where it failed, which is logged and never fatal (R53).

        `task_status` reports once every request is on its way: from then on the rollout may go on. `compared` is set
        once the log-prob check is done: from then on training may change the trainer's weights.
        """
        started = anyio.current_time()
        greedy: list[_Scored] = []
        sampled: list[_Scored] = []
        gap: float | None = None
        sent = False
        try:
            async with anyio.create_task_group() as tasks:
                for prompt in self._parts.prompts:
                    tasks.start_soon(self._score, prompt, 0.0, greedy)
                    if self._config.eval.sampled:
                        tasks.start_soon(self._score, prompt, self._config.rollout.temperature, sampled)
                await anyio.lowlevel.checkpoint()
                sent = True
                task_status.started()
                gap = await self._logprob_gap(completed)
                if compared is not None:
                    compared.set()
        except* (EngineError, RewardError) as failures:
            self._parts.sink.event(
                "evaluation_failed", level="warning", completed=completed, cause=str(failures.exceptions[0])
            )
        if not sent:
            task_status.started()
        if len(greedy) < len(self._parts.prompts):
            return None
        result = self._result(completed, greedy, sampled, gap=gap, wall_s=anyio.current_time() - started)
        self._parts.sink.evaluation(result)
        return result

    async def _logprob_gap(self, completed: int) -> float | None:
        """max |trainer - engine| log-prob over fresh samples of the same weights; None if nothing can be compared."""
        prompts = self._parts.prompts[: self._config.eval.logprob_check_samples]
        if not prompts or any(engine.state.version != completed for engine in self._parts.fleet.verified):
            return None
        scored: list[tuple[Prompt, Completion]] = []

        async def generate(prompt: Prompt) -> None:
            scored.append((prompt, await self._generate(prompt, self._config.rollout.temperature)))

        async with anyio.create_task_group() as tasks:
            for prompt in prompts:
                tasks.start_soon(generate, prompt)
        checked = [(prompt, completion) for prompt, completion in scored if completion.output_ids]
        trainer = await self._parts.trainer.logprobs([_for_check(*pair) for pair in checked])
        pairs = (
            zip(ours, completion.logprobs, strict=True) for ours, (_, completion) in zip(trainer, checked, strict=True)
        )
        return max((abs(a - b) for pair in pairs for a, b in pair), default=None)

    async def _score(self, prompt: Prompt, temperature: float, into: list[_Scored]) -> None:
        completion = await self._generate(prompt, temperature)
        text = self._parts.tokenizer.decode(completion.output_ids)
        (reward,) = await self._parts.reward(prompt, [text], [completion])
        into.append(_Scored(completion, reward))

    async def _generate(self, prompt: Prompt, temperature: float) -> Completion:
        seeds: tuple[int, ...] = ()
        if self._config.rollout.deterministic and temperature:
            seeds = sample_seeds(self._config.seed, "evaluation", prompt.uid, count=1)
        params = SamplingParams(self._parts.limits.budget(len(prompt.input_ids)), temperature, seeds=seeds)
        request = GroupRequest(
            prompt.input_ids, params, partial_rollout=False, max_retries=self._config.rollout.max_retries, gated=False
        )
        (completion,) = await generate_group(self._parts.fleet, request)
        return completion

    def _result(
        self, completed: int, greedy: list[_Scored], sampled: list[_Scored], *, gap: float | None, wall_s: float
    ) -> EvalResult:
        everything = [scored.completion for scored in greedy + sampled]
        versions = {version for c in everything if (version := c.oldest_version) is not None}
        served = min(versions, default=completed)
        if versions - {completed}:
            self._parts.sink.event("evaluation_version", level="warning", completed=completed, served=sorted(versions))
        return EvalResult(
            version=served,
            step=completed,
            accuracy=_accuracy(greedy),
            sampled_accuracy=_accuracy(sampled) if sampled else None,
            prompts=len(greedy),
            mean_response_tokens=sum(len(c.output_ids) for c in everything) / len(everything),
            truncated_fraction=sum(c.finish_reason == "length" for c in everything) / len(everything),
            logprob_gap_max=gap,
            wall_s=wall_s,
        )


def _accuracy(scored: Sequence[_Scored]) -> float:
    return sum(item.reward >= CORRECT for item in scored) / len(scored)


def _for_check(prompt: Prompt, completion: Completion) -> TrainSample:
    return TrainSample(
        group=prompt.uid,
        input_ids=prompt.input_ids + completion.output_ids,
        response_start=len(prompt.input_ids),
        rollout_logprobs=completion.logprobs,
        advantage=0.0,
    )
