"""`hybridasync resume-rollout` and the replay at a run's start: real sidecar processes beside a scripted engine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest
from tests.fake_engine import FakeEngine, serving
from tests.system.test_sidecar import TOKEN, Sidecars, txn
from typer.testing import CliRunner, Result

from hybridasync.config.load import load
from hybridasync.config.resolved import write_resolved
from hybridasync.errors import CompensationFailed
from hybridasync.protocol.debts import Debts
from hybridasync.runtime.resume_rollout import settle_debts
from hybridasync.transport.journal import JournalFile
from hybridasync_cli.main import app

pytestmark = pytest.mark.slow

HOUR_S = 3600.0


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDASYNC_TOKEN", TOKEN)


@pytest.fixture
def sidecars(tmp_path: Path) -> Iterator[Sidecars]:
    rig = Sidecars(tmp_path)
    yield rig
    stop(rig)


@pytest.fixture
def engine() -> Iterator[tuple[FakeEngine, str]]:
    scripted = FakeEngine()
    with serving(scripted) as url:
        yield scripted, url


def stop(rig: Sidecars) -> None:
    for running in rig.started:
        running.process.kill()
        running.process.wait()


def a_run(folder: Path, *settings: str, owes: str | None = None) -> Path:
    """A run directory as a controller that was killed leaves it."""
    run_dir = folder / "run"
    (run_dir / "logs").mkdir(parents=True)
    write_resolved(load("quickstart-fast", list(settings)), run_dir)
    if owes is not None:
        JournalFile(run_dir / "journal.jsonl").append(Debts().incur("engine-0", owes))
    return run_dir


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["resume-rollout", *arguments])


def pause(sidecars: Sidecars, url: str, name: str) -> str:
    """A sidecar elsewhere whose engine is paused for an hour; its URL."""
    sidecar = sidecars.start("--engine-url", url)
    answer = sidecar.http("POST", "/v1/pause", json={"txn": name, "mode": "retract", "lease_s": HOUR_S})
    assert answer.json()["paused"] is True
    return sidecar.url


def open_debts(run_dir: Path) -> list[str]:
    return [debt.txn for debt in Debts.replay(JournalFile(run_dir / "journal.jsonl").replay()).open]


@contextmanager
def held_by_another_process(run_dir: Path) -> Iterator[None]:
    code = (
        "import sys, pathlib; from hybridasync.runtime import lock\n"
        "with lock.hold(pathlib.Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code, str(run_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None and owner.stdout.readline() == "held\n"
    try:
        yield
    finally:
        owner.communicate()


def test_r104_a_dead_run_whose_lease_is_an_hour_is_ended_at_once(
    tmp_path: Path, sidecars: Sidecars, engine: tuple[FakeEngine, str]
) -> None:
    """What the journal owes is ended through the sidecar, exit 0; a second call has nothing to do."""
    url = pause(sidecars, engine[1], txn(3))
    run_dir = a_run(tmp_path, f'engine.sidecar_url=["{url}"]', owes=txn(3))
    looked = invoke("--run-dir", str(run_dir), "--dry-run")
    assert looked.exit_code == 3 and "would end" in looked.output
    assert engine[0].paused
    ended = invoke("--run-dir", str(run_dir), "--json")
    assert ended.exit_code == 0, ended.output
    (row,) = json.loads(ended.output)
    assert row["done"] == ["ended"] and row["found"]["txn"] == txn(3) and row["left"]["state"] == "running"
    assert not engine[0].paused and open_debts(run_dir) == []
    again = invoke("--run-dir", str(run_dir))
    assert again.exit_code == 0 and "nothing to do" in again.output


def test_r104_the_table_says_who_paused_since_when_and_for_how_long(
    tmp_path: Path, sidecars: Sidecars, engine: tuple[FakeEngine, str]
) -> None:
    """--sidecar URL: transaction, holder and lease are shown; naming the sidecar is the order to end its pause."""
    url = pause(sidecars, engine[1], txn(0))
    looked = invoke("--sidecar", url, "--dry-run", "--json")
    (row,) = json.loads(looked.output)
    assert looked.exit_code == 3
    assert row["found"]["holder"] == "a" * 32 and 3000 < row["found"]["lease_left_s"] <= HOUR_S
    assert row["found"]["since"] > 0 and row["found"]["weight_version"] == "default" and not row["found"]["torn"]
    assert invoke("--sidecar", url).exit_code == 0
    assert not engine[0].paused


def test_r104_a_live_run_is_looked_at_and_left_alone(
    tmp_path: Path, sidecars: Sidecars, engine: tuple[FakeEngine, str]
) -> None:
    """With run.lock held its own transaction stays, exit 3; --force ends it."""
    url = pause(sidecars, engine[1], txn(1))
    run_dir = a_run(tmp_path, f'engine.sidecar_url=["{url}"]', owes=txn(1))
    with held_by_another_process(run_dir):
        left = invoke("--run-dir", str(run_dir))
        assert left.exit_code == 3 and "alive" in left.output
        assert engine[0].paused and open_debts(run_dir) == [txn(1)]
        assert invoke("--run-dir", str(run_dir), "--force").exit_code == 0
    assert not engine[0].paused


def test_r104_a_pause_of_another_controller_is_left_unless_forced(
    tmp_path: Path, sidecars: Sidecars, engine: tuple[FakeEngine, str]
) -> None:
    """A transaction that the run's journal doesn't know isn't ended by --run-dir alone: exit 3."""
    url = pause(sidecars, engine[1], f"ha1:{'b' * 32}:0")
    run_dir = a_run(tmp_path, f'engine.sidecar_url=["{url}"]')
    left = invoke("--run-dir", str(run_dir))
    assert left.exit_code == 3 and "not of this run" in " ".join(left.output.split())
    assert engine[0].paused
    assert invoke("--run-dir", str(run_dir), "--force").exit_code == 0
    assert not engine[0].paused


