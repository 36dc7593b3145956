"""The rollout loop: failures are counted and bounded, nothing is lost silently."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import anyio
import pytest
from kit import RecordingSink, World, completion, make_fleet

from hybridasync.config.models import AlgorithmSection, Config, ModelSection, RolloutSection
from hybridasync.drivers import rollout
from hybridasync.drivers.generation import Limits
from hybridasync.drivers.rollout import Rollout, RolloutParts
from hybridasync.errors import DataError, EngineError, RewardError, leading_cause
from hybridasync.protocol.ledger import RolloutLedger
from hybridasync.types import Completion, Group, Prompt, SamplingParams


class Source:
    """`count` prompts, or endless."""

    def __init__(self, count: int | None = None) -> None:
        self.drawn = 0
        self.again: list[int] = []
        self.count = count

    def draw(self) -> Prompt | None:
        if self.drawn == self.count:
            return None
        if self.again:
            return self._at(self.again.pop(0))
        self.drawn += 1
        return self._at(self.drawn - 1)

    def _at(self, uid: int) -> Prompt:
        return Prompt(uid, 0, 0, "d", (1, 2, 3), "p", "l")

    def state(self, unused: Iterable[int] = ()) -> dict[str, Any]:
        return {"next": self.drawn, "unused": list(unused)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.drawn, self.again = state["next"], list(state["unused"])

    def __len__(self) -> int:
        return self.count or 0


class Tokens:
    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


class Bench:
    """A rollout over one fake engine, with a reward function of the test's."""

    def __init__(
        self, reward: Any, *, source: Source | None = None, staleness: int = 0, steps: int = 3, **algorithm: Any
    ):
        config = Config(
            model=ModelSection(hf_checkpoint="x"),
            rollout=RolloutSection(
                rollout_batch_size=4,
                n_samples_per_prompt=2,
                max_response_tokens=8,
                max_staleness=staleness,
                max_retries=0,
            ),
            algorithm=AlgorithmSection(**algorithm),
        )
        self.fleet, (self.server,), _ = make_fleet(World(), 1)
        self.fleet.engines[0].state.verified(0)
        self.ledger = RolloutLedger(
            batch_size=4, max_staleness=staleness, num_rollout=steps, max_gen_batches=config.algorithm.max_gen_batches
        )
        self.source, self.sink = source or Source(), RecordingSink()
        parts = RolloutParts(self.fleet, self.source, reward, Tokens(), self.sink, Limits(8, 64))  # type: ignore[arg-type]
        self.rollout = Rollout(config, self.ledger, parts)

    async def take(self, steps: int = 1, *, first: int = 0) -> list[tuple[Group, ...]]:
        batches = []
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.rollout.run)
                with anyio.fail_after(30):
                    for step in range(first, first + steps):
                        batches.append(await self.rollout.take(step))
                        self.rollout.finish(step)
                tasks.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise leading_cause(group) from None
        return batches


def rewards(*values: float) -> Any:
    async def reward(_prompt: Prompt, texts: Sequence[str], _completions: Sequence[Completion]) -> list[float]:
        return list(values)[: len(texts)]

    return reward


async def test_batches_are_full_and_every_prompt_is_in_one() -> None:
    """Three steps of four groups: twelve prompts, each once, in the order drawn."""
    batches = await Bench(rewards(1.0, 0.0)).take(3)
    assert [g.prompt.uid for batch in batches for g in batch] == list(range(12))


async def test_c15_a_reward_function_that_always_fails_ends_the_run_with_its_text() -> None:
    """Every group fails: after 64 samples the run stops with the original message."""

    async def reward(*_: object) -> list[float]:
        raise RewardError("reward backend failed")

    with pytest.raises(RewardError, match="reward backend failed"):
        await Bench(reward, max_gen_batches=50).take()


async def test_c15_one_failing_reward_is_counted_and_replaced() -> None:
    """One group of the batch fails: the batch still has four groups, and one drop is counted."""

    async def reward(prompt: Prompt, texts: Sequence[str], _completions: Sequence[Completion]) -> list[float]:
        if prompt.uid == 2:
            raise RewardError("this row is bad")
        return [1.0, 0.0]

    bench = Bench(reward)
    (batch,) = await bench.take()
    assert [g.prompt.uid for g in batch] == [0, 1, 3, 4]
    assert bench.rollout.counts["groups_dropped"] == 1
    assert bench.sink.names() == ["group_dropped"]


async def test_c15_an_engine_that_answers_nothing_but_errors_ends_the_run() -> None:
    """Every generate fails: the run stops with the engine's error instead of waiting for a batch."""
    bench = Bench(rewards(1.0, 0.0))

    async def reply(_ids: Sequence[int], _params: SamplingParams) -> tuple[Completion, ...]:
        raise EngineError("engine-0", "generate", "HTTP 500")

    bench.server.reply = reply
    with pytest.raises(EngineError, match="HTTP 500"):
        await bench.take()


async def test_c15_a_source_that_raises_ends_the_run() -> None:
    """An exception of the data source reaches whoever waits for the batch."""
    bench = Bench(rewards(1.0, 0.0))

    def draw() -> Prompt | None:
        raise DataError("the file vanished")

    bench.source.draw = draw  # type: ignore[method-assign]
    with pytest.raises(DataError, match="the file vanished"):
        await bench.take()


async def test_c20_unsolvable_prompts_stop_with_the_counts_and_the_setting() -> None:
    """B=4, max_gen_batches=3, equal rewards: 12 prompts, then an error: 0 of 4 kept, 12 filtered, what to set."""
    bench = Bench(rewards(1.0, 1.0), filter_zero_variance=True, max_gen_batches=3)
    with pytest.raises(DataError, match=r"0 of 4 groups kept, 12 filtered.*algorithm\.max_gen_batches = 3"):
        await bench.take()
    assert bench.source.drawn == 12


