"""One seeded history of the virtual world: a storm of faults, then fair weather in which everything must come right.

The seed decides all of it: sizes, which kinds of faults occur at all, when, and in which order ready tasks run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

import anyio

from hybridasync.config.models import Config
from hybridasync.errors import EngineError, HybridAsyncError, leaves
from hybridasync.sim.adapters import Disk
from hybridasync.sim.controller import Controller, World
from hybridasync.sim.engine import Speed
from hybridasync.sim.network import FAULTS, ControllerKilled, Fault, Network, Weather
from hybridasync.sim.node import SimNode
from hybridasync.sim.record import Bounds, Record

STORM_S = 45.0

FIRST_EVENT_S = 5.0
"""Engines have just come up."""

FAIR_LIMIT_S = 4000.0
"""Within this the run must have finished. Recovery waits at the longest are minutes."""

RESTART_S = 2.0

OUTAGE_S = 400.0
"""Nobody restarts the run for so long: only leases end its pauses."""

KILL_WAIT_S = 15.0
"""For a publication to be under way."""

FAIR_STARTS = 6
"""Starts of the controller that fair weather may need: one that died in the storm's last moment, and its followers."""

SETTLE_S = 150.0
"""After the end: leases run out, resumes that failed are tried again, late messages arrive."""

SCENARIOS: Mapping[str, tuple[str, ...]] = {
    "network": (),
    "engines": ("kill_engine", "kill_switched", "freeze_engine", "stop_engine", "break_engine", "slow_pause"),
    "updates": ("tear_update", "drop_tensor", "slow_pause"),
    "sidecars": ("kill_sidecar", "partition"),
    "controller": ("kill_controller", "kill_in_publication", "interrupt_controller", "fill_disk"),
    "workers": ("lose_worker",),
}
EVENTS = tuple(dict.fromkeys(event for events in SCENARIOS.values() for event in events))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a seed. `digest` is the same whenever the seed is played."""

    seed: int
    violations: tuple[str, ...]
    trace: tuple[str, ...]
    digest: str
    starts: int
    virtual_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What a seed has in store."""

    config: Config
    stages: tuple[bool, ...]  # by engine: whether it can prepare weights, and switch to them
    chances: Mapping[Fault, float]
    events: tuple[tuple[float, str], ...]  # time, kind
    lose_at: frozenset[int]
    outage_s: float  # until a controller that was killed is started again


def draw_plan(rng: Random, scenario: str | None = None) -> Plan:
    """`scenario` leaves only the faults of that kind."""
    kinds = [kind for kind in (SCENARIOS[scenario] if scenario else EVENTS) if rng.random() < 0.6 or scenario]
    steps = rng.randint(3, 6)
    network = scenario in (None, "network") and rng.random() < 0.8
    chances = {fault: rng.choice((0.0, 0.02, 0.1)) if network else 0.0 for fault in FAULTS}
    happen = [kind for kind in kinds if kind != "lose_worker"]
    # Without other faults a run is over after some 20 s: most of what happens has to happen before that.
    last = rng.choice((14.0, 20.0, STORM_S))
    times = sorted(rng.uniform(FIRST_EVENT_S, last) for _ in range(rng.randint(1, 8))) if happen else []
    lose = rng.sample(range(steps), 1) if "lose_worker" in kinds and rng.random() < 0.5 else []
    return Plan(
        _config(rng, steps),
        stages=_draw_stages(rng),
        chances=chances,
        events=tuple((at, rng.choice(happen)) for at in times),
        lose_at=frozenset(lose),
        outage_s=rng.choice((RESTART_S, RESTART_S, OUTAGE_S)),
    )


def _draw_stages(rng: Random) -> tuple[bool, ...]:
    """Two fifths of the worlds pause every engine, one none, two some."""
    engines, kind = rng.randint(1, 3), rng.choice(("none", "none", "all", "some", "some"))
    return tuple(kind == "all" or (kind == "some" and rng.random() < 0.5) for _ in range(engines))


