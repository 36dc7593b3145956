"""One life of the controller: the real drivers over adapters of the virtual world."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import anyio

from hybridasync.config.models import Config
from hybridasync.drivers.checkpointing import Checkpointing
from hybridasync.drivers.evaluation import Evaluation, EvaluationParts
from hybridasync.drivers.fleet import Engine, Fleet
from hybridasync.drivers.generation import Limits
from hybridasync.drivers.health import Health
from hybridasync.drivers.publish import Publisher, PublishParts
from hybridasync.drivers.recovery import Recovery
from hybridasync.drivers.resume_rollout import Orders, resume_engines
from hybridasync.drivers.rollout import Rollout, RolloutParts
from hybridasync.drivers.staged import transfer_by_disk
from hybridasync.drivers.training import LoopParts, TrainingLoop
from hybridasync.errors import CompensationFailed, EngineError
from hybridasync.protocol.debts import Debts
from hybridasync.protocol.ledger import RolloutLedger
from hybridasync.schedule import Schedule
from hybridasync.sim.adapters import CONTEXT_LENGTH, Disk, SimJournal, SimReward, SimSource, SimStore, SimTrainer
from hybridasync.sim.network import Life, Network, SimServer, SimSidecar
from hybridasync.sim.node import SimNode
from hybridasync.sim.record import Record
from hybridasync.types import Prompt

EVAL_PROMPTS = 2


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
        self.killed = True
        self._life.end()
        self._work.cancel()

    def interrupt(self) -> None:
        """SIGTERM: cancelled, and what is owed is still paid."""
        self._work.cancel()

    async def run(self) -> None:
        try:
            with self._work:
                await self._all_steps()
        finally:
            self._life.end()

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
        trainer = SimTrainer(world.disk, self._life, world.record, lose_at=world.lose_at, rng=world.rng)
        store, reward = SimStore(world.disk), SimReward(world.record)
        ledger = RolloutLedger(config.rollout.rollout_batch_size, config.rollout.max_staleness, steps)
        limits = Limits(config.rollout.max_response_tokens, CONTEXT_LENGTH)
        rollout = Rollout(config, ledger, RolloutParts(fleet, SimSource(), reward, reward, world.record, limits))
        journal = SimJournal(world.disk, self._life)
        transfer = transfer_by_disk(config.publication, trainer, world.record)
        publisher = Publisher(
            config.publication,
            PublishParts(fleet, trainer, transfer, journal=journal, debts=debts, sink=world.record),
            session=self._session,
            mode=config.publication.pause_mode or "retract",
        )
        held_out = tuple(Prompt(-1 - index, 0, 0, "sim", (1, 2), "", "") for index in range(EVAL_PROMPTS))
        evaluation = Evaluation(
            config, EvaluationParts(fleet, trainer, reward, reward, world.record, limits, prompts=held_out)
        )
        checkpointing = Checkpointing(store, trainer)
        parts = LoopParts(
            rollout, fleet, trainer, publisher, evaluation, checkpointing, world.record, store, resources=dict
        )
        work.start_soon(Health(config.engine, fleet, world.record).run)
        work.start_soon(Recovery(config.engine, fleet, publisher, sink=world.record).run)
        schedule = Schedule(
            num_rollout=steps,
            update_weights_interval=config.publication.longest_interval,
            save_interval=config.checkpoint.save_interval,
            eval_interval=config.eval.eval_interval,
            steps_per_epoch=None,
        )
        self._store, self._checkpointing = store, checkpointing
        return TrainingLoop(config, schedule, parts, background=work)

    async def _restore(self, loop: TrainingLoop) -> None:
        latest = self._store.latest()
        if latest is not None:
            loop.restore(await self._checkpointing.restore(latest))
