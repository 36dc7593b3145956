"""Whole runs whose weights are sent over a group or in requests, struck in mid-transfer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.system import chaos
from tests.system.chaos import Cell, World, strike
from tests.system.gate import Point

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROUTES = {"collective": "/update_weights_from_distributed", "tensor": "/update_weights_from_tensor"}
BUCKET_MIB = 0.01
"""Several buckets: the first request is never the last one."""

CELLS = [
    Cell("sender", "broadcast begun", "KILL"),
    Cell("engine", "weights mixed", "KILL"),
    Cell("worker", "broadcast begun", "KILL"),
]
MORE_CELLS = [
    Cell("sender", "weights mixed", "KILL"),
    Cell("sender", "weights mixed", "STOP"),
    Cell("engine", "broadcast begun", "KILL"),
    Cell("engine", "weights mixed", "STOP"),
    Cell("sidecar", "weights mixed", "KILL"),
    Cell("rank0", "weights mixed", "KILL"),
    Cell("worker", "weights mixed", "STOP"),
]
if os.environ.get("ALL_CELLS"):
    CELLS = CELLS + MORE_CELLS


@pytest.fixture(scope="module", params=["collective"] if not os.environ.get("ALL_CELLS") else list(ROUTES))
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    transport: str = request.param
    points = {
        "broadcast begun": Point(ROUTES[transport], passed_on=False),
        "weights mixed": Point(ROUTES[transport], passed_on=True),
    }
    with pytest.MonkeyPatch.context() as patch, World(tmp_path_factory.mktemp(transport)) as found:
        patch.setattr(chaos, "PHASES", {**chaos.PHASES, **points})
        patch.setattr(chaos, "PROGRAMS", {**chaos.PROGRAMS, "sender": ("hybridasync.runtime.sender", None)})
        patch.setattr(chaos, "STOPPED_S", {**chaos.STOPPED_S, "sender": 10.0})
        found.start(publication={"transport": transport, "bucket_mib": BUCKET_MIB})
        found.trains(1)
        yield found


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_c04_a_transfer_that_breaks_off_leaves_no_engine_with_mixed_weights(world: World, cell: Cell) -> None:
    """C04: of sender, engine or worker, whoever goes in mid-transfer: by the rules of publication the run goes on.

    No engine stays paused, every engine serves verified weights again, and the run trains on each prompt once.
    """
    verdict = strike(world, cell)
    print(f"{verdict}\n{(world.run_dir / 'logs' / 'sender.log').read_text()[-2000:]}")
    assert not verdict.problem


def test_the_snapshot_folder_is_the_trainers_alone(world: World, tmp_path: Path) -> None:
    """Engines were given no path of it."""
    world.trains(1)
    for log in world.side.folder.glob("engine-*.log"):
        assert str(world.run_dir) not in log.read_text()
