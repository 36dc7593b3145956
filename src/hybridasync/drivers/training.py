"""The training loop: batch → train step → publish → evaluate → checkpoint, one step at a time.

It is the only owner of the step number. What is due after a step is decided in `schedule.py` and nowhere else.

Where engines run ahead, a publication goes on beside the next step: training waits for the export alone. One at a time,
and its step's places in the rollout become free only when engines serve it, so that all bounds count as without that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import anyio
from anyio.abc import TaskGroup

from hybridasync.algorithms.assembly import advantages_of, to_train_samples
from hybridasync.algorithms.filters import has_signal
from hybridasync.config.models import Config
from hybridasync.config.publishing import goes_on_beside_training
from hybridasync.drivers.checkpointing import Checkpointing
from hybridasync.drivers.evaluation import Evaluation
from hybridasync.drivers.fleet import Fleet
from hybridasync.drivers.klpenalty import kl_metrics, with_kl
from hybridasync.drivers.publish import Publisher
from hybridasync.drivers.rollout import Rollout
from hybridasync.drivers.stepmetrics import StepRow, Stopwatch, batch_metrics
from hybridasync.errors import CheckpointError, LocalProtocolError, PromptsUsedUp, PublicationFailed, leading_cause
from hybridasync.ports import MetricSink, SnapshotFolder, Trainer
from hybridasync.protocol.pace import Pace
from hybridasync.schedule import Schedule
from hybridasync.types import EvalResult, Group, PublicationResult, TrainBatch

EVAL_WAIT_S = 1800.0
"""R52: the longest wait for a previous evaluation; after it, warn and go on."""


@dataclass(frozen=True, slots=True)
class LoopParts:
    """What the loop works with; all of it is owned by `app.py`."""

    rollout: Rollout
    fleet: Fleet
    trainer: Trainer
    publisher: Publisher
    evaluation: Evaluation | None
    checkpointing: Checkpointing
    sink: MetricSink
    snapshots: SnapshotFolder
    resources: Callable[[], Mapping[str, float]]  # memory and processor use of the run's processes


@dataclass(frozen=True, slots=True)
class Step:
    """What one step did, for whoever drives the run.

    Where its publication goes on beside the next step, `publication` is None, and its times in `metrics` are NaN until
    they are known.
    """

    step: int
    metrics: Mapping[str, float]
    publication: PublicationResult | None
    saved: str | None


class TrainingLoop:
    """`one_step` until it returns None. `background` is the run's task group: evaluations go on there."""

    def __init__(self, config: Config, schedule: Schedule, parts: LoopParts, *, background: TaskGroup) -> None:
        self._config = config
        self._schedule = schedule
        self._parts = parts
        self._background = background
        self._evaluated = anyio.Event()
        self._evaluated.set()
        self._compared = anyio.Event()  # an evaluation has no more need of the trainer's present weights
        self._compared.set()
        self._beside: StepRow | None = None  # the row of the last publication beside training
        self._owes_evaluation = False
        self._ended = False  # before the last step, because the data is
        self._published = -1  # version that engines serve
        self._saved = -1  # completed steps of the last checkpoint
        self._saving_s = 0.0  # of the checkpoint after the previous step, which the next row reports
        self.step = 0  # the next one
        self.version = 0
        self.publications = 0
        self.samples_trained = 0
        self.evaluations: list[EvalResult] = []
        self.latest: Mapping[str, float] = {}  # the last row that is complete
        publication = config.publication
        self._overlaps = goes_on_beside_training(config)
        self._pace: Pace | None = None  # the interval is fixed
        if publication.update_weights_interval == "auto":
            self._pace = Pace(publication.k_min, publication.k_max)

    async def begin(self) -> None:
        """The initial publication (R13), the evaluation before training where configured (R50), then the rollout."""
        await self.publish(None)
        first = self.step == 0 and not self._config.eval.skip_eval_before_train
        if self._parts.evaluation and (first or self._owes_evaluation):
            await self.evaluate()
        self._background.start_soon(self._parts.rollout.run)

    async def one_step(self) -> Step | None:
        """None once all steps are done, with the last evaluation and checkpoint finished."""
        if self._ended or self.step >= self._schedule.num_rollout:
            await self._evaluation_over()
            return None
        step, row = self.step, StepRow(self.step, saving_s=self._saving_s)
        try:
            groups = await self._parts.rollout.take(step)
        except PromptsUsedUp as error:
            await self.settle()
            if not self.samples_trained:
                raise
            await self._end_early(str(error))
            return None
        row.metrics["train_wait_s"] = row.time.seconds - self._saving_s
        self._saving_s = 0.0
        row.metrics |= await self._train(step, groups)
        if self._pace is not None:
            self._pace.worked(row.time.seconds - row.saving_s)
        self.step = self.version = step + 1
        await self.settle(row)
        row.metrics |= {"weight_version": float(self.version), "in_flight": float(self._parts.fleet.in_flight)}
        publication = await self._after(step, row)
        # After its row: a run that is killed in between and resumed there would lack the row for ever.
        saved = await self._save() if self._schedule.save_due(step) else None
        return Step(step, row.metrics, publication, saved)

    async def publish(
        self, step: int | None, *, evaluating: bool = False, held: Stopwatch | None = None
    ) -> PublicationResult | None:
        """Publish the trainer's weights now. None: no engine took them, and training goes on (R63, R66).

        `evaluating`: evaluation requests are sent before the engines sample again (R51, U9). `held` gets the time that
        it takes.
        """
        await self.settle()
        await self._evaluation_over()
        then = self._start_evaluation if evaluating else None
        held = held or Stopwatch()
        held.start()
        try:
            return await self._publish(self.version, step, held=held, before_sampling=then)
        finally:
            held.stop()

    async def _publish(
        self,
        version: int,
        step: int | None,
        *,
        held: Stopwatch,
        then: Callable[[PublicationResult | None], None] | None = None,
        **moments: Callable[[], Any] | None,
    ) -> PublicationResult | None:
        """`held` measures how long training is held up; `then` is called once it is known how it goes on from here."""
        path, cost_s = self._parts.snapshots.path(version), None

        def outcome(result: PublicationResult | None) -> None:
            if result is not None:
                self._published = version
                self.publications += 1
            if then is not None and (result is not None or self._goes_on_without()):
                then(result)

        try:
            result = await self._parts.publisher.publish(version, path, step=step, outcome=outcome, **moments)
            cost_s = None if step is None else held.seconds
        except PublicationFailed as error:
            if not self._goes_on_without():
                raise
            self._parts.sink.event("publication_skipped", level="warning", version=version, cause=str(error))
            return None
        finally:
            self._parts.snapshots.drop_all_but(newest=2)
            self._choose_interval(version, cost_s)
        return result

    def _goes_on_without(self) -> bool:
        """Whether training goes on after a publication that no engine took (R66, R109)."""
        return bool(self._parts.fleet.verified) or (self._config.engine.use_fault_tolerance and self.publications > 0)

    async def evaluate(self) -> EvalResult | None:
        """Evaluate now, and wait for the result."""
        if self._parts.evaluation is None:
            raise LocalProtocolError("evaluation isn't configured: set eval.eval_prompt_data")
        await self.settle()
        try:
            result = await self._parts.evaluation.run(self.step)
        except BaseExceptionGroup as group:
            raise leading_cause(group) from None
        if result is not None:
            self.evaluations.append(result)
        return result

    def state(self) -> dict[str, Any]:
        if self._beside and not self._beside.over.is_set():
            raise LocalProtocolError("a publication goes on beside training: what it comes to isn't known yet")
        return {
            "step": self.step,
            "num_rollout": self._schedule.num_rollout,
            "version": self.version,
            "publications": self.publications,
            "samples_trained": self.samples_trained,
            "evaluation_pending": not self._evaluated.is_set(),
            "rollout": self._parts.rollout.state(),
        } | ({"pace": self._pace.state()} if self._pace else {})

    def start_at(self, step: int) -> None:
        """Begin at a step other than 0, without a checkpoint: versions count on from it, so that they never go back."""
        self.step = self.version = step
        self._parts.rollout.start_at(step)

    def restore(self, state: Mapping[str, Any]) -> None:
        self.step = self._saved = int(state["step"])
        self.version = int(state["version"])
        self.publications = int(state["publications"])
        self.samples_trained = int(state["samples_trained"])
        self._owes_evaluation = bool(state.get("evaluation_pending"))  # it was cut off: these weights again
        self._parts.rollout.restore(state["rollout"])
        if self._pace is not None and "pace" in state:
            self._pace.restore(state["pace"])

    def _publish_due(self, step: int) -> bool:
        if self._pace is None:
            return self._schedule.publish_due(step)
        return self._schedule.publish_due(step, interval=self._pace.interval, published=self._pace.published)

    def _choose_interval(self, completed: int, cost_s: float | None) -> None:
        """`cost_s`: what a publication held training up for; None: it failed, or was the first one of a process."""
        if self._pace is not None and (choice := self._pace.tried(completed, cost_s)):
            self._parts.sink.event("interval_chosen", interval=choice.interval, reason=choice.reason, step=completed)

    async def _train(self, step: int, groups: tuple[Group, ...]) -> dict[str, float]:
        algorithm = self._config.algorithm
        if algorithm.kl_coef:
            groups = await with_kl(groups, self._parts.trainer, self._config)
        trained = groups
        if algorithm.filter_zero_variance and not algorithm.refill:
            trained = tuple(group for group in groups if has_signal(group, self._config))
        batch = TrainBatch(step, "policy", to_train_samples(trained, self._config))
        await self._compared.wait()
        started = anyio.current_time()
        result = await self._parts.trainer.train_step(batch)
        self.samples_trained += len(batch.samples)
        advantages = zip(trained, advantages_of(trained, self._config), strict=True)
        self._parts.sink.samples(step, trained, {group.prompt.uid: values for group, values in advantages})
        metrics = batch_metrics(step, groups, trained)
        counts = self._parts.rollout.counts
        metrics |= {
            "groups_filtered": float(counts["groups_filtered"] + len(groups) - len(trained)),
            "groups_dropped": float(counts["groups_dropped"]),
            "framework_s": anyio.current_time() - started,
            "samples_trained": float(self.samples_trained),
        }
        counts.clear()
        return metrics | dict(result.metrics) | (kl_metrics(groups, algorithm.kl_coef) if algorithm.kl_coef else {})

    async def _after(self, step: int, row: StepRow) -> PublicationResult | None:
        """Publication and evaluation of a finished step; then its slots are free, and its row is complete.

        A step without a publication touches nothing on the rollout side (R11): pausing without the matching end would
        leave the engines standing.
        """
        publication = None
        evaluating = self._parts.evaluation is not None and self._schedule.eval_due(step)
        if self._publish_due(step):
            # An evaluation compares with the trainer's weights; a checkpoint says what is published.
            if self._overlaps and not evaluating and not self._schedule.save_due(step):
                await self._publish_beside(row)
                return None
            publication = await self.publish(step, evaluating=evaluating, held=row.held)
        elif self._config.publication.clear_cache_on_skipped_steps:
            await self._parts.trainer.clear_cache()
        if evaluating and publication is None and self._serving(step):
            await self._start_evaluation()  # of the older weights that serve, and filed under them (U13)
        self._parts.rollout.finish(step)
        self._complete(row, publication)
        return publication

    async def _publish_beside(self, row: StepRow) -> None:
        """Returns once the weights are exported; errors from then on end the run's task group."""
        await self._evaluation_over()
        self._beside = row
        row.held.start()
        try:
            await self._background.start(self._publish_in_background, row)
        except BaseException:  # the weights weren't exported, and nothing goes on
            row.over.set()
            raise

    async def _publish_in_background(self, row: StepRow, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        def exported() -> None:
            row.metrics |= self._figures(use=True)
            row.let_go()
            task_status.started()

        def then(publication: PublicationResult | None) -> None:
            row.served()
            self._parts.rollout.finish(row.step)
            self._complete(row, publication)

        try:
            result = await self._publish(row.step + 1, row.step, held=row.held, then=then, exported=exported)
            if not row.completed.is_set():  # an engine came back only after the outcome was known
                then(result)
        except BaseException:
            if not row.completed.is_set():
                self._complete(row, None)
            raise
        # Not in a `finally`: after an error training must not go on until the task group is cancelled.
        row.over.set()

    async def settle(self, own: StepRow | None = None) -> None:
        """Wait for the publication beside training. The wait counts for its step, not for the `own` one (R122)."""
        row = self._beside
        if row is None or row.over.is_set():
            return
        if not row.completed.is_set():
            if own is not None:
                own.time.stop()
            row.hold_up()
            await row.completed.wait()
            if own is not None:
                own.time.start()
        await row.over.wait()

    def _complete(self, row: StepRow, publication: PublicationResult | None) -> None:
        """All of a step is known, its publication included."""
        row.metrics |= self._figures(use="engine_idle_s" not in row.metrics)
        row.complete(publication)
        self._parts.sink.step(row.step, row.metrics)
        self.latest = row.metrics

    def _figures(self, *, use: bool) -> dict[str, float]:
        """`use`: that of the machine as well, which counts from the last time it was asked for."""
        interval = self._pace.interval if self._pace else self._schedule.update_weights_interval
        figures = {"publications": float(self.publications), "publish_interval": float(interval)}
        if use:
            figures |= {"engine_idle_s": self._parts.fleet.take_idle_s(), **self._parts.resources()}
        return figures

    async def _end_early(self, cause: str) -> None:
        """The data ended before the last step: what was trained is published, evaluated and saved all the same."""
        self._ended, last = True, self.step - 1
        self._parts.sink.event("prompts_used_up", level="warning", completed=self.step, cause=cause)
        evaluating = self._parts.evaluation is not None and self._config.eval.eval_at_end
        evaluating = evaluating and not self._schedule.eval_due(last)
        if evaluating or self._published != self.version:
            await self.publish(last, evaluating=evaluating)
        if self._saved != self.step:
            await self._save()
        await self._evaluation_over()

    async def _save(self) -> str | None:
        started = anyio.current_time()
        self._parts.sink.sync()
        try:
            path = await self._parts.checkpointing.save(self.step, self.state())
            self._saved = self.step
            return path
        except CheckpointError as error:
            if self._config.checkpoint.on_save_error == "stop":
                raise
            self._parts.sink.event("checkpoint_failed", level="warning", completed=self.step, cause=str(error))
            return None
        finally:
            self._saving_s = anyio.current_time() - started

    def _serving(self, step: int) -> bool:
        """With every engine away an evaluation would hold up training, which still has queued batches (R109)."""
        if not self._parts.fleet.verified:
            self._parts.sink.event("evaluation_failed", level="warning", completed=step + 1, cause="no engine serves")
        return bool(self._parts.fleet.verified)

    async def _evaluation_over(self) -> None:
        """Wait for the evaluation under way (R52, R54), `EVAL_WAIT_S` at most, or until no engine serves."""
        with anyio.move_on_after(EVAL_WAIT_S) as waiting:
            while not self._evaluated.is_set() and self._parts.fleet.verified:
                await self._parts.fleet.changed.wait()
        if waiting.cancelled_caught:
            cause = f"not over after {EVAL_WAIT_S:g} s; the run goes on"
            self._parts.sink.event("evaluation_overdue", level="warning", completed=self.step, cause=cause)

    async def _start_evaluation(self) -> None:
        self._evaluated, self._compared = anyio.Event(), anyio.Event()
        await self._background.start(self._evaluate_in_background)

    async def _evaluate_in_background(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        evaluation, event, compared = self._parts.evaluation, self._evaluated, self._compared
        if evaluation is None:
            return
        try:
            result = await evaluation.run(self.step, compared=compared, task_status=task_status)
            if result is not None:
                self.evaluations.append(result)
        finally:
            compared.set()
            event.set()
            self._parts.fleet.changed.notify()
