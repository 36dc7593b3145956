"""What changed between two versions of weights: lossless, small, and refused where it is broken."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from hybridasync.weights.delta import DELTA_FILE, Change, bits, change_of, open_delta, write_delta
from hybridasync.weights.snapshot import SnapshotError

SIZE = 70_000  # a gap in base 255 and one in base 65535 both overflow


def applied(old: torch.Tensor, change: Change) -> torch.Tensor:
    new = old.clone()
    row = bits(new).numpy().view(change.values.dtype)
    if change.gaps is None:
        row[:] = change.values
    else:
        row[change.positions(row.size)] = change.values
    return new


@settings(max_examples=60, deadline=None)
@given(
    where=st.sets(st.integers(0, SIZE - 1), max_size=60),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    seed=st.integers(0, 3),
)
def test_any_change_is_described_bit_by_bit(where: set[int], dtype: torch.dtype, seed: int) -> None:
    """Whatever changes, however far apart, the description applied to the old gives the new."""
    old = torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)).to(dtype)
    new = old.clone()
    if where:
        bits(new)[torch.tensor(sorted(where))] ^= 1
    change = change_of(old, new)
    assert (change is None) == (not where)
    if change is not None:
        assert torch.equal(bits(applied(old, change)), bits(new))
        assert change.nbytes <= len(where) * (dtype.itemsize + 2) + SIZE // 255 + 2


def test_the_width_of_gaps_follows_how_rare_changes_are() -> None:
    """A byte where changes are frequent, two where they are rare, and no gaps where nearly everything changed."""
    old = torch.zeros(SIZE, dtype=torch.bfloat16)
    frequent, rare, everywhere = old.clone(), old.clone(), torch.ones_like(old)
    frequent[::50], rare[::5000] = 1, 1
    kinds = [change_of(old, new) for new in (frequent, rare, everywhere)]
    assert [None if c is None or c.gaps is None else c.gaps.dtype for c in kinds] == [np.uint8, np.uint16, None]


def test_bits_that_compare_equal_are_still_changes() -> None:
    """Minus zero, and a NaN that has always been one, are compared by their bits."""
    old = torch.tensor([0.0, float("nan"), 1.0])
    new = torch.tensor([-0.0, float("nan"), 1.0])
    change = change_of(old, new)
    assert change is not None and change.gaps is not None and change.positions(3).tolist() == [0]
    assert change_of(old, old.clone()) is None


def test_a_delta_comes_back_from_its_file(tmp_path: Path) -> None:
    """Version, base, type and changes are read as they were written, complete or not at all."""
    changes = {"a.weight": Change(np.arange(4, dtype=np.uint16)), "b.bias": Change(*np.array([[7], [3]], np.uint16))}
    size = write_delta(tmp_path / "v", changes, version=5, base_version=3, dtype=torch.bfloat16)
    assert size == sum(change.nbytes for change in changes.values()) == 12
    assert [path.name for path in (tmp_path / "v").iterdir()] == [DELTA_FILE]
    with open_delta(tmp_path / "v") as delta:
        assert (delta.version, delta.base_version, delta.dtype) == ("5", "3", "bfloat16")
        read = dict(delta.changes)
    assert read["a.weight"].gaps is None and read["a.weight"].values.tolist() == [0, 1, 2, 3]
    assert read["b.bias"].positions(4).tolist() == [3]


def test_broken_deltas_are_refused(tmp_path: Path) -> None:
    """A missing file, another format, half a change and positions outside of the tensor are errors, not weights."""

    def read() -> None:
        with open_delta(tmp_path) as delta:
            for _, change in delta.changes:
                change.positions(4)

    with pytest.raises(SnapshotError):
        read()
    one = np.array([1], np.uint16)
    write_delta(tmp_path, {"a": Change(one, np.array([4], np.uint8))}, version=2, base_version=1, dtype=torch.bfloat16)
    with pytest.raises(SnapshotError, match="1 values for 1 positions in 4"):
        read()
    arrays = load_file(tmp_path / DELTA_FILE)
    for broken, metadata, expected in (
        ({"a.values": one}, {"format": "hybridasync-delta-1"}, "alone or unknown"),
        ({"a.gaps": one}, {"format": "hybridasync-delta-1"}, "alone or unknown"),
        ({"a.values": one, "a.gaps": one.astype(np.int64)}, {"format": "hybridasync-delta-1"}, "gaps of a are int64"),
        ({"a.values": one, "a.gaps": np.zeros(3, np.uint8)}, {"format": "hybridasync-delta-1"}, "1 values for 3"),
        (arrays, {"format": "other"}, "format 'other'"),
    ):
        save_file(broken, tmp_path / DELTA_FILE, metadata=metadata)
        with pytest.raises(SnapshotError, match=expected):
            read()
    (tmp_path / DELTA_FILE).write_bytes(b"\x08" * 20)
    with pytest.raises(SnapshotError):
        read()
