"""A snapshot as buckets: runs of tensors that are sent at once, as SGLang's flattened buckets.

In a safetensors file the tensors lie one behind the other, so a bucket is a part of the mapped file, and making it
copies nothing. Names, types and shapes go beside it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from hybridasync.weights.snapshot import SnapshotError, weight_files

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_HEADER_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some tensors, one behind the other. `dtypes` are names as in torch, `flat` is of bytes."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    flat: torch.Tensor  # uint8 [bytes of all tensors]

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors, which share memory with `flat`. Raises ValueError when sizes and bytes don't fit together."""
        return unflatten(self.flat, self.names, self.dtypes, shapes=self.shapes)


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def buckets_of(path: str | Path, limit_bytes: int) -> list[Bucket]:
    """All weights of a snapshot directory, in buckets of at most `limit_bytes`; a larger tensor has one of its own.

    The memory is that of the mapped files: not to be written to. Raises SnapshotError.
    """
    result = []
    for file in weight_files(path):
        start, entries = _header(Path(path) / file)
        size = entries[-1].end if entries else 0
        mapped = torch.from_file(str(Path(path) / file), shared=False, size=start + size, dtype=torch.uint8)
        for run in _runs(entries, limit_bytes):
            flat = mapped[start + run[0].start : start + run[-1].end]
            names, dtypes, shapes = zip(*[(entry.name, entry.dtype, entry.shape) for entry in run], strict=True)
            result.append(Bucket(names, dtypes, shapes, flat))
    return result


def bucket_bytes(names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> int:
    """Size of a bucket. Raises ValueError for an unknown type, a negative size, or lists of unequal lengths."""
    if len({len(names), len(dtypes), len(shapes)}) != 1 or not names:
        raise ValueError("names, dtypes and shapes should be lists of the same length, with something in them")
    total = 0
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        if dtype not in _DTYPES.values():
            raise ValueError(f"{name} has type {dtype}, known are {', '.join(_DTYPES.values())}")
        if any(length < 0 for length in shape):
            raise ValueError(f"{name} has the shape {list(shape)}")
        total += prod(shape) * _itemsize(dtype)
    return total


def unflatten(
    flat: torch.Tensor, names: Sequence[str], dtypes: Sequence[str], *, shapes: Sequence[Sequence[int]]
) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a bucket, which share its memory. Raises ValueError when it isn't of their size."""
    if bucket_bytes(names, dtypes, shapes) != flat.numel():
        raise ValueError(f"a bucket of {flat.numel()} bytes can't hold {', '.join(names[:3])} …")
    result, offset = [], 0
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        end = offset + prod(shape) * _itemsize(dtype)
        result.append((name, flat[offset:end].view(getattr(torch, dtype)).reshape(tuple(shape))))
        offset = end
    return result


def _itemsize(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)


def _header(file: Path) -> tuple[int, list[_Entry]]:
    """Where the data starts, and the tensors in their order in the file."""
    try:
        with file.open("rb") as handle:
            length = int.from_bytes(handle.read(_HEADER_LENGTH_BYTES), "little")
            content = json.loads(handle.read(length))
        entries = [
            _Entry(name, _DTYPES[entry["dtype"]], tuple(entry["shape"]), *entry["data_offsets"])
            for name, entry in content.items()
            if name != "__metadata__"
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SnapshotError(f"{file}: no floating-point safetensors file: {error!r}") from error
    return _HEADER_LENGTH_BYTES + length, sorted(entries, key=lambda entry: entry.start)


def _runs(entries: Sequence[_Entry], limit_bytes: int) -> Iterator[list[_Entry]]:
    run: list[_Entry] = []
    for entry in entries:
        if run and entry.end - run[0].start > limit_bytes:
            yield run
            run = []
        run.append(entry)
    if run:
        yield run