async def test_c21_the_last_groups_are_trained_on_when_the_data_ends() -> None:
    """Six prompts, batches of four: the second batch has the two that are left, nothing is lost."""
    batches = await Bench(rewards(1.0, 0.0), source=Source(6)).take(2)
    assert [len(batch) for batch in batches] == [4, 2]


async def test_c14_a_slow_consumer_delays_submission_and_never_the_loop() -> None:
    """While nobody takes batches the number of admitted groups stays at the slots, and a ticker keeps its rhythm."""
    bench = Bench(rewards(1.0, 0.0), staleness=1, steps=50)
    gaps: list[float] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bench.rollout.run)
        last = anyio.current_time()
        for _ in range(20):
            await anyio.sleep(0.01)
            gaps.append(anyio.current_time() - last)
            last = anyio.current_time()
        tasks.cancel_scope.cancel()
    assert bench.source.drawn == 8 == bench.ledger.slots
    # A loop that is held up is so at every turn; a machine that stands still takes one or two.
    assert sorted(gaps)[len(gaps) // 2] < 1.0


async def test_c41_a_reward_of_the_wrong_length_is_never_zipped_away() -> None:
    """One value for two samples is our bug or the user's, and raises instead of shifting rewards."""
    with pytest.raises(ValueError, match="zip"):
        await Bench(rewards(1.0)).take()


async def test_a_group_in_flight_or_waiting_is_drawn_again_after_a_resume() -> None:
    """A resumed run trains first on what was drawn and not trained on, each prompt once, none left out."""
    bench = Bench(rewards(1.0, 0.0), staleness=1)
    (first,) = await bench.take(1)
    state = bench.rollout.state()
    resumed = Bench(rewards(1.0, 0.0), staleness=1)
    resumed.rollout.restore(state)
    (second,) = await resumed.take(1, first=1)
    trained = [g.prompt.uid for batch in (first, second) for g in batch]
    assert trained == list(range(8))


async def test_an_empty_completion_is_an_answer_too() -> None:
    """Zero tokens: the reward is asked with an empty text and the group completes."""
    bench = Bench(rewards(0.0, 0.0))

    async def reply(_ids: Sequence[int], params: SamplingParams) -> tuple[Completion, ...]:
        return tuple(completion(0) for _ in range(params.n))

    bench.server.reply = reply
    (batch,) = await bench.take()
    assert [s.text for s in batch[0].samples] == ["", ""]


async def test_every_group_has_its_states_on_record() -> None:
    """In flight, complete, trained; or filtered; or dropped with the reason: each group comes to exactly one end."""

    async def reward(prompt: Prompt, texts: Sequence[str], _completions: Sequence[Completion]) -> list[float]:
        if prompt.uid == 1:
            raise RewardError("no judge")
        return [1.0, 1.0] if prompt.uid == 2 else [1.0, 0.0]

    bench = Bench(reward, steps=1, filter_zero_variance=True)
    await bench.take(1)
    states: dict[int, list[str]] = {}
    for uid, state, _ in bench.sink.groups:
        states.setdefault(uid, []).append(state)
    assert states.pop(1) == ["in_flight", "dropped"]
    assert states.pop(2) == ["in_flight", "filtered"]
    assert states == {key: ["in_flight", "complete", "trained"] for key in (0, 3, 4, 5)}
    reasons = [fields["reason"] for _, state, fields in bench.sink.groups if state == "dropped"]
    assert reasons == ["no judge"]
    assert [fields for _, state, fields in bench.sink.groups if state == "trained"] == [{"step": 0}] * 4


async def test_r113_a_batch_that_is_long_in_coming_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """R113: training waits past the limit (60 s): one warning with what is in flight, then the batch."""
    assert rollout.BATCH_STALL_S == 60
    monkeypatch.setattr(rollout, "BATCH_STALL_S", 0.02)

    async def slow(_prompt: Prompt, texts: Sequence[str], _completions: Sequence[Completion]) -> list[float]:
        await anyio.sleep(0.2)
        return [float(index) for index, _ in enumerate(texts)]

    bench = Bench(slow, steps=1)
    await bench.take(1)
    (fields,) = [fields for name, fields in bench.sink.events if name == "batch_stalled"]
    assert fields["step"] == 0 and fields["cause"] == "4 groups in flight, 0 complete, 4 places"


async def test_r113_engines_that_wait_long_for_a_place_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """R113: the gate stays shut past the limit (600 s, then each 60, past 1200 each 30): warned of while it lasts."""
    waits = [0.0]
    while waits[-1] < 1320:
        waits.append(rollout.next_place_warning_s(waits[-1]))
    assert waits[1:] == [600, 660, 720, 780, 840, 900, 960, 1020, 1080, 1140, 1200, 1230, 1260, 1290, 1320]

    monkeypatch.setattr(rollout, "next_place_warning_s", lambda waited: waited + 0.02)
    bench = Bench(rewards(1.0, 0.0), steps=2)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bench.rollout.run)
        await bench.rollout.take(0)
        await anyio.sleep(0.1)  # step 0 trains; its places aren't free
        assert "places_stalled" in bench.sink.names()
        bench.rollout.finish(0)
        await bench.rollout.take(1)
        before = len(bench.sink.events)
        await anyio.sleep(0.1)  # the last step trains, and there is nothing more to admit: always allowed, never said
        assert len(bench.sink.events) == before
        tasks.cancel_scope.cancel()
