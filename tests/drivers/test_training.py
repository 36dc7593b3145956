"""The training loop over fakes: what is due after a step happens then, in order, and at no other time."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from kit import FakeTrainer, MemoryJournal, RecordingSink, World, completion, make_fleet

from hybridasync.algorithms.shaping import shaped_reward
from hybridasync.config.load import validate
from hybridasync.config.models import Config
from hybridasync.config.pipeline import resolve, schedule_of
from hybridasync.drivers import training
from hybridasync.drivers.checkpointing import Checkpointing
from hybridasync.drivers.evaluation import Evaluation, EvaluationParts
from hybridasync.drivers.generation import Limits
from hybridasync.drivers.publish import Publisher, PublishParts
from hybridasync.drivers.rollout import Rollout, RolloutParts
from hybridasync.drivers.training import LoopParts, TrainingLoop
from hybridasync.drivers.transfer import DiskTransfer
from hybridasync.errors import CheckpointError, NotSent, Rejected
from hybridasync.protocol.debts import Debts
from hybridasync.protocol.ledger import RolloutLedger
from hybridasync.types import Completion, Prompt, StepResult, TrainBatch, TrainSample, WeightSnapshot


class Trainer(FakeTrainer):
    """Writes down what it is asked for."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log
        self.batches: list[TrainBatch] = []

    async def train_step(self, batch: TrainBatch) -> StepResult:
        self.log.append(f"train {batch.step}")
        self.batches.append(batch)
        return StepResult(batch.step, True, {"loss": 0.0})

    async def decide(self, epoch: int, *, version: int, commit: bool) -> None:
        await super().decide(epoch, version=version, commit=commit)
        self.log.append(f"{'commit' if commit else 'abort'} {version}")

    async def reference_logprobs(self, samples: Sequence[TrainSample]) -> list[list[float]]:
        return [[-1.0] * len(sample.rollout_logprobs) for sample in samples]

    async def save_checkpoint(self, path: str) -> None:
        self.log.append("save")


