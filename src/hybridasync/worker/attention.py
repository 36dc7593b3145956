"""Causal attention by torch's `scaled_dot_product_attention`, for Megatron's local layer spec.

Megatron's own local attention refuses packed sequences ("thd": all sequences of a micro-batch one after the other,
without padding). Here a pack is regrouped into a few padded batches of similar length, one kernel call each.
Positions, buckets and RoPE tables depend on the lengths alone, so they are made once for each pack, not in each layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch.utils.weak import WeakTensorKeyDictionary

SHORT_SEQUENCE = 32
"""Tokens. Sequences up to here share a bucket: the padding costs less than one more kernel call."""


@dataclass(frozen=True)
class Bucket:
    """Sequences that are padded to one length and attended to in one call."""

    sequences: int
    length: int
    tokens: torch.Tensor  # [sequences * length] index into the pack; padding repeats the sequence's last token
    kept: torch.Tensor  # index into the flattened bucket of what isn't padding, each token of the pack once


@dataclass
class PackPlan:
    """What all layers need to know of a pack of sequences."""

    positions: torch.Tensor  # [tokens] position of each token in its sequence
    buckets: list[Bucket]
    unpack: torch.Tensor  # [tokens] where each token of the pack lies in the concatenated buckets
    rope: dict[torch.dtype, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """dtype → (table that it was made of, cos, sin), each [tokens, 1, head_dim]"""


_plans = WeakTensorKeyDictionary()  # cu_seqlens → PackPlan; the plan lives as long as the pack


def plan_of(cu_seqlens: torch.Tensor) -> PackPlan:
    """The plan of the pack with these cumulated lengths ([sequences + 1], from 0), made at the first call."""
    if cu_seqlens not in _plans:
        _plans[cu_seqlens] = make_plan(cu_seqlens.diff().tolist(), cu_seqlens.device)
    plan: PackPlan = _plans[cu_seqlens]
    return plan


@dataclass(frozen=True, slots=True)
class SharedTokens:
    """Sequences of a pack that have tokens in common: one beginning, held once, with several continuations.

    A token attends to nothing behind it, so what it computes is the same in every sequence that it belongs to.
    """

    lengths: list[int]  # of each sequence, the common tokens counted in each
    tokens: torch.Tensor  # [sum(lengths)] place in the pack of each token of each sequence
    owned: torch.Tensor  # [sum(lengths)] true in exactly one sequence for each token of the pack


def share(cu_seqlens: torch.Tensor, shared: SharedTokens) -> None:
    """Let the pack that `cu_seqlens` belongs to be these sequences, whatever its own boundaries say."""
    if cu_seqlens not in _plans:
        _plans[cu_seqlens] = make_plan(shared.lengths, cu_seqlens.device, shared=shared)


def make_plan(lengths: Sequence[int], device: torch.device, *, shared: SharedTokens | None = None) -> PackPlan:
    """Group sequences so that each is longer than half its bucket, or shorter than SHORT_SEQUENCE.

    So padding at most doubles the tokens of long ones, and there are at most log2(longest / SHORT_SEQUENCE) + 2 groups.
    """
    lengths_S = torch.tensor(lengths, dtype=torch.long)
    starts_S = lengths_S.cumsum(0) - lengths_S
    ramp = torch.arange(int(lengths_S.sum())) - starts_S.repeat_interleave(lengths_S)
    tokens = torch.arange(ramp.numel()) if shared is None else shared.tokens
    owned = torch.ones(ramp.numel(), dtype=torch.bool) if shared is None else shared.owned
    positions = torch.empty(int(owned.sum()), dtype=torch.long)
    positions[tokens[owned]] = ramp[owned]
    order = sorted((i for i in range(len(lengths)) if lengths[i]), key=lambda i: -lengths[i])
    groups: list[list[int]] = []
    for i in order:
        if groups and (lengths[i] > lengths[groups[-1][0]] // 2 or lengths[groups[-1][0]] <= SHORT_SEQUENCE):
            groups[-1].append(i)
        else:
            groups.append([i])
    buckets, packed = [], [torch.empty(0, dtype=torch.long)]
    for group in groups:
        length = lengths[group[0]]
        column_L = torch.arange(length)
        last_S = lengths_S[group, None] - 1
        places = (starts_S[group, None] + torch.minimum(column_L, last_S)).flatten()
        kept = ((column_L <= last_S).flatten() & owned[places]).nonzero().flatten()
        packed.append(tokens[places[kept]])
        buckets.append(Bucket(len(group), length, tokens[places].to(device), kept.to(device)))
    unpack = torch.cat(packed).argsort()
    return PackPlan(positions.to(device), buckets, unpack.to(device))


def packed(lengths: Sequence[int], device: torch.device) -> PackedSeqParams:
    """Megatron's description of a pack of sequences with these lengths, none of them 0."""
    cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    longest = max(lengths)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


