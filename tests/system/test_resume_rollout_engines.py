"""`hybridasync resume-rollout` beside real sidecars with real engines, and with input that can't be right."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.system.rollout_side import TOKEN, Node, RolloutSide
from typer.testing import CliRunner, Result

from hybridasync.config.load import load
from hybridasync.config.resolved import write_resolved
from hybridasync.drivers import resume_rollout as drivers
from hybridasync.protocol.debts import Debts
from hybridasync.transport.journal import JournalFile
from hybridasync_cli.main import app

pytestmark = pytest.mark.slow

SESSION = "c" * 32
NOBODY = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDASYNC_TOKEN", TOKEN)


@pytest.fixture(scope="module")
def side(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutSide]:
    with RolloutSide(tmp_path_factory.mktemp("rollout"), 2) as found:
        yield found


@pytest.fixture
def nodes(side: RolloutSide) -> list[Node]:
    """Two engines that are paused for an hour, in a transaction that none of the tests uses again."""
    for node in side.nodes:
        node.wait_ready()
    side.transactions += 1
    for node in side.nodes:
        pause(node, txn(side))
    return side.nodes


def txn(side: RolloutSide) -> str:
    return f"ha1:{SESSION}:{side.transactions}"


def pause(node: Node, name: str) -> None:
    answer = httpx.post(
        f"{node.url}/v1/pause",
        json={"txn": name, "mode": "retract", "lease_s": 3600.0},
        headers={"Authorization": f"Bearer {TOKEN}"},
        trust_env=False,
        timeout=10,
    )
    assert answer.json()["paused"] is True


def engine_is_ready(node: Node) -> bool:
    """By the engine's own word."""
    return httpx.get(f"{node.status()['engine_url']}/ready", trust_env=False).status_code == 200


def invoke(*arguments: str) -> Result:
    result = CliRunner().invoke(app, ["resume-rollout", *arguments])
    assert "Traceback" not in result.output
    return result


def a_run(folder: Path, nodes: list[Node], *, owes: str | None = None) -> Path:
    """As a controller that was killed leaves it."""
    run_dir = folder / "run"
    (run_dir / "logs").mkdir(parents=True)
    urls = json.dumps([node.url for node in nodes])
    write_resolved(load("quickstart-fast", [f"engine.sidecar_url={urls}"]), run_dir)
    if owes is not None:
        for index in range(len(nodes)):
            JournalFile(run_dir / "journal.jsonl").append(Debts().incur(f"engine-{index}", owes))
    return run_dir


def test_r104_dry_run_shows_every_column_and_changes_nothing(side: RolloutSide, nodes: list[Node]) -> None:
    """Engine, state, by whom, transaction, since when, lease left, weights; exit 3. Without it they are ended: 0."""
    targets = [part for node in nodes for part in ("--sidecar", node.url)]
    looked = invoke(*targets, "--dry-run")
    table = " ".join(looked.output.split())
    assert looked.exit_code == 3
    for part in (nodes[0].url, "paused", "controller cccccccc", txn(side), " s ", "default", "would end"):
        assert part in table
    assert [engine_is_ready(node) for node in nodes] == [False, False]
    assert invoke(*targets).exit_code == 0
    assert [engine_is_ready(node) for node in nodes] == [True, True]
    again = invoke(*targets)
    assert again.exit_code == 0 and "nothing to do" in again.output


def test_r104_run_dir_says_this_run_and_passes_over_a_torn_journal(
    side: RolloutSide, nodes: list[Node], tmp_path: Path
) -> None:
    """A last line that was cut off and one of garbage hide no debt: both engines are ended, exit 0."""
    run_dir = a_run(tmp_path, nodes, owes=txn(side))
    with (run_dir / "journal.jsonl").open("ab") as journal:
        journal.write(b'\n\x00\xff garbage\n{"event": "pause_settl')
    looked = invoke("--run-dir", str(run_dir), "--dry-run")
    assert looked.exit_code == 3 and looked.output.count("this run") == 2
    assert invoke("--run-dir", str(run_dir)).exit_code == 0
    assert [engine_is_ready(node) for node in nodes] == [True, True]
    assert not Debts.replay(JournalFile(run_dir / "journal.jsonl").replay()).open


