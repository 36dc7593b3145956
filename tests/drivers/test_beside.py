"""Publications beside training, over fakes on the virtual clock: training waits for the export, all bounds hold."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from random import Random
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from beside import SerialTrainer, bench_of, config_of, place, steps_of
from kit import completion
from loop import EVAL, TIS, Bench
from test_recovery import virtual

from hybridasync.config.models import Config
from hybridasync.errors import (
    LocalProtocolError,
)
from hybridasync.types import Completion


@virtual
async def test_training_waits_for_the_export_and_for_nothing_else() -> None:
    """Export, next step, meanwhile the pause and all that follows; the workers hear of it between two steps."""
    bench = bench_of(config_of(4))
    await bench.run()
    log = [entry for entry in bench.log if entry.split()[0] in ("train", "trained", "export", "commit")]
    first = ["export 0", "commit 0", "train 0", "trained 0", "export 1"]
    middle = ["train 1", "trained 1", "commit 1", "export 2", "train 2", "trained 2", "commit 2", "export 3"]
    assert log == [*first, *middle, "train 3", "trained 3", "commit 3", "export 4", "commit 4"]
    ends = [index for index, entry in enumerate(bench.log) if entry == "engine-0 end"]
    for version, end in enumerate(ends[1:4], start=1):
        assert place(bench.log, f"train {version}") < end < place(bench.log, f"trained {version}")
    assert ends[4] > place(bench.log, "trained 3")
    assert [result.version for result in bench.sink.publications] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "config",
    [
        config_of(4, staleness=0),
        config_of(4, staleness=1, publication={"blocking": True, "staged": False}),
        config_of(4, algorithm={"use_tis": True, "keep_old_actor": True}),
        config_of(4, checkpoint={"save_interval": 1}),
        config_of(4, eval={**EVAL, "eval_interval": 1}),
    ],
    ids=["staleness 0", "blocking", "keep_old_actor", "checkpoint", "evaluation"],
)
def test_r30_r51_where_the_next_step_needs_the_outcome_it_waits_for_it(config: Config) -> None:
    """No lead, blocking, old log-probs of the published weights (R30), a checkpoint, an evaluation (R51): in order."""
    bench = bench_of(config)

    @virtual
    async def run() -> None:
        await bench.run()

    run()
    for version in range(1, 4):
        assert place(bench.log, f"commit {version}") < place(bench.log, f"train {version}")
    assert all(row["publish_s"] > 0.39 for _, row in bench.sink.steps)


class Watched(Bench):
    """Checks each admission and each batch against what happened, by counting from the beginning."""

    def __init__(self, config: Config, rng: Random) -> None:
        super().__init__(config)
        self.rng = rng
        self.trainer = self.busy = SerialTrainer(self.log)
        self.server.reply = self._reply
        self.world.hook = self._hook
        self.admitted: dict[int, int] = {}
        self.consumed = 0
        self._seen = self.sink.group
        self.sink.group = self._group  # type: ignore[method-assign]

    async def _hook(self, _point: str) -> None:
        self.busy.train_s, self.busy.export_s = self.rng.choice((0.001, 0.02, 0.3)), self.rng.choice((0.0, 0.03))
        await anyio.sleep(self.rng.choice((0.0, 0.01, 0.1)))

    async def _reply(self, _ids: Sequence[int], params: Any) -> tuple[Completion, ...]:
        version = int(self.server.version)
        assert self.sidecar.paused_by is None
        await anyio.sleep(self.rng.choice((0.0, 0.02, 0.2)))
        return tuple(completion(2, version=version) for _ in range(params.n))

    def finished(self) -> int:
        """Leading steps that are trained and, where a publication was due, served."""
        served = int(self.server.version)
        count = 0
        while f"trained {count}" in self.log and not (self.schedule.publish_due(count) and served < count + 1):
            count += 1
        return count

    def _group(self, uid: int, state: Any, **fields: Any) -> None:
        self._seen(uid, state, **fields)
        size, staleness = self.config.rollout.rollout_batch_size, self.config.rollout.max_staleness
        if state == "in_flight":
            assert fields["partition"] <= self.finished()
            self.admitted[uid] = fields["partition"]
            assert len(self.admitted) - self.consumed <= (staleness + 1) * size
        elif state == "trained":
            self.consumed += 1
            assert fields["step"] - self.admitted[uid] <= staleness


@pytest.mark.parametrize(("staleness", "interval"), [*itertools.product((0, 1, 2), (1, 2)), (3, 1)])
def test_r113_r114_c19_the_bounds_hold_as_counted_from_the_beginning(staleness: int, interval: int) -> None:
    """R113, R114, C19: 40 seeds each, durations at random: admissions, both lags, each prompt once, rows in order."""

    @virtual
    async def one(seed: int) -> None:
        bench = Watched(config_of(8, staleness=staleness, interval=interval), Random(seed))
        await bench.run()
        rows = [row for _, row in bench.sink.steps]
        assert [step for step, _ in bench.sink.steps] == list(range(8))
        assert max(row["partition_lag_max"] for row in rows) <= staleness
        assert max(row["version_lag_max"] for row in rows) <= staleness + interval - 1
        due = [step + 1 for step in range(8) if bench.schedule.publish_due(step)]
        assert [result.version for result in bench.sink.publications] == [0, *due]
        assert [row["publications"] for row in rows] == [1 + sum(v <= step + 1 for v in due) for step in range(8)]
        used = [sample.group for batch in bench.trainer.batches for sample in batch.samples]
        assert len(used) == 32 and len(set(used)) == 16
        assert [batch.step for batch in bench.trainer.batches] == list(range(8))

    for seed in range(40):
        one(seed)


@virtual
async def test_r122_times_are_booked_to_the_step_that_caused_them() -> None:
    """R122: a publication that is longer than the next step: the wait is in its own row, and rows add up to the run."""
    bench = bench_of(config_of(5), train_s=1.0, export_s=0.1, pause_s=1.5)
    async with bench.loop() as loop:
        await loop.begin()
        started = anyio.current_time()
        await steps_of(loop, 5)
        took = anyio.current_time() - started
    rows = [row for _, row in bench.sink.steps]
    assert [row["publish_s"] for row in rows] == pytest.approx([0.6, 0.6, 0.6, 0.6, 1.6])
    assert [row["step_s"] for row in rows] == pytest.approx([1.6, 1.6, 1.6, 1.6, 2.6])
    assert sum(row["step_s"] for row in rows) == pytest.approx(took)
    assert [row["train_wait_s"] for row in rows] == pytest.approx([0.0] * 5)
    assert all(row["samples_s"] == pytest.approx(4 / row["step_s"]) for row in rows)
    assert sum(row["engine_idle_s"] for row in rows) <= took + 0.1
    assert [row["weight_version"] for row in rows] == [1, 2, 3, 4, 5]


@virtual
async def test_a_short_publication_costs_training_its_export() -> None:
    """The parts are in the row as they were; what training was held up for is the export alone."""
    bench = bench_of(config_of(4), train_s=1.0, export_s=0.02, pause_s=0.5)
    await bench.run()
    for _, row in bench.sink.steps[:3]:
        assert row["publish_s"] == pytest.approx(0.02)
        assert row["publish_export_s"] == pytest.approx(0.02)
        assert row["pause_ms"] == pytest.approx(500.0)
        assert row["step_s"] == pytest.approx(1.02)


@pytest.mark.parametrize(("staleness", "waits"), [(1, [0.0] * 4), (2, [0.0, 0.7, 1.4, 1.4])])
def test_waiting_for_requests_in_flight_is_waiting_for_samples(staleness: int, waits: list[float]) -> None:
    """Generation of 2.5 s, steps of 1 s, draining: what is left of it when the step is over is booked as such."""
    bench = bench_of(config_of(6, staleness=staleness), train_s=1.0, export_s=0.1, pause_s=0.3)

    async def reply(_ids: Sequence[int], params: Any) -> tuple[Completion, ...]:
        await anyio.sleep(2.5)
        return tuple(completion(2, version=int(bench.server.version)) for _ in range(params.n))

    bench.server.reply = reply

    @virtual
    async def run() -> None:
        await bench.run()

    run()
    rows = [row for _, row in bench.sink.steps]
    assert [row["publish_drain_wait_s"] for row in rows[:4]] == pytest.approx(waits)
    assert rows[3]["step_s"] == pytest.approx(2.8)  # where engines are the slower half: generation and pause
    for row in rows:
        parts = row["train_wait_s"] + row["publish_s"] + 1.0
        assert row["step_s"] == pytest.approx(parts)


@virtual
async def test_a_step_is_handed_out_before_its_publication_is_over() -> None:
    """Its metrics then have no times of it yet and get them later; the state isn't known in between."""
    bench = bench_of(config_of(4))
    async with bench.loop() as loop:
        await loop.begin()
        step = await loop.one_step()
        assert step is not None and (step.publication, bench.sink.steps) == (None, [])
        known, measures = set(step.metrics), step.metrics["step_s"]
        assert math.isnan(step.metrics["pause_ms"]) and measures == pytest.approx(1.1)
        with pytest.raises(LocalProtocolError, match="beside training"):
            loop.state()
        await loop.settle()
        assert step.metrics["pause_ms"] == pytest.approx(300.0)
        assert set(step.metrics) == known and not any(map(math.isnan, step.metrics.values()))
        assert loop.state()["rollout"]["ledger"]["finished"] == 1
        assert loop.latest == step.metrics == bench.sink.steps[0][1]
        again = await loop.publish(0)
        assert again is not None and again.version == 1
        assert await loop.one_step() is not None
        assert await loop.publish(1) is not None  # which first waits for the one beside training
    assert [result.version for result in bench.sink.publications] == [0, 1, 1, 2, 2]


