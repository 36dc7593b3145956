"""The health monitor: a dead engine ends the wait for it within seconds."""

from __future__ import annotations

import anyio

from hybridasync.config.models import EngineSection
from hybridasync.drivers.fleet import Engine, Fleet
from hybridasync.errors import EngineError, NotSent
from hybridasync.ports import MetricSink


class Health:
    """Asks every sidecar for its status. Consecutive failures, or a certain death, take an engine out of routing."""

    def __init__(self, settings: EngineSection, fleet: Fleet, sink: MetricSink) -> None:
        self._settings = settings
        self._fleet = fleet
        self._sink = sink
        self._failures: dict[str, tuple[int, str]] = {}  # engine → consecutive failures, last cause

    async def run(self) -> None:
        """For ever; raises EngineError once fewer than `min_healthy_engines` are left."""
        while True:
            await anyio.sleep(self._settings.health_interval_s)
            async with anyio.create_task_group() as probes:
                for engine in self._fleet.engines:
                    probes.start_soon(self._probe, engine)
            dead = {
                name: why for name, (count, why) in self._failures.items() if count >= self._settings.health_failures
            }
            if len(self._fleet.engines) - len(dead) < self._settings.min_healthy_engines:
                name, why = next(iter(dead.items()))
                raise EngineError(name, "health", why)

    async def _probe(self, engine: Engine) -> None:
        try:
            status = await engine.sidecar.status()
        except EngineError as error:
            why, final = str(error), isinstance(error, NotSent)
        else:
            if status.state != "down" and status.healthy:
                self._failures.pop(engine.name, None)
                return
            why, final = status.detail or f"the engine is {status.state}", status.state == "down"
        count = self._settings.health_failures if final else self._failures.get(engine.name, (0, ""))[0] + 1
        self._failures[engine.name] = (count, why)
        self._sink.event("engine_unhealthy", level="warning", engine=engine.name, failures=count, cause=why)
        if count >= self._settings.health_failures:
            engine.state.quarantine(why)