def test_r104_an_attached_engine_without_its_sidecar_is_ended_directly(
    tmp_path: Path, engine: tuple[FakeEngine, str]
) -> None:
    """The sidecar was killed too: an owed resume goes to /continue_generation; without a debt only with --force."""
    scripted, url = engine
    settings = ("engine.kind=attach", f'engine.url=["{url}"]')
    scripted.paused = True
    run_dir = a_run(tmp_path / "owing", *settings, owes=txn(0))
    assert invoke("--run-dir", str(run_dir)).exit_code == 0
    assert not scripted.paused and open_debts(run_dir) == []
    scripted.paused = True
    run_dir = a_run(tmp_path / "clear", *settings)
    assert invoke("--run-dir", str(run_dir)).exit_code == 3
    assert scripted.paused
    assert invoke("--run-dir", str(run_dir), "--force").exit_code == 0
    assert not scripted.paused


def test_r104_an_engine_that_does_not_resume_is_reported_and_cannot_be_fenced_from_here(
    tmp_path: Path, sidecars: Sidecars, engine: tuple[FakeEngine, str]
) -> None:
    """Three ends are refused by the engine: exit 3, the debt stays; an attached engine can't be restarted either."""
    url = pause(sidecars, engine[1], txn(0))
    run_dir = a_run(tmp_path, f'engine.sidecar_url=["{url}"]', owes=txn(0))
    engine[0].faults["/continue_generation"] = [500.0] * 50
    forced = invoke("--run-dir", str(run_dir), "--force")
    assert forced.exit_code == 3 and "fence failed" in " ".join(forced.output.split())
    assert open_debts(run_dir) == [txn(0)]


def test_what_a_launched_engine_owed_went_with_it(tmp_path: Path) -> None:
    """An engine that the run launched has ended with its sidecar: the debt is settled without a call."""
    run_dir = a_run(tmp_path, owes=txn(0))
    assert invoke("--run-dir", str(run_dir)).exit_code == 0
    assert open_debts(run_dir) == []


def test_engines_that_the_settings_no_longer_name_hold_up_no_start(tmp_path: Path) -> None:
    """What launched engines were owed went with them. One elsewhere is asked for, until --force forgets it."""
    owed = Debts().incur("engine-3", txn(0))
    run_dir = a_run(tmp_path / "launched")
    JournalFile(run_dir / "journal.jsonl").append(owed)
    anyio.run(settle_debts, load("quickstart-fast"), run_dir)
    assert open_debts(run_dir) == []
    run_dir = a_run(tmp_path / "elsewhere", 'engine.kind="attach"', 'engine.url=["http://127.0.0.1:9"]')
    JournalFile(run_dir / "journal.jsonl").append(owed)
    left = invoke("--run-dir", str(run_dir))
    assert left.exit_code == 3 and "--sidecar URL" in " ".join(left.output.split())
    assert invoke("--run-dir", str(run_dir), "--force").exit_code == 0
    assert open_debts(run_dir) == []


def test_a_start_ends_the_debts_of_the_run_before(
    tmp_path: Path, sidecars: Sidecars, engine: tuple[FakeEngine, str]
) -> None:
    """Replay before anything else: the engine runs again; a sidecar that doesn't answer stops the start (exit 3)."""
    url = pause(sidecars, engine[1], txn(5))
    config = load("quickstart-fast", [f'engine.sidecar_url=["{url}"]'])
    run_dir = a_run(tmp_path, owes=txn(5))
    (report,) = anyio.run(settle_debts, config, run_dir)
    assert report.settled == {txn(5): "ended"} and not engine[0].paused
    assert anyio.run(settle_debts, config, run_dir) == []
    JournalFile(run_dir / "journal.jsonl").append(Debts().incur("engine-0", txn(6)))
    stop(sidecars)
    with pytest.raises(CompensationFailed, match="engine-0") as caught:
        anyio.run(settle_debts, config, run_dir)
    assert caught.value.exit_code == 3


def test_the_target_must_be_named(tmp_path: Path) -> None:
    """Neither, both, and a directory that holds no run are mistakes: exit 2."""
    assert invoke().exit_code == 2
    assert invoke("--run-dir", str(tmp_path), "--sidecar", "http://127.0.0.1:1").exit_code == 2
    assert invoke("--run-dir", str(tmp_path)).exit_code == 2
