"""The trainer's weights as Hugging Face directories: snapshots for the engines, whole or what changed, and the policy.

Every rank calls these functions; the weights come together on the first rank, which writes them one tensor at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from hybridasync.errors import CheckpointError
from hybridasync.types import WeightSnapshot
from hybridasync.weights.checksums import Checksums
from hybridasync.weights.delta import write_delta
from hybridasync.weights.layout import EngineLayout
from hybridasync.weights.snapshot import read_config, write_snapshot
from hybridasync.worker.hf_mapping import iter_hf
from hybridasync.worker.parallel import layout
from hybridasync.worker.published import PublishedCopy

T = TypeVar("T")
Named = Iterable[tuple[str, torch.Tensor]]
Gather = Callable[[], Iterator[tuple[str, torch.Tensor]]]


def export_snapshot(
    gpt: Any,
    version: int,
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    engines: EngineLayout | None = None,
    published: PublishedCopy | None = None,
) -> WeightSnapshot:
    """Write the weights of `gpt` as version `version` to `path`, complete or not at all; the same answer on every rank.

    `dtype` is the type that the engines hold (default the trainer's) and `engines` how they hold it, so that the
    checksums are of the bytes they will have. Only `config.json` and the weights are written; with `published`, which
    then holds this version, only what differs from what it held, where that is smaller. Raises CheckpointError on every
    rank.
    """
    started = time.perf_counter()
    engines = engines or EngineLayout()

    def write(tensors: Named) -> WeightSnapshot:
        sums = Checksums(tie_word_embeddings=gpt.hf.tied_embeddings, layout=engines)
        held = dtype or next(gpt.parameters()).dtype
        # SHA-256 and the file need the bytes on the CPU, once; the other hash is far faster where they are.
        cast = _observed(_cast(tensors, held, device=None if engines.cuda else "cpu"), sums.add)
        if published is None:
            # Not durable: after a crash snapshots are dropped and written anew.
            size, base = write_snapshot(path, cast, _config_of(gpt, held), durable=False), None
            full = size
        else:
            size, full, base = _write_published(cast, published, version, path=path, config=_config_of(gpt, held))
        took_s = time.perf_counter() - started
        return WeightSnapshot(version, str(path), sums.result(), size, took_s, full, base)

    return _on_first_rank(lambda: iter_hf(gpt), f"weights of version {version} can't be written to {path}", write)


def _write_published(
    tensors: Named, published: PublishedCopy, version: int, *, path: str | Path, config: dict[str, Any]
) -> tuple[int, int, int | None]:
    """Bytes written, bytes of complete weights, and the version that the files are a delta to (None: complete)."""
    replacement = published.replace(version)
    dtype = torch.float32
    for name, tensor in tensors:
        dtype = tensor.dtype
        replacement.take(name, tensor.cpu())
    base, changes, full = replacement.base, replacement.changes, published.nbytes
    if base is not None and changes is not None:
        size = write_delta(path, changes, version=version, base_version=base, dtype=dtype)
    else:
        base, size = None, write_snapshot(path, published.tensors(), config, durable=False)
    replacement.finish()
    return size, full, base


def export_published(gpt: Any, published: PublishedCopy, version: int, *, path: str | Path) -> int:
    """Write what `published` holds, version `version`, as complete weights to `path`; answers their bytes.

    For engines that can't apply a delta. Raises CheckpointError on every rank.
    """

    def write(tensors: Named) -> int:
        held = dict(tensors)
        if published.version != version or not held:
            raise ValueError(f"version {published.version} is held")
        return write_snapshot(path, held.items(), _config_of(gpt, next(iter(held.values())).dtype), durable=False)

    return _on_first_rank(published.tensors, f"version {version} can't be written to {path}", write)


def export_hf(gpt: Any, path: str | Path) -> None:
    """Write a directory that `transformers` loads: weights bit by bit as they are, configuration, tokenizer files.

    Everything but the weights is copied from the directory the model came from. Raises CheckpointError on every rank.
    """

    def write(tensors: Named) -> None:
        config = _config_of(gpt, next(gpt.parameters()).dtype)
        write_snapshot(path, tensors, config, files_from=gpt.hf.path)

    _on_first_rank(lambda: iter_hf(gpt), f"the model can't be exported to {path}", write)


def _config_of(gpt: Any, dtype: torch.dtype) -> dict[str, Any]:
    """The model's own config.json, except that it names the type in which the weights are stored."""
    config = read_config(gpt.hf.path)
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    return {**config, key: str(dtype).removeprefix("torch.")}


def _cast(tensors: Named, dtype: torch.dtype, *, device: str | None) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors:
        yield name, tensor.to(device=device, dtype=dtype)


def _observed(tensors: Named, see: Callable[[str, torch.Tensor], None]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors:
        see(name, tensor)
        yield name, tensor


def _on_first_rank(gather: Gather, failure: str, write: Callable[[Named], T]) -> T:
    """Run `write` on the first rank with the weights of `gather`, and give every rank its answer or its error."""
    place = layout()
    outcome: list[Any] = [None]
    if place.dp_rank == 0:
        tensors = gather()
        try:
            if place.rank == 0:
                outcome = [write(tensors)]
        except (OSError, SafetensorError, ValueError) as error:  # SnapshotError is a ValueError, too
            outcome = [CheckpointError(f"{failure}: {error}")]
        for _ in tensors:
            pass  # the other ranks are in the same gathers: to leave early would leave them waiting for ever
    dist.broadcast_object_list(outcome, src=0)
    answer = outcome[0]
    if isinstance(answer, CheckpointError):
        raise answer
    return answer  # type: ignore[no-any-return]