@pytest.mark.parametrize("interval", [1, 2])
def test_c28_checkpoints_are_those_of_a_run_that_waits(interval: int) -> None:
    """C28, R115: the states agree with those of blocking publications; a resume from each trains each prompt once."""
    trained: dict[bool, list[int]] = {}
    states: dict[bool, dict[int, dict[str, Any]]] = {}

    def config(blocking: bool) -> Config:
        publication = {"blocking": blocking, "staged": not blocking}
        return config_of(9, interval=interval, publication=publication, checkpoint={"save_interval": 3})

    @virtual
    async def whole(blocking: bool) -> None:
        bench = bench_of(config(blocking))
        await bench.run()
        trained[blocking] = sorted({sample.group for batch in bench.trainer.batches for sample in batch.samples})
        states[blocking] = bench.store.states

    @virtual
    async def resumed(completed: int) -> None:
        bench = bench_of(config(False))
        await bench.run(states[False][completed])
        assert [step for step, _ in bench.sink.steps] == list(range(completed, 9))
        used = {sample.group for batch in bench.trainer.batches for sample in batch.samples}
        assert used == set(range(2 * completed, 18))

    whole(True)
    whole(False)
    assert trained[True] == trained[False] == list(range(18))
    assert states[True].keys() == states[False].keys() == {3, 6, 9}
    for completed, state in states[False].items():
        same = ("step", "version", "publications", "samples_trained", "evaluation_pending")
        assert {name: state[name] for name in same} == {name: states[True][completed][name] for name in same}
        assert state["rollout"]["ledger"]["finished"] == completed
        resumed(completed)


