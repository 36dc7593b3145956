"""One life of the controller: the real drivers over adapters of the virtual world."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import anyio

from hybridasync.config.models import Config
from hybridasync.drivers.checkpointing import Checkpointing
from hybridasync.drivers.fleet import Engine, Fleet
from hybridasync.drivers.generation import Limits
from hybridasync.drivers.health import Health
from hybridasync.drivers.publish import Publisher, PublishParts
from hybridasync.drivers.recovery import Recovery
from hybridasync.drivers.resume_rollout import Orders, resume_engines
from hybridasync.drivers.rollout import Rollout, RolloutParts
from hybridasync.drivers.training import LoopParts, TrainingLoop
from hybridasync.drivers.transfer import DiskTransfer
from hybridasync.errors import CompensationFailed, EngineError, OperatingError, WorkerLost
from hybridasync.protocol.debts import INCURRED, Debt, Debts, must_be_durable
from hybridasync.protocol.decisions import Decisions
from hybridasync.protocol.ledger import RolloutLedger
from hybridasync.schedule import Schedule
from hybridasync.sim.engine import checksums_of
from hybridasync.sim.network import Life, Network, SimServer, SimSidecar
from hybridasync.sim.node import SimNode
from hybridasync.sim.record import Record
from hybridasync.types import Completion, Prompt, StepResult, TrainBatch, TrainerInfo, TrainSample, WeightSnapshot

CONTEXT_LENGTH = 64
TRAIN_S = 1.0
EXPORT_S = 0.2


@dataclass(slots=True)
class Disk:
    """What survives a controller: journal, checkpoints, snapshots."""

    journal: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: dict[int, str] = field(default_factory=dict)
    snapshots: list[str] = field(default_factory=list)
    full: bool = False
    was_full: bool = False
    _read: int = 0
    _debts: Debts = field(default_factory=Debts)

    @property
    def owed(self) -> tuple[Debt, ...]:
        """What the journal leaves open; read on from where the last call ended."""
        for record in self.journal[self._read :]:
            if record["event"] == INCURRED:
                self._debts.incur(record["engine"], record["txn"])
            else:
                self._debts.settle(record["engine"], record["txn"], "read")
        self._read = len(self.journal)
        return self._debts.open


class SimJournal:
    """Implements Journal. A full disk refuses debts, and forgets settlements, as the real one does."""

    def __init__(self, disk: Disk, life: Life) -> None:
        self._disk = disk
        self._life = life

    def append(self, record: Mapping[str, Any]) -> None:
        self._life.check()
        if self._disk.full:
            if must_be_durable(record):
                raise OperatingError("journal: no space left on device")
            return
        self._disk.journal.append(dict(record))

    def replay(self) -> list[dict[str, Any]]:
        return list(self._disk.journal)


class SimTrainer:
    """Implements Trainer, as far as the loop uses it. `lose_at` are steps before which a worker dies, once each."""

    def __init__(self, disk: Disk, life: Life, record: Record, *, lose_at: set[int]) -> None:
        self._disk = disk
        self._life = life
        self._record = record
        self._lose_at = lose_at
        self.completed = 0
        self._decisions = Decisions()

    async def setup(self) -> TrainerInfo:
        return TrainerInfo(8, 16, CONTEXT_LENGTH, 1, 1, 1, "sim", {})

    async def start_phase(self, phase: str, total_steps: int) -> None:
        await self._work(0.0)

    async def train_step(self, batch: TrainBatch) -> StepResult:
        if batch.step in self._lose_at:
            self._lose_at.discard(batch.step)
            raise WorkerLost(1, "killed", step=batch.step)
        await self._work(TRAIN_S)
        if batch.step != self.completed:
            self._record.violated(f"step {batch.step} applied to weights of {self.completed} steps")
        self._record.check_batch(batch)
        self.completed = batch.step + 1
        return StepResult(batch.step, True, {"loss": 0.0})

    async def logprobs(self, samples: Sequence[TrainSample]) -> list[list[float]]:
        return [list(sample.rollout_logprobs) for sample in samples]

    async def reference_logprobs(self, samples: Sequence[TrainSample]) -> list[list[float]]:
        return await self.logprobs(samples)

    async def export_published(self, version: int, path: str) -> int:
        return (await self.export_weights(version, path)).bytes

    async def decide(self, epoch: int, *, version: int, commit: bool) -> None:
        await self._work(0.0)
        self._decisions.take(epoch, version, commit=commit)

    async def export_weights(self, version: int, path: str) -> WeightSnapshot:
        await self._work(EXPORT_S)
        if path not in self._disk.snapshots:
            self._disk.snapshots.append(path)
        return WeightSnapshot(version, path, checksums_of(version), 8, EXPORT_S)

    async def save_checkpoint(self, path: str) -> None:
        await self._work(0.1)

    async def load_checkpoint(self, path: str) -> None:
        self.completed = int(Path(path).parent.name)

    async def export_hf(self, path: str) -> None:
        await self._work(0.0)

    async def clear_cache(self) -> None:
        await self._work(0.0)

    async def memory(self) -> Mapping[str, float]:
        return {}

    async def close(self) -> None: ...

    async def _work(self, seconds: float) -> None:
        self._life.check()
        await anyio.sleep(seconds)
        self._life.check()


class SimStore:
    """Implements CheckpointStore and SnapshotFolder."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def begin(self, step: int) -> Path:
        return Path("checkpoints") / str(step)

    def commit(self, step: int, state: Mapping[str, Any]) -> Path:
        self._disk.checkpoints[step] = json.dumps(state)
        return self.begin(step)

    def verified_state(self, path: Path) -> dict[str, Any]:
        return dict(json.loads(self._disk.checkpoints[int(path.name)]))

    def latest(self) -> Path | None:
        return self.begin(max(self._disk.checkpoints)) if self._disk.checkpoints else None

    def path(self, version: int) -> str:
        return f"version-{version:08d}"

    def drop_all_but(self, newest: int) -> None:
        self._disk.snapshots[:] = sorted(self._disk.snapshots)[-newest:]