class Source:
    """Endless prompts with an exact position."""

    def __init__(self) -> None:
        self.next = 0
        self.again: list[int] = []

    def draw(self) -> Prompt:
        if self.again:
            return _prompt(self.again.pop(0))
        self.next += 1
        return _prompt(self.next - 1)

    def state(self, unused: Sequence[int] = ()) -> dict[str, Any]:
        return {"next": self.next, "unused": list(unused)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.next, self.again = state["next"], list(state["unused"])


def _prompt(uid: int) -> Prompt:
    return Prompt(uid, uid, 0, "d", (1, 2 + uid), "p", "l")


class Store:
    """Checkpoints in memory; `full` is a disk without room."""

    def __init__(self) -> None:
        self.states: dict[int, dict[str, Any]] = {}
        self.full = False

    def begin(self, step: int) -> Path:
        if self.full:
            raise CheckpointError(f"can't make step_{step}: No space left on device")
        return Path("x")

    def commit(self, step: int, state: Mapping[str, Any]) -> Path:
        self.states[step] = dict(state)
        return Path(f"step_{step}")


class Snapshots:
    def path(self, version: int) -> str:
        return f"/v{version}"

    def drop_all_but(self, newest: int) -> None:
        return None


class Tokens:
    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


async def reward(_prompt: Prompt, texts: Sequence[str], _completions: Sequence[Completion]) -> list[float]:
    return [float(index % 2) for index, _ in enumerate(texts)]


def recipe(steps: int, **sections: dict[str, Any]) -> Config:
    base: dict[str, Any] = {
        "model": {"hf_checkpoint": "m"},
        "data": {"prompt_data": "d"},
        "rollout": {"num_rollout": steps, "rollout_batch_size": 2, "n_samples_per_prompt": 2, "max_response_tokens": 8},
        "publication": {"pause_mode": "drain", "resume_budget_s": 0.3, "rollout_http_timeout": 0.2},
    }
    merged = {name: {**base.get(name, {}), **sections.get(name, {})} for name in {*base, *sections}}
    return validate(merged, source="test")


class Bench:
    """A whole controller over one fake engine; `log` has what reached engine and trainer, in order."""

    def __init__(self, config: Config, *, steps_per_epoch: int | None = None) -> None:
        self.config = config
        self.world, self.store, self.sink = World(), Store(), RecordingSink()
        self.log = self.world.log
        self.fleet, (self.server,), (self.sidecar,) = make_fleet(self.world, 1)
        self.trainer = Trainer(self.log)
        self.source = Source()
        self.served: list[tuple[int, str]] = []  # (trainer's step, engine's version) of each evaluation request
        self.schedule = schedule_of(
            config, num_rollout=config.rollout.num_rollout or 0, steps_per_epoch=steps_per_epoch
        )

    @asynccontextmanager
    async def loop(self, state: Mapping[str, Any] | None = None) -> AsyncIterator[TrainingLoop]:
        config, limits = self.config, Limits(8, 64)
        ledger = RolloutLedger(
            batch_size=2, max_staleness=config.rollout.max_staleness, num_rollout=self.schedule.num_rollout
        )
        rollout = Rollout(config, ledger, RolloutParts(self.fleet, self.source, reward, Tokens(), self.sink, limits))  # type: ignore[arg-type]
        transfer = DiskTransfer(self.trainer)  # type: ignore[arg-type]
        publish = PublishParts(self.fleet, self.trainer, transfer, MemoryJournal(), Debts(), self.sink)  # type: ignore[arg-type]
        pause_mode = config.publication.pause_mode or "drain"
        publisher = Publisher(config.publication, publish, session="0" * 32, mode=pause_mode)
        evaluation = None
        async with anyio.create_task_group() as work:
            if self.schedule.eval_interval is not None:
                parts = EvaluationParts(
                    self.fleet, self.trainer, self._judge, Tokens(), self.sink, limits, [_prompt(0)]
                )  # type: ignore[arg-type]
                evaluation = Evaluation(config, parts)
            loop = TrainingLoop(
                config,
                self.schedule,
                LoopParts(
                    rollout,
                    self.fleet,
                    self.trainer,  # type: ignore[arg-type]
                    publisher,
                    evaluation,
                    Checkpointing(self.store, self.trainer),  # type: ignore[arg-type]
                    self.sink,
                    Snapshots(),
                    dict,
                ),
                background=work,
            )
            if state is not None:
                loop.restore(state)
            self._loop = loop
            with anyio.fail_after(20):
                yield loop
            work.cancel_scope.cancel()

    async def _judge(self, _prompt: Prompt, texts: Sequence[str], completions: Sequence[Completion]) -> list[float]:
        self.served.append((self._loop.step, str(completions[0].oldest_version)))
        return [1.0 for _ in texts]

    async def run(self, state: Mapping[str, Any] | None = None) -> TrainingLoop:
        async with self.loop(state) as loop:
            await loop.begin()
            while await loop.one_step() is not None:
                pass
            return loop


TIS = {"use_tis": True}
EVAL = {"eval_prompt_data": "e", "sampled": False, "logprob_check_samples": 0}


@pytest.mark.parametrize(("interval", "publications"), [(1, 21), (2, 11)])
async def test_c29_twenty_steps_are_21_or_11_publications(interval: int, publications: int) -> None:
    """C29, R13: the initial one included, versions as trained; the engine ends with the newest."""
    bench = Bench(recipe(20, publication={"update_weights_interval": interval}, algorithm=TIS))
    loop = await bench.run()
    assert loop.publications == publications == len(bench.sink.publications)
    assert [result.version for result in bench.sink.publications] == list(range(0, 21, interval))
    assert bench.server.version == "20"


async def test_c29_every_evaluation_is_of_the_weights_of_its_step() -> None:
    """C29, R9, R55: interval 2 with an evaluation each 5: 13 publications, and each answer is of the step's version."""
    bench = Bench(
        recipe(20, publication={"update_weights_interval": 2}, eval={**EVAL, "eval_interval": 5}, algorithm=TIS)
    )
    loop = await bench.run()
    assert len(bench.sink.publications) == 13
    assert [(result.step, result.version) for result in loop.evaluations] == [(s, s) for s in (0, 5, 10, 15, 20)]
    assert all(served == str(step) for step, served in bench.served if step % 5 == 0)


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


async def test_r50_r54_evaluation_before_the_first_step_and_awaited_after_the_last() -> None:
    """R50, R54: the first result is of step 0; the loop ends only when the last one is in; both can be left out."""
    bench = Bench(recipe(4, eval={**EVAL, "eval_interval": 2}))
    assert [result.step for result in (await bench.run()).evaluations] == [0, 2, 4]
    skipped = Bench(recipe(4, eval={**EVAL, "eval_interval": 3, "skip_eval_before_train": True}))
    assert [result.step for result in (await skipped.run()).evaluations] == [3]
    at_end = Bench(recipe(4, eval={**EVAL, "eval_interval": 3, "eval_at_end": True}))
    assert [result.step for result in (await at_end.run()).evaluations] == [0, 3, 4]


async def test_r51_an_evaluation_is_sent_before_sampling_goes_on() -> None:
    """R51: pause, swap, resume, evaluation, and only then the prompts that waited for the publication."""
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
    """R52, R54: an evaluation that hangs is waited for before the next publication and at the end, then warned of."""
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


async def test_r30_workers_hear_of_each_publication_whether_engines_serve_it() -> None:
    """R30, R105a, U3: committed once an engine took it, else aborted; one decision each, in growing epochs."""
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
    export = bench.trainer.export_weights

    async def slow(version: int, path: str) -> WeightSnapshot:
        await anyio.sleep(0.05)
        return await export(version, path)

    bench.trainer.export_weights = slow  # type: ignore[method-assign]


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


async def test_r9_an_adaptive_interval_never_evaluates_unpublished_weights() -> None:
    """R9, R55: evaluations each 5 steps publish first whatever K is, and K counts on from there."""
    bench = Bench(recipe(12, publication=AUTO, algorithm=TIS, eval={**EVAL, "eval_interval": 5}))
    slow_exports(bench)
    loop = await bench.run()
    assert [result.version for result in bench.sink.publications] == [0, 1, 4, 5, 8, 10, 12]
    assert [(result.step, result.version) for result in loop.evaluations] == [(0, 0), (5, 5), (10, 10)]


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
    await fixed.run(state)  # and a run with a fixed interval has no use for it
    assert [result.version for result in fixed.sink.publications] == [5, 8, 12]


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
