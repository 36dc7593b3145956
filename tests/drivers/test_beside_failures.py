"""Failures and cancellations of a publication beside training: no engine stays paused, and the run hears of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import pytest
from beside import bench_of, config_of, steps_of
from kit import nothing
from loop import Bench
from test_recovery import virtual

from hybridasync.drivers.training import TrainingLoop
from hybridasync.errors import (
    CheckpointError,
    CompensationFailed,
    DivergedError,
    NotSent,
    OutcomeUnknown,
    PublicationFailed,
    WorkerLost,
    leaves,
)
from hybridasync.types import StepResult, TrainBatch, WeightSnapshot


async def refused(*_: object) -> bool:
    raise NotSent("engine-0", "pause", "refused")


@virtual
async def test_r66_a_publication_that_no_engine_took_leaves_training_going() -> None:
    """R63, R66: skipped with an event and an abort; its places are free all the same; the next one is tried."""
    bench = bench_of(config_of(5))
    async with bench.loop() as loop:
        await loop.begin()
        await steps_of(loop, 1)
        await loop.settle()
        pause, bench.sidecar.pause = bench.sidecar.pause, refused  # type: ignore[method-assign]
        await steps_of(loop, 1)
        await loop.settle()
        bench.sidecar.pause = pause  # type: ignore[method-assign]
        await steps_of(loop, 3)
    assert bench.trainer.decisions[:4] == [(0, 0, True), (1, 1, True), (2, 2, False), (3, 3, True)]
    assert bench.sink.names().count("publication_skipped") == 1
    assert [row["publications"] for _, row in bench.sink.steps] == [2, 2, 3, 4, 5]
    assert bench.sink.steps[1][1]["pause_ms"] == 0.0
    assert max(row["partition_lag_max"] for _, row in bench.sink.steps) <= 1


def failure_of(
    bench: Bench, break_it: Callable[[Bench], None], *, second_s: float
) -> tuple[list[BaseException], float]:
    """The errors that ended a run whose steps after the first one take `second_s`, and when, after `break_it`."""
    found: list[BaseException] = []
    ended: list[float] = []

    @virtual
    async def run() -> None:
        try:
            async with bench.loop() as loop:
                await loop.begin()
                break_it(bench)
                await steps_of(loop, 1)
                bench.trainer.train_s = second_s  # type: ignore[attr-defined]
                await steps_of(loop, 3)
        except BaseExceptionGroup as group:
            found.extend(leaves(group))
        ended.append(anyio.current_time())

    run()
    return found, ended[0]


def step_1_fails(bench: Bench, error: Exception, *, look: Callable[[], Awaitable[None]]) -> None:
    """Training raises `error` in its second step, after `look`."""
    train = bench.trainer.train_step

    async def failing(batch: TrainBatch) -> StepResult:
        if batch.step == 1:
            await look()
            raise error
        return await train(batch)

    bench.trainer.train_step = failing  # type: ignore[method-assign]


def test_a_resume_that_fails_for_good_ends_the_run_at_once() -> None:
    """CompensationFailed doesn't wait for the training step under way, and workers aren't asked before it."""

    def break_it(bench: Bench) -> None:
        async def unknown(*_: object) -> None:
            raise OutcomeUnknown("engine-0", "end", "reset")

        bench.sidecar.end = bench.sidecar.fence = unknown  # type: ignore[method-assign, assignment]

    bench = bench_of(config_of(4))
    found, ended = failure_of(bench, break_it, second_s=1000.0)
    assert [type(error) for error in found] == [CompensationFailed]
    assert ended < 15.0
    assert bench.trainer.decisions == [(0, 0, True)]


def test_without_any_engine_left_the_run_ends_as_before() -> None:
    """No engine serves and there is no fault tolerance: PublicationFailed ends the run, after the step under way."""

    def break_it(bench: Bench) -> None:
        bench.server.sums = {"a": "torn"}

    bench = bench_of(config_of(4, engine={"use_fault_tolerance": False}))
    bench.trainer.train_s = 1.0  # type: ignore[attr-defined]
    found, _ = failure_of(bench, break_it, second_s=1.0)
    assert [type(error) for error in found] == [PublicationFailed]
    assert bench.log.count("train 1") == 1 and "train 2" not in bench.log
    assert bench.sidecar.paused_by is None


@virtual
async def test_a_step_that_fails_meanwhile_still_resumes_the_engine() -> None:
    """The workers are lost in step 1 while the engine is paused for version 1: it runs again, the error is theirs."""
    bench = bench_of(config_of(4), pause_s=0.5)

    async def look() -> None:
        await anyio.sleep(0.2)
        assert bench.sidecar.paused_by is not None

    step_1_fails(bench, WorkerLost(1, "killed", step=1), look=look)
    with pytest.raises(BaseExceptionGroup) as caught:
        await bench.run()
    assert [type(error) for error in leaves(caught.value)] == [WorkerLost]
    assert bench.sidecar.paused_by is None and bench.log[-1] == "engine-0 end"


@virtual
async def test_an_export_that_fails_leaves_nothing_to_wait_for() -> None:
    """A full disk: whoever catches that error can leave, publish or evaluate; nothing waits for what never began."""
    bench = bench_of(config_of(4))
    async with bench.loop() as loop:
        await loop.begin()
        export = bench.trainer.export_weights

        async def full(version: int, path: str) -> WeightSnapshot:
            raise CheckpointError("no space left")

        bench.trainer.export_weights = full  # type: ignore[method-assign]
        with pytest.raises(CheckpointError):
            await loop.one_step()
        bench.trainer.export_weights = export  # type: ignore[method-assign]
        with anyio.fail_after(2.0):
            await loop.settle()
            result = await loop.publish(0)
    assert result is not None and result.version == 1
    assert [step for step, _ in bench.sink.steps] == [0]


@virtual
async def test_given_up_during_the_export_the_run_can_be_left() -> None:
    """A time limit around the steps that expires while weights are being exported."""
    bench = bench_of(config_of(4), export_s=0.5)
    async with bench.loop() as loop:
        await loop.begin()
        with anyio.move_on_after(1.2) as limit:
            while True:
                await loop.one_step()
        assert limit.cancelled_caught and "export 1" in bench.log
        with anyio.fail_after(2.0):
            await loop.settle()


@virtual
async def test_a_step_that_fails_leaves_the_row_of_the_one_before() -> None:
    """The publication of step 0 is over while step 1 diverges: its row is there, with its times, long before that."""
    bench, seen = bench_of(config_of(4), train_s=0.5, pause_s=0.1), []

    async def look() -> None:
        await anyio.sleep(5.0)
        seen.extend(bench.sink.steps)

    step_1_fails(bench, DivergedError("loss is nan", step=1), look=look)
    with pytest.raises(BaseExceptionGroup):
        await bench.run()
    [(step, row)] = seen
    assert step == 0 and row["pause_ms"] == pytest.approx(100.0)


@virtual
async def test_a_row_is_written_even_if_its_publication_is_cut_off() -> None:
    """Step 1 is lost while step 0's publication pauses the engine."""
    bench = bench_of(config_of(4), pause_s=1.5)
    step_1_fails(bench, WorkerLost(1, "killed", step=1), look=anyio.lowlevel.checkpoint)
    with pytest.raises(BaseExceptionGroup):
        await bench.run()
    assert [step for step, _ in bench.sink.steps] == [0]
    assert bench.sidecar.paused_by is None


