"""Bringing engines back: a new process where it takes one, then the last published weights, verified, to it alone.

    quarantined ─▶ [fence] ─▶ [recover: its process answers] ─▶ publish to it alone ─▶ verified, routed to

Meanwhile training goes on with the other engines, and with what is queued. Prompts that a dead engine had are made
elsewhere. What can't be brought back in time ends the run with its cause (R109).
"""

from __future__ import annotations

import anyio

from hybridasync.config.models import EngineSection
from hybridasync.drivers.fleet import Engine, Fleet
from hybridasync.drivers.publish import Publisher
from hybridasync.errors import EngineError, NotSent, OutcomeUnknown, PublicationFailed, Rejected
from hybridasync.ports import MetricSink
from hybridasync.protocol.routing import Remedy

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
"""Between two attempts, doubling: an engine that dies in its start must not be started in a loop."""

STATUS_DEADLINE_S = 12.0


class Recovery:
    """Tends every engine that waits for a remedy."""

    def __init__(self, settings: EngineSection, fleet: Fleet, publisher: Publisher, *, sink: MetricSink) -> None:
        self._settings = settings
        self._fleet = fleet
        self._publisher = publisher
        self._sink = sink
        self._causes: dict[str, str] = {}

    async def run(self) -> None:
        """For ever; raises EngineError when too few engines serve for too long: without fault tolerance, none."""
        async with anyio.create_task_group() as tasks:
            for engine in self._fleet.engines:
                tasks.start_soon(self._tend, engine)
            tasks.start_soon(self._limit)

    async def _tend(self, engine: Engine) -> None:
        while True:
            while engine.state.remedy is None or not self._publisher.has_published:
                await self._fleet.changed.wait()
            engine.state.absent = True
            engine.state.absent = not await self._bring_back(engine, engine.state.remedy)
            if engine.state.absent:
                self._raise_if_too_few(engine)
            self._fleet.changed.notify()

    def _raise_if_too_few(self, engine: Engine) -> None:
        left = sum(not (other.state.absent and other.state.remedy is None) for other in self._fleet.engines)
        if left < self._settings.min_healthy_engines:
            raise EngineError(engine.name, "recovery", self._causes[engine.name])

    async def _bring_back(self, engine: Engine, remedy: Remedy) -> bool:
        """The first attempt with what it was said to need; with fault tolerance others follow, with new processes.

        Without it a second one follows where the first leaves a load behind that may be carried out late. False: nobody
        knows what this process will serve, so that no publication may go to it.
        """
        self._causes[engine.name] = engine.state.reason
        self._sink.event(
            "engine_recovery", level="warning", engine=engine.name, remedy=remedy, cause=engine.state.reason
        )
        started, pause_s = anyio.current_time(), FIRST_PAUSE_S
        while True:
            try:
                if remedy != "publish":
                    await self._new_process(engine, fence=remedy == "fence")
                await self._publisher.bring_up(engine)
            except (EngineError, PublicationFailed, TimeoutError) as error:
                self._causes[engine.name] = str(error)
                self._sink.event("engine_recovery_failed", level="warning", engine=engine.name, cause=str(error))
                if not self._settings.use_fault_tolerance and (remedy == "fence" or engine.state.remedy != "fence"):
                    engine.state.remedy = None  # the health monitor decides whether too few are left
                    return remedy != "fence"
                remedy = "fence"
                await anyio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            else:
                took_s = anyio.current_time() - started
                self._sink.event("engine_recovered", engine=engine.name, version=engine.state.version, took_s=took_s)
                return True

    async def _new_process(self, engine: Engine, *, fence: bool) -> None:
        """The engine's process answers again, and we know where."""
        try:
            with anyio.fail_after(STATUS_DEADLINE_S):
                await engine.sidecar.status()
        except (NotSent, OutcomeUnknown, TimeoutError) as error:
            if engine.revive is None:
                raise EngineError(engine.name, "recover", f"its sidecar doesn't answer: {error}") from error
            await engine.revive()
            fence = False
        if fence:
            try:
                await engine.sidecar.fence()
            except Rejected as error:  # it was launched elsewhere: all we can do is wait for it
                self._sink.event("fence_failed", level="warning", engine=engine.name, cause=str(error))
        await engine.sidecar.recover(self._settings.rollout_engine_init_timeout)
        status = await engine.sidecar.status()
        await engine.server.moved(status.engine_url)
        engine.pid = status.engine_pid if engine.pid is not None else None

    async def _limit(self) -> None:
        while True:
            while self._enough():
                await self._fleet.changed.wait()
            with anyio.move_on_after(self._settings.recovery_timeout_s):
                while not self._enough():
                    await self._fleet.changed.wait()
            if not self._enough():
                name = next(engine.name for engine in self._fleet.engines if engine.state.version is None)
                limit = self._settings.recovery_timeout_s
                cause = self._causes.get(name, "unknown")
                raise EngineError(name, "recovery", f"not back within engine.recovery_timeout_s = {limit:g} s: {cause}")

    def _enough(self) -> bool:
        """Before the first publication nothing serves yet, and nothing is missing."""
        # Without fault tolerance dead ones are the monitor's; here it's ones that live and wait for a publication that
        # a starved training loop will never come to.
        needed = self._settings.min_healthy_engines if self._settings.use_fault_tolerance else 1
        serving = len(self._fleet.verified) >= needed
        return serving or not self._publisher.has_published
