"""`hybridasync sglang setup` and the launch line: mistakes are told, nothing is done twice, the files ship."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hybridasync.config.models import Config
from hybridasync.config.recipes import recipe_directory
from hybridasync.errors import ConfigError
from hybridasync.runtime import sglang_setup
from hybridasync.runtime.environment import without_torchrun
from hybridasync.runtime.sglang_launch import launch_command, launch_environment, reserved_tokens
from hybridasync.runtime.sglang_setup import LOG, MARKER, SetupError, setup_sglang


class Steps:
    """Stands in for pip and for the import of SGLang; makes what `venv` would."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ran: list[str] = []
        self.verified = 0

    def run(self, directory: Path, what: str, command: list[str]) -> None:
        self.ran.append(what)
        if "venv" in command:
            (directory / "bin").mkdir(parents=True)
            (directory / "bin" / "python").symlink_to(sys.executable)
            (directory / "pyvenv.cfg").write_text("")

    def verify(self, directory: Path, python: Path) -> dict[str, str]:
        self.verified += 1
        return {"sglang": "0.5.23", "torch": "2.13.0", "python": "3.11"}


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Steps:
    steps = Steps(tmp_path / "env")
    monkeypatch.setattr(sglang_setup, "_run", steps.run)
    monkeypatch.setattr(sglang_setup, "_verify", steps.verify)
    monkeypatch.setattr(sglang_setup, "_install_stand_ins", lambda *_: None)
    return steps


def test_a_second_call_only_verifies(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is complete isn't installed again; what was interrupted, or made from other files, is."""
    first = setup_sglang(steps.directory, say=lambda _: None)
    assert first.made_now and first.python == steps.directory / "bin" / "python"
    assert len(steps.ran) == 3
    assert not setup_sglang(steps.directory, say=lambda _: None).made_now
    assert len(steps.ran) == 3 and steps.verified == 2
    (steps.directory / MARKER).write_text(json.dumps({"made_from": "other files"}))
    assert setup_sglang(steps.directory, say=lambda _: None).made_now
    assert len(steps.ran) == 5  # the virtual environment itself stays


def test_a_directory_that_holds_something_else(steps: Steps, tmp_path: Path) -> None:
    """Neither a file nor a folder with other things in it is touched, nor the environment that runs."""
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "full", Path(sys.prefix)):
        with pytest.raises(ConfigError, match=str(path)):
            setup_sglang(path, say=lambda _: None)
    assert steps.ran == []


def test_a_step_that_fails_says_which_and_why(tmp_path: Path) -> None:
    """With the end of its log, and that a repetition goes on."""
    command = [sys.executable, "-c", "import sys; print('no matching distribution'); sys.exit(3)"]
    with pytest.raises(SetupError, match=r"(?s)install SGLang \(exit code 3\).*no matching distribution.*goes on"):
        sglang_setup._run(tmp_path, "install SGLang", command)
    assert (tmp_path / LOG).is_file()


def test_the_files_ship_and_are_pinned() -> None:
    """Every requirement has an exact version, torch comes first, and the stand-ins are packages."""
    source = recipe_directory() / "sglang-cpu"
    for name in (sglang_setup.REQUIREMENTS, sglang_setup.REQUIREMENTS_NO_DEPS):
        lines = [line.partition("#")[0].strip() for line in (source / name).read_text().splitlines()]
        assert all("==" in line for line in lines if line)
    assert next(
        line for line in (source / sglang_setup.REQUIREMENTS).read_text().splitlines() if "==" in line
    ).startswith("torch==")
    assert {path.parent.name for path in (source / "stand_ins").glob("*/__init__.py")} == {"sgl_kernel", "torchvision"}


def test_stand_ins_can_be_imported_and_not_used() -> None:
    """Whatever is asked for is there, as SGLang and transformers ask at import; calling it says what it is."""
    program = """
import sgl_kernel, torchvision
from sgl_kernel import verify_tree_greedy_cpu
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms.v2 import functional
from torchvision.transforms import InterpolationMode
assert InterpolationMode.BICUBIC == "bicubic" and functional is torchvision.transforms.v2.functional
for call in (verify_tree_greedy_cpu, decode_image, functional.resize):
    try:
        call(1, size=2)
    except RuntimeError as error:
        assert "stand-in" in str(error)
    else:
        raise SystemExit(1)
"""
    stand_ins = recipe_directory() / "sglang-cpu" / "stand_ins"
    done = subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": str(stand_ins)}, timeout=60)
    assert done.returncode == 0


def config_of(**engine: object) -> Config:
    return Config.model_validate(
        {
            "model": {"hf_checkpoint": "m", "dtype": "bf16"},
            "data": {"prompt_data": "p.jsonl"},
            "rollout": {
                "num_rollout": 1,
                "rollout_batch_size": 1,
                "n_samples_per_prompt": 1,
                "max_response_tokens": 1,
            },
            "engine": {"kind": "sglang", "python": "/env/bin/python", **engine},
        }
    )


def test_a_deterministic_rollout_is_deterministic_inference_there() -> None:
    """Seeds alone have no effect in SGLang; on a CPU, where it has no such mode, the setting is refused."""
    config = config_of()
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"deterministic": True})})
    assert "--enable-deterministic-inference" in launch_command(config, device="cuda", address=())
    with pytest.raises(ConfigError, match=r"rollout\.deterministic"):
        launch_command(config, device="cpu", address=())


def test_the_launch_line() -> None:
    """On a CPU with what SGLang needs there, on a GPU without; the recipe's own arguments come last."""
    config = config_of(tensor_parallel_size=2, args=("--mem-fraction-static", "0.8"))
    cpu = launch_command(config, device="cpu", address=("--port", "{port}"))
    gpu = launch_command(config, device="cuda", address=("--port", "{port}"))
    assert cpu[:3] == ["/env/bin/python", "-m", "sglang.launch_server"]
    assert cpu[cpu.index("--dtype") + 1] == "bfloat16" and cpu[cpu.index("--tp-size") + 1] == "2"
    assert "torch_native" in cpu and "torch_native" not in gpu
    assert cpu[-2:] == gpu[-2:] == ["--mem-fraction-static", "0.8"]
    assert "--enable-deterministic-inference" not in gpu
    assert launch_environment(device="cuda", tensor_parallel_size=2) == {}
    environment = launch_environment(device="cpu", tensor_parallel_size=2)
    assert environment["SGLANG_USE_CPU_ENGINE"] == "1"
    assert environment["SGLANG_CPU_OMP_THREADS_BIND"].count("|") == 1
    assert (reserved_tokens(config), reserved_tokens(config_of(kind="embedded"))) == (6, 0)


def test_torchruns_variables_stay_behind() -> None:
    """An engine's own process group would wait for the store that they name."""
    ours = {"PATH": "/bin", "HYBRIDASYNC_TOKEN": "t", "WORLD_SIZES": "kept"}
    theirs = {"RANK": "0", "MASTER_ADDR": "x", "TORCHELASTIC_USE_AGENT_STORE": "True", "ROLE_NAME": "default"}
    assert without_torchrun(ours | theirs) == ours
