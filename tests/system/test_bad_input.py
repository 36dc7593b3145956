"""Mistakes and missing resources as users meet them: one clear message, the right exit code, nothing left running.

What the configuration and the preflight refuse by themselves is in tests/unit/test_cli.py and test_preflight.py.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from whole_run import ENVIRONMENT, HYBRIDASYNC, SHORT, Run, overrides, train

from hybridasync.config.load import load
from hybridasync.config.models import Config
from hybridasync.config.pipeline import resolve
from hybridasync.config.recipes import shipped_recipes
from hybridasync.config.resolved import write_resolved
from hybridasync.data.sort_digits import prepare
from hybridasync.errors import ConfigError
from hybridasync.observability.process import descendants, wait_ended
from hybridasync.runtime import lock
from hybridasync.runtime.inputs import read_inputs
from hybridasync.runtime.preflight import preflight

SMALL = SHORT | {
    "prepare.args.digits": 3,
    "prepare.args.warm_start_rows": 256,
    "warm_start.steps": 2,
    "eval.max_prompts": 4,
    "algorithm.filter_zero_variance": False,
    "checkpoint.export_hf": False,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory and data files, as a user would have them."""
    folder = tmp_path_factory.mktemp("made")
    prepare(folder, 0, digits=3, warm_start_rows=16, eval_prompts=8)
    return folder


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """A small disk: a tmpfs of so many MiB."""
    mounted: list[Path] = []

    def mount(size_mib: int) -> Path:
        folder = tmp_path / "disk"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "tmpfs", str(folder)]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
            pytest.skip("only root may mount a tmpfs")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def config(made: Path, *overrides: str) -> Config:
    paths = (
        "prepare.function=none",
        f"model.hf_checkpoint={made}/model",
        f"data.prompt_data={made}/train.jsonl",
        f"warm_start.data={made}/warm_start.jsonl",
        f"eval.eval_prompt_data={made}/eval.jsonl",
    )
    return resolve(load("quickstart-fast", [*paths, *overrides])).config


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [HYBRIDASYNC, *arguments], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )


def check_refusal(done: subprocess.CompletedProcess[str], *expected: str) -> None:
    """Exit code 2, nothing on stdout, one message on stderr that has all of `expected`."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == "" and "Traceback" not in done.stderr
    assert done.stderr.count("error: ") == 1
    for part in expected:
        assert part in done.stderr


def check_failure(run: Run, code: int, *expected: str) -> None:
    """The code, one error message that has all of `expected`, nothing left, and a summary that says so."""
    assert run.returncode == code, run.explain()
    assert "Traceback" not in run.output, run.output
    assert len(re.findall("^error: ", run.output, flags=re.MULTILINE)) == 1, run.output
    for part in expected:
        assert part in run.output, run.output
    assert not run.left
    assert run.summary["status"] == "failed" and run.summary["exit_code"] == code


# --- before anything is started


def test_an_unknown_recipe_lists_what_there_is(tmp_path: Path) -> None:
    """Every recipe that ships is named."""
    check_refusal(command(tmp_path, "train", "kwikstart"), "'kwikstart'", *(one.name for one in shipped_recipes()))


def test_layers_that_pipeline_stages_do_not_divide_are_refused(made: Path) -> None:
    """Two layers over three stages: the message has the setting and both numbers."""
    with pytest.raises(ConfigError, match=r"parallel.pipeline_model_parallel_size: .*3.*2|.*2.*3"):
        preflight(config(made, "parallel.num_workers=3", "parallel.pipeline_model_parallel_size=3"))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"question": "sort 1=", "label": "1"}', "line 3: no field 'prompt'"),
        ('{"prompt": "sort 1="}', "line 3: no field 'label'"),
        ('{"prompt": 7, "label": "1"}', "line 3"),
    ],
)
def test_a_bad_row_far_down_is_named(made: Path, tmp_path: Path, line: str, expected: str) -> None:
    """The first rows are in order; the line that isn't is named before anything is started."""
    file = tmp_path / "data.jsonl"
    file.write_text('{"prompt": "sort 12=", "label": "12"}\n' * 2 + line + "\n")
    with pytest.raises(ConfigError) as caught:
        read_inputs(config(made, f"data.prompt_data={file}"), tmp_path / "run")
    assert str(caught.value).startswith("data.prompt_data: ") and expected in str(caught.value)


def test_c54_prompts_beyond_the_context_are_filtered_with_a_count(made: Path, tmp_path: Path) -> None:
    """A prompt that fills the context is left out, and the count is a line for the log."""
    file = tmp_path / "data.jsonl"
    rows = [{"prompt": text, "label": "1"} for text in ("sort 1=", "sort 2=", "1" * 500)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    notes = "\n".join(read_inputs(config(made, f"data.prompt_data={file}"), tmp_path / "run").notes)
    assert "3 prompts loaded" in notes and "1 filtered (longer than 127 tokens), 2 left" in notes


def test_a_directory_of_a_live_run_is_refused(made: Path, tmp_path: Path) -> None:
    """--resume of a run that still runs names its process, and leaves the run's files alone."""
    run_dir = tmp_path / "run"
    with lock.hold(run_dir):
        resolved = write_resolved(config(made), run_dir)
        before = resolved.read_bytes()
        done = command(tmp_path, "train", "--resume", "run", "--num-rollout", "7")
        check_refusal(done, "run.dir: run belongs to a live run (process ", str(os.getpid()))
        assert resolved.read_bytes() == before


def test_a_taken_port_is_refused(tmp_path: Path) -> None:
    """Setting, port and remedy in one message; no run directory is made."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = command(tmp_path, "train", "quickstart-fast", "--set", f"network.master_port={port}")
    check_refusal(done, f"network.master_port: port {port} is taken; give another, or 0")
    assert list(tmp_path.iterdir()) == []


def fill(folder: Path, *, leave: int) -> None:
    """Take all of the disk's space but `leave` bytes, while others may be writing to it."""
    with (folder / "filler").open("ab") as file:
        for _ in range(100):
            more = shutil.disk_usage(folder).free - leave
            if more <= 0:
                return
            with suppress(OSError):  # somebody took some of it in the meantime
                os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, more)


