"""Snapshots as buckets: every byte once, in the file's order, whatever the size of a bucket."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridasync.weights.buckets import Bucket, bucket_bytes, buckets_of, unflatten
from hybridasync.weights.snapshot import SnapshotError, write_snapshot

SHAPES = {"norm": (3,), "scalar": (), "empty": (0, 4), "matrix": (5, 7), "head": (2, 3, 4)}


def tensors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape).to(dtype) for name, shape in SHAPES.items()}


@settings(max_examples=30, deadline=None)
@given(limit=st.integers(1, 400), shard=st.integers(20, 400), bf16=st.booleans())
def test_buckets_are_the_snapshot(tmp_path_factory: pytest.TempPathFactory, limit: int, shard: int, bf16: bool) -> None:
    """All tensors, bit by bit, each in one bucket; a bucket is within the limit or has one tensor."""
    path = tmp_path_factory.mktemp("snapshot")
    written = tensors(torch.bfloat16 if bf16 else torch.float32)
    write_snapshot(path / "s", written.items(), {}, durable=False, shard_bytes=shard)
    buckets = buckets_of(path / "s", limit)
    found = [pair for bucket in buckets for pair in bucket.tensors()]
    assert sorted(name for name, _ in found) == sorted(written)
    assert all(torch.equal(tensor, written[name]) for name, tensor in found)
    assert all(bucket.flat.numel() <= limit or len([s for s in bucket.shapes if 0 not in s]) == 1 for bucket in buckets)
    assert all(bucket_bytes(b.names, b.dtypes, b.shapes) == b.flat.numel() for b in buckets)


def test_a_bucket_copies_nothing(tmp_path: Path) -> None:
    """Its tensors lie in the mapped file, one behind the other."""
    write_snapshot(tmp_path / "s", tensors(torch.float32).items(), {}, durable=False)
    [bucket] = buckets_of(tmp_path / "s", 1 << 20)
    start = bucket.flat.data_ptr()
    assert all(start <= t.data_ptr() <= start + bucket.flat.numel() for _, t in bucket.tensors() if t.numel())


def test_what_is_no_snapshot_is_refused(tmp_path: Path) -> None:
    """A missing folder, a damaged header, a type that isn't a floating-point one."""
    with pytest.raises(SnapshotError):
        buckets_of(tmp_path / "absent", 1)
    write_snapshot(tmp_path / "s", {"ids": torch.arange(3)}.items(), {}, durable=False)
    with pytest.raises(SnapshotError, match="floating-point"):
        buckets_of(tmp_path / "s", 1)
    (tmp_path / "s" / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(SnapshotError):
        buckets_of(tmp_path / "s", 1)


@pytest.mark.parametrize(
    ("names", "dtypes", "shapes", "words"),
    [
        ([], [], [], "same length"),
        (["a"], ["float32", "float32"], [[1]], "same length"),
        (["a"], ["int64"], [[1]], "type int64"),
        (["a"], ["float32"], [[-1]], "shape"),
        (["a"], ["float32"], [[5]], "can't hold a"),
    ],
)
def test_an_announcement_that_does_not_fit_is_refused(
    names: list[str], dtypes: list[str], shapes: list[list[int]], *, words: str
) -> None:
    """Before anything is received or cut."""
    with pytest.raises(ValueError, match=words):
        unflatten(torch.zeros(16, dtype=torch.uint8), names, dtypes, shapes=shapes)


def test_a_bucket_of_its_own_tensors() -> None:
    """Views of one flat tensor."""
    flat = torch.arange(4.0).view(torch.uint8)
    [(name, tensor)] = Bucket(("a",), ("float32",), ((2, 2),), flat).tensors()
    assert name == "a"
    assert tensor.tolist() == [[0, 1], [2, 3]]