def _config(rng: Random, steps: int) -> Config:
    return Config.model_validate(
        {
            "model": {"hf_checkpoint": "sim"},
            "rollout": {
                "num_rollout": steps,
                "rollout_batch_size": rng.randint(1, 3),
                "n_samples_per_prompt": rng.randint(1, 3),
                "max_response_tokens": rng.randint(2, 12),
                "max_staleness": rng.randint(0, 2),
                "partial_rollout": rng.random() < 0.5,
                "max_retries": 3,
                "request_timeout_s": 60.0,
            },
            "publication": {
                "update_weights_interval": rng.randint(1, 2),
                "pause_mode": rng.choice(("retract", "retract", "drain")),
                "rollout_http_timeout": 10.0,
                "lease_s": rng.choice((5.0, 20.0, 900.0)),
                "drain_timeout_s": 60.0,
                "resume_budget_s": 9.0,
            },
            "engine": {
                "use_fault_tolerance": rng.random() < 0.8,
                "recovery_timeout_s": 300.0,
                "generation_probe_s": 20.0,
                "health_interval_s": 2.0,
                "rollout_engine_init_timeout": 120.0,
            },
            "checkpoint": {"save_interval": rng.randint(1, 2)},
            "eval": {
                "eval_interval": rng.choice((None, 2)),
                "sampled": False,
                "skip_eval_before_train": rng.random() < 0.8,
                "logprob_check_samples": 1,
            },
        }
    )


