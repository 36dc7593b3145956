"""One group: budgets, continuation after an interruption, retries."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest
from kit import World, completion, make_fleet

from hybridasync.drivers.generation import GroupRequest, Limits, generate_group
from hybridasync.errors import OutcomeUnknown, Rejected
from hybridasync.types import Completion, SamplingParams


def request(tokens: int, budget: int, *, n: int = 1, partial: bool = True, retries: int = 2) -> GroupRequest:
    return GroupRequest(tuple(range(tokens)), SamplingParams(budget, n=n), partial, retries)


async def run(replies: list[Completion], wanted: GroupRequest) -> tuple[tuple[Completion, ...], list[tuple[int, int]]]:
    fleet, (server, *_), _ = make_fleet(World(), 1)
    fleet.engines[0].state.verified(0)
    queue = list(replies)

    async def reply(_ids: Sequence[int], _params: SamplingParams) -> tuple[Completion, ...]:
        return (queue.pop(0),)

    server.reply = reply
    made = await generate_group(fleet, wanted)
    return made, [(len(ids), params.max_new_tokens) for ids, params in server.requests]


async def test_c13_a_continuation_asks_for_the_remaining_budget_only() -> None:
    """Prompt 10, cap 32, interrupted after 12: the second request has 22 input tokens and 20 new ones at most."""
    made, requests = await run([completion(12, finish="abort"), completion(20, version=1)], request(10, 32))
    assert requests == [(10, 32), (22, 20)]
    assert len(made[0].output_ids) == len(made[0].logprobs) == 32
    assert [(s.version, s.start, s.end) for s in made[0].spans] == [(0, 0, 12), (1, 12, 32)]


async def test_a_continuation_keeps_the_seed_of_its_sample() -> None:
    """The second of two samples is interrupted: what is left of it is asked for with the second seed alone."""
    fleet, (server, *_), _ = make_fleet(World(), 1)
    fleet.engines[0].state.verified(0)
    queue = [(completion(4), completion(2, finish="abort")), (completion(3),)]

    async def reply(_ids: Sequence[int], _params: SamplingParams) -> tuple[Completion, ...]:
        return queue.pop(0)

    server.reply = reply
    await generate_group(fleet, GroupRequest((1, 2), SamplingParams(8, n=2, seeds=(70, 71)), True, 2))
    assert [(params.n, params.seeds) for _, params in server.requests] == [(2, (70, 71)), (1, (71,))]


async def test_c13_a_continuation_near_the_end_of_the_context() -> None:
    """C13: prompt 40 in a context of 64, cap 32, interrupted after 10: 24 tokens at first, then 14, never beyond 64."""
    budget = Limits(32, 64).budget(40)
    made, requests = await run([completion(10, finish="abort"), completion(14, finish="length")], request(40, budget))
    assert requests == [(40, 24), (50, 14)]
    assert len(made[0].output_ids) == 24 and made[0].finish_reason == "length"


async def test_c13_an_interruption_exactly_at_the_cap_is_a_finish_by_length() -> None:
    """Aborted after 32 of 32 tokens: no further request, finish reason length."""
    made, requests = await run([completion(32, finish="abort")], request(10, 32))
    assert requests == [(10, 32)]
    assert made[0].finish_reason == "length"


@pytest.mark.parametrize(("prompt", "budget"), [(10, 32), (40, 24), (63, 1), (64, 0), (70, -6)])
def test_c13_c54_the_budget_fits_the_context(prompt: int, budget: int) -> None:
    """Context 64, cap 32: prompts of 10, 40 and 63 tokens leave 32, 24 and 1."""
    assert Limits(32, 64).budget(prompt) == budget


async def test_without_partial_rollout_an_interrupted_sample_starts_again() -> None:
    """partial_rollout off: the second request is the bare prompt with the whole budget, and no old token is kept."""
    made, requests = await run(
        [completion(12, finish="abort"), completion(5, version=1)], request(10, 32, partial=False)
    )
    assert requests == [(10, 32), (10, 32)]
    assert [(s.version, s.start, s.end) for s in made[0].spans] == [(1, 0, 5)]


async def test_c54_a_bad_request_is_not_repeated_and_a_busy_engine_is() -> None:
    """400 is raised after one attempt; 429 and an unknown outcome are tried again, up to max_retries."""
    for error, attempts in (
        (Rejected("e", "generate", 400), 1),
        (Rejected("e", "generate", 429), 3),
        (OutcomeUnknown("e", "g"), 3),
    ):
        fleet, (server,), _ = make_fleet(World(), 1)
        fleet.engines[0].state.verified(0)

        async def reply(
            _ids: Sequence[int], _params: SamplingParams, error: Exception = error
        ) -> tuple[Completion, ...]:
            raise error

        server.reply = reply
        with pytest.raises(type(error)):
            await generate_group(fleet, request(4, 8))
        assert len(server.requests) == attempts
        assert fleet.in_flight == 0


async def test_cancelling_a_group_aborts_it_at_the_engine() -> None:
    """An engine notices a closed connection only seconds later: the abort is sent."""
    fleet, (server,), _ = make_fleet(World(), 1)
    fleet.engines[0].state.verified(0)

    async def reply(_ids: Sequence[int], _params: SamplingParams) -> tuple[Completion, ...]:
        await anyio.sleep_forever()
        return ()

    server.reply = reply
    with anyio.move_on_after(0.05):
        await generate_group(fleet, request(4, 8))
    assert len(server.aborted) == 1
    assert fleet.in_flight == 0


async def test_no_request_goes_to_an_engine_that_is_not_verified() -> None:
    """With every engine unverified a request waits; it goes out once one is re-admitted."""
    fleet, servers, _ = make_fleet(World(), 2)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(generate_group, fleet, request(4, 8))
        await anyio.sleep(0.02)
        assert not any(server.requests for server in servers)
        fleet.engines[1].state.verified(3)
        fleet.changed.notify()
    assert [len(server.requests) for server in servers] == [0, 1]
