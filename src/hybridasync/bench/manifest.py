"""Where a trial ran, with what, on what: and whether all trials of a benchmark differ only in what they declare."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Any

import psutil

import hybridasync
from hybridasync.bench.plan import Job, Plan
from hybridasync.bench.variants import VARIED, settings_of
from hybridasync.config.load import read_toml
from hybridasync.config.names import settings
from hybridasync.config.resolved import FILE_NAME as RESOLVED

FILE_NAME = "manifest.json"
Manifest = dict[str, Any]

NAMED = ("torch", "megatron-core", "transformers", "sglang", "numpy", "anyio", "httpx")
"""Packages that the report names; the manifest has all."""

_ENVIRONMENT = ("OMP_", "MKL_", "CUDA_", "NCCL_", "HYBRIDASYNC_", "TORCH", "PYTORCH")
_SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD")


def build(plan: Plan, job: Job, run_dir: Path) -> Manifest:
    """Of a trial that has run in `run_dir`. Raises OSError, ConfigError where the run left no configuration."""
    return {
        "variant": job.variant,
        "trial": job.trial,
        "seed": job.seed,
        "declared": settings_of(job.variant, blocking=plan.blocking),
        "config": flat(read_toml(run_dir / RESOLVED)),
        "data": digests(run_dir / "prepared"),
        "source": source(),
        "packages": packages(),
        "machine": machine(),
        "environment": environment(),
    }


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by their path. A table that is one setting's value stays whole."""
    known = settings()
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and name not in known:
            found |= {f"{name}.{leaf}": inner for leaf, inner in value.items()}
        else:
            found[name] = value
    return found


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of each file below a folder, by its path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): sha256(path) for path in files}


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def source() -> dict[str, Any]:
    """The program: release, commit where it runs from a checkout, and a digest of its source files."""
    package = Path(hybridasync.__file__).resolve().parent
    files = sorted(package.rglob("*.py"))
    tree = hashlib.sha256()
    for path in files:
        tree.update(f"{path.relative_to(package).as_posix()} {sha256(path)}\n".encode())
    return {"version": _own_version(), "commit": _git(package), "files": len(files), "sha256": tree.hexdigest()}


def _own_version() -> str:
    try:
        return version("hybridasync")
    except PackageNotFoundError:
        return "not installed"


def _git(folder: Path) -> str:
    """The commit, with `+` behind it where the checkout has changes; empty outside of a checkout."""
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True)
        command = ["git", "status", "--porcelain", "--untracked-files=no", "."]
        changed = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return commit.stdout.strip() + ("+" if changed.stdout.strip() else "")


def packages() -> dict[str, str]:
    """Every installed distribution."""
    found = {str(dist.metadata["Name"]).lower(): dist.version for dist in distributions() if dist.metadata["Name"]}
    return dict(sorted(found.items()))


def machine() -> dict[str, Any]:
    """What speed depends on. No host name: evidence is passed on."""
    return {
        "cpus": os.cpu_count(),
        "usable_cpus": len(os.sched_getaffinity(0)),
        "processor": processor(),
        "architecture": platform.machine(),
        "memory_mib": psutil.virtual_memory().total // 2**20,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "gpus": _gpus(),
    }


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _gpus() -> list[str]:
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.partition(" (UUID")[0] for line in done.stdout.splitlines() if line.startswith("GPU ")]


def environment() -> dict[str, str]:
    """Variables that change how it runs; nothing whose name smells of a secret."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_ENVIRONMENT) and not any(word in name for word in _SECRET)
    }


def inequalities(manifests: Sequence[Manifest]) -> list[str]:
    """What differs between trials although no variant declares it; empty where they may be compared.

    Settings that variants vary must be equal among the trials of one variant; the seed, and the data that it may
    make, among those of one number.
    """
    found = list[str]()
    for part in ("source", "packages", "machine", "environment"):
        found += _unequal(part, [(one, one[part]) for one in manifests])
    for trial in sorted({one["trial"] for one in manifests}):
        found += _unequal("data", [(one, one["data"]) for one in manifests if one["trial"] == trial])
    names = sorted({name for one in manifests for name in one["config"]})
    for name in names:
        values = [(one, one["config"].get(name)) for one in manifests]
        if name == "seed":
            values = [(one, "as planned" if value == one["seed"] else value) for one, value in values]
        groups: Iterable[list[tuple[Manifest, Any]]] = [values]
        if name in VARIED:
            groups = [
                [v for v in values if v[0]["variant"] == variant] for variant in {v[0]["variant"] for v in values}
            ]
        for group in groups:
            found += _unequal(f"setting {name}", group)
    return found


def _unequal(what: str, values: Sequence[tuple[Manifest, Any]]) -> list[str]:
    if not values:
        return []
    first, expected = values[0]
    return [
        f"{what} of {_name(one)} differs from {_name(first)}'s{_details(expected, value)}"
        for one, value in values[1:]
        if value != expected
    ]


def _name(manifest: Manifest) -> str:
    return f"{manifest['trial']:02d}-{manifest['variant']}"


def _details(expected: Any, value: Any) -> str:
    if isinstance(expected, dict) and isinstance(value, dict):
        names = sorted(name for name in expected.keys() | value.keys() if expected.get(name) != value.get(name))
        return f": {', '.join(names[:5])}"
    return f": {value!r}, not {expected!r}"
