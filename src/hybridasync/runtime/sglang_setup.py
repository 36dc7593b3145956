"""SGLang's own environment on a machine without a GPU, from the pinned files of recipes/sglang-cpu.

It is an environment apart because SGLang's pinned packages differ from ours. Two packages that SGLang imports exist
only for CUDA: stand-ins that can be imported take their place (recipes/sglang-cpu/stand_ins).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridasync.config.recipes import recipe_directory
from hybridasync.errors import ConfigError, OperatingError
from hybridasync.observability.process import log_tail
from hybridasync.runtime.sglang_launch import CPU_ENVIRONMENT

MARKER = "hybridasync-sglang.json"
"""In the environment's folder, written last: which files it was made from, and what was found in it."""

LOG = "setup.log"
REQUIREMENTS = "requirements.txt"
REQUIREMENTS_NO_DEPS = "requirements-no-deps.txt"
STAND_INS = "stand_ins"

IMPORT_TIMEOUT_S = 600.0
"""The first import compiles thousands of modules: over a minute on a busy machine."""

_VERIFY = """
import json, sys, torch, sglang
import sglang.srt.entrypoints.http_server
from sglang.srt.managers import scheduler
print(json.dumps({"sglang": sglang.__version__, "torch": torch.__version__, "python": sys.version.split()[0]}))
"""


class SetupError(OperatingError):
    """The environment couldn't be made. Says which step failed, with the end of its log."""


@dataclass(frozen=True, slots=True)
class SglangEnvironment:
    """A verified environment: `python` is what engine.python wants."""

    python: Path
    versions: dict[str, str]
    made_now: bool


def setup_sglang(directory: Path, *, say: Callable[[str], None]) -> SglangEnvironment:
    """Make the environment in `directory`, or verify the one that is there; `say` hears of each step.

    Safe to repeat: what is installed already stays, and a run that was interrupted is taken up again.
    Raises ConfigError for a directory that holds something else, SetupError for a step that failed.
    """
    directory = directory.expanduser().absolute()
    python = directory / "bin" / "python"
    source = recipe_directory() / "sglang-cpu"
    wanted = _fingerprint(source)
    _check_directory(directory, python)
    if _made_from(directory) == wanted:
        say(f"{directory} is complete; importing SGLang to make sure")
        return SglangEnvironment(python, _verify(directory, python), made_now=False)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"can't make {directory}: {error.strerror}") from error
    (directory / LOG).unlink(missing_ok=True)
    if not python.exists():
        say(f"making a virtual environment in {directory}")
        _run(directory, "make the virtual environment", [sys.executable, "-m", "venv", str(directory)])
    say("installing torch and what SGLang needs (2.4 GB in all; minutes)")
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
    # torch comes first, so that nothing pulls in another build of it.
    _run(directory, "install the requirements", [*pip, "-r", str(source / REQUIREMENTS)])
    say("installing SGLang without what is for CUDA only")
    _run(directory, "install SGLang", [*pip, "--no-deps", "-r", str(source / REQUIREMENTS_NO_DEPS)])
    _install_stand_ins(directory, python, source / STAND_INS)
    say("importing SGLang (a minute the first time)")
    versions = _verify(directory, python)
    (directory / MARKER).write_text(json.dumps({"made_from": wanted, "versions": versions}, indent=1) + "\n")
    return SglangEnvironment(python, versions, made_now=True)


def _check_directory(directory: Path, python: Path) -> None:
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory} is a file; give a directory for SGLang's environment")
    is_environment = (directory / "pyvenv.cfg").is_file()
    if directory.is_dir() and any(directory.iterdir()) and not is_environment:
        raise ConfigError(f"{directory} holds something else; give a new directory for SGLang's environment")
    if is_environment and python.exists() and python.resolve() == Path(sys.executable).resolve():
        same = Path(sys.prefix).resolve() == directory.resolve()
        if same:
            raise ConfigError(f"{directory} is the environment that runs now; SGLang needs one of its own")
    if not directory.exists():
        parent = next(path for path in directory.parents if path.exists())
        if not os.access(parent, os.W_OK):
            raise ConfigError(f"can't make {directory}: {parent} isn't writable")


def _fingerprint(source: Path) -> str:
    """Of everything that the environment is made from. Raises ConfigError where the files don't ship."""
    files = sorted(path for path in source.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    if not (source / REQUIREMENTS).is_file():
        raise ConfigError(f"{source} is missing: this installation ships without the files of SGLang's environment")
    digest = hashlib.sha256()
    for path in files:
        digest.update(str(path.relative_to(source)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _made_from(directory: Path) -> str | None:
    try:
        marker = json.loads((directory / MARKER).read_text())
    except (OSError, ValueError):
        return None
    return marker.get("made_from") if isinstance(marker, dict) else None


def _run(directory: Path, what: str, command: Sequence[str]) -> None:
    log = directory / LOG
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    with log.open("ab") as output:
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)
        except OSError as error:
            raise SetupError(f"can't {what}: {error}") from error
    if done.returncode != 0:
        raise SetupError(
            f"can't {what} (exit code {done.returncode}). The end of {log}:\n{log_tail(log)}\n"
            "The same command again goes on from here."
        )


def _install_stand_ins(directory: Path, python: Path, source: Path) -> None:
    """Into the environment itself, so that a server that is launched by hand finds them as well."""
    command = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    try:
        site = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    except (OSError, subprocess.CalledProcessError) as error:
        raise SetupError(f"{python} doesn't run: {error}; remove {directory} and try again") from error
    for package in sorted(path for path in source.iterdir() if path.is_dir() and path.name != "__pycache__"):
        target = site / package.name
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(package, target, ignore=shutil.ignore_patterns("__pycache__"))


def _verify(directory: Path, python: Path) -> dict[str, str]:
    """Import what a server imports; versions of what was imported. Raises SetupError."""
    environment = {**os.environ, **CPU_ENVIRONMENT, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    command = [str(python), "-c", _VERIFY]
    try:
        done = subprocess.run(
            command, env=environment, cwd=directory, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SetupError(f"SGLang can't be imported: {error}") from error
    if done.returncode != 0:
        tail = "\n".join(done.stderr.strip().splitlines()[-8:])
        raise SetupError(f"SGLang can't be imported:\n{tail}\nRemove {directory} and set it up anew.")
    versions: dict[str, str] = json.loads(done.stdout.strip().splitlines()[-1])
    return versions
