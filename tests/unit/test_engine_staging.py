"""Memory of the embedded engine while weights come and go: two sets at the most, whatever the order of the calls."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.engine_models import saved_model

from hybridasync.engine import weights
from hybridasync.engine.scheduler import Scheduler
from hybridasync.engine.schema import StageWeightsBody, SwitchBody, UpdateFromDiskBody
from hybridasync.engine.server import _parser, build_service
from hybridasync.engine.service import EngineService
from hybridasync.weights.checksums import overall


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # the engine's own loop


@pytest.fixture
def service(tmp_path: Path) -> Iterator[EngineService]:
    for seed in (1, 2):
        saved_model(tmp_path / str(seed), seed=seed)
    options = ["--model-path", str(tmp_path / "1"), "--max-total-tokens", "512"]
    service = build_service(_parser().parse_args(options))
    yield service
    service.thread.stop()


async def test_there_are_never_three_sets_of_weights(
    service: EngineService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a set is made only the live one is left: after stagings, switches, paused or not, and complete loads."""
    alive: weakref.WeakSet[weights.Weights] = weakref.WeakSet([service._scheduler.weights])
    before: list[int] = []
    load = weights.WeightStore.load

    def counted(store: weights.WeightStore, named: Any) -> weights.Weights:
        before.append(len(alive))
        made = load(store, named)
        alive.add(made)
        return made

    monkeypatch.setattr(weights.WeightStore, "load", counted)
    paths = {seed: str(tmp_path / str(seed)) for seed in (1, 2)}

    async def stage(seed: int) -> None:
        body = StageWeightsBody(model_path=paths[seed], weight_version=str(seed))
        assert (await service.stage(body))[0]

    async def switch(seed: int) -> None:
        assert service._staged is not None
        body = SwitchBody(weight_version=str(seed), checksum=overall(service._staged[2].checksums()))
        assert isinstance(await service.switch(body), dict)

    with anyio.fail_after(30):
        await stage(2)
        await stage(1)
        await service.pause("retract")
        await stage(1)
        await service.resume()
        await switch(1)
        await stage(2)
        await switch(2)
        await stage(1)
        assert (await service.update_from_disk(UpdateFromDiskBody(model_path=paths[2], weight_version="2")))[0]
        await stage(1)
        assert not (await service.stage(StageWeightsBody(model_path="/nowhere", weight_version="3")))[0]
        await service.resume()
    assert before == [1] * 8
    assert len(alive) == 1 and service.weight_version == "2"


async def test_a_switch_that_fails_leaves_no_engine_paused(
    service: EngineService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever goes wrong between its pause and its resume: nobody else would know that it is paused."""

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    assert (await service.stage(StageWeightsBody(model_path=str(tmp_path / "2"), weight_version="2")))[0]
    assert service._staged is not None
    body = SwitchBody(weight_version="2", checksum=overall(service._staged[2].checksums()))
    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "install", broken)
        with pytest.raises(RuntimeError, match="out of memory"):
            await service.switch(body)
    assert not service.paused and service.weight_version == "default"
    assert (await service.switch(body))["weight_version"] == "2"  # type: ignore[index]
