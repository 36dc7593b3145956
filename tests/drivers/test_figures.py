"""What a publication promises in seconds: one budget for the resumes of 64 engines, a port where nobody listens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import anyio
from kit import FakeServer, FakeSidecar, FakeTrainer, MemoryJournal, RecordingSink, World, nothing
from test_recovery import virtual
from tests.fake_engine import refusing

from hybridasync.config.publication import PublicationSection
from hybridasync.drivers.fleet import Engine, Fleet
from hybridasync.drivers.publish import Publisher, PublishParts
from hybridasync.drivers.transfer import DiskTransfer
from hybridasync.errors import OutcomeUnknown
from hybridasync.protocol.debts import SETTLED, Debts
from hybridasync.transport.sidecar import SidecarClient


def publisher(engines: Sequence[Engine], journal: MemoryJournal, debts: Debts) -> tuple[Publisher, Fleet]:
    """With the settings that ship."""
    fleet, trainer = Fleet(engines), FakeTrainer()
    parts: Any = PublishParts(fleet, trainer, DiskTransfer(trainer), journal, debts, RecordingSink())  # type: ignore[arg-type]
    return Publisher(PublicationSection(), parts, session="0" * 32, mode="retract"), fleet


@virtual
async def test_r102_the_resumes_of_64_engines_keep_one_budget() -> None:
    """R98, R102, U1, U11: a quarter hangs, a quarter fails: three attempts each and a fence, within resume_budget_s."""
    world, journal, debts = World(), MemoryJournal(), Debts()
    attempts = dict.fromkeys((f"engine-{index}" for index in range(64)), 0)

    async def hook(point: str) -> None:
        await nothing(point)
        name, _, rest = point.partition(" ")
        if rest == "end: before send":
            attempts[name] += 1
            kind = int(name.removeprefix("engine-")) % 4
            if kind == 0:
                await anyio.sleep_forever()
            elif kind == 1:
                raise OutcomeUnknown(name, "end", "reset")

    world.hook = hook
    sidecars = [FakeSidecar(name, world) for name in attempts]
    engines = [Engine(FakeServer(sidecar.name, world), sidecar) for sidecar in sidecars]
    publish, fleet = publisher(engines, journal, debts)
    started = anyio.current_time()
    result = await publish.publish(1, "/x", step=0)
    budget_s = PublicationSection().resume_budget_s
    assert result.resume_s <= budget_s
    assert anyio.current_time() - started <= budget_s + 1.0
    assert sorted(set(attempts.values())) == [1, 3]
    assert [sidecar.fenced for sidecar in sidecars] == [1, 1, 0, 0] * 16
    assert len(fleet.verified) == 32 and not debts.open and not Debts.replay(journal.records).open


async def test_r63_a_port_where_nobody_listens_degrades_at_once(figure: Callable[[str], None]) -> None:
    """R62, R63: a real client of a refused port: the other engine is published, and no end is sent for that one."""
    world, journal, debts = World(), MemoryJournal(), Debts()
    with refusing() as url:
        async with SidecarClient("engine-0", url, "t", timeout_s=120.0) as refused:
            engines = [
                Engine(FakeServer("engine-0", world), refused),
                Engine(FakeServer("engine-1", world), FakeSidecar("engine-1", world)),
            ]
            publish, fleet = publisher(engines, journal, debts)
            started = time.monotonic()
            with anyio.fail_after(20):
                result = await publish.publish(1, "/x", step=0)
            took_s = time.monotonic() - started
    assert result.degraded and [engine.name for engine in fleet.verified] == ["engine-1"]
    settled = {record["engine"]: record["how"] for record in journal.records if record["event"] == SETTLED}
    assert settled == {"engine-0": "not sent", "engine-1": "ended"}
    figure(f"refused port: the publication went on without that engine after {took_s:.3f} s")