@virtual
async def test_given_up_while_a_trained_step_waits_the_next_publication_is_of_its_weights() -> None:
    """A time limit that expires after step 1 was trained, in the wait for publication 1: version 2 comes next."""
    bench = bench_of(config_of(4), train_s=1.0, export_s=0.1, pause_s=1.9)
    async with bench.loop() as loop:
        await loop.begin()
        await steps_of(loop, 1)
        with anyio.move_on_after(1.5):
            await loop.one_step()
        assert (loop.step, loop.version) == (2, 2) and "trained 1" in bench.log
        result = await loop.publish(None)
    assert result is not None and result.version == 2


@virtual
async def test_r109_an_engine_is_brought_up_while_workers_are_in_a_long_step() -> None:
    """A publication that no engine took: its abort waits for the step, but neither places nor a new engine do."""
    bench = bench_of(config_of(5))
    async with bench.loop() as loop:
        await loop.begin()
        await steps_of(loop, 1)
        await loop.settle()
        bench.trainer.train_s = 8.0  # type: ignore[attr-defined]
        pause, bench.sidecar.pause = bench.sidecar.pause, refused  # type: ignore[method-assign]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(steps_of, loop, 2)
            await anyio.sleep(9.0)
            assert len(bench.sink.steps) == 2 and "trained 2" not in bench.log
            bench.sidecar.pause = pause  # type: ignore[method-assign]
            [engine] = bench.fleet.engines
            engine.state.version = None
            waited = anyio.current_time()
            await loop._parts.publisher.bring_up(engine)
            assert anyio.current_time() - waited < 2.0 and engine.state.version == 2
            assert "trained 2" not in bench.log


