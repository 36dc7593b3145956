"""Weights as the decoder holds them: fused, under SGLang's names, never changed once made.

A new version is built beside the live one and checked in full before anyone sees it; switching is one assignment. So a
set's checksums are computed once: they are of the very tensors that decode afterwards, and torch's counter of in-place
changes proves that nobody wrote to one since.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from hybridasync.engine.model_config import ModelConfig
from hybridasync.weights.checksums import checksums
from hybridasync.weights.delta import Change, bits, open_delta
from hybridasync.weights.layout import FUSED_PARTS, fused_name


class WeightMismatchError(ValueError):
    """Tensors that don't belong to this model: a missing or unknown name, a wrong shape or type."""


class Layer(NamedTuple):
    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None  # [query heads + key heads, head size]
    out: torch.Tensor
    out_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


class Weights:
    """One complete set. `named`: SGLang's parameter name → tensor."""

    def __init__(
        self, named: Mapping[str, torch.Tensor], config: ModelConfig, *, shared_with: Weights | None = None
    ) -> None:
        """`shared_with` is a set that some of the tensors are of: their checksums are known from there."""
        self.named = dict(named)
        self._sums: dict[str, tuple[int, str]] = {}
        if shared_with is not None:
            known, theirs = dict(shared_with._sums), shared_with.named  # copied: another thread may add to it
            self._sums = {name: sum_ for name, sum_ in known.items() if self.named.get(name) is theirs[name]}
        self.tied = config.tied
        self.embedding = self.named["model.embed_tokens.weight"]
        self.head = self.embedding if config.tied else self.named["lm_head.weight"]
        self.norm = self.named["model.norm.weight"]
        self.layers = [self._layer(f"model.layers.{index}.", config) for index in range(config.layers)]

    def checksums(self) -> dict[str, str]:
        """SGLang's parameter name → checksum. Computed where it isn't known, or where a tensor was written to since."""
        for name, tensor in self.named.items():
            writes = _writes(tensor)
            if writes is None or self._sums.get(name, ())[:1] != (writes,):
                (value,) = checksums([(name, tensor)], tie_word_embeddings=self.tied).values()
                self._sums[name] = (-1 if writes is None else writes, value)
        return {name: self._sums[name][1] for name in self.named}

    def _qk_norm(self, prefix: str, config: ModelConfig) -> torch.Tensor:
        query, key = (self.named[f"{prefix}self_attn.{name}_norm.weight"] for name in "qk")
        return torch.cat([query.expand(config.heads, -1), key.expand(config.kv_heads, -1)])

    def _layer(self, prefix: str, config: ModelConfig) -> Layer:
        get = self.named.get
        return Layer(
            input_norm=self.named[f"{prefix}input_layernorm.weight"],
            qkv=self.named[f"{prefix}self_attn.qkv_proj.weight"],
            qkv_bias=get(f"{prefix}self_attn.qkv_proj.bias"),
            qk_norm=self._qk_norm(prefix, config) if config.qk_norm else None,
            out=self.named[f"{prefix}self_attn.o_proj.weight"],
            out_bias=get(f"{prefix}self_attn.o_proj.bias"),
            post_norm=self.named[f"{prefix}post_attention_layernorm.weight"],
            gate_up=self.named[f"{prefix}mlp.gate_up_proj.weight"],
            gate_up_bias=get(f"{prefix}mlp.gate_up_proj.bias"),
            down=self.named[f"{prefix}mlp.down_proj.weight"],
            down_bias=get(f"{prefix}mlp.down_proj.bias"),
        )


def _writes(tensor: torch.Tensor) -> int | None:
    """How often the tensor was changed in place; None where torch doesn't count."""
    return None if tensor.is_inference() else tensor._version


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face name → shape of every tensor that the model needs."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    attention = {"q_proj": (query, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, query)}
    feed_forward = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    for index in range(config.layers):
        prefix = f"model.layers.{index}."
        shapes[f"{prefix}input_layernorm.weight"] = shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
        if config.qk_norm:
            norm = (config.head_dim,)
            shapes[f"{prefix}self_attn.q_norm.weight"] = shapes[f"{prefix}self_attn.k_norm.weight"] = norm
        for group, projections, bias in (
            ("self_attn", attention, config.attention_bias),
            ("mlp", feed_forward, config.mlp_bias),
        ):
            for name, shape in projections.items():
                shapes[f"{prefix}{group}.{name}.weight"] = shape
                if bias:
                    shapes[f"{prefix}{group}.{name}.bias"] = shape[:1]
    return shapes


