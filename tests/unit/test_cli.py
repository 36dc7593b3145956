"""The command line: what is printed, which exit code, and that nothing heavy is loaded to say what is wrong."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner, Result

from hybridasync.config.load import load
from hybridasync.config.names import STACK_NAMES
from hybridasync.config.pipeline import Resolved, resolve
from hybridasync.config.resolved import write_resolved
from hybridasync.errors import CompensationFailed, ConfigError, WorkerLost
from hybridasync_cli import start
from hybridasync_cli.main import app
from hybridasync_cli.train import name_latest


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run directories of tests lie in the test's own folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Resolved, Path, bool]]:
    """A launcher that only notes what it was asked to launch."""
    calls: list[tuple[Resolved, Path, bool]] = []

    def launch(resolved: Resolved, *, run_dir: Path, resume: bool) -> int:
        calls.append((resolved, run_dir, resume))
        write_resolved(resolved.config, run_dir)
        return 0

    replace_launch(monkeypatch, launch)
    return calls


def replace_launch(monkeypatch: pytest.MonkeyPatch, launch: Callable[..., int]) -> None:
    module = ModuleType("hybridasync.runtime.launcher")
    module.launch = launch  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hybridasync.runtime.launcher", module)


def test_dry_run_prints_a_recipe_and_its_bounds(tmp_path: Path) -> None:
    """What --dry-run prints is a recipe that resolves to the same, followed by the bounds as comments."""
    result = invoke("train", "quickstart", "--dry-run", "--lr", "5e-4")
    assert result.exit_code == 0, result.output
    (tmp_path / "again.toml").write_text(result.stdout, encoding="utf-8")
    assert load("again.toml") == resolve(load("quickstart", ["optimizer.lr=5e-4"])).config
    assert "# max_version_lag = 1 " in result.stdout and "# publications = 101 " in result.stdout
    assert list(tmp_path.iterdir()) == [tmp_path / "again.toml"]


def test_dry_run_warns(tmp_path: Path) -> None:
    """Warnings and changes are on stderr, beside a recipe on stdout; with --explain once."""
    for further in ((), ("--explain",)):
        result = invoke("train", "quickstart", "--dry-run", "--set", "publication.bucket_mib=1", *further)
        assert result.stderr.count("publication.bucket_mib: has no effect") == 1


def test_explain_shows_what_was_written_what_runs_and_why() -> None:
    """--explain says for each change what was written, what runs, and the reason; and it doesn't train."""
    result = invoke("train", "quickstart", "--explain", "--mode", "sync", "--use-kl-loss")
    assert result.exit_code == 0
    words = " ".join(result.stdout.split())
    for part in ("you wrote", "what runs", "why", "rollout.max_staleness 1 0", "algorithm.use_kl_loss true false"):
        assert part in words


def test_options_override_set_and_set_overrides_the_recipe() -> None:
    """Precedence: option, then --set, then the recipe; a flag has both directions."""
    arguments = ("--set", "optimizer.lr=2e-3", "--set", "seed=5", "--lr", "3e-3", "--no-use-tis", "--mode", "sync")
    printed = tomllib.loads(invoke("train", "quickstart", "--dry-run", *arguments).stdout)
    assert (printed["optimizer"]["lr"], printed["seed"]) == (3e-3, 5)
    assert printed["algorithm"]["use_tis"] is False