@asynccontextmanager
async def cut(bench: Bench, at: int, passed: list[int]) -> AsyncIterator[TrainingLoop]:
    """The loop, cancelled at the `at`-th point of the world."""
    async with bench.loop() as loop:

        async def hook(point: str) -> None:
            passed[0] += 1
            if passed[0] - 1 == at:
                scope.cancel()
            await nothing(point)

        with anyio.CancelScope() as scope:
            bench.world.hook = hook
            yield loop


@pytest.mark.parametrize("mode", ["drain", "retract"])
def test_r100_cancelled_at_every_point_no_engine_stays_paused(mode: str, figure: Callable[[str], None]) -> None:
    """Before a send, after it and after the reply, over three steps: the engine runs, and its weights are whole."""

    @virtual
    async def one(at: int, passed: list[int]) -> None:
        bench = bench_of(config_of(3, publication={"pause_mode": mode}), train_s=0.0)
        async with cut(bench, at, passed) as loop:
            await loop.begin()
            while await loop.one_step() is not None:
                pass
        assert bench.sidecar.paused_by is None, at
        commits = [version for _, version, commit in bench.trainer.decisions if commit]
        assert commits == sorted(set(commits))

    at = 0
    while True:
        passed = [0]
        one(at, passed)
        if passed[0] <= at:
            break
        at += 1
    assert at >= 40
    figure(f"cancellation matrix, beside training, {mode}: cancelled at {at} points")


@virtual
async def test_cancelled_in_a_long_step_the_workers_are_not_waited_for() -> None:
    """An interrupt while the outcome waits for the workers: the run is left at once."""
    bench = bench_of(config_of(3))
    async with bench.loop() as loop:
        await loop.begin()
        await steps_of(loop, 1)
        bench.trainer.train_s = 1000.0  # type: ignore[attr-defined]
        with anyio.move_on_after(3.0):
            await loop.one_step()
        assert anyio.current_time() < 10.0
    assert bench.sidecar.paused_by is None
    assert anyio.current_time() < 10.0


async def test_r100_cancelled_at_every_turn_of_the_loop(figure: Callable[[str], None]) -> None:
    """R100, U14: three steps on the other event loop, cancelled at their first turn, at the second, and so on."""
    turns, finished = 0, False
    while not finished:
        bench = bench_of(config_of(3), train_s=0.0, export_s=0.0)
        bench.world.hook = nothing
        async with anyio.create_task_group() as tasks:

            async def run(bench: Bench = bench) -> None:
                nonlocal finished
                await bench.run()
                finished = True

            tasks.start_soon(run)
            for _ in range(turns):
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        assert bench.sidecar.paused_by is None, turns
        turns += 1
    assert turns >= 100
    figure(f"cancellation matrix, beside training: cancelled at {turns - 1} turns of the event loop")