class Story:
    """Plays one plan. Everything that happens is in `record`."""

    def __init__(self, plan: Plan, rng: Random) -> None:
        rollout, publication = plan.config.rollout, plan.config.publication
        # Lease, a resume that runs into its 60 s deadline, its retry, and the longest stop of a process.
        longest = publication.lease_s + 60.0 + 65.0 + 40.0
        bounds = Bounds(
            rollout.rollout_batch_size,
            rollout.n_samples_per_prompt,
            rollout.max_staleness,
            longest_pause_s=longest,
            resume_budget_s=publication.resume_budget_s,
        )
        self.record = Record(bounds)
        self.starts = 0
        self._plan = plan
        self._rng = rng
        self._disk = Disk()
        self._weather = Weather(rng, dict(plan.chances))
        self._fair = False
        self._controller: Controller | None = None
        self._nodes = [
            SimNode(f"engine-{i}", Speed(), rng, snapshots=lambda path: path in self._disk.snapshots, stages=stages)
            for i, stages in enumerate(plan.stages)
        ]

    async def play(self) -> None:
        async with anyio.create_task_group() as tasks:
            for node in self._nodes:
                tasks.start_soon(self._service, node)
            tasks.start_soon(self._watch_pauses)
            tasks.start_soon(self._watch_debts)
            tasks.start_soon(self._storm)
            world = World(
                self._plan.config,
                self._nodes,
                Network(self._weather, tasks),
                disk=self._disk,
                record=self.record,
                rng=self._rng,
                lose_at=set(self._plan.lose_at),
            )
            with anyio.move_on_after(STORM_S + FAIR_LIMIT_S) as limit:
                await self._starts(world)
            if limit.cancelled_caught:
                self.record.violated(f"not finished {FAIR_LIMIT_S:g} s after the storm")
            self._calm()
            await anyio.sleep(SETTLE_S)
            self._check_end(finished=not limit.cancelled_caught)
            tasks.cancel_scope.cancel()

    async def _starts(self, world: World) -> None:
        """The launcher: start after start until one gets through."""
        fair = 0
        while True:
            self.starts += 1
            fair += self._fair
            controller = self._controller = Controller(world, self.starts)
            self.record.note(f"start {self.starts}")
            self.record.groups.clear()
            try:
                await controller.run()
            except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001  # the supervisor of a whole world
                self._account(error, last=fair >= FAIR_STARTS)
            else:
                self._check_debts_of(controller)
            if controller.finished or fair >= FAIR_STARTS:
                return
            await anyio.sleep(self._plan.outage_s if controller.killed else RESTART_S)

    def _account(self, error: BaseException, *, last: bool) -> None:
        """A dead rollout side never ends a run with fault tolerance, unless none can be restored in time (R109)."""
        tolerant = self._plan.config.engine.use_fault_tolerance
        for leaf in leaves(error):
            self.record.note(f"ended by {type(leaf).__name__}: {leaf}")
            if not isinstance(leaf, HybridAsyncError | ControllerKilled | TimeoutError):
                self.record.violated(f"a bug: {type(leaf).__name__}: {leaf}")
            elif isinstance(leaf, EngineError) and tolerant and leaf.operation != "recovery":
                self.record.violated(f"an engine ended the run: {leaf}")
            elif last:
                self.record.violated(f"the run doesn't get through in fair weather: {type(leaf).__name__}: {leaf}")

    def _check_debts_of(self, controller: Controller) -> None:
        """One that ended in good order, interrupted or not, has paid what it owed."""
        owed = [debt for debt in self._disk.owed if controller.owns(debt.txn)]
        if owed and not controller.killed and not self._disk.was_full:
            self.record.violated(f"an orderly end left {owed}")

    async def _service(self, node: SimNode) -> None:
        """A node's init system: a sidecar that was killed is started again."""
        while True:
            await node.run()
            await anyio.sleep(3.0)

    async def _storm(self) -> None:
        for at, kind in self._plan.events:
            await anyio.sleep(max(0.0, at - anyio.current_time()))
            node = self._rng.choice(self._nodes)
            self.record.note(f"{kind} {node.name}")
            await self._happen(kind, node)
        await anyio.sleep(max(0.0, STORM_S - anyio.current_time()))
        self._calm()

    async def _happen(self, kind: str, node: SimNode) -> None:
        engine = node.engine
        if kind == "kill_engine" and engine is not None:
            engine.kill()
        elif kind == "freeze_engine" and engine is not None:
            engine.freeze()
        elif kind == "stop_engine" and engine is not None:
            engine.stop()
            await anyio.sleep(self._rng.uniform(1.0, 30.0))
            engine.stop(False)
        elif kind == "break_engine" and engine is not None and node.up:
            node.host.broken = True
            engine.kill()
        elif kind == "tear_update" and engine is not None:
            engine.tears = self._rng.randint(1, 2)
        elif kind == "drop_tensor" and engine is not None:
            engine.drops = 1
        elif kind == "slow_pause" and engine is not None:
            engine.pause_s = self._rng.uniform(5.0, 20.0)
        elif kind == "kill_sidecar" and node.up:
            node.kill()
        elif kind == "partition":
            self._weather.partitioned.add(node.name)
            await anyio.sleep(self._rng.uniform(1.0, 20.0))
            self._weather.partitioned.discard(node.name)
        elif kind == "fill_disk":
            self._disk.full = self._disk.was_full = True
            await anyio.sleep(self._rng.uniform(1.0, 10.0))
            self._disk.full = False
        elif kind == "kill_controller" and self._controller is not None:
            self._controller.kill()
        elif kind == "kill_in_publication":
            await self._kill_in_publication()
        elif kind == "kill_switched":
            await self._kill_switched()
        elif kind == "interrupt_controller" and self._controller is not None:
            self._controller.interrupt()

    async def _kill_switched(self) -> None:
        """An engine that has switched dies while others are still to be paused."""
        for engine in (paused := [n.engine for n in self._nodes if not n.stages and n.engine is not None]):
            engine.pause_s = 9.5
        with anyio.move_on_after(KILL_WAIT_S):
            while not any(node.up and node.control.machine.state != "running" for node in self._nodes):  # noqa: ASYNC110
                await anyio.sleep(0.2)
            for engine in [node.engine for node in self._nodes if node.stages and node.engine is not None]:
                engine.kill()
        for engine in paused:
            engine.pause_s = 0.0

    async def _kill_in_publication(self) -> None:
        """While an engine is paused, or its pause is on the way, or it has weights to switch to."""
        engines = [node.engine for node in self._nodes if node.engine is not None]
        staged = [engine.staged for engine in engines]
        for engine in engines:
            engine.pause_s = self._rng.choice((0.0, 1.0))
        with anyio.move_on_after(KILL_WAIT_S):
            while True:  # the real sidecar tells nobody
                await anyio.sleep(0.2)
                if any(node.up and node.control.machine.state != "running" for node in self._nodes):
                    break
                if any(e.staged not in (None, before) for e, before in zip(engines, staged, strict=True)):
                    break
            await anyio.sleep(self._rng.uniform(0.0, 0.4))
        if self._controller is not None:
            self._controller.kill()
        await anyio.sleep(1.0)
        for engine in engines:
            engine.pause_s = 0.0

    def _calm(self) -> None:
        self._fair = True
        self._weather.heal()
        self._disk.full = False
        for node in self._nodes:
            if node.up:
                node.host.broken = False
            if node.engine is not None:
                node.engine.pause_s = 0.0
                node.engine.freeze(False)  # a run without fault tolerance leaves that to its administrator

    async def _watch_pauses(self) -> None:
        while True:
            await anyio.sleep(8.0)
            for node in self._nodes:
                engine = node.engine
                if engine is None or not engine.alive or engine.paused_since is None:
                    continue
                paused_s = anyio.current_time() - engine.paused_since
                if paused_s > self.record.bounds.longest_pause_s:
                    self.record.violated(f"{node.name} has been paused for {paused_s:.0f} s")
                    engine.paused_since = anyio.current_time()

    async def _watch_debts(self) -> None:
        """Who holds an engine is owed by the journal, now and for as long as it is held; messages take a moment."""
        suspects: dict[str, str] = {}
        while True:
            working = self._controller is not None and not (self._controller.finished or self._controller.killed)
            await anyio.sleep(0.4 if any(suspects.values()) else 1.5 if working else 6.0)
            for node in self._nodes:
                while node.broken:
                    self.record.violated(node.broken.pop())
                holder = node.control.machine.holder if node.up and node.control.machine.state == "paused" else None
                owed = holder and any((d.engine, d.txn) == (node.name, holder.txn) for d in self._disk.owed)
                txn = holder.txn if holder and not owed else None
                if txn is not None and suspects.get(node.name) == txn and not self._disk.was_full:
                    self.record.violated(f"{node.name} is paused by {txn}, which nobody owes")
                suspects[node.name] = txn or ""

    def _check_end(self, *, finished: bool) -> None:
        for node in self._nodes:
            engine = node.engine
            if engine is not None and engine.alive and engine.paused:
                self.record.violated(f"{node.name} is paused at the end")
            if node.up and not node.control.machine.idle:
                self.record.violated(f"{node.name} holds {node.control.machine.holder} at the end")
        if finished and not self.record.violations:
            self.record.check_end(self._plan.config.rollout.num_rollout or 0)
            left = self._disk.owed
            if left and not self._disk.was_full:  # a full disk loses settlements, which costs an idempotent end
                self.record.violated(f"debts are open at the end: {left}")


def play(seed: int, scenario: str | None = None) -> Outcome:
    """Raises ImportError where trio isn't installed."""
    from trio._core import _run
    from trio.testing import MockClock

    # trio runs ready tasks in a random order; this is its own hook to make that order a function of the seed.
    vars(_run)["_ALLOW_DETERMINISTIC_SCHEDULING"] = True
    _run._r.seed(seed)
    rng = Random(seed)
    story = Story(draw_plan(rng, scenario), rng)
    ended: list[float] = []

    async def main() -> None:
        await story.play()
        ended.append(anyio.current_time())

    clock = MockClock(autojump_threshold=0)
    anyio.run(main, backend="trio", backend_options={"clock": clock})
    record = story.record
    digest = hashlib.sha256("\n".join(record.trace).encode()).hexdigest()[:16]
    return Outcome(seed, tuple(record.violations), tuple(record.trace), digest, story.starts, ended[0])


Play = Callable[[int, str | None], Outcome]