class SimSource:
    """Implements PromptSource: endless, with an exact position."""

    def __init__(self) -> None:
        self._next = 0
        self._again: list[int] = []

    def draw(self) -> Prompt | None:
        if self._again:
            uid = self._again.pop(0)
        else:
            uid, self._next = self._next, self._next + 1
        return Prompt(uid, uid, 0, "sim", (1, 2), "", "")

    def state(self, unused: Iterable[int] = ()) -> dict[str, Any]:
        return {"next": self._next, "again": sorted({*unused, *self._again})}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._next, self._again = int(state["next"]), list(state["again"])

    def __len__(self) -> int:
        return 1_000_000


class SimReward:
    """Implements RewardFn and Tokenizer."""

    async def __call__(self, prompt: Prompt, texts: Sequence[str], completions: Sequence[Completion]) -> list[float]:
        return [float(index % 2) for index in range(len(texts))]

    def decode(self, ids: Sequence[int]) -> str:
        return ""


@dataclass(slots=True)
class World:
    """What a controller finds when it starts."""

    config: Config
    nodes: list[SimNode]
    network: Network
    disk: Disk
    record: Record
    rng: Random
    lose_at: set[int] = field(default_factory=set)


class Controller:
    """`run` returns once all steps are done. Raises what ended it before; ControllerKilled after `kill`."""

    def __init__(self, world: World, number: int) -> None:
        self._world = world
        self._session = f"{number:032x}"
        self._life = Life()
        self._work = anyio.CancelScope()
        self.finished = False
        self.killed = False

    def owns(self, txn: str) -> bool:
        return txn.split(":")[1] == self._session

    def kill(self) -> None:
        """SIGKILL: none of its code has any effect from here on, `finally` blocks included."""
        self.killed = self._life.dead = True
        self._work.cancel()

    def interrupt(self) -> None:
        """SIGTERM: cancelled, and what is owed is still paid."""
        self._work.cancel()

    async def run(self) -> None:
        try:
            with self._work:
                await self._all_steps()
        finally:
            self._life.dead = True

    async def _all_steps(self) -> None:
        debts = await self._settle_debts()
        fleet = Fleet([await self._reach(node) for node in self._world.nodes])
        async with anyio.create_task_group() as work:
            loop = self._loop(fleet, debts, work)
            await self._restore(loop)
            await loop.begin()
            while await loop.one_step() is not None:
                pass
            work.cancel_scope.cancel()
        self.finished = True

    async def _settle_debts(self) -> Debts:
        """As `settle_debts` at the start of a run."""
        journal = SimJournal(self._world.disk, self._life)
        debts = Debts.replay(journal.replay())
        if debts.open:
            work = [(self._sidecar(n), Orders(self._owed(debts, n.name))) for n in self._world.nodes]
            for report in await resume_engines(work):
                for txn, how in report.settled.items():
                    journal.append(debts.settle(report.engine, txn, how))
            if debts.open:
                raise CompensationFailed(sorted(debts.owed()))
        return debts

    def _owed(self, debts: Debts, engine: str) -> tuple[str, ...]:
        return tuple(debt.txn for debt in debts.open if debt.engine == engine)

    def _sidecar(self, node: SimNode) -> SimSidecar:
        return SimSidecar(node, self._world.network, self._life, self._world.config.publication.rollout_http_timeout)

    async def _reach(self, node: SimNode) -> Engine:
        sidecar = self._sidecar(node)
        rollout = self._world.config.rollout
        server = SimServer(node, self._world.network, self._life, sidecar.timeout_s, rollout.request_timeout_s)
        with anyio.fail_after(self._world.config.engine.rollout_engine_init_timeout):
            while True:
                try:
                    status = await sidecar.status()
                    if status.healthy and status.state != "down":
                        break
                    if status.state == "down" and status.detail:
                        await sidecar.recover(self._world.config.engine.rollout_engine_init_timeout)
                except EngineError as error:
                    self._world.record.note(f"{node.name} isn't there: {error}")
                await anyio.sleep(1.0)
        await server.moved(status.engine_url)
        return Engine(server, sidecar)

    def _loop(self, fleet: Fleet, debts: Debts, work: anyio.abc.TaskGroup) -> TrainingLoop:
        world, config = self._world, self._world.config
        steps = config.rollout.num_rollout or 1
        trainer = SimTrainer(world.disk, self._life, world.record, lose_at=world.lose_at)
        store, reward = SimStore(world.disk), SimReward()
        ledger = RolloutLedger(config.rollout.rollout_batch_size, config.rollout.max_staleness, steps)
        limits = Limits(config.rollout.max_response_tokens, CONTEXT_LENGTH)
        rollout = Rollout(config, ledger, RolloutParts(fleet, SimSource(), reward, reward, world.record, limits))
        journal = SimJournal(world.disk, self._life)
        publisher = Publisher(
            config.publication,
            PublishParts(fleet, trainer, DiskTransfer(trainer), journal=journal, debts=debts, sink=world.record),
            session=self._session,
            mode=config.publication.pause_mode or "retract",
        )
        checkpointing = Checkpointing(store, trainer)
        parts = LoopParts(rollout, fleet, trainer, publisher, None, checkpointing, world.record, store, resources=dict)
        work.start_soon(Health(config.engine, fleet, world.record).run)
        work.start_soon(Recovery(config.engine, fleet, publisher, sink=world.record).run)
        schedule = Schedule(
            num_rollout=steps,
            update_weights_interval=config.publication.longest_interval,
            save_interval=config.checkpoint.save_interval,
            eval_interval=None,
            steps_per_epoch=None,
        )
        self._store, self._checkpointing = store, checkpointing
        return TrainingLoop(config, schedule, parts, background=work)

    async def _restore(self, loop: TrainingLoop) -> None:
        latest = self._store.latest()
        if latest is not None:
            loop.restore(await self._checkpointing.restore(latest))