@virtual
async def test_r51_r55_evaluations_compare_with_the_weights_that_were_published() -> None:
    """R51, R55, U9: every second step: published, compared, and only then the next step; filed under its version."""
    bench = bench_of(config_of(6, eval={**EVAL, "eval_interval": 2, "logprob_check_samples": 1}))
    loop = await bench.run()
    assert [(result.step, result.version) for result in loop.evaluations] == [(s, s) for s in (0, 2, 4, 6)]
    assert all(result.logprob_gap_max is not None for result in loop.evaluations)
    for completed in (2, 4):
        compared = [i for i, entry in enumerate(bench.log) if entry == "compare"][completed // 2]
        assert place(bench.log, f"trained {completed - 1}") < compared < place(bench.log, f"train {completed}")
    assert place(bench.log, "train 1") < place(bench.log, "commit 1")  # the others go on beside training


@virtual
async def test_an_evaluation_that_is_asked_for_waits_for_the_publication() -> None:
    """`evaluate` between two steps is of the weights of the last one."""
    bench = bench_of(config_of(4, eval={**EVAL, "eval_interval": 4, "skip_eval_before_train": True}))
    async with bench.loop() as loop:
        await loop.begin()
        await steps_of(loop, 1)
        assert bench.server.version == "0"
        result = await loop.evaluate()
    assert result is not None and (result.step, result.version) == (1, 1)


@virtual
async def test_c21_data_that_ends_during_a_publication() -> None:
    """C21: five prompts for four steps of two, engines one step ahead: all published, saved, each row once."""
    bench = bench_of(config_of(4, algorithm=TIS))
    draw = bench.source.draw
    bench.source.draw = lambda: None if bench.source.next == 5 else draw()  # type: ignore[method-assign, assignment, return-value]
    loop = await bench.run()
    assert [len(batch.samples) for batch in bench.trainer.batches] == [4, 4, 2]
    assert [result.version for result in bench.sink.publications] == [0, 1, 2, 3]
    assert (loop.step, list(bench.store.states)) == (3, [3])
    assert [step for step, _ in bench.sink.steps] == [0, 1, 2]


@virtual
async def test_an_adaptive_interval_counts_what_held_training_up() -> None:
    """A publication of 0.8 s whose export takes 0.02 s of a step of 1 s: below 3 %, so that K stays 1."""
    config = config_of(8, publication={"update_weights_interval": "auto", "k_max": 2})
    bench = bench_of(config, train_s=1.0, export_s=0.02, pause_s=0.8)
    await bench.run()
    assert [result.version for result in bench.sink.publications] == list(range(9))
    costly = bench_of(config, train_s=1.0, export_s=0.2, pause_s=0.1)
    await costly.run()
    assert len(costly.sink.publications) < 9
