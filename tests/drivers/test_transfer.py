"""What is asked of the sender, and what becomes of its failures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import anyio
import anyio.lowlevel
from kit import FakeTrainer, MemoryJournal, RecordingSink, World, make_fleet

from hybridasync.config.models import PublicationSection
from hybridasync.drivers.publish import Publisher, PublishParts
from hybridasync.drivers.transfer import SentTransfer
from hybridasync.errors import EngineError, NotSent, OutcomeUnknown
from hybridasync.protocol.debts import Debts
from hybridasync.types import SendTarget, WeightSnapshot


class FakeSender:
    """Brings each version to the servers, unless told to fail for an engine."""

    def __init__(self, world_servers: Sequence[object]) -> None:
        self.servers = {server.name: server for server in world_servers}  # type: ignore[attr-defined]
        self.asked: list[tuple[SendTarget, ...]] = []
        self.failures: dict[str, EngineError] = {}

    async def send(self, targets: Sequence[SendTarget], snapshot: WeightSnapshot) -> Mapping[str, EngineError]:
        self.asked.append(tuple(targets))
        await anyio.lowlevel.checkpoint()
        for target in targets:
            if target.name not in self.failures:
                self.servers[target.name].version = str(snapshot.version)
        return {name: error for name, error in self.failures.items() if name in {t.name for t in targets}}


class Rig:
    def __init__(self) -> None:
        fleet, servers, self.sidecars = make_fleet(World(), 2)
        self.fleet, self.sender = fleet, FakeSender(servers)
        trainer, self.debts = FakeTrainer(), Debts()
        transfer = SentTransfer(trainer, self.sender)  # type: ignore[arg-type]
        parts = PublishParts(fleet, trainer, transfer, MemoryJournal(), self.debts, RecordingSink())  # type: ignore[arg-type]
        settings = PublicationSection(resume_budget_s=29.0, rollout_http_timeout=30.0)
        self.publisher = Publisher(settings, parts, session="0" * 32, mode="retract")

    def asked(self) -> dict[str, bool]:
        """Engine → whether it was said to be fresh, in the last transfer."""
        return {target.name: target.fresh for target in self.sender.asked[-1]}


async def test_an_engine_is_fresh_until_it_was_verified() -> None:
    """The first publication meets new engines, the second known ones."""
    rig = Rig()
    await rig.publisher.publish(1, "/x", step=0)
    assert rig.asked() == {"engine-0": True, "engine-1": True}
    assert [target.url for target in rig.sender.asked[-1]] == ["http://engine-0", "http://engine-1"]
    await rig.publisher.publish(2, "/x", step=1)
    assert rig.asked() == {"engine-0": False, "engine-1": False}


async def test_c04_one_failed_transfer_leaves_the_other_engine_serving() -> None:
    """C04: the one that failed serves nothing and is resumed; brought up, it is sent everything, as a fresh one."""
    for error, remedy in ((NotSent("engine-1", "send"), "publish"), (OutcomeUnknown("engine-1", "send"), "fence")):
        rig = Rig()
        await rig.publisher.publish(1, "/x", step=0)
        rig.sender.failures["engine-1"] = error
        result = await rig.publisher.publish(2, "/x", step=1)
        assert result.engines == ("engine-0",)
        assert result.degraded
        torn = rig.fleet.engines[1]
        assert (torn.state.version, torn.state.remedy) == (None, remedy)
        assert [sidecar.paused_by for sidecar in rig.sidecars] == [None, None]
        assert not rig.debts.open
        rig.sender.failures.clear()
        await rig.publisher.bring_up(torn)
        assert rig.asked() == {"engine-1": True}
        assert torn.state.version == 2
