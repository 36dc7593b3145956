"""Evaluation in the background of training: never fatal, and never in the way of the next step."""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import partial
from typing import Any

import anyio
import pytest
from kit import FakeTrainer, RecordingSink, World, completion, make_fleet

from hybridasync.config.models import Config, EvalSection, ModelSection, RolloutSection
from hybridasync.drivers.evaluation import Evaluation, EvaluationParts
from hybridasync.drivers.generation import Limits
from hybridasync.errors import EngineError, RewardError
from hybridasync.types import Completion, Prompt, SamplingParams

PROMPTS = tuple(Prompt(uid, uid, 0, "eval", (1, 2, 3), "p", "l") for uid in range(5))


class Tokens:
    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


class Bench:
    """One fake engine. `fails_at` is the request, counted from 0, from which on it fails."""

    def __init__(
        self,
        *,
        fails_at: int | None = None,
        reward_fails: bool = False,
        prompts: int = 3,
        correct: Container[int] = range(9),
    ) -> None:
        self.fleet, (server,), _ = make_fleet(World(), 1)
        self.fleet.engines[0].state.verified(0)
        self.sink = RecordingSink()
        config = Config(
            model=ModelSection(hf_checkpoint="x"),
            rollout=RolloutSection(rollout_batch_size=1, n_samples_per_prompt=1, max_response_tokens=8, max_retries=0),
            eval=EvalSection(logprob_check_samples=2),
        )

        async def reply(_ids: Sequence[int], params: SamplingParams) -> tuple[Completion, ...]:
            if fails_at is not None and len(server.requests) > fails_at:
                raise EngineError("engine-0", "generate", "connection reset")
            return (completion(2),)

        async def reward(prompt: Prompt, texts: Sequence[str], _completions: Sequence[Completion]) -> list[float]:
            if reward_fails:
                raise RewardError("no judge")
            return [float(prompt.uid in correct)] * len(texts)

        self._server = server
        server.reply = reply
        parts = EvaluationParts(
            self.fleet, FakeTrainer(), reward, Tokens(), self.sink, Limits(8, 32), PROMPTS[:prompts]
        )
        self.evaluation = Evaluation(config, parts)

    def requests(self) -> list[SamplingParams]:
        return [params for _, params in self._server.requests]

    async def in_background(self) -> None:
        """As the training loop does: go on once the requests are on their way."""
        async with anyio.create_task_group() as background:
            with anyio.fail_after(30):
                await background.start(partial(self.evaluation.run, 0))


async def test_an_evaluation_is_filed_under_its_step() -> None:
    """All prompts answered: one result, with the accuracy."""
    bench = Bench()
    await bench.in_background()
    (result,) = bench.sink.evaluations
    assert (result.step, result.accuracy, result.prompts) == (0, 1.0, 3)


async def test_c30_an_odd_set_is_scored_whole_and_nothing_twice() -> None:
    """C30 (e): five held-out prompts are five greedy requests, and the accuracy is a mean over five."""
    bench = Bench(prompts=5, correct=(0, 3))
    await bench.in_background()
    (result,) = bench.sink.evaluations
    assert (result.prompts, result.accuracy) == (5, 0.4)
    assert sum(params.temperature == 0 for params in bench.requests()) == 5


async def test_r55_u13_a_result_is_filed_under_the_weights_that_served_it() -> None:
    """R55, U13: after two steps the engines still serve version 0: the result says 0 and the difference is an event."""
    bench = Bench()
    result = await bench.evaluation.run(2)
    assert result is not None and (result.version, result.step, result.logprob_gap_max) == (0, 2, None)
    ((name, fields),) = bench.sink.events
    assert (name, fields["level"], fields["completed"], fields["served"]) == ("evaluation_version", "warning", 2, [0])


async def test_weights_stay_for_the_log_prob_check() -> None:
    """R55: requests are out before the check, and the check is over before training is told that it may go on."""
    bench, compared = Bench(), anyio.Event()
    async with anyio.create_task_group() as background:
        await background.start(partial(bench.evaluation.run, 0, compared=compared))
        assert len(bench.requests()) >= 3 and not compared.is_set()
        with anyio.fail_after(30):
            await compared.wait()
    (result,) = bench.sink.evaluations
    assert result.logprob_gap_max == 0.0


@pytest.mark.parametrize("failure", [{"fails_at": 0}, {"fails_at": 1}, {"fails_at": 3}, {"reward_fails": True}])
async def test_r53_a_failed_evaluation_is_logged_and_training_goes_on(failure: dict[str, Any]) -> None:
    """An engine that dies in the log-prob check or in the scoring, and a reward that raises: a warning, no more."""
    bench = Bench(**failure)
    await bench.in_background()
    assert bench.sink.names() == ["evaluation_failed"] and bench.sink.evaluations == []


async def test_u09_engines_set_apart_answer_evaluation_alone() -> None:
    """U9: two of three do the rollout, whatever their load; the third one evaluates; who is left does both."""
    fleet, servers, _ = make_fleet(World(), 3, for_evaluation=1)
    for engine in fleet.engines:
        engine.state.verified(0)
    params = SamplingParams(4, 1.0)

    async def ask(count: int, *, gated: bool) -> list[int]:
        """How many requests each engine got."""
        before = [len(server.requests) for server in servers]
        async with anyio.create_task_group() as tasks:
            for index in range(count):
                tasks.start_soon(partial(fleet.generate, f"r{index}", (1, 2), params, gated=gated))
        return [len(server.requests) - was for server, was in zip(servers, before, strict=True)]

    assert await ask(4, gated=True) == [2, 2, 0]
    with fleet.held():
        assert await ask(3, gated=False) == [0, 0, 3]
    fleet.quarantine(fleet.engines[2], "gone")
    assert sum((await ask(4, gated=False))[:2]) == 4
    fleet.readmit(fleet.engines[2], 0)
    for engine in fleet.engines[:2]:
        fleet.quarantine(engine, "gone")
    assert await ask(4, gated=True) == [0, 0, 4]