def test_every_known_option_is_in_the_help() -> None:
    """The help teaches: every option of the table, in panels, with its setting."""
    result = CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "250", "TERMINAL_WIDTH": "250"})
    assert result.exit_code == 0
    missing = [name for name in STACK_NAMES if f"--{name}" not in result.stdout]
    assert missing == []
    for panel in ("Loss and off-policy correction", "Publication of weights", "hybridasync train quickstart"):
        assert panel in result.stdout
    assert "(publication.update_weights_interval)" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("train", "quikstart"), "Did you mean quickstart?"),
        (("train",), "no recipe given"),
        (("train", "quickstart", "--set", "rollout.max_stalenes=1"), "did you mean rollout.max_staleness?"),
        (("train", "quickstart", "--mode", "hybird"), "mode: wants one of sync, hybrid, fully_async"),
        (("train", "quickstart", "--update-weights-interval", "0"), "must be positive"),
        (("train", "quickstart", "--update-weights-interval", "2", "--no-use-rollout-logprobs"), "Enable --use-tis"),
        (("train", "quickstart", "--reward-function", "nowhere:f"), "reward.function: "),
        (("train", "quickstart", "--resume"), "--resume: no run of quickstart"),
        (("train", "--resume", "nowhere"), "--resume: nowhere holds no run"),
        (("train", "quickstart", "--no-such-option"), "No such option"),
    ],
)
def test_mistakes_are_one_message_and_exit_2(arguments: Sequence[str], expected: str, tmp_path: Path) -> None:
    """A mistake is told on stderr with exit code 2, without a traceback, and leaves nothing behind."""
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert expected in result.stderr
    assert "Traceback" not in result.output and result.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_train_launches_into_a_new_directory(launched: list[tuple[Resolved, Path, bool]]) -> None:
    """Without --run-dir a run gets runs/<recipe>-<time>; two runs at the same second get two directories."""
    assert invoke("train", "quickstart").exit_code == 0
    assert invoke("train", "quickstart").exit_code == 0
    (first, directory, resumed), (_, other, _) = launched
    assert directory.parent == Path("runs") and directory.name.startswith("quickstart-") and directory.is_dir()
    assert other != directory and not resumed
    assert first.config == resolve(load("quickstart")).config


def test_a_used_run_directory_needs_resume(launched: list[tuple[Resolved, Path, bool]]) -> None:
    """A directory that holds a run is refused, unless the run is to go on there."""
    assert invoke("train", "quickstart", "--run-dir", "here").exit_code == 0
    refused = invoke("train", "quickstart", "--run-dir", "here")
    assert refused.exit_code == 2 and "go on with --resume here" in refused.stderr
    assert invoke("train", "quickstart", "--resume", "here").exit_code == 0
    assert [resumed for _, _, resumed in launched] == [False, True]


def test_resume_finds_the_latest_run_and_its_recipe(launched: list[tuple[Resolved, Path, bool]]) -> None:
    """--resume alone means the latest run of the recipe; with a directory no recipe is needed."""
    invoke("train", "quickstart")
    invoke("train", "quickstart")
    latest = launched[-1][1]
    assert invoke("train", "quickstart", "--resume").exit_code == 0
    assert launched[-1][1:] == (latest, True)
    assert invoke("train", "--resume", str(latest), "--num-rollout", "200").exit_code == 0
    assert launched[-1][0].config.rollout.num_rollout == 200


def test_resume_says_what_changed_and_refuses_what_must_not(launched: list[tuple[Resolved, Path, bool]]) -> None:
    """A resumed run lists its harmless changes, and doesn't start with those that don't fit the checkpoint."""
    invoke("train", "quickstart", "--run-dir", "here")
    changed = invoke("train", "quickstart", "--resume", "here", "--lr", "5e-4")
    assert changed.exit_code == 0 and "optimizer.lr: 0.001 before, 0.0005 now" in changed.stderr
    refused = invoke("train", "quickstart", "--resume", "here", "--seed", "9")
    assert refused.exit_code == 2 and "seed: was 0 when the run began and is 9 now" in refused.stderr
    assert len(launched) == 2


@pytest.mark.parametrize("given", ["file", "file/below", "/proc/none/here"])
def test_a_directory_that_cannot_be_written_is_named(
    given: str, tmp_path: Path, launched: list[tuple[Resolved, Path, bool]]
) -> None:
    """A run directory that can't be made is exit 2 with its path, before anything is launched."""
    (tmp_path / "file").write_text("")
    result = invoke("train", "quickstart", "--run-dir", given)
    assert result.exit_code == 2 and given in result.stderr
    assert launched == []


