"""The training loop over fakes: what is due after a step happens then, in order, and at no other time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from kit import completion
from loop import EVAL, TIS, Bench, recipe
from tests.virtual_clock import virtual

from hybridasync.algorithms.shaping import shaped_reward
from hybridasync.config.pipeline import resolve
from hybridasync.config.sizing import resolve_sizing, with_sizing
from hybridasync.errors import CheckpointError, NotSent
from hybridasync.types import Completion, StepResult, TrainBatch, WeightSnapshot


@pytest.mark.parametrize(("interval", "publications"), [(1, 21), (2, 11)])
async def test_c29_twenty_steps_are_21_or_11_publications(interval: int, publications: int) -> None:
    """C29, R13: the initial one included, versions as trained; the engine ends with the newest."""
    bench = Bench(recipe(20, publication={"update_weights_interval": interval}, algorithm=TIS))
    loop = await bench.run()
    assert loop.publications == publications == len(bench.sink.publications)
    assert [result.version for result in bench.sink.publications] == list(range(0, 21, interval))
    assert bench.server.version == "20"


async def test_r11_a_skipped_step_touches_nothing_on_the_rollout_side() -> None:
    """R11: after steps 0 and 2 of interval 2 no control call reaches the engine; sampling goes on meanwhile."""
    bench = Bench(recipe(4, publication={"update_weights_interval": 2}, algorithm=TIS))
    async with bench.loop() as loop:
        await loop.begin()
        control = []
        for _ in range(4):
            before = len(bench.log)
            await loop.one_step()
            control.append([entry for entry in bench.log[before:] if not entry.startswith(("train", "save", "commit"))])
    cycle = ["engine-0 pause", "engine-0 load", "engine-0 version", "engine-0 checksums", "engine-0 end"]
    assert control == [[], cycle, [], cycle]


async def test_r114_u8_skipped_publications_show_in_the_version_lag() -> None:
    """R114, U8: interval 2, no steps ahead: K - 1 versions older after each skipped step, in partitions no lag."""
    bench = Bench(recipe(4, publication={"update_weights_interval": 2}, algorithm=TIS))
    await bench.run()
    lags = [(metrics["partition_lag_max"], metrics["version_lag_max"]) for _, metrics in bench.sink.steps]
    assert lags == [(0, 0), (0, 1), (0, 0), (0, 1)]
    ahead = Bench(recipe(4, rollout={"max_staleness": 1}, algorithm=TIS))
    await ahead.run()
    assert max(metrics["partition_lag_max"] for _, metrics in ahead.sink.steps) == 1
    assert all(metrics["version_lag_max"] <= metrics["partition_lag_max"] for _, metrics in ahead.sink.steps)


async def test_r30_workers_hear_of_each_publication_whether_engines_serve_it() -> None:
    """R30, R56, R66, R105a, U3: committed once an engine took it, else aborted; a decision each, in growing epochs."""
    bench = Bench(recipe(4))
    async with bench.loop() as loop:
        await loop.begin()
        await loop.one_step()

        async def refused(*_: object) -> bool:
            raise NotSent("engine-0", "pause", "refused")

        pause, bench.sidecar.pause = bench.sidecar.pause, refused  # type: ignore[method-assign]
        await loop.one_step()
        bench.sidecar.pause = pause  # type: ignore[method-assign]
        await loop.one_step()
    assert bench.trainer.decisions == [(0, 0, True), (1, 1, True), (2, 2, False), (3, 3, True)]
    assert "publication_skipped" in bench.sink.names()


async def test_kl_in_the_reward_moves_the_advantages() -> None:
    """kl_coef 0.1, two tokens of -0.5 each against -1 under the reference: 0.1 * (-1 + 2) less for each response."""
    bench = Bench(recipe(1, algorithm={"kl_coef": 0.1, "advantage": "dr_grpo"}))
    penalised: list[float] = []
    record = bench.sink.samples

    def samples(step: int, groups: Any, advantages: Any) -> None:
        penalised.extend(shaped_reward(sample, bench.config) for group in groups for sample in group.samples)
        record(step, groups, advantages)

    bench.sink.samples = samples  # type: ignore[method-assign]
    await bench.run()
    assert penalised == pytest.approx([-0.1, 0.9, -0.1, 0.9])
    ((_, metrics),) = bench.sink.steps
    assert metrics["kl_penalty"] == pytest.approx(0.1)
    assert metrics["has_reference_forward"] == 1.0


async def test_c28_a_resume_goes_on_where_it_was_and_versions_never_go_back() -> None:
    """C28, R115: saved after step 5 of 8: steps 6 and 7 follow; labels go on; every prompt is trained on once."""
    first = Bench(recipe(8, checkpoint={"save_interval": 6}, rollout={"max_staleness": 1}, algorithm=TIS))
    async with first.loop() as loop:
        await loop.begin()
        for _ in range(6):
            await loop.one_step()
    used = [result.version for result in first.sink.publications]
    assert used == list(range(7))
    second = Bench(first.config)
    loop = await second.run(first.store.states[6])
    labels = [result.version for result in second.sink.publications]
    assert labels[0] >= max(used) and labels == sorted(labels)
    assert [step for step, _ in second.sink.steps] == [6, 7]
    assert all(metrics["partition_lag_max"] <= 1 for _, metrics in second.sink.steps)
    trained = [sample.group for bench in (first, second) for batch in bench.trainer.batches for sample in batch.samples]
    assert sorted(set(trained)) == list(range(16)) and len(trained) == 32


async def test_c53_the_row_of_a_step_is_on_disk_before_its_checkpoint() -> None:
    """C53: killed between the two, a resumed run has neither a gap nor a second row; the next row counts the saving."""
    bench = Bench(recipe(4, checkpoint={"save_interval": 2}))
    commit, synced = bench.store.commit, list[tuple[int, int]]()

    def slow_commit(step: int, state: Mapping[str, Any]) -> Path:
        synced.append((step, bench.sink.synced))
        return commit(step, state)

    bench.store.commit = slow_commit  # type: ignore[method-assign]
    await bench.run()
    assert synced == [(2, 2), (4, 4)]
    took = [metrics["checkpoint_s"] for _, metrics in bench.sink.steps]
    assert [seconds > 0 for seconds in took] == [False, False, True, False]
    assert all(metrics["step_s"] >= metrics["checkpoint_s"] for _, metrics in bench.sink.steps)


async def test_c19_at_staleness_zero_the_three_modes_train_on_the_same_samples() -> None:
    """C19: same prompts, tokens, log-probs, advantages and versions, step by step, in sync, hybrid and fully_async."""
    batches = []
    for mode in ("sync", "hybrid", "fully_async"):
        config = resolve(recipe(6, rollout={"max_staleness": 0}).model_copy(update={"mode": mode})).config
        bench = Bench(config)

        async def reply(ids: Sequence[int], params: Any, bench: Bench = bench) -> tuple[Completion, ...]:
            """Tokens follow from prompt, weights and number of the sample, as with an engine of fixed seeds."""
            await anyio.sleep(0.001 * (ids[-1] % 3))
            version = int(bench.server.version)
            return tuple(
                dataclasses.replace(
                    completion(2 + (ids[-1] + n) % 3, version=version), logprobs=(-0.1 * n - 0.1,) * size
                )
                for n in range(params.n)
                for size in [2 + (ids[-1] + n) % 3]
            )

        bench.server.reply = reply
        await bench.run()
        batches.append(bench.trainer.batches)
        assert all(sample.oldest_version == batch.step for batch in bench.trainer.batches for sample in batch.samples)
    assert batches[0] == batches[1] == batches[2]
    assert len(batches[0]) == 6


@pytest.mark.parametrize("completed", [10, 12])
async def test_c28_a_resume_at_or_past_the_end_does_nothing(completed: int) -> None:
    """C28: a checkpoint at 10 or 12 of 10 steps: no step is run."""
    ended = {"step": completed, "version": completed, "publications": 3, "samples_trained": 9}
    state = {**ended, "rollout": {"ledger": {"finished": completed, "counts": {}}, "source": {"next": 9, "unused": []}}}
    bench = Bench(recipe(10))
    loop = await bench.run(state)
    assert (loop.step, bench.sink.steps, bench.trainer.batches) == (completed, [], [])


async def test_c28_an_explicit_first_step_is_kept() -> None:
    """C28: start 7 of 9 without a checkpoint: steps 7 and 8 are run, and versions count on from 7."""
    bench = Bench(recipe(9))
    async with bench.loop() as loop:
        loop.start_at(7)
        await loop.begin()
        while await loop.one_step() is not None:
            pass
    assert [step for step, _ in bench.sink.steps] == [7, 8]
    assert [result.version for result in bench.sink.publications] == [7, 8, 9]


async def test_c30_a_resume_keeps_the_length_of_the_whole_run() -> None:
    """C30 (f): 8 prompts by 2, two epochs, resumed after step 5: still 8 steps, and the last one has its checkpoint."""
    asked = recipe(20, rollout={"num_epoch": 2}, checkpoint={"save_interval": 5})
    sized = with_sizing(asked, resolve_sizing(asked, 8))
    assert sized.rollout.num_rollout == 8
    first = Bench(sized)
    async with first.loop() as loop:
        await loop.begin()
        for _ in range(5):
            await loop.one_step()
    again = Bench(with_sizing(sized, resolve_sizing(sized, 8)))
    await again.run(first.store.states[5])
    assert [step for step, _ in again.sink.steps] == [5, 6, 7]
    assert list(again.store.states) == [8]


async def test_c21_a_run_whose_data_ends_early_keeps_what_it_trained() -> None:
    """C21: five prompts for four steps of two: 2, 2 and 1; then published, saved and ended with a warning, no error."""
    bench = Bench(recipe(4, publication={"update_weights_interval": 2}, algorithm=TIS))
    draw = bench.source.draw
    bench.source.draw = lambda: None if bench.source.next == 5 else draw()  # type: ignore[method-assign, assignment, return-value]
    loop = await bench.run()
    assert [len(batch.samples) for batch in bench.trainer.batches] == [4, 4, 2]
    assert [result.version for result in bench.sink.publications] == [0, 2, 3]
    assert (loop.step, list(bench.store.states)) == (3, [3])
    ((_, fields),) = [event for event in bench.sink.events if event[0] == "prompts_used_up"]
    assert fields["completed"] == 3 and "the prompts are used up" in str(fields["cause"])
    again = Bench(bench.config)
    again.source.draw = lambda: None  # type: ignore[method-assign, assignment, return-value]
    assert (await again.run(bench.store.states[3])).step == 3
    assert (again.trainer.batches, again.store.states) == ([], {})


async def test_a_checkpoint_is_saved_while_engines_go_on() -> None:
    """Nothing is paused for a save, and rollout requests are answered during it."""
    bench = Bench(recipe(3, checkpoint={"save_interval": 1}, rollout={"max_staleness": 1}, algorithm=TIS))
    answered: list[int] = []

    async def save(_path: str) -> None:
        before = len(bench.server.requests)
        assert bench.sidecar.paused_by is None
        await anyio.sleep(0.02)
        answered.append(len(bench.server.requests) - before)

    bench.trainer.save_checkpoint = save  # type: ignore[method-assign]
    await bench.run()
    assert answered[0] > 0
    assert list(bench.store.states) == [1, 2, 3]


async def test_c32_a_full_disk_stops_the_run_or_is_warned_of_as_configured() -> None:
    """C32: the last good checkpoint stays; on_save_error says whether the run goes on; no engine stays paused."""
    for policy in ("continue", "stop"):
        bench = Bench(recipe(4, checkpoint={"save_interval": 2, "on_save_error": policy}))
        async with bench.loop() as loop:
            await loop.begin()
            for _ in range(3):
                await loop.one_step()
            bench.store.full = True
            if policy == "stop":
                with pytest.raises(CheckpointError, match="No space left"):
                    await loop.one_step()
            else:
                step = await loop.one_step()
                assert step is not None and step.saved is None
                assert "checkpoint_failed" in bench.sink.names()
        assert list(bench.store.states) == [2]
        assert bench.sidecar.paused_by is None


AUTO = {"update_weights_interval": "auto", "k_max": 3}


def slow_exports(bench: Bench) -> None:
    """Publications that cost many times a step."""
    export, train = bench.trainer.export_weights, bench.trainer.train_step

    async def slow(version: int, path: str) -> WeightSnapshot:
        await anyio.sleep(0.05)
        return await export(version, path)

    async def step(batch: TrainBatch) -> StepResult:
        await anyio.sleep(0.001)  # on the virtual clock a step would take no time
        return await train(batch)

    bench.trainer.export_weights, bench.trainer.train_step = slow, step  # type: ignore[method-assign]


@virtual
async def test_an_adaptive_interval_grows_with_what_publications_cost() -> None:
    """K begins at k_min; measured cost makes it k_max, said once with its reason; the last step is published."""
    bench = Bench(recipe(12, publication=AUTO, algorithm=TIS))
    slow_exports(bench)
    loop = await bench.run()
    assert [result.version for result in bench.sink.publications] == [0, 1, 4, 7, 10, 12]
    assert loop.publications == 6
    (event,) = [fields for name, fields in bench.sink.events if name == "interval_chosen"]
    assert (event["interval"], event["step"]) == (3, 1) and "a publication costs" in str(event["reason"])
    assert [row["publish_interval"] for _, row in bench.sink.steps] == [3.0] * 12


@virtual
async def test_a_resumed_run_keeps_its_adaptive_interval() -> None:
    """The interval and its measurements are in the checkpoint; the publication at the resume counts from there."""
    first = Bench(recipe(12, publication=AUTO, algorithm=TIS))
    slow_exports(first)
    async with first.loop() as loop:
        await loop.begin()
        for _ in range(5):
            await loop.one_step()
        state = loop.state()
    resumed = Bench(recipe(12, publication=AUTO, algorithm=TIS))
    slow_exports(resumed)
    await resumed.run(state)
    assert [result.version for result in resumed.sink.publications] == [5, 8, 11, 12]
    assert "interval_chosen" not in resumed.sink.names()
    fixed = Bench(recipe(12, algorithm=TIS, publication={"update_weights_interval": 4}))
    slow_exports(fixed)
    await fixed.run(state)  # and a run with a fixed interval has no use for it
    assert [result.version for result in fixed.sink.publications] == [5, 8, 12]


@virtual
async def test_r9_an_adaptive_interval_never_evaluates_unpublished_weights() -> None:
    """R9, R55: evaluations each 5 steps publish first whatever K is, and K counts on from there."""
    bench = Bench(recipe(12, publication=AUTO, algorithm=TIS, eval={**EVAL, "eval_interval": 5}))
    slow_exports(bench)
    loop = await bench.run()
    assert [result.version for result in bench.sink.publications] == [0, 1, 4, 5, 8, 10, 12]
    assert [(result.step, result.version) for result in loop.evaluations] == [(0, 0), (5, 5), (10, 10)]
