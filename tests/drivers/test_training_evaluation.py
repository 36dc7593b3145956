"""The training loop over fakes: evaluations come when they are due, of the weights of their step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import pytest
from loop import EVAL, TIS, Bench, recipe

from hybridasync.config.pipeline import resolve
from hybridasync.drivers import training
from hybridasync.errors import Rejected
from hybridasync.schedule import Schedule
from hybridasync.types import Completion


async def test_c29_every_evaluation_is_of_the_weights_of_its_step() -> None:
    """C29, R9, R55: interval 2 with an evaluation each 5: 13 publications, and each answer is of the step's version."""
    bench = Bench(
        recipe(20, publication={"update_weights_interval": 2}, eval={**EVAL, "eval_interval": 5}, algorithm=TIS)
    )
    loop = await bench.run()
    assert len(bench.sink.publications) == 13
    assert [(result.step, result.version) for result in loop.evaluations] == [(s, s) for s in (0, 5, 10, 15, 20)]
    assert all(served == str(step) for step, served in bench.served if step % 5 == 0)


async def test_r50_r54_evaluation_before_the_first_step_and_awaited_after_the_last() -> None:
    """R50, R54: the first result is of step 0; the loop ends only when the last one is in; both can be left out."""
    bench = Bench(recipe(4, eval={**EVAL, "eval_interval": 2}))
    assert [result.step for result in (await bench.run()).evaluations] == [0, 2, 4]
    skipped = Bench(recipe(4, eval={**EVAL, "eval_interval": 3, "skip_eval_before_train": True}))
    assert [result.step for result in (await skipped.run()).evaluations] == [3]
    at_end = Bench(recipe(4, eval={**EVAL, "eval_interval": 3, "eval_at_end": True}))
    assert [result.step for result in (await at_end.run()).evaluations] == [0, 3, 4]


@pytest.mark.parametrize("mode", ["sync", "hybrid", "fully_async"])
async def test_r12_r49_every_step_asks_for_evaluation_alike_in_every_mode(
    monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """R12, R49: the schedule is asked after each step, answers no where nothing was published, and knows no mode."""
    asked: list[tuple[int, bool]] = []
    due = Schedule.eval_due

    def told(schedule: Schedule, step: int) -> bool:
        asked.append((step, due(schedule, step)))
        return asked[-1][1]

    monkeypatch.setattr(Schedule, "eval_due", told)
    interval = 1 if mode == "sync" else 2
    publication = {"update_weights_interval": interval, "pause_mode": "drain"}
    written = recipe(8, eval={**EVAL, "eval_interval": 3}, publication=publication, algorithm=TIS)
    bench = Bench(resolve(written.model_copy(update={"mode": mode})).config, steps_per_epoch=8)
    asked.clear()  # resolving counts the evaluations beforehand
    await bench.run()
    assert list(dict.fromkeys(asked)) == [(step, step in (2, 5, 7)) for step in range(8)]
    assert [result.step for result in bench.sink.evaluations] == [0, 3, 6, 8]
    published = {result.step for result in bench.sink.publications}
    assert {step for step, answer in asked if answer} <= published


async def test_r51_an_evaluation_is_sent_before_sampling_goes_on() -> None:
    """R51, U9: pause, swap, resume, evaluation, and only then the prompts that waited for the publication."""
    bench = Bench(recipe(4, eval={**EVAL, "eval_interval": 1}, rollout={"max_staleness": 1}, algorithm=TIS))
    answer = bench.server.generate

    async def told(rid: str, ids: Sequence[int], params: Any) -> tuple[Completion, ...]:
        bench.log.append("rollout" if params.temperature else "evaluation")
        return await answer(rid, ids, params)

    bench.server.generate = told  # type: ignore[method-assign]
    await bench.run()
    ends = [index for index, entry in enumerate(bench.log) if entry == "engine-0 end"]
    assert len(ends) == 5
    for end in ends:
        assert next(entry for entry in bench.log[end:] if entry in ("rollout", "evaluation")) == "evaluation"


async def test_r52_the_wait_for_an_evaluation_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """R52, R54, R108: an evaluation that hangs is waited for before the next publication and at the end, then told."""
    assert training.EVAL_WAIT_S == 1800
    monkeypatch.setattr(training, "EVAL_WAIT_S", 0.05)
    evaluation = {**EVAL, "eval_interval": 1, "skip_eval_before_train": True}
    bench = Bench(recipe(2, eval=evaluation, publication={"pause_mode": "retract"}))
    answer = bench.server.generate

    async def hangs(rid: str, ids: Sequence[int], params: Any) -> tuple[Completion, ...]:
        if params.temperature == 0:
            await anyio.sleep_forever()
        return await answer(rid, ids, params)

    bench.server.generate = hangs  # type: ignore[method-assign]
    loop = await bench.run()
    assert (loop.step, loop.evaluations, bench.sidecar.paused_by) == (2, [], None)
    assert bench.sink.names().count("evaluation_overdue") == 2


async def test_r53_an_evaluation_that_fails_leaves_the_engine_running() -> None:
    """R53: every evaluation request is refused: it is logged, the engine was resumed, all steps are trained."""
    bench = Bench(recipe(2, eval={**EVAL, "eval_interval": 1}, rollout={"max_retries": 0}))
    answer = bench.server.generate

    async def greedy_fails(rid: str, ids: Sequence[int], params: Any) -> tuple[Completion, ...]:
        if params.temperature == 0:
            raise Rejected("engine-0", "generate", 400)
        return await answer(rid, ids, params)

    bench.server.generate = greedy_fails  # type: ignore[method-assign]
    loop = await bench.run()
    assert (loop.step, loop.evaluations) == (2, [])
    assert bench.sink.names().count("evaluation_failed") == 3
    assert bench.sidecar.paused_by is None


async def test_an_evaluation_that_was_cut_off_is_made_again_after_a_resume() -> None:
    """A checkpoint knows of an evaluation under way: the same weights are evaluated before the next step."""
    first = Bench(recipe(4, eval={**EVAL, "eval_interval": 2}, checkpoint={"save_interval": 2}))
    answer = first.server.generate

    async def hangs(rid: str, ids: Sequence[int], params: Any) -> tuple[Completion, ...]:
        if params.temperature == 0 and first.log.count("train 1"):
            await anyio.sleep_forever()
        return await answer(rid, ids, params)

    first.server.generate = hangs  # type: ignore[method-assign]
    async with first.loop() as loop:
        await loop.begin()
        for _ in range(2):
            await loop.one_step()
    assert [result.step for result in first.sink.evaluations] == [0]
    second = Bench(first.config)
    await second.run(first.store.states[2])
    assert [(result.step, result.version) for result in second.sink.evaluations] == [(2, 2), (4, 4)]


@pytest.mark.parametrize(("wanted", "steps"), [(True, [0, 2]), (False, [])])
async def test_r120_the_cache_is_cleared_after_steps_that_do_not_publish(wanted: bool, steps: list[int]) -> None:
    """R120: with interval 2 after steps 0 and 2 of 5, once each, and only where that is asked for."""
    publication = {"update_weights_interval": 2, "clear_cache_on_skipped_steps": wanted}
    bench = Bench(recipe(5, publication=publication, algorithm=TIS))
    seen = []
    async with bench.loop() as loop:
        await loop.begin()
        for step in range(5):
            before = bench.trainer.cleared
            await loop.one_step()
            seen += [step] * (bench.trainer.cleared - before)
    assert seen == steps
