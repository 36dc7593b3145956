"""Hugging Face weights ↔ Megatron parameters, aware of tensor and pipeline parallelism.

`slots` lists, for the whole model and in the order of export, each Megatron parameter with the Hugging Face tensors it
is made of. Loading reads from the files only the rows or columns that a rank holds. Exporting gathers one parameter
after the other, so that no rank ever holds the whole model a second time.

The vocabulary is padded so that it divides by the tensor parallel size. The padding is zero, leaves the trainer in no
export and enters no softmax (see `model.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from safetensors import SafetensorError, safe_open

from hybridasync.data.model_dir import ModelFacts, check_weights, parameter_shapes, read_model_facts, weight_file_of
from hybridasync.errors import ConfigError, LocalProtocolError
from hybridasync.worker.parallel import Layout, layout

VOCAB_MULTIPLE = 64
"""Rows. Every tensor parallel size up to 64 that is a power of two then pads to the same size, so checkpoints reshard
without a change of shape, and matrix kernels get a size they like. SGLang pads to the same multiple."""

Split = Literal["whole", "rows", "columns", "vocab", "qkv", "gate_up"]
GetTensor = Callable[[torch.nn.Parameter], torch.Tensor]


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """Rows of the embedding inside the trainer, over all tensor parallel ranks."""
    multiple = math.lcm(VOCAB_MULTIPLE, tp)
    return -(-vocab_size // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Slot:
    """One Megatron parameter. `names` are its Megatron names by layer spec: Transformer Engine's differ for norms."""

    names: tuple[str, ...]
    parts: tuple[str, ...]  # Hugging Face names
    split: Split
    stage: int  # pipeline stage that holds it


