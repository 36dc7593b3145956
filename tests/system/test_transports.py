"""Whole runs whose weights are sent over a group or in requests, struck in mid-transfer."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from tests.system import chaos
from tests.system.chaos import Cell, World, strike
from tests.system.gate import Point

from hybridasync.transport.weights import _places

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


def test_snapshots_stay_in_the_trainers_memory(world: World) -> None:
    """Though the engines are elsewhere, which takes a shared folder for transport disk."""
    world.trains(1)
    in_memory, in_run_directory = _places(world.run_dir.resolve(), None)
    assert in_memory.is_dir()
    assert not in_run_directory.exists()