def test_a_full_disk_is_told_before_the_start(
    launched: list[tuple[Resolved, Path, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No space for logs and a checkpoint is exit 2 with the path."""
    monkeypatch.setattr("hybridasync_cli.rundir._LEAST_FREE_BYTES", 2**70)
    result = invoke("train", "quickstart", "--run-dir", "here")
    assert result.exit_code == 2 and "no space on the disk of here" in result.stderr
    assert launched == []


@pytest.mark.parametrize(
    ("error", "code", "expected"),
    [
        (WorkerLost(1, "killed"), 1, "worker rank 1 is lost: killed (logs: here/logs)"),
        (CompensationFailed(["engine-0"]), 3, "Failed to resume rollout on: engine-0"),
        (ConfigError("bad", setting="seed"), 2, "seed: bad"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_failures_exit_with_their_code(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, expected: str
) -> None:
    """A failed run says what happened and where its logs are, and exits with the code of its kind."""

    def launch(*_: object, **__: object) -> int:
        raise error

    replace_launch(monkeypatch, launch)
    result = invoke("train", "quickstart", "--run-dir", "here")
    assert result.exit_code == code and expected in result.stderr
    assert "Traceback" not in result.output


def test_the_exit_code_of_the_run_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the launcher returns is the exit code."""
    replace_launch(monkeypatch, lambda *_, **__: 143)
    assert invoke("train", "quickstart").exit_code == 143


def test_engine_and_sidecar_get_their_arguments_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """`hybridasync engine …` and `sidecar …` hand everything on, --help included, and exit with the code returned."""
    with recorded(monkeypatch, "hybridasync.engine.server") as calls:
        assert invoke("engine", "--model-path", "m", "--port", "0", "--help").exit_code == 5
    with recorded(monkeypatch, "hybridasync.sidecar.__main__") as more:
        assert invoke("sidecar", "--engine-url", "http://127.0.0.1:1").exit_code == 5
    assert calls == [["--model-path", "m", "--port", "0", "--help"]]
    assert more == [["--engine-url", "http://127.0.0.1:1"]]


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[list[list[str]]]:
    """Replace a module by one whose main notes its arguments and returns 5."""
    calls: list[list[str]] = []

    def main(arguments: list[str]) -> int:
        calls.append(arguments)
        return 5

    module = ModuleType(name)
    module.main = main  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, name, module)
        yield calls


def test_recipes_and_version_are_printed() -> None:
    """`recipes` lists name and summary; `version` is a version."""
    listing = invoke("recipes")
    assert listing.exit_code == 0 and "quickstart-fast" in listing.stdout
    assert invoke("version").stdout.strip()[0].isdigit()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--resume"], ["--resume=latest"]),
        (["--resume", "--dry-run"], ["--resume=latest", "--dry-run"]),
        (["--resume", "quickstart"], ["--resume=latest", "quickstart"]),
        (["--resume", "my.toml"], ["--resume=latest", "my.toml"]),
        (["--resume", "runs/x"], ["--resume", "runs/x"]),
    ],
)
def test_resume_may_stand_alone(arguments: list[str], named: list[str]) -> None:
    """A --resume that no directory follows means the latest run."""
    assert name_latest(arguments) == named


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hybridasync_cli", *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "nowhere"),
        ("train", "quickstart", "--rollout-temperature", "0"),
        ("train", "quickstart", "--hf-checkpoint", "/nowhere"),
        ("train", "quickstart", "--run-dir", "/proc/none"),
    ],
)
def test_a_real_process_exits_2_without_a_traceback(arguments: Sequence[str]) -> None:
    """As users see it: exit code 2, a message on stderr, nothing on stdout, no traceback."""
    done = command(*arguments)
    assert done.returncode == 2, done.stderr
    assert done.stderr and "Traceback" not in done.stderr and done.stdout == ""


def test_ctrl_c_while_the_command_line_is_built_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports are over, and no command has begun that would see to it."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hybridasync_cli.main.app", interrupted)
    with pytest.raises(SystemExit) as raised:
        start.main()
    assert raised.value.code == start.INTERRUPTED


def test_looking_at_a_recipe_loads_nothing_heavy() -> None:
    """--help, --dry-run and --explain need neither torch nor megatron nor transformers."""
    code = (
        "import sys; from typer.testing import CliRunner; from hybridasync_cli.main import app\n"
        "for a in (['--help'], ['train', '--help'], ['train', 'quickstart', '--dry-run', '--explain']):\n"
        "    assert CliRunner().invoke(app, a).exit_code == 0\n"
        "sys.exit(bool({'torch', 'megatron', 'transformers', 'numpy', 'starlette'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
