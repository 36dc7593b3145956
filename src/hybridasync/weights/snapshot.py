"""Hugging Face model directories as files: read name → tensor, write complete or not at all.

A directory is written beside its place and renamed into it once every byte is on the disk, so a reader never sees half
of one and a crash leaves only a folder whose name starts with a dot.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DEFAULT_SHARD_BYTES = 4 << 30
_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""safetensors' names of types."""


class SnapshotError(ValueError):
    """A directory that isn't a readable Hugging Face model."""


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """`config.json` of the model directory. Raises SnapshotError."""
    file = Path(path) / "config.json"
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise SnapshotError(f"{file}: {error}") from error
    if not isinstance(value, dict):
        raise SnapshotError(f"{file}: not a JSON object")
    return value


def weight_files(path: str | os.PathLike[str]) -> dict[str, list[str]]:
    """File name → tensor names in it, from the index if there is one, else of the single file. Raises SnapshotError."""
    directory = Path(path)
    index = directory / INDEX_FILE
    if index.exists():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files: dict[str, list[str]] = {}
            for name, file in sorted(weight_map.items()):
                if not isinstance(file, str) or Path(file).name != file:
                    raise SnapshotError(f"{index}: {name} lies outside the directory")
                files.setdefault(file, []).append(name)
        except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, AttributeError, TypeError) as error:
            raise SnapshotError(f"{index}: not a safetensors index: {error!r}") from error
        return files
    single = directory / SINGLE_FILE
    if not single.is_file():
        raise SnapshotError(f"{directory}: no {SINGLE_FILE} and no {INDEX_FILE}")
    with _opened(single) as handle:
        return {SINGLE_FILE: sorted(handle.keys())}


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(str(file), framework="pt", device="cpu") as handle:
            yield handle
    except (OSError, SafetensorError) as error:
        raise SnapshotError(f"{file}: {error}") from error


def read_tensors(path: str | os.PathLike[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Name, tensor (CPU, as stored) one at a time, sharded directories too. Raises SnapshotError."""
    for file, names in weight_files(path).items():
        yield from _mapped(Path(path) / file, names)


def _mapped(file: Path, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors over the mapped file. safetensors checks the file, but isn't asked for tensors: version 0.8.0 loses 61
    bytes for each, which over thousands of publications adds up."""
    with _opened(file) as handle:
        known = set(handle.keys())
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
    octets = np.memmap(file, np.uint8, mode="c")  # private: a reader that writes changes its own copy
    for name in names:
        if name not in known:
            raise SnapshotError(f"{file}: no tensor {name}")
        entry = header[name]
        dtype = _TYPES.get(entry["dtype"])
        if dtype is None:
            raise SnapshotError(f"{file}: {name} has type {entry['dtype']}, which isn't known here")
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        row = torch.from_numpy(octets[begin:end])
        row = row if begin % dtype.itemsize == 0 else row.clone()
        yield name, row.view(dtype).view(entry["shape"])


def write_snapshot(
    path: str | os.PathLike[str],
    tensors: Iterable[tuple[str, torch.Tensor]],
    config_source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    files_from: str | os.PathLike[str] | None = None,
    durable: bool = True,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> int:
    """Write a model directory at `path`, complete or not at all; answers the bytes of its weight files.

    `config_source` is a directory whose files except weights (config, tokenizer, …) are copied, or the configuration;
    in the latter case the other files are copied from the directory `files_from`, if given.
    `durable=False` skips fsync, for a folder in memory. An existing directory at `path` is replaced.
    Raises OSError (no space, …) and leaves nothing behind then.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    try:
        work.chmod(0o755)
        _write_config(work, config_source, files_from)
        written = _write_tensors(work, tensors, shard_bytes)
        if durable:
            for file in work.iterdir():
                _fsync(file)
            _fsync(work)
        _replace(work, target)
        if durable:
            _fsync(target.parent)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return written


def _write_config(
    work: Path, source: str | os.PathLike[str] | Mapping[str, Any], files_from: str | os.PathLike[str] | None
) -> None:
    directory = files_from if isinstance(source, Mapping) else source
    for file in sorted(Path(directory).iterdir()) if directory is not None else ():
        weights = file.name == INDEX_FILE or file.suffix in {".safetensors", ".bin", ".pt", ".pth"}
        if file.is_file() and not weights and not file.name.startswith("."):
            shutil.copyfile(file, work / file.name)
    if isinstance(source, Mapping):
        (work / "config.json").write_text(json.dumps(dict(source), indent=2, sort_keys=True), encoding="utf-8")


def _write_tensors(work: Path, tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int) -> int:
    shards: list[list[str]] = []
    pending: dict[str, torch.Tensor] = {}
    pointers: set[int] = set()
    size = total = 0

    def flush() -> None:
        save_file(pending, str(work / _shard_name(len(shards))), metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()
        pointers.clear()

    for name, tensor in tensors:
        held = tensor.detach().to("cpu").contiguous()
        if held.untyped_storage().nbytes() != held.nbytes or held.data_ptr() in pointers:
            held = held.clone()  # safetensors refuses tensors that share memory
        if pending and size + held.nbytes > shard_bytes:
            flush()
            size = 0
        pointers.add(held.data_ptr())
        pending[name] = held
        size += held.nbytes
        total += held.nbytes
    flush()
    if len(shards) == 1:
        (work / _shard_name(0)).rename(work / SINGLE_FILE)
        return total
    weight_map: dict[str, str] = {}
    for index, names in enumerate(shards):
        final = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        (work / _shard_name(index)).rename(work / final)
        weight_map.update(dict.fromkeys(names, final))
    content = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (work / INDEX_FILE).write_text(json.dumps(content, indent=2, sort_keys=True), encoding="utf-8")
    return total


def _shard_name(index: int) -> str:
    return f"shard-{index:05d}.safetensors"


def _replace(work: Path, target: Path) -> None:
    """Rename into place. A directory can't be renamed over a full one, so that one steps aside first."""
    if not target.exists():
        work.rename(target)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".old", dir=target.parent))
    target.rename(aside / "old")
    work.rename(target)
    shutil.rmtree(aside, ignore_errors=True)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
