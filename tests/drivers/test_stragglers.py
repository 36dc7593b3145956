"""One request or judge that never ends holds up neither its step nor the end of the run."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import anyio.lowlevel
import pytest
from kit import completion
from test_rollout import Bench, Source, rewards

from hybridasync.errors import OutcomeUnknown
from hybridasync.types import Completion, Prompt, SamplingParams


async def test_c16_a_group_whose_request_never_ends_is_replaced() -> None:
    """C16: one prompt is never answered within its deadline: the step has four groups, one is dropped and counted."""
    bench = Bench(rewards(1.0, 0.0), steps=1)
    calls = 0

    async def reply(_ids: Sequence[int], params: SamplingParams) -> tuple[Completion, ...]:
        nonlocal calls
        calls += 1
        if calls == 2:
            # As the adapter does at the end of rollout.request_timeout_s.
            with anyio.move_on_after(0.2):
                await anyio.sleep_forever()
            raise OutcomeUnknown("engine-0", "generate", "no answer within request_timeout_s")
        return tuple(completion(2) for _ in range(params.n))

    bench.server.reply = reply
    (batch,) = await bench.take()
    assert len(batch) == 4
    assert bench.rollout.counts["groups_dropped"] == 1
    assert bench.fleet.in_flight == 0
    assert bench.ledger.in_flight == 0


async def test_c16_judges_of_later_groups_hold_nothing_up() -> None:
    """C16: with a lead of one step two judges of the next step sleep for a minute: this step is taken at once."""

    async def reward(prompt: Prompt, texts: Sequence[str], _completions: Sequence[Completion]) -> list[float]:
        if prompt.uid in (4, 5):
            await anyio.sleep(60)
        return [1.0, 0.0][: len(texts)]

    bench = Bench(reward, staleness=1)
    with anyio.fail_after(30):
        (batch,) = await bench.take()
    assert [group.prompt.uid for group in batch] == [0, 1, 2, 3]
    assert bench.fleet.in_flight == 0


async def test_c16_cancelled_at_any_moment_no_slot_leaks() -> None:
    """C16: 300 runs that are cancelled while groups complete: nothing stays in flight, no group comes twice."""
    for moment in range(300):
        bench = Bench(rewards(1.0, 0.0), staleness=1, source=Source(8), steps=2)
        taken: list[int] = []

        async def consume(bench: Bench = bench, taken: list[int] = taken) -> None:
            for step in range(2):
                taken += [group.prompt.uid for group in await bench.rollout.take(step)]
                bench.rollout.finish(step)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(bench.rollout.run)
            tasks.start_soon(consume)
            for _ in range(moment % 60):
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        assert bench.fleet.in_flight == 0
        assert len(set(taken)) == len(taken)


async def test_c16_a_group_that_is_slow_is_not_lost_at_the_end_of_the_data() -> None:
    """C16, C21: the slowest group of the last batch is waited for, and is in it."""
    slow = anyio.Event()

    async def reward(prompt: Prompt, texts: Sequence[str], _completions: Sequence[Completion]) -> list[float]:
        if prompt.uid == 1:
            await slow.wait()
        return [1.0, 0.0][: len(texts)]

    bench = Bench(reward, source=Source(4), steps=1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bench.rollout.run)
        await anyio.wait_all_tasks_blocked()
        assert bench.ledger.take(0) is None
        slow.set()
        with anyio.fail_after(30):
            assert [group.prompt.uid for group in await bench.rollout.take(0)] == [0, 1, 2, 3]
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("good", [0, 1])
async def test_c20_a_batch_that_stays_short_stops_with_what_was_kept(good: int) -> None:
    """C20: of 12 groups `good` have signal: the step isn't trained short; the message has kept and filtered counts."""

    async def reward(prompt: Prompt, texts: Sequence[str], _completions: Sequence[Completion]) -> list[float]:
        return [1.0, 0.0 if prompt.uid == 5 and good else 1.0][: len(texts)]

    bench = Bench(reward, filter_zero_variance=True, max_gen_batches=3)
    with pytest.raises(Exception, match=f"{good} of 4 groups kept, {12 - good} filtered"):
        await bench.take()
    assert bench.source.drawn == 12
