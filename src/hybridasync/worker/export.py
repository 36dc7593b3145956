"""The trainer's weights as Hugging Face directories: snapshots for the engines, whole or what changed, and the policy.

Every rank calls these functions but `write_taken`; the weights come together on the first rank, one tensor at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from hybridasync.data.model_dir import parameter_count
from hybridasync.errors import CheckpointError, LocalProtocolError
from hybridasync.types import WeightSnapshot
from hybridasync.weights.checksums import Checksums
from hybridasync.weights.delta import write_delta
from hybridasync.weights.layout import EngineLayout
from hybridasync.weights.snapshot import read_config, write_snapshot
from hybridasync.worker.hf_mapping import iter_hf
from hybridasync.worker.parallel import layout
from hybridasync.worker.published import PublishedCopy, Taken

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
    checksums are of the bytes they will have. Only `config.json` and the weights are written. With `published`, where
    memory allows, they are only copied to it, and the answer is `pending`: `write_taken` writes them. Raises
    CheckpointError on every rank.
    """
    started = time.perf_counter()
    held = dtype or next(gpt.parameters()).dtype
    sums = Checksums(tie_word_embeddings=gpt.hf.tied_embeddings, layout=engines)
    on_gpu = engines is not None and engines.cuda

    def write(tensors: Named) -> WeightSnapshot:
        # SHA-256 and the file need the bytes on the CPU, once; the other hash is far faster where they are.
        cast = _observed(_cast(tensors, held, device=None if on_gpu else "cpu"), sums.add)
        # Not durable: after a crash snapshots are dropped and written anew.
        size = write_snapshot(path, cast, _config_of(gpt, held), durable=False)
        return WeightSnapshot(version, str(path), sums.result(), size, time.perf_counter() - started, size)

    def take(tensors: Named) -> WeightSnapshot:
        if published is None or not published.fits(parameter_count(gpt.hf) * held.itemsize):
            return write(tensors)
        replacement = published.replace(version, held)
        for name, tensor in _observed(_cast(tensors, held, device=None), sums.add) if on_gpu else tensors:
            replacement.take(name, tensor)
        published.taken = Taken(replacement, _config_of(gpt, held), held, sums=sums)
        return WeightSnapshot(version, str(path), {}, 0, time.perf_counter() - started, pending=True)

    return _on_first_rank(lambda: iter_hf(gpt), f"weights of version {version} can't be written to {path}", take)


def write_taken(published: PublishedCopy, version: int, path: str | Path) -> WeightSnapshot:
    """Write version `version`, which `export_snapshot` took last, to `path`: what differs from its base, or everything.

    On the first rank alone, in any thread: nobody changes the copy before this is over. Raises CheckpointError.
    """
    taken, started = published.taken, time.perf_counter()
    published.taken = None
    if taken is None or taken.replacement.version != version:
        raise LocalProtocolError(f"version {version} wasn't taken, or is written already")
    base, changes = taken.replacement.base, taken.replacement.changes
    try:
        for name, tensor in published.tensors() if taken.sums.empty else ():
            taken.sums.add(name, tensor)
        if base is not None and changes is not None:
            size = write_delta(path, changes, version=version, base_version=base, dtype=taken.dtype)
        else:
            # Not durable: after a crash snapshots are dropped and written anew.
            base, size = None, write_snapshot(path, published.tensors(), taken.config, durable=False)
        sums = taken.sums.result()
    except (OSError, SafetensorError, ValueError) as error:  # SnapshotError is a ValueError, too
        raise CheckpointError(f"weights of version {version} can't be written to {path}: {error}") from error
    taken.replacement.finish()
    return WeightSnapshot(version, str(path), sums, size, time.perf_counter() - started, published.nbytes, base)


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