class WeightStore:
    """Builds `Weights` of one model on one device, checking every tensor."""

    def __init__(self, config: ModelConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        self.config = config
        self.device = device
        self.dtype = dtype
        self._shapes = expected_shapes(config)

    def load(self, named: Iterable[tuple[str, torch.Tensor]]) -> Weights:
        """A complete set from Hugging Face names. Raises WeightMismatchError."""
        return self._build(named, base=None)

    def updated(self, weights: Weights, named: Iterable[tuple[str, torch.Tensor]]) -> Weights:
        """`weights` with some tensors replaced; the others are shared. Raises WeightMismatchError."""
        return self._build(named, base=weights)

    @torch.no_grad()
    def patched(self, weights: Weights, path: str, *, version: str, base_version: str) -> Weights:
        """`weights`, which are of `base_version`, with the delta at `path`; tensors without a change are shared.

        Raises WeightMismatchError for a delta of other versions, another type or another model, SnapshotError for one
        that can't be read.
        """
        result = dict(weights.named)
        with open_delta(path) as delta:
            wanted = (version, base_version, str(self.dtype).removeprefix("torch."))
            if (found := (delta.version, delta.base_version, delta.dtype)) != wanted:
                raise WeightMismatchError(f"the delta is of (version, base, type) {found}, not {wanted}")
            for name, change in delta.changes:
                shape = self._shapes.get(name)
                if shape is None:
                    raise WeightMismatchError(f"the model has no parameter {name}")
                target, part = fused_name(name)
                if result[target] is weights.named[target]:
                    result[target] = weights.named[target].clone()
                start = self._offset(name, part)
                _patch(bits(result[target][start : start + shape[0]]), change, name=name)
        return Weights(result, self.config, shared_with=weights)

    @torch.no_grad()
    def _build(self, named: Iterable[tuple[str, torch.Tensor]], base: Weights | None) -> Weights:
        result: dict[str, torch.Tensor] = dict(base.named) if base else {}
        fresh: set[str] = set()
        seen: set[str] = set()
        for name, tensor in named:
            if (self.config.tied and name == "lm_head.weight") or name.endswith("rotary_emb.inv_freq"):
                continue
            shape = self._check(name, tensor)
            target, part = fused_name(name)
            if target not in fresh:
                fresh.add(target)
                held = torch.empty(self._fused_shape(target, shape, part), dtype=self.dtype, device=self.device)
                if base:
                    held.copy_(base.named[target])
                result[target] = held
            start = self._offset(name, part)
            result[target][start : start + shape[0]].copy_(tensor)
            seen.add(name)
        if base is None and (missing := sorted(self._shapes.keys() - seen)):
            raise WeightMismatchError(f"{len(missing)} parameters are missing, {missing[0]} among them")
        return Weights(result, self.config, shared_with=base)

    def _check(self, name: str, tensor: torch.Tensor) -> tuple[int, ...]:
        shape = self._shapes.get(name)
        if shape is None:
            raise WeightMismatchError(f"the model has no parameter {name}")
        if tuple(tensor.shape) != shape:
            raise WeightMismatchError(f"{name} has shape {list(tensor.shape)}, the model's is {list(shape)}")
        if not tensor.is_floating_point() or tensor.layout != torch.strided:
            raise WeightMismatchError(f"{name} has type {tensor.dtype}, which isn't a dense floating-point one")
        return shape

    def _parts(self, name: str, part: str) -> list[str]:
        wanted = next(parts for parts in FUSED_PARTS.values() if part in parts)
        return [name.replace(f".{part}.", f".{other}.") for other in wanted]

    def _fused_shape(self, target: str, shape: tuple[int, ...], part: str | None) -> tuple[int, ...]:
        if part is None:
            return shape
        fused = target.rsplit(".", 2)[1]
        names = [target.replace(f".{fused}.", f".{other}.") for other in FUSED_PARTS[fused]]
        return (sum(self._shapes[name][0] for name in names), *shape[1:])

    def _offset(self, name: str, part: str | None) -> int:
        if part is None:
            return 0
        names = self._parts(name, part)
        return sum(self._shapes[other][0] for other in names[: names.index(name)])


def _patch(row: torch.Tensor, change: Change, *, name: str) -> None:
    """Write a change into the bits of a tensor."""
    values = torch.from_numpy(change.values)
    if values.element_size() != row.element_size() or (change.gaps is None and values.numel() != row.numel()):
        raise WeightMismatchError(
            f"{name} has {row.numel()} values of {row.element_size()} bytes, the delta other ones"
        )
    values = values.view(row.dtype).to(row.device)
    if change.gaps is None:
        row.copy_(values)
    else:
        row[torch.from_numpy(change.positions(row.numel())).to(row.device)] = values
