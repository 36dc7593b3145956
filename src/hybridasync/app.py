"""The composition root: builds the parts, wires them, owns every task.

    prompts ─▶ rollout ─▶ batch ─▶ training loop ─▶ publication ─▶ engines ─▶ rollout …

| loop             | consumes         | produces              | waits for       | unblocked by   | on failure          |
|------------------|------------------|-----------------------|-----------------|----------------|---------------------|
| rollout.run      | prompts, slots   | groups in flight      | a free slot     | finish(step)   | ends the run        |
| rollout._produce | one prompt       | one group             | verified engine | re-admission   | retried, dropped    |
| training loop    | a batch          | weights, metrics      | a full batch    | complete group | ends the run        |
| publisher        | a weight version | verified engines      | engines         | their answers  | compensates         |
| evaluation       | held-out prompts | accuracy of a version | verified engine | re-admission   | logged, never fatal |
| health           | sidecars' status | quarantined engine    | its interval    | the clock      | ends if too few     |
| recovery         | quarantines      | verified engine       | a quarantine    | health, swaps  | tries again, in time|
| trainer.watch    | lifelines        | nothing               | a lost worker   | its death      | ends the run        |

Two task groups: the outer one holds processes and connections, the inner one the work. When the work ends, in whatever
way, it is unwound completely, owed resumes included, before any process or connection goes away.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Generic, Self, TypeVar
from uuid import uuid4

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from hybridasync.config.findings import say_changes
from hybridasync.config.load import load
from hybridasync.config.models import Config
from hybridasync.config.pipeline import resolve, schedule_of
from hybridasync.data.warm_start import warm_start_batches
from hybridasync.drivers.checkpointing import Checkpointing
from hybridasync.drivers.evaluation import Evaluation, EvaluationParts
from hybridasync.drivers.fleet import Engine, Fleet
from hybridasync.drivers.generation import Limits
from hybridasync.drivers.health import Health
from hybridasync.drivers.publish import Publisher, PublishParts
from hybridasync.drivers.recovery import Recovery
from hybridasync.drivers.rollout import Rollout, RolloutParts
from hybridasync.drivers.training import LoopParts, Step, TrainingLoop
from hybridasync.drivers.transfer import Transfer
from hybridasync.drivers.warmstart import warm_start
from hybridasync.errors import LocalProtocolError, leading_cause
from hybridasync.observability.heap import settled_heap
from hybridasync.observability.progress import make_progress
from hybridasync.observability.resources import ResourceGauge
from hybridasync.observability.sinks import RunSinks
from hybridasync.protocol.debts import Debts
from hybridasync.protocol.ledger import RolloutLedger
from hybridasync.runtime import lock
from hybridasync.runtime.controller import connect
from hybridasync.runtime.engines import running_engines
from hybridasync.runtime.inputs import Inputs, read_inputs
from hybridasync.runtime.resume_rollout import settle_debts
from hybridasync.runtime.transfer import transfer_to_engines
from hybridasync.transport.checkpoints import CheckpointFolders, remove_unfinished
from hybridasync.transport.journal import JournalFile
from hybridasync.transport.rpc import RpcTrainer
from hybridasync.transport.weights import SnapshotFolder
from hybridasync.types import EvalResult, PublicationResult, TrainerInfo


@dataclass(slots=True)
class _Assembly:
    """What a started run consists of."""

    inputs: Inputs
    trainer: RpcTrainer
    info: TrainerInfo
    store: CheckpointFolders
    snapshots: SnapshotFolder
    transfer: Transfer
    loop: TrainingLoop | None = None  # None with run.debug_train_only


class Run:
    """A run as an async context manager and iterator over its steps.

        async with Run("quickstart", run_dir="runs/mine") as run:
            async for step in run:
                print(step.step, step.metrics["reward_mean"])

    `config` is a Config, or a recipe's name or path. Entering starts workers and engines and publishes the initial
    weights; leaving, in whatever way, resumes every engine and ends every process that was started. Inside torchrun
    only rank 0 may enter; `hybridasync.launch` sees to that, and to signals.

    Raises ConfigError for mistakes in the recipe or its files, OperatingError's kinds for what fails in operation,
    CompensationFailed when an engine could not be resumed.
    """

    def __init__(self, config: Config | str, *, run_dir: str | Path | None = None, resume: bool = False) -> None:
        written = load(config) if isinstance(config, str) else config
        resolved = resolve(written)
        self.config, self._changes = resolved.config, resolved.changes
        self.run_dir = Path(run_dir or self.config.run.dir or f"runs/run-{uuid4().hex[:8]}")
        self._resume = resume
        self._stack = AsyncExitStack()
        self._assembly: _Assembly | None = None

    async def __aenter__(self) -> Self:
        try:
            self._assembly = await self._stack.enter_async_context(self._running())
        except BaseExceptionGroup as group:
            raise leading_cause(group) from None
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        try:
            return await self._stack.__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            raise leading_cause(group) from None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Step:
        loop = self._started.loop
        step = await loop.one_step() if loop else None
        if step is None:
            raise StopAsyncIteration
        known = {name: value for name, value in step.metrics.items() if not math.isnan(value)}
        self.progress.advance({**self._loop.latest, **known})  # of a publication that goes on: the one before it
        return step

    @property
    def step(self) -> int:
        """Completed steps."""
        return self._loop.step

    @property
    def num_rollout(self) -> int:
        """Steps of the whole run."""
        return self._started.inputs.sizing.num_rollout

    @property
    def evaluations(self) -> list[EvalResult]:
        return list(self._loop.evaluations)

    async def publish(self) -> PublicationResult | None:
        """Publish the trainer's weights now; None where no engine took them and the run goes on with the old ones."""
        return await self._loop.publish(self.step - 1 if self.step else None)

    async def evaluate(self) -> EvalResult | None:
        """Evaluate the published weights now; None where it failed, which is logged."""
        return await self._loop.evaluate()

    async def export_hf(self, path: str | Path) -> None:
        """Write the current policy as a directory that `transformers` loads."""
        await self._started.trainer.export_hf(str(path))

    @property
    def _started(self) -> _Assembly:
        if self._assembly is None:
            raise LocalProtocolError("the run isn't entered: use `async with Run(...) as run`")
        return self._assembly

    @property
    def _loop(self) -> TrainingLoop:
        if self._started.loop is None:
            raise LocalProtocolError("the run has no engines: run.debug_train_only is set")
        return self._started.loop

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[_Assembly]:
        with lock.hold(self.run_dir), self._observed():
            self.progress.phase("start", waiting_for="model and data")
            say_changes(self._changes, self.sink.event)
            for report in await settle_debts(self.config, self.run_dir):
                self.sink.event("debts_settled", engine=report.engine, transactions=report.settled)
            inputs = await anyio.to_thread.run_sync(read_inputs, self.config, self.run_dir)
            for line in inputs.notes:
                self.sink.event("inputs", text=line)
            engines = _Held[list[Engine]]()
            with inputs.snapshot_folder(self.run_dir) as snapshots:
                async with anyio.create_task_group() as processes:
                    if not self.config.run.debug_train_only:
                        processes.start_soon(engines.hold, running_engines(inputs.config, self.run_dir))
                    try:
                        async with (
                            connect(inputs.config, self.run_dir) as trainer,
                            transfer_to_engines(inputs.config, self.run_dir, trainer, sink=self.sink) as transfer,
                            self._at_work(
                                inputs, trainer, engines=engines, snapshots=snapshots, transfer=transfer
                            ) as assembly,
                        ):
                            yield assembly
                    finally:
                        engines.let_go()

    @asynccontextmanager
    async def _at_work(
        self,
        inputs: Inputs,
        trainer: RpcTrainer,
        *,
        engines: _Held[list[Engine]],
        snapshots: SnapshotFolder,
        transfer: Transfer,
    ) -> AsyncIterator[_Assembly]:
        async with anyio.create_task_group() as work:
            work.start_soon(trainer.watch)
            self.progress.waiting_for("workers to build the model")
            info = await trainer.setup()
            self.sink.event("trainer_ready", parameters=info.parameters, device=info.device, pids=dict(info.pids))
            store = CheckpointFolders(self.run_dir / "checkpoints", keep=self.config.checkpoint.keep)
            found = (store.latest() if self._resume else None) or inputs.start.resumes
            if self._resume and found is None:
                self.sink.event("resumed_anew", level="warning", cause="the run hasn't saved a checkpoint yet")
            if found is None:
                await self._warm_start(inputs, trainer)
            assembly = _Assembly(inputs, trainer, info, store, snapshots, transfer)
            if not self.config.run.debug_train_only:
                self.progress.waiting_for("engines to come up")
                apart = self.config.eval.eval_engines
                fleet = Fleet(await engines.get(), for_evaluation=0 if apart == "shared" else apart)
                await trainer.start_phase("rl", inputs.sizing.num_rollout)
                assembly.loop = self._build_loop(assembly, fleet, work)
                if found is None and (first := self.config.rollout.start_rollout_id):
                    assembly.loop.start_at(first)
                if found is not None:
                    assembly.loop.restore(await Checkpointing(store, trainer).restore(found))
                    self.sink.event("resumed", checkpoint=str(found), step=assembly.loop.step)
                self.sink.begin_at(assembly.loop.step)  # also where a killed run had recorded steps but no checkpoint
                if assembly.loop.step >= inputs.sizing.num_rollout:
                    cause = f"{assembly.loop.step} steps are done and the run has {inputs.sizing.num_rollout}"
                    self.sink.event("nothing_to_do", level="warning", cause=cause)
                self.progress.waiting_for("the initial publication")
                await assembly.loop.begin()
                self.progress.phase("train", inputs.sizing.num_rollout, completed=assembly.loop.step)
            with settled_heap():
                yield assembly
            if assembly.loop is not None:
                await assembly.loop.settle()
            work.cancel_scope.cancel()
        await inputs.reward.aclose()

    async def _warm_start(self, inputs: Inputs, trainer: RpcTrainer) -> None:
        if inputs.warm_start is not None:
            section = inputs.config.warm_start
            batches = warm_start_batches(
                inputs.warm_start, steps=section.steps, batch_size=section.batch_size, seed=self.config.seed
            )
            alone = self.config.run.debug_train_only
            await warm_start(trainer, batches, section.steps, display=self.progress, sink=self.sink, rows=alone)

    def _build_loop(self, assembly: _Assembly, fleet: Fleet, work: TaskGroup) -> TrainingLoop:
        inputs, trainer, config = assembly.inputs, assembly.trainer, assembly.inputs.config
        limits = Limits(config.rollout.max_response_tokens, inputs.context_length)
        ledger = RolloutLedger(
            batch_size=config.rollout.rollout_batch_size,
            max_staleness=config.rollout.max_staleness,
            num_rollout=inputs.sizing.num_rollout,
            max_gen_batches=config.algorithm.max_gen_batches,
        )
        rollout = Rollout(
            config, ledger, RolloutParts(fleet, inputs.source(), inputs.reward, inputs.tokenizer, self.sink, limits)
        )
        publisher = Publisher(
            config.publication,
            PublishParts(
                fleet,
                trainer,
                assembly.transfer,
                journal=JournalFile(self.run_dir / "journal.jsonl"),
                debts=Debts(),
                sink=self.sink,
            ),
            session=uuid4().hex,
            mode=config.publication.pause_mode or "retract",
        )
        evaluation = None
        if inputs.eval_prompts:
            parts = EvaluationParts(
                fleet, trainer, inputs.reward, inputs.tokenizer, self.sink, limits, inputs.eval_prompts
            )
            evaluation = Evaluation(config, parts)
        schedule = schedule_of(
            config, num_rollout=inputs.sizing.num_rollout, steps_per_epoch=inputs.sizing.steps_per_epoch
        )
        loop_parts = LoopParts(
            rollout,
            fleet,
            trainer,
            publisher,
            evaluation,
            Checkpointing(assembly.store, trainer),
            self.sink,
            assembly.snapshots,
            _resources(assembly.info, fleet),
        )
        work.start_soon(Health(config.engine, fleet, self.sink).run)
        work.start_soon(Recovery(config.engine, fleet, publisher, sink=self.sink).run)
        return TrainingLoop(config, schedule, loop_parts, background=work)

    @contextmanager
    def _observed(self) -> Iterator[None]:
        for folder in ("logs", "checkpoints"):
            (self.run_dir / folder).mkdir(parents=True, exist_ok=True)
        self.progress = make_progress(self.config.observability.progress)
        self.sink = RunSinks(self.run_dir, self.config, echo=self.progress.note)
        try:
            yield
        finally:
            remove_unfinished(self.run_dir / "checkpoints")
            self.progress.close()
            self.sink.close()


T = TypeVar("T")


class _Held(Generic[T]):
    """A value that a task of its own brings up, and holds until it is let go."""

    def __init__(self) -> None:
        self._ready = anyio.Event()
        self._released = anyio.Event()
        self._values: list[T] = []

    async def get(self) -> T:
        await self._ready.wait()
        return self._values[0]

    def let_go(self) -> None:
        self._released.set()

    async def hold(self, manager: AbstractAsyncContextManager[T]) -> None:
        async with manager as value:
            self._values.append(value)
            self._ready.set()
            # Shielded: a cancellation reaches the work first, which still needs the engines to resume them.
            with anyio.CancelScope(shield=True):
                await self._released.wait()


def _resources(info: TrainerInfo, fleet: Fleet) -> Callable[[], Mapping[str, float]]:
    gauge = ResourceGauge()
    trainer = list(info.pids.values())

    def sample() -> Mapping[str, float]:
        rollout = [engine.pid for engine in fleet.engines if engine.pid is not None]
        return gauge.sample(trainer=trainer, rollout=rollout)

    return sample
