"""`hybridasync bench` as it is typed: mistakes are told before anything starts, with exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hybridasync_cli.main import app


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments])


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--variants", "fast"), "--variants: unknown: fast; there are baseline"),
        (("--accept", "optimized = 1"), "wants VARIANT[.MEASURE][/VARIANT] OPERATOR NUMBER"),
        (("--accept", "optimized > 1", "--variants", "zero_kl"), "'optimized' doesn't take part"),
        (("--window", "10:30"), "--window: wants FIRST:LAST, steps from 0 to 19"),
        (("--recipe", "quickstrt"), "Did you mean quickstart?"),
        (("--set", "optimizer.lrr=1"), "did you mean optimizer.lr?"),
        (
            ("--set", "network.nnodes=2", "--set", "network.master_port=29500"),
            "network.nnodes: a benchmark runs on one",
        ),
        (("--accept", "optimized/zero_kl >= nan"), "'nan' is no number"),
        (("--set", "rollout.num_rollout=3"), "rollout.num_rollout: can't be given with --set: --steps sets it"),
        (("--set", "publication.staged=false"), "publication.staged: can't be given with --set: the variants set it"),
        (("--set", "seed=1"), "seed: can't be given with --set: each trial has its own"),
        (("--trials", "0"), "--trials"),
    ],
)
def test_a_mistake_in_the_options_starts_nothing(tmp_path: Path, options: tuple[str, ...], says: str) -> None:
    """Exit code 2, the option or setting, what would do; and no directory is left."""
    result = invoke("publication", "--out", "out", *options)
    assert result.exit_code == 2
    assert says in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("verify", "nowhere"), "no directory nowhere"),
        (("overlap", "--modes", "sync"), "there are hybrid, fully_async"),
        (("engine", "--shapes", "huge"), "there are quickstart, larger"),
        (("engine", "--shapes", ","), "there are quickstart, larger"),
        (("control", "--engines", "2,x"), "--engines: wants numbers above 0"),
        (("publication", "--out", "file/x"), "--out: can't write to file/x: Not a directory"),
        (("overlap", "--out", "."), "--out: . is a directory; name a file"),
        (("engine", "--out", "file/x"), "--out: can't write file/x"),
        (("control", "--out", "file/x"), "--out: can't write file/x"),
    ],
)
def test_other_commands_say_what_would_do(arguments: tuple[str, ...], says: str) -> None:
    """Exit code 2 and the choices, before anything is measured."""
    Path("file").touch()
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert says in result.stderr


def test_a_directory_without_evidence_does_not_verify(tmp_path: Path) -> None:
    """Exit code 1: it is no completed benchmark."""
    result = invoke("verify", str(tmp_path))
    assert result.exit_code == 1
    assert "isn't a completed benchmark" in result.stderr