def slots(facts: ModelFacts, pp: int) -> Iterator[Slot]:
    """All parameters in the order of export. A tied head belongs to the embedding and isn't listed."""
    per_stage = facts.num_layers // pp
    yield Slot(("embedding.word_embeddings.weight",), ("model.embed_tokens.weight",), "vocab", 0)
    for layer in range(facts.num_layers):
        yield from _layer_slots(facts, layer, local=layer % per_stage, stage=layer // per_stage)
    yield Slot(("decoder.final_layernorm.weight",), ("model.norm.weight",), "whole", pp - 1)
    if not facts.tied_embeddings:
        yield Slot(("output_layer.weight",), ("lm_head.weight",), "vocab", pp - 1)


def _layer_slots(facts: ModelFacts, layer: int, *, local: int, stage: int) -> Iterator[Slot]:
    hf, mc = f"model.layers.{layer}.", f"decoder.layers.{local}."

    def slot(names: tuple[str, ...], parts: tuple[str, ...], split: Split) -> Slot:
        return Slot(tuple(mc + name for name in names), tuple(f"{hf}{part}.weight" for part in parts), split, stage)

    attention = tuple(f"self_attn.{letter}_proj" for letter in "qkv")
    norm = ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
    yield slot(norm, ("input_layernorm",), "whole")
    yield slot(("self_attention.linear_qkv.weight",), attention, "qkv")
    if facts.qk_norm:
        for letter in "qk":
            yield slot((f"self_attention.{letter}_layernorm.weight",), (f"self_attn.{letter}_norm",), "whole")
    yield slot(("self_attention.linear_proj.weight",), ("self_attn.o_proj",), "columns")
    norm = ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
    yield slot(norm, ("post_attention_layernorm",), "whole")
    yield slot(("mlp.linear_fc1.weight",), ("mlp.gate_proj", "mlp.up_proj"), "gate_up")
    yield slot(("mlp.linear_fc2.weight",), ("mlp.down_proj",), "columns")


def mark_tensor_parallel(gpt: Any) -> None:
    """Say of each parameter whether tensor parallel ranks hold different parts of it.

    Megatron does this where it initialises weights, which a model loaded from files skips. Without it the gradient norm
    counts the shards of the first rank alone, and clipping goes wrong.
    """
    place = layout()
    parameters = dict(gpt.named_parameters())
    sharded = [slot for slot in slots(gpt.hf, place.pp) if slot.stage == place.pp_rank and slot.split != "whole"]
    marked = [(_parameter(parameters, slot), 1 if slot.split == "columns" else 0) for slot in sharded]
    if (head := parameters.get("output_layer.weight")) is not None:
        marked.append((head, 0))  # a tied head on the last of several stages has no slot of its own
    for parameter, dimension in marked:
        if not hasattr(parameter, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(parameter, True, dimension, 1)


class _Reader:
    """Slices of the tensors in a model directory, read from disk as they are asked for."""

    def __init__(self, path: str, stack: ExitStack) -> None:
        self._path = Path(path)
        self._files = weight_file_of(path)
        self._stack = stack
        self._open: dict[str, Any] = {}

    def slice(self, name: str) -> Any:
        file = self._files[name]
        if file not in self._open:
            opened = safe_open(str(self._path / file), framework="pt", device="cpu")
            self._open[file] = self._stack.enter_context(opened)
        return self._open[file].get_slice(name)


def _read_shard(reader: _Reader, slot: Slot, *, facts: ModelFacts, place: Layout) -> torch.Tensor:
    """What this rank holds of the parameter."""
    views = [reader.slice(part) for part in slot.parts]
    if slot.split == "whole":
        return _tensor(views[0][:])
    if slot.split == "columns":
        width = views[0].get_shape()[1] // place.tp
        return _tensor(views[0][:, place.tp_rank * width : (place.tp_rank + 1) * width])
    if slot.split == "vocab":
        rows = padded_vocab_size(facts.vocab_size, place.tp) // place.tp
        start = min(place.tp_rank * rows, facts.vocab_size)
        real = _tensor(views[0][start : min(start + rows, facts.vocab_size)])
        return torch.cat([real, real.new_zeros(rows - real.shape[0], facts.hidden_size)])
    shards = []
    for view in views:
        rows = view.get_shape()[0] // place.tp
        shards.append(_tensor(view[place.tp_rank * rows : (place.tp_rank + 1) * rows]))
    if slot.split == "gate_up":
        return torch.cat(shards)
    groups = facts.num_kv_heads // place.tp
    per_group = [shard.view(groups, -1, facts.head_dim, facts.hidden_size) for shard in shards]
    return torch.cat(per_group, dim=1).flatten(0, 2)


def _tensor(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise LocalProtocolError(f"safetensors gave a {type(value).__name__}")
    return value


def _merge(slot: Slot, shards: list[torch.Tensor], facts: ModelFacts) -> list[torch.Tensor]:
    """The Hugging Face tensors, of the shards of all tensor parallel ranks in order."""
    if slot.split == "whole":
        return [shards[0]]
    if slot.split == "columns":
        return [torch.cat(shards, dim=1) if len(shards) > 1 else shards[0]]
    if slot.split == "gate_up":
        halves = [shard.chunk(2) for shard in shards]
        return [torch.cat([half[index] for half in halves]) for index in (0, 1)]
    whole = torch.cat(shards) if len(shards) > 1 else shards[0]
    if slot.split == "vocab":
        return [whole[: facts.vocab_size]]
    per_group = whole.view(facts.num_kv_heads, -1, facts.head_dim, facts.hidden_size)
    sizes = [per_group.shape[1] - 2, 1, 1]
    return [part.flatten(0, 2) for part in torch.split(per_group, sizes, dim=1)]


def _parameter(parameters: dict[str, torch.nn.Parameter], slot: Slot) -> torch.nn.Parameter:
    for name in slot.names:
        if name in parameters:
            return parameters[name]
    raise LocalProtocolError(f"the model has no parameter {' or '.join(slot.names)}")


@torch.no_grad()
def load_hf(gpt: Any, path: str | Path, *, setting: str = "model.hf_checkpoint") -> None:
    """Fill this rank's part of `gpt` from the model directory `path`, which is of the same architecture and shapes.

    Raises ConfigError when files are missing or unreadable, or when shapes aren't those of `gpt`.
    """
    facts = read_model_facts(path, setting=setting)
    check_weights(facts, setting=setting)
    if list(parameter_shapes(facts)) != list(parameter_shapes(gpt.hf)):
        raise ConfigError(f"{path} isn't of the same shapes as {gpt.hf.path}", setting=setting)
    place = layout()
    parameters = dict(gpt.named_parameters())
    filled = set()
    try:
        with ExitStack() as stack:
            reader = _Reader(facts.path, stack)
            for slot in slots(facts, place.pp):
                if slot.stage == place.pp_rank:
                    parameter = _parameter(parameters, slot)
                    parameter.copy_(_read_shard(reader, slot, facts=facts, place=place))
                    filled.add(parameter)
            if facts.tied_embeddings and place.last_stage and not place.first_stage:
                head = parameters["output_layer.weight"]  # the last stage's copy of the tied embedding
                head.copy_(_read_shard(reader, next(slots(facts, place.pp)), facts=facts, place=place))
                filled.add(head)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"weights in {path} can't be read: {error}", setting=setting) from error
    if left := [name for name, parameter in parameters.items() if parameter not in filled]:
        raise LocalProtocolError(f"no Hugging Face weight for {', '.join(left)}")


def _value(parameter: torch.nn.Parameter) -> torch.Tensor:
    return parameter


@torch.no_grad()
def iter_hf(gpt: Any, get: GetTensor = _value) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, whole tensor) of each parameter, always in the same order; `get` may pick its gradient.

    Collective over the model parallel group, and to be run to the end on each of its ranks. The tensors come out on the
    group's first rank alone (first stage, first tensor parallel rank); the others yield nothing. They may share memory
    with the parameters.
    """
    facts: ModelFacts = gpt.hf
    place = layout()
    parameters = dict(gpt.named_parameters())
    shapes = dict(parameter_shapes(facts))
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    like = get(next(iter(parameters.values())))
    for slot in slots(facts, place.pp):
        tensors: list[torch.Tensor] = []
        if slot.stage == place.pp_rank:
            tensors = _gather(slot, get(_parameter(parameters, slot)).detach(), facts=facts, place=place)
            if place.tp_rank == 0 and slot.stage > 0:
                for tensor in tensors:
                    dist.send(tensor.contiguous(), group=pipeline, group_dst=0)
        elif place.first_stage and place.tp_rank == 0:
            for part in slot.parts:
                received = torch.empty(shapes[part], dtype=like.dtype, device=like.device)
                dist.recv(received, group=pipeline, group_src=slot.stage)
                tensors.append(received)
        if place.first_stage and place.tp_rank == 0:
            yield from zip(slot.parts, tensors, strict=True)


def _gather(slot: Slot, shard: torch.Tensor, *, facts: ModelFacts, place: Layout) -> list[torch.Tensor]:
    """The whole tensors on tensor parallel rank 0, nothing on the others."""
    if place.tp == 1 or slot.split == "whole":
        return _merge(slot, [shard], facts) if place.tp_rank == 0 else []
    shard = shard.contiguous()
    shards = [torch.empty_like(shard) for _ in range(place.tp)] if place.tp_rank == 0 else None
    dist.gather(shard, shards, group=parallel_state.get_tensor_model_parallel_group(), group_dst=0)
    return _merge(slot, shards, facts) if shards is not None else []
