"""Checksums of a model's parameters as SGLang 0.5.23 holds and computes them (`/weights_checker`).

A trainer computes them while it writes a snapshot; an engine computes them of what it loaded; equal means that every
byte arrived. Both sides start from Hugging Face names; `layout.py` translates names, padding and tensor parallelism.

On a CPU (and in the embedded engine on any device) the checksum of a tensor is the first 64 bits of the SHA-256 of its
bytes, on CUDA the hash in `gpu_hash.py`; both in hexadecimal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch

from hybridasync.weights.gpu_hash import gpu_hash
from hybridasync.weights.layout import FUSED_PARTS, EngineLayout, fused_name, shards


class Checksums:
    """Collects checksums one tensor at a time, in any order; keeps only tensors whose fused parameter is open."""

    def __init__(
        self, *, tie_word_embeddings: bool, dtype: torch.dtype | None = None, layout: EngineLayout | None = None
    ) -> None:
        """`dtype`: the type that the engine holds, None when the tensors have it already. `layout`: how it does."""
        self._tied = tie_word_embeddings
        self._dtype = dtype
        self._layout = layout or EngineLayout()
        self._done: dict[str, list[str]] = {}
        self._open: dict[str, dict[str, torch.Tensor]] = {}

    @property
    def empty(self) -> bool:
        return not self._done and not self._open

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Raises ValueError if `name` came before, or can't be divided among the engine's ranks."""
        if (self._tied and name == "lm_head.weight") or "inv_freq" in name:
            return
        target, part = fused_name(name)
        parts = self._open.setdefault(target, {})
        if target in self._done or (part or "") in parts:
            raise ValueError(f"{name} came twice")
        parts[part or ""] = tensor
        wanted = next(fused for fused in FUSED_PARTS.values() if part in fused) if part else ("",)
        if len(parts) == len(wanted):
            held = [parts[piece].detach().to(dtype=self._dtype) for piece in wanted]
            self._done[target] = [self._hash(shard) for shard in shards(target, held, self._layout)]
            del self._open[target]

    def result(self) -> dict[str, str]:
        """SGLang's parameter name → checksum; names start with `rank<i>/` where an engine has several ranks.

        Raises ValueError if a fused parameter lacks a part.
        """
        if self._open:
            target, parts = next(iter(self._open.items()))
            raise ValueError(f"{target} is incomplete: only {', '.join(sorted(parts))} came")
        if self._layout.tensor_parallel_size == 1:
            return {name: values[0] for name, values in self._done.items()}
        return {f"rank{rank}/{name}": value for name, values in self._done.items() for rank, value in enumerate(values)}

    def _hash(self, tensors: Sequence[torch.Tensor]) -> str:
        if self._layout.cuda:
            return gpu_hash(torch.cat(tuple(tensors)) if len(tensors) > 1 else tensors[0])
        digest = hashlib.sha256()
        for tensor in tensors:
            digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()[:16]


def checksums(
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    tie_word_embeddings: bool,
    dtype: torch.dtype | None = None,
    layout: EngineLayout | None = None,
) -> dict[str, str]:
    """SGLang's parameter name → checksum, of tensors under their Hugging Face names.

    `dtype` is the type that the engine holds, None when the tensors have it already.
    Raises ValueError for a name that comes twice and for an incomplete fused parameter.
    """
    collector = Checksums(tie_word_embeddings=tie_word_embeddings, dtype=dtype, layout=layout)
    for name, tensor in named_tensors:
        collector.add(name, tensor)
    return collector.result()


def overall(values: Mapping[str, str]) -> str:
    """One SHA-256 over all names and checksums, SGLang's `per_gpu_checksum`."""
    digest = hashlib.sha256()
    for name in sorted(values):
        digest.update(name.encode())
        digest.update(values[name].encode())
    return digest.hexdigest()
