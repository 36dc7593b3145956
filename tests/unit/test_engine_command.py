"""The command that an engine is launched with."""

from __future__ import annotations

import pytest

from hybridasync.config.load import load
from hybridasync.config.pipeline import resolve
from hybridasync.engine.server import main
from hybridasync.runtime import engines


@pytest.mark.parametrize("seed", [0, 20260802, 2**31 - 1])
def test_every_seed_of_a_run_is_one_that_an_engine_takes(seed: int) -> None:
    """numpy, and with it SGLang, takes seeds below 2**32; engines of one run have different ones, on each node."""
    config = resolve(load("quickstart", [f"seed={seed}"])).config
    commands = [
        engines._command(config, index, host=host) for host in (engines.LOOPBACK, "10.77.0.3") for index in range(2)
    ]
    seeds = [int(command[command.index("--random-seed") + 1]) for command in commands]
    assert all(0 <= found < 2**32 for found in seeds)
    assert len(set(seeds)) == 4


def test_a_seed_that_torch_cannot_take_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """By hand any number can be given: exit code 2 with its range, before the model is read."""
    with pytest.raises(SystemExit) as ended:
        main(["--model-path", "nowhere", "--random-seed", str(2**70)])
    assert ended.value.code == 2
    assert "--random-seed: 1180591620717411303424 isn't between 0 and" in capsys.readouterr().err
