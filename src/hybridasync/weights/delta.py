"""What changed between two versions of the same weights, bit by bit: smaller than a snapshot where little did.

A file `delta.safetensors` in the folder of a version, under Hugging Face names, values as unsigned integers of the
type's width. A tensor that didn't change is absent; of the others there is

* `<name>.whole`, all its values, or
* `<name>.values`, those that changed, in order, and `<name>.gaps`, where they are.

Gaps are the numbers of unchanged values before each changed one, in base 255 (uint8) or 65535 (uint16), whichever is
smaller: the largest digit says "so many, and none changed yet". 255, 3 is a gap of 258. So a position costs a byte at
the densities of bf16 under a small learning rate, and two where changes are rare. The header names format, version,
the version that it applies to, and the type.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from hybridasync.weights.snapshot import SnapshotError

DELTA_FILE = "delta.safetensors"
FORMAT = "hybridasync-delta-1"
CHUNK = 1 << 24
"""Values that are compared at once: the positions found are 64 bits wide before they are written as gaps."""

Array = np.ndarray[Any, Any]
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_GAP_TYPES: tuple[np.dtype[Any], np.dtype[Any]] = (np.dtype(np.uint8), np.dtype(np.uint16))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as one row of integers of the same width; it must be contiguous. Shares the memory."""
    return tensor.detach().view(-1).view(_SIGNED[tensor.element_size()])


@dataclass(frozen=True, slots=True)
class Change:
    """What changed in one tensor: `values` alone are all of it, with `gaps` those that changed. Raw bits."""

    values: Array
    gaps: Array | None = None

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.gaps is None else self.gaps.nbytes)

    def positions(self, size: int) -> Array:
        """Where the values go in a tensor of `size` values. Raises SnapshotError for gaps that don't fit."""
        if self.gaps is None:
            raise SnapshotError("a whole tensor has no positions")
        largest = np.iinfo(self.gaps.dtype).max
        ends = self.gaps != largest
        found: Array = np.cumsum(self.gaps, dtype=np.int64)[ends]
        found += np.arange(found.size)
        if found.size != self.values.size or (found.size and found[-1] >= size):
            raise SnapshotError(f"{self.values.size} values for {found.size} positions in {size}")
        return found


def change_of(old: torch.Tensor, new: torch.Tensor) -> Change | None:
    """The smallest description of `new` for who has `old` (same shape and type, on the CPU); None: not one bit differs.

    -0.0 and 0.0 differ, and so do two NaNs of different bits.
    """
    before, after = bits(old).numpy(), bits(new.contiguous()).numpy()
    found = [
        np.flatnonzero(before[start : start + CHUNK] != after[start : start + CHUNK]) + start
        for start in range(0, after.size, CHUNK)
    ]
    where = np.concatenate(found) if found else np.empty(0, np.int64)
    if not where.size:
        return None
    raw = after.view(_UNSIGNED[after.itemsize])
    if where.size * (raw.itemsize + 1) >= raw.nbytes:  # a gap takes a byte at least
        return Change(raw.copy())
    gaps = np.diff(where, prepend=-1) - 1
    small, large = _GAP_TYPES
    unit = small if _coded_bytes(gaps, small) <= _coded_bytes(gaps, large) else large
    if where.size * raw.itemsize + _coded_bytes(gaps, unit) >= raw.nbytes:
        return Change(raw.copy())
    return Change(raw[where], _coded(gaps, unit))


def _coded_bytes(gaps: Array, unit: np.dtype[Any]) -> int:
    return int(gaps.size + (gaps // np.iinfo(unit).max).sum()) * unit.itemsize


def _coded(gaps: Array, unit: np.dtype[Any]) -> Array:
    largest = np.iinfo(unit).max
    full, rest = np.divmod(gaps, largest)
    ends = np.cumsum(full + 1) - 1
    coded = np.full(int(ends[-1]) + 1, largest, unit)
    coded[ends] = rest
    return coded


def write_delta(
    path: str | os.PathLike[str], changes: Mapping[str, Change], *, version: int, base_version: int, dtype: torch.dtype
) -> int:
    """Write the folder `path` with a delta alone, complete or not at all; answers the bytes of its arrays.

    Raises OSError and leaves nothing behind then.
    """
    arrays: dict[str, Array] = {}
    for name, change in changes.items():
        if change.gaps is None:
            arrays[f"{name}.whole"] = change.values
        else:
            arrays |= {f"{name}.values": change.values, f"{name}.gaps": change.gaps}
    header = {
        "format": FORMAT,
        "version": str(version),
        "base_version": str(base_version),
        "dtype": str(dtype).removeprefix("torch."),
    }
    target = Path(path)
    target.mkdir(parents=True, exist_ok=True)
    descriptor, partial = tempfile.mkstemp(prefix=".delta.", dir=target)
    os.close(descriptor)
    try:
        save_file(arrays, partial, metadata=header)
        Path(partial).chmod(0o644)
        Path(partial).replace(target / DELTA_FILE)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    finally:
        Path(partial).unlink(missing_ok=True)
    return sum(change.nbytes for change in changes.values())


@dataclass(frozen=True, slots=True)
class Delta:
    """A delta as it is read: what it says of itself, and its changes one tensor at a time."""

    version: str
    base_version: str
    dtype: str
    changes: Iterator[tuple[str, Change]]


@contextmanager
def open_delta(path: str | os.PathLike[str]) -> Iterator[Delta]:
    """Raises SnapshotError for a file that is missing, broken or of another format."""
    file = Path(path) / DELTA_FILE
    try:
        with safe_open(str(file), framework="np") as handle:
            header = handle.metadata() or {}
            if header.get("format") != FORMAT:
                raise SnapshotError(f"{file}: format {header.get('format')!r}, not {FORMAT}")
            version, base, dtype = (header.get(key, "") for key in ("version", "base_version", "dtype"))
            yield Delta(version, base, dtype, _changes(handle, file))
    except (OSError, SafetensorError) as error:
        raise SnapshotError(f"{file}: {error}") from error


def _changes(handle: Any, file: Path) -> Iterator[tuple[str, Change]]:
    keys = set(handle.keys())
    for key in sorted(keys):
        name, _, kind = key.rpartition(".")
        if kind == "whole":
            yield name, Change(handle.get_tensor(key))
        elif kind == "values" and f"{name}.gaps" in keys:
            gaps = handle.get_tensor(f"{name}.gaps")
            if gaps.dtype not in _GAP_TYPES:
                raise SnapshotError(f"{file}: gaps of {name} are {gaps.dtype}")
            yield name, Change(handle.get_tensor(key), gaps)
        elif kind != "gaps" or f"{name}.values" not in keys:
            raise SnapshotError(f"{file}: {key} is alone or unknown")
