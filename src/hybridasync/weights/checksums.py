"""Checksums of a model's parameters as SGLang 0.5.23 holds and computes them (`/weights_checker`; TP 1, CPU).

A trainer computes them while it writes a snapshot; an engine computes them of what it loaded; equal means that every
byte arrived. Both sides start from Hugging Face names, and the names and the layout are translated here:

* `q_proj, k_proj, v_proj` are one parameter `qkv_proj`, rows in this order; `gate_proj, up_proj` one `gate_up_proj`;
* the rows of the embedding and of the head are padded with zeros to a multiple of 64 (`VocabParallelEmbedding`);
* with tied embeddings there is no `lm_head.weight`; rotary buffers aren't compared.

The checksum of a tensor is the first 64 bits of the SHA-256 of its bytes, in hexadecimal. (On CUDA, SGLang hashes with
a kernel of its own, so these values compare to a server on a CPU and to the embedded engine on any device.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch

VOCAB_PADDING_ROWS = 64  # SGLang's DEFAULT_VOCAB_PADDING_SIZE
FUSED_PARTS: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_FUSED_OF_PART = {part: fused for fused, parts in FUSED_PARTS.items() for part in parts}
_PADDED = frozenset({"model.embed_tokens.weight", "lm_head.weight"})


def fused_name(name: str) -> tuple[str, str | None]:
    """SGLang's name of the parameter that holds Hugging Face's `name`, and which part of it (None: the whole).

    >>> fused_name("model.layers.0.self_attn.k_proj.weight")
    ('model.layers.0.self_attn.qkv_proj.weight', 'k_proj')
    """
    pieces = name.split(".")
    for index, piece in enumerate(pieces):
        if fused := _FUSED_OF_PART.get(piece):
            return ".".join([*pieces[:index], fused, *pieces[index + 1 :]]), piece
    return name, None


class Checksums:
    """Collects checksums one tensor at a time, in any order; keeps only tensors whose fused parameter is open."""

    def __init__(self, *, tie_word_embeddings: bool, dtype: torch.dtype | None = None) -> None:
        """`dtype`: the type that the engine holds; None when the tensors already have it."""
        self._tied = tie_word_embeddings
        self._dtype = dtype
        self._done: dict[str, str] = {}
        self._open: dict[str, dict[str, torch.Tensor]] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Raises ValueError if `name` came before."""
        if (self._tied and name == "lm_head.weight") or "inv_freq" in name:
            return
        target, part = fused_name(name)
        parts = self._open.setdefault(target, {})
        if target in self._done or (part or "") in parts:
            raise ValueError(f"{name} came twice")
        parts[part or ""] = tensor
        wanted = FUSED_PARTS[_FUSED_OF_PART[part]] if part else ("",)
        if len(parts) == len(wanted):
            self._done[target] = self._hash([parts[piece] for piece in wanted], pad=target in _PADDED)
            del self._open[target]

    def result(self) -> dict[str, str]:
        """SGLang's parameter name → checksum. Raises ValueError if a fused parameter lacks a part."""
        if self._open:
            target, parts = next(iter(self._open.items()))
            raise ValueError(f"{target} is incomplete: only {', '.join(sorted(parts))} came")
        return dict(self._done)

    def _hash(self, tensors: list[torch.Tensor], *, pad: bool) -> str:
        digest = hashlib.sha256()
        for tensor in tensors:
            held = tensor.detach().to(device="cpu", dtype=self._dtype or tensor.dtype).contiguous()
            digest.update(held.reshape(-1).view(torch.uint8).numpy().data)
            if pad:
                padding_rows = -held.shape[0] % VOCAB_PADDING_ROWS
                digest.update(bytes(padding_rows * held[:1].nbytes))
        return digest.hexdigest()[:16]


def checksums(
    named_tensors: Iterable[tuple[str, torch.Tensor]], *, tie_word_embeddings: bool, dtype: torch.dtype | None = None
) -> dict[str, str]:
    """SGLang's parameter name → checksum, of tensors under their Hugging Face names.

    `dtype` is the type that the engine holds, None when the tensors have it already.
    Raises ValueError for a name that comes twice and for an incomplete fused parameter.
    """
    collector = Checksums(tie_word_embeddings=tie_word_embeddings, dtype=dtype)
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