@pytest.mark.parametrize("leave", [2**20, 0])
def test_a_full_disk_is_refused_at_the_start(tmp_path: Path, disk: Callable[[int], Path], leave: int) -> None:
    """A disk without room for a checkpoint, and one without room for a byte."""
    fill(disk(4), leave=leave)
    done = command(tmp_path, "train", "quickstart-fast", "--run-dir", "disk/run")
    check_refusal(done, "run.dir: ", "disk/run", "no space" if leave else "No space left on device")


# --- while it runs

REWARDS = """
def raises(response, label):
    raise LookupError(f"no judge for {label!r}")

def miscounts(responses, labels):
    return [0.0] * (len(responses) + 1)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"reward.function": "judge:raises"}, "judge:raises raised LookupError: no judge for"),
        ({"reward.function": "judge:miscounts", "reward.batched": True}, "judge:miscounts"),
    ],
)
def test_a_reward_function_that_fails_ends_the_run(tmp_path: Path, settings: dict[str, object], expected: str) -> None:
    """A reward that raises, or answers too many values, is exit code 1 with the original text."""
    (tmp_path / "judge.py").write_text(REWARDS)
    check_failure(train(tmp_path, SMALL | settings), 1, expected)


@pytest.mark.slow
def test_a_mistake_that_only_the_run_can_see_is_exit_2(made: Path, tmp_path: Path) -> None:
    """A bad line far down in the data ends the started job with exit code 2 and the line."""
    file = tmp_path / "data.jsonl"
    file.write_text('{"prompt": "sort 12=", "label": "12"}\n' * 5 + '{"prompt": "sort 12="}\n')
    check_failure(train(tmp_path, SMALL | {"data.prompt_data": str(file)}), 2, "data.prompt_data: ", "line 6")


@pytest.mark.slow
@pytest.mark.parametrize("leave", [3 * 2**20, 0])
def test_a_disk_that_fills_up_ends_the_run_with_its_name(
    tmp_path: Path, disk: Callable[[int], Path], leave: int
) -> None:
    """No room for a checkpoint, or for a byte: exit code 1, what couldn't be written, and earlier checkpoints stay."""
    folder = disk(96)
    settings = SMALL | {"rollout.num_rollout": 300, "checkpoint.save_interval": 1}
    run_dir = folder / "run"
    arguments = ["train", "quickstart-fast", "--run-dir", str(run_dir), *overrides(settings)]
    with background(tmp_path, *arguments) as process:
        wait_for(process, (run_dir / "checkpoints" / "step_000002").is_dir)
        fill(folder, leave=leave)
        output = ended(process)
    assert process.returncode == 1, output
    assert "Traceback" not in output and output.count("\nerror: ") == 1, output
    assert re.search(r"^error: \S*/disk/run/.*(MiB are free|No space left on device)", output, re.MULTILINE), output
    assert "without a word" not in output
    kept = [path for path in (run_dir / "checkpoints").glob("step_*") if (path / "manifest.json").is_file()]
    assert kept and not list((run_dir / "checkpoints").glob("*.partial"))


# --- Ctrl-C, once, at any moment

MOMENTS: dict[str, Callable[[int, Path], bool]] = {
    "imports": lambda pid, _: "pydantic_core" in text(Path(f"/proc/{pid}/maps")),  # ours: Python's own start is over
    "run directory made": lambda _, run_dir: run_dir.is_dir(),
    "workers and engine come up": lambda _, run_dir: (run_dir / "logs" / "engine-0.log").exists(),
    "evaluation": lambda _, run_dir: "publication.completed" in text(run_dir / "events.jsonl"),
    "shutdown": lambda _, run_dir: text(run_dir / "metrics.jsonl").count("\n") == SMALL["rollout.num_rollout"],
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_at_any_moment_is_no_traceback(tmp_path: Path, moment: str) -> None:
    """Exit code 130, or 0 where everything was done already; at most a few words, and nothing is left."""
    run_dir = tmp_path / "run"
    delay = random.uniform(0.0, 0.5)
    with background(tmp_path, "train", "quickstart-fast", "--run-dir", str(run_dir), *overrides(SMALL)) as process:
        wait_for(process, lambda: MOMENTS[moment](process.pid, run_dir))
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        output = ended(process)
    print(f"{delay:.3f} s after: {moment}\n{output}")
    done = text(run_dir / "metrics.jsonl").count("\n") == SMALL["rollout.num_rollout"]
    assert process.returncode in ({130, 0} if done else {130})
    assert "Traceback" not in output
    if (run_dir / "summary.json").exists():
        assert json.loads(text(run_dir / "summary.json"))["exit_code"] == process.returncode


def text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@contextmanager
def background(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`hybridasync` at work; the block ends it, if need be by force."""
    with subprocess.Popen(
        [HYBRIDASYNC, *arguments],
        cwd=folder,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def wait_for(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 150
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            process.terminate()
            pytest.fail(f"it never came:\n{process.communicate(timeout=60)[0]}")
        time.sleep(0.005)


def ended(process: subprocess.Popen[str]) -> str:
    """Its output, once it has ended and nothing that it started is left."""
    members = descendants(process.pid)
    output = process.communicate(timeout=90)[0]
    left = wait_ended(members, 30)
    assert not left, f"left behind: {left}\n{output}"
    return output
