"""The health monitor: finds engines that died, hang, or aren't what they were, and never kills one that is merely busy.

Each engine is watched by itself, so that one that hangs hides no other:

    sidecar says down ────────────────────────────────────▶ dead
    no answer, mute engine, no token generated ─ N times ─▶ dead
    other weights than were verified ─────────────────────▶ dead (it was restarted behind our back)
    asked before or during a publication ─────────────────▶ says nothing (C11)
"""

from __future__ import annotations

from uuid import uuid4

import anyio

from hybridasync.config.models import EngineSection
from hybridasync.drivers.fleet import Engine, Fleet
from hybridasync.errors import EngineError
from hybridasync.ports import MetricSink
from hybridasync.protocol.routing import Remedy
from hybridasync.types import SamplingParams, SidecarStatus

STATUS_DEADLINE_S = 12.0
"""A sidecar asks its engine two things, 5 s each, before it answers."""

RECHECK_S = 0.5
"""After a failure or a suspicion: death is certain, or disproved, within seconds."""

PROBE = SamplingParams(max_new_tokens=1, temperature=0.0)


class Health:
    """Takes dead engines out of routing. Without fault tolerance too few of them end the run."""

    def __init__(self, settings: EngineSection, fleet: Fleet, sink: MetricSink) -> None:
        self._settings = settings
        self._fleet = fleet
        self._sink = sink
        self._dead: dict[str, str] = {}  # engine → cause; only without fault tolerance

    async def run(self) -> None:
        """For ever; raises EngineError once fewer than `min_healthy_engines` are left."""
        self._fleet.watched = True
        async with anyio.create_task_group() as watches:
            for engine in self._fleet.engines:
                watches.start_soon(self._watch, engine)

    async def _watch(self, engine: Engine) -> None:
        failures = 0
        while True:
            await self._rest(engine, urgent=failures > 0)
            swaps = engine.state.swaps
            if engine.state.absent or engine.state.swapping:
                failures = 0
                continue
            verdict = await self._probe(engine)
            if engine.state.absent or engine.state.swaps != swaps:
                engine.progress_at = anyio.current_time()
                continue
            if verdict is None:
                failures = 0
                self._dead.pop(engine.name, None)
                self._fleet.clear(engine)
                continue
            cause, remedy, certain = verdict
            failures = self._settings.health_failures if certain else failures + 1
            fields = {"engine": engine.name, "failures": failures, "cause": cause}
            self._sink.event("engine_unhealthy", level="warning", **fields)
            if failures >= self._settings.health_failures:
                failures = 0
                self._lost(engine, cause, remedy)

    async def _rest(self, engine: Engine, *, urgent: bool) -> None:
        """Until the next probe is due; a failed request makes it due at once."""
        soon = urgent or engine.state.suspect
        interval_s = self._settings.health_interval_s
        with anyio.move_on_after(min(RECHECK_S, interval_s) if soon else interval_s):
            while soon or not engine.state.suspect:
                await self._fleet.suspicion.wait()

    async def _probe(self, engine: Engine) -> tuple[str, Remedy, bool] | None:
        """None: it is well. Else why not, what would bring it back, and whether that is certain."""
        try:
            with anyio.fail_after(STATUS_DEADLINE_S):
                status = await engine.sidecar.status()
        except (EngineError, TimeoutError) as error:
            return str(error) or f"its sidecar didn't answer in {STATUS_DEADLINE_S:g} s", "fence", False
        if status.state == "down":
            if not status.detail and engine.state.version is None:
                return None  # it is starting; its sidecar knows how long that may take
            return status.detail or "it was started anew", "recover", True
        if not status.healthy:
            return status.detail or f"the engine is {status.state}", "fence", False
        if status.state == "paused" and status.holder is None:
            return "it is paused, and nobody holds the pause", "publish", False
        if self._other_weights(engine, status):
            why = f"it serves weight version {status.weight_version}, not {engine.state.version}"
            return why, "publish", True
        return await self._generates(engine, status)

    def _other_weights(self, engine: Engine, status: SidecarStatus) -> bool:
        verified, served = engine.state.version, status.weight_version
        return verified is not None and served is not None and served != str(verified)

    async def _generates(self, engine: Engine, status: SidecarStatus) -> tuple[str, Remedy, bool] | None:
        """A server may answer /health while its scheduler is wedged: only tokens prove that it generates."""
        limit = self._settings.generation_probe_s
        silent_s = anyio.current_time() - engine.progress_at
        if status.state != "running" or not engine.state.in_flight or silent_s < limit:
            return None
        before = engine.progress_at
        rid = uuid4().hex
        with anyio.move_on_after(limit):
            try:
                await engine.server.generate(rid, (0,), PROBE)
            except EngineError as error:
                return f"generation probe: {error}", "fence", False
            engine.progress_at = max(engine.progress_at, anyio.current_time())
        if engine.progress_at > before:
            return None
        silent_s += limit  # each whole limit of silence counts as one failed probe, the one before the first too
        certain = silent_s >= limit * self._settings.health_failures
        return f"it generated nothing in {silent_s:.0f} s", "fence", certain

    def _lost(self, engine: Engine, cause: str, remedy: Remedy) -> None:
        tolerant = self._settings.use_fault_tolerance
        self._fleet.quarantine(engine, cause, remedy if tolerant else None)
        if tolerant:
            return
        self._dead[engine.name] = cause
        if len(self._fleet.engines) - len(self._dead) < self._settings.min_healthy_engines:
            name, why = next(iter(self._dead.items()))
            raise EngineError(name, "health", why)
