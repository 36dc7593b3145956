"""The trainer's weights as Hugging Face directories: snapshots for the engines, and the policy to keep.

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
from hybridasync.weights.layout import EngineLayout
from hybridasync.weights.snapshot import read_config, write_snapshot
from hybridasync.worker.hf_mapping import iter_hf
from hybridasync.worker.parallel import layout

T = TypeVar("T")
Named = Iterable[tuple[str, torch.Tensor]]


def export_snapshot(
    gpt: Any,
    version: int,
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    engines: EngineLayout | None = None,
) -> WeightSnapshot:
    """Write the weights of `gpt` as version `version` to `path`, complete or not at all; the same answer on every rank.

    `dtype` is the type that the engines hold (default the trainer's) and `engines` how they hold it, so that the
    checksums are of the bytes they will have. Only `config.json` and the weights are written. Raises CheckpointError
    on every rank.
    """
    started = time.perf_counter()
    engines = engines or EngineLayout()

    def write(tensors: Named) -> WeightSnapshot:
        sums = Checksums(tie_word_embeddings=gpt.hf.tied_embeddings, layout=engines)
        held = dtype or next(gpt.parameters()).dtype
        # SHA-256 and the file need the bytes on the CPU, once; the other hash is far faster where they are.
        cast = _cast(tensors, held, device=None if engines.cuda else "cpu")
        # Not durable: after a crash snapshots are dropped and written anew.
        size = write_snapshot(path, _observed(cast, sums.add), _config_of(gpt, held), durable=False)
        return WeightSnapshot(version, str(path), sums.result(), size, time.perf_counter() - started)

    return _on_first_rank(gpt, f"weights of version {version} can't be written to {path}", write)


def export_hf(gpt: Any, path: str | Path) -> None:
    """Write a directory that `transformers` loads: weights bit by bit as they are, configuration, tokenizer files.

    Everything but the weights is copied from the directory the model came from. Raises CheckpointError on every rank.
    """

    def write(tensors: Named) -> None:
        config = _config_of(gpt, next(gpt.parameters()).dtype)
        write_snapshot(path, tensors, config, files_from=gpt.hf.path)

    _on_first_rank(gpt, f"the model can't be exported to {path}", write)


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


def _on_first_rank(gpt: Any, failure: str, write: Callable[[Named], T]) -> T:
    """Run `write` on the first rank with the gathered weights, and give every rank its answer or its error."""
    place = layout()
    outcome: list[Any] = [None]
    if place.dp_rank == 0:
        tensors = iter_hf(gpt)
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
