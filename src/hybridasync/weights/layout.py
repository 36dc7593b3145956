"""How SGLang 0.5.23 holds a dense model's parameters: fused, padded, divided among tensor-parallel ranks.

* `q_proj, k_proj, v_proj` are one parameter `qkv_proj`, rows in this order; `gate_proj, up_proj` one `gate_up_proj`;
* the rows of the embedding and of the head are padded with zeros to a multiple of 64 (`VocabParallelEmbedding`);
* on a CPU the intermediate size is padded with zeros to a multiple of 32 per rank (`configs/update_config.py`);
* ranks divide rows of `qkv_proj` (by heads), `gate_up_proj`, embedding and head, columns of `o_proj` and `down_proj`;
  everything else is whole on each; with fewer key-value heads than ranks, several ranks hold the same head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from hybridasync.config.models import EngineSection

VOCAB_PADDING_ROWS = 64  # SGLang's DEFAULT_VOCAB_PADDING_SIZE
CPU_INTERMEDIATE_PADDING = 32  # its DEFAULT_MOE_PADDING_SIZE, which on a CPU holds for dense layers as well
FUSED_PARTS: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_FUSED_OF_PART = {part: fused for fused, parts in FUSED_PARTS.items() for part in parts}
_VOCABULARY = frozenset({"model.embed_tokens.weight", "lm_head.weight"})


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """`kv_heads` of the model is needed where there are several ranks."""

    tensor_parallel_size: int = 1
    kv_heads: int | None = None
    cuda: bool = False


def engine_layout(settings: EngineSection, *, kv_heads: int, gpu_here: bool) -> EngineLayout:
    """How the engines of a recipe hold their weights.

    With engine.device = "auto" they are taken to be on a GPU where the trainer is (`gpu_here`). The embedded engine
    holds and hashes the same on all devices.
    """
    if settings.kind == "embedded":
        return EngineLayout(kv_heads=kv_heads)
    on_gpu = settings.device == "cuda" or (settings.device == "auto" and gpu_here)
    return EngineLayout(settings.tensor_parallel_size, kv_heads, cuda=on_gpu)


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


def shards(target: str, parts: Sequence[torch.Tensor], layout: EngineLayout) -> list[list[torch.Tensor]]:
    """For each rank what it holds of the parameter, as pieces one after the other.

    `parts` are those of FUSED_PARTS in order, or the parameter as a whole. Raises ValueError if it can't be divided.
    """
    ranks = layout.tensor_parallel_size
    module, _, kind = target.rpartition(".")
    module = module.rpartition(".")[2]
    if target in _VOCABULARY:
        unit = (
            VOCAB_PADDING_ROWS if -(-parts[0].shape[0] // VOCAB_PADDING_ROWS) * VOCAB_PADDING_ROWS % ranks == 0 else 0
        )
        divided = [_divided(target, _padded(parts[0], unit or VOCAB_PADDING_ROWS * ranks, dim=0), ranks, dim=0)]
    elif module == "qkv_proj" and ranks > 1:
        query, key, value = parts
        divided = [_divided(target, query, ranks, dim=0)]
        divided += [_divided_heads(target, tensor, layout) for tensor in (key, value)]
    elif module == "gate_up_proj":
        halves = parts if len(parts) > 1 else parts[0].chunk(2)
        divided = [_divided(target, _padded(half, _inner_unit(layout), dim=0), ranks, dim=0) for half in halves]
    elif module == "down_proj" and kind == "weight":
        divided = [_divided(target, _padded(parts[0], _inner_unit(layout), dim=1), ranks, dim=1)]
    elif module == "o_proj" and kind == "weight":
        divided = [_divided(target, parts[0], ranks, dim=1)]
    else:
        divided = [[part] * ranks for part in parts]
    return [[pieces[rank] for pieces in divided] for rank in range(ranks)]


def _inner_unit(layout: EngineLayout) -> int:
    return 1 if layout.cuda else CPU_INTERMEDIATE_PADDING * layout.tensor_parallel_size


def _padded(tensor: torch.Tensor, unit: int, *, dim: int) -> torch.Tensor:
    missing = -tensor.shape[dim] % unit
    if missing == 0:
        return tensor
    behind = tensor.dim() - 1 - dim
    return pad(tensor, (0, 0) * behind + (0, missing))


def _divided(target: str, tensor: torch.Tensor, ranks: int, *, dim: int) -> list[torch.Tensor]:
    if tensor.shape[dim] % ranks:
        raise ValueError(f"{target}: {tensor.shape[dim]} can't be divided among {ranks} ranks")
    return list(tensor.chunk(ranks, dim))


def _divided_heads(target: str, tensor: torch.Tensor, layout: EngineLayout) -> list[torch.Tensor]:
    heads, ranks = layout.kv_heads or 0, layout.tensor_parallel_size
    if heads and ranks % heads == 0:
        return [tensor.chunk(heads)[rank * heads // ranks] for rank in range(ranks)]
    if heads and heads % ranks == 0:
        return _divided(target, tensor, ranks, dim=0)
    raise ValueError(
        f"{target}: {heads or 'an unknown number of'} key-value heads can't be divided among {ranks} ranks"
    )