class SDPACoreAttention(MegatronModule):  # type: ignore[misc]
    """`core_attention` of a layer: causal, grouped queries, packed ("thd") or a right-padded batch ("sbhd")."""

    def __init__(self, config: Any, layer_number: int, attn_mask_type: Any, *_: object, **options: Any) -> None:
        super().__init__(config=config)
        self.scale: float = options.get("softmax_scale") or config.kv_channels**-0.5

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_: object,
        packed_seq_params: PackedSeqParams | None = None,
        **__: object,
    ) -> torch.Tensor:
        """[s, b, heads, d] → [s, b, heads * d], or [t, heads, d] → [t, heads * d] for a pack.

        The mask is causal and nothing else, and Megatron's is ignored: real tokens never look to the right, where the
        padding is.
        """
        if packed_seq_params is None:
            out_BNSD = self._attend(*(x.permute(1, 2, 0, 3) for x in (query, key, value)))
            return out_BNSD.permute(2, 0, 1, 3).flatten(2)
        plan = plan_of(packed_seq_params.cu_seqlens_q)
        parts = []
        for bucket in plan.buckets:
            batch_BNLD = (
                x.index_select(0, bucket.tokens).view(bucket.sequences, bucket.length, *x.shape[1:]).transpose(1, 2)
                for x in (query, key, value)
            )
            out_BNLD = self._attend(*batch_BNLD)
            parts.append(out_BNLD.transpose(1, 2).flatten(0, 1).flatten(1).index_select(0, bucket.kept))
        return torch.cat(parts).index_select(0, plan.unpack)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.scale, enable_gqa=query.size(1) != key.size(1)
        )


def install_packed_rope() -> None:
    """Let Megatron's unfused RoPE for packs use the plan: its own loops over the sequences, twice in each layer.

    Raises ImportError if this release of Megatron-core hasn't the function that is replaced.
    """
    original = getattr(rope_utils, "_apply_rotary_pos_emb_thd", None)
    if original is None:
        raise ImportError("megatron-core has no rope_utils._apply_rotary_pos_emb_thd; hybridasync needs 0.16.1")
    if original is not _packed_rope:
        rope_utils._apply_rotary_pos_emb_thd = _packed_rope


def _packed_rope(
    t: torch.Tensor,
    cu_seqlens: torch.Tensor,
    freqs: torch.Tensor,
    *_: object,
    mscale: float = 1.0,
    **__: object,
) -> torch.Tensor:
    """RoPE of [t, heads, d], halves not interleaved; `freqs` is [max_length, 1, 1, d], the angles of both halves."""
    plan = plan_of(cu_seqlens)
    held = plan.rope.get(t.dtype)
    if held is None or held[0] is not freqs:
        angles = freqs.flatten(1)
        tables = (
            (table * mscale).to(t.dtype).index_select(0, plan.positions).unsqueeze(1)
            for table in (angles.cos(), angles.sin())
        )
        plan.rope[t.dtype] = held = (freqs, next(tables), next(tables))
    cos_T, sin_T = held[1:]
    left, right = t.chunk(2, dim=-1)
    return t * cos_T + torch.cat((-right, left), dim=-1) * sin_T