def test_r104_without_a_journal_nothing_is_owed(nodes: list[Node], tmp_path: Path) -> None:
    """The engines are shown, and left to whoever paused them; --force ends that too."""
    run_dir = a_run(tmp_path, nodes)
    left = invoke("--run-dir", str(run_dir))
    assert left.exit_code == 3 and "not of this run" in " ".join(left.output.split())
    assert [engine_is_ready(node) for node in nodes] == [False, False]
    assert invoke("--run-dir", str(run_dir), "--force").exit_code == 0
    assert [engine_is_ready(node) for node in nodes] == [True, True]


def test_r104_one_that_does_not_answer_holds_up_no_other(nodes: list[Node]) -> None:
    """Exit 3, because it may be paused; the others are ended all the same."""
    result = invoke("--sidecar", NOBODY, "--sidecar", nodes[0].url, "--sidecar", nodes[1].url)
    assert result.exit_code == 3 and "no answer" in result.output and "ConnectError" in result.output
    assert [engine_is_ready(node) for node in nodes] == [True, True]


def test_r104_a_wrong_token_ends_nothing_and_says_so(nodes: list[Node], tmp_path: Path) -> None:
    """Exit 3 and a hint; the token of a file goes before that of the environment."""
    wrong, right = tmp_path / "wrong", tmp_path / "right"
    wrong.write_text("another\n")
    right.write_text(f"{TOKEN}\n")
    targets = [part for node in nodes for part in ("--sidecar", node.url)]
    refused = invoke(*targets, "--token-file", str(wrong))
    assert refused.exit_code == 3 and "--token-file" in refused.output
    assert [engine_is_ready(node) for node in nodes] == [False, False]
    assert invoke(*targets, "--token-file", str(right)).exit_code == 0


def test_r104_force_starts_an_engine_anew_that_will_not_resume(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped engine answers no resume, and with --force another process takes its place, which isn't paused."""
    monkeypatch.setattr(drivers, "END_ATTEMPTS", 1)  # instead of shorter ones: a fence takes its time to kill
    hung = nodes[0].status()["engine_pid"]
    os.kill(hung, signal.SIGSTOP)
    forced = invoke("--sidecar", nodes[0].url, "--force", "--json")
    (row,) = json.loads(forced.output)
    assert forced.exit_code == 0 and row["done"] == ["end failed", "fenced"]
    assert nodes[0].wait_ready()["engine_pid"] != hung
    assert engine_is_ready(nodes[0]) and not engine_is_ready(nodes[1])
    assert invoke("--sidecar", nodes[1].url).exit_code == 0


BAD = {
    "a directory that isn't there": (["--run-dir", "{folder}/none"], "holds no run"),
    "a file": (["--run-dir", "{folder}/file"], "holds no run"),
    "no target": ([], "one of the two"),
    "both targets": (["--run-dir", "{folder}", "--sidecar", NOBODY], "one of the two"),
    "not a URL": (["--sidecar", "host:31000"], "http://"),
    "no such token file": (["--sidecar", NOBODY, "--token-file", "{folder}/none"], "--token-file"),
    "an empty token file": (["--sidecar", NOBODY, "--token-file", "{folder}/file"], "is empty"),
    "a journal that can't be read": (["--run-dir", "{folder}/unreadable"], "journal.jsonl"),
    "settings that can't be right": (["--run-dir", "{folder}/wrong"], "config.resolved.toml"),
}


@pytest.mark.parametrize("what", BAD)
def test_r104_input_that_cannot_be_right_is_refused(what: str, tmp_path: Path) -> None:
    """Exit 2, with what was given or what would do, and no traceback."""
    (tmp_path / "file").touch()
    (a_run(tmp_path / "u", []) / "journal.jsonl").mkdir()
    (tmp_path / "u" / "run").rename(tmp_path / "unreadable")
    (a_run(tmp_path / "w", []) / "config.resolved.toml").write_text("[rollout]\nnum_rollout = 'many'\n")
    (tmp_path / "w" / "run").rename(tmp_path / "wrong")
    arguments, words = BAD[what]
    result = invoke(*(argument.format(folder=tmp_path) for argument in arguments))
    assert result.exit_code == 2 and words in " ".join(result.output.split()), result.output
