"""The policy as a Megatron `GPTModel`, from the Hugging Face configuration of a Llama or Qwen3."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from hybridasync.config.models import Config
from hybridasync.data.model_dir import ModelFacts, check_layout, read_model_facts
from hybridasync.worker.attention import SDPACoreAttention, install_packed_rope
from hybridasync.worker.hf_mapping import mark_tensor_parallel, padded_vocab_size
from hybridasync.worker.parallel import Layout, device, layout

PADDING_LOGIT = -1e9
"""Logit of a vocabulary row that exists only as padding. exp() of it is 0 at any temperature above 1e-4; infinity would
make 0 × inf = NaN in an entropy."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class ModelBundle:
    """A model as built on this rank. Weights are whatever memory held until `hf_mapping.load_hf`."""

    config: TransformerConfig
    gpt: GPTModel
    module: torch.nn.Module  # what to call and to wrap: `gpt`, inside a Float16Module where dtype is bf16
    hf: ModelFacts
    device: torch.device
    dtype: torch.dtype


def build(config: Config, model_dir: str | Path, *, setting: str = "model.hf_checkpoint") -> ModelBundle:
    """Build this rank's part of the model in `model_dir`. `parallel.init` came before.

    The module maps token ids [b, s] to logits [b, s, padded vocabulary / TP] in fp32 on the last pipeline stage and to
    hidden states on the others; with `packed_seq_params` b is 1. Raises ConfigError.
    """
    facts = read_model_facts(model_dir, setting=setting)
    place = layout()
    check_layout(facts, place.tp, place.pp)
    dtype = DTYPES[config.model.dtype]
    fused = device().type == "cuda" and has_transformer_engine()
    settings = transformer_config(
        facts, place, dtype=dtype, fused=fused, recompute=config.parallel.recompute_activations
    )
    gpt = GPTModel(
        settings,
        _layer_spec(facts, fused),
        vocab_size=padded_vocab_size(facts.vocab_size, place.tp),
        max_sequence_length=facts.context_length,
        pre_process=place.first_stage,
        post_process=place.last_stage,
        share_embeddings_and_output_weights=facts.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=facts.rope_theta,
        rope_scaling=facts.rope_llama3_factor is not None,
        rope_scaling_factor=facts.rope_llama3_factor or 1.0,
        parallel_output=True,
    ).to(device=device())
    gpt.hf = facts
    mark_tensor_parallel(gpt)
    if place.last_stage:
        _mask_padding(gpt, facts, place)
    module = Float16Module(settings, gpt) if dtype != torch.float32 else gpt
    return ModelBundle(settings, gpt, module, facts, device(), dtype)


def has_transformer_engine() -> bool:
    """Whether Transformer Engine is installed and loads."""
    try:
        import transformer_engine.pytorch  # noqa: F401
    except (ImportError, OSError):  # OSError: its shared libraries don't fit this driver
        return False
    return True


def transformer_config(
    facts: ModelFacts, place: Layout, *, dtype: torch.dtype, fused: bool, recompute: bool
) -> TransformerConfig:
    """Megatron's configuration of the model. `fused`: the layers come from Transformer Engine."""
    options: dict[str, Any] = {}
    if recompute:
        options = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=facts.num_layers,
        hidden_size=facts.hidden_size,
        ffn_hidden_size=facts.intermediate_size,
        num_attention_heads=facts.num_heads,
        num_query_groups=facts.num_kv_heads,
        kv_channels=facts.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=facts.norm_eps,
        qk_layernorm=facts.qk_norm,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=place.tp,
        pipeline_model_parallel_size=place.pp,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=device().type == "cpu",
        perform_initialization=False,  # the weights come from files
        calculate_per_token_loss=True,  # sums and counts are reduced, so a token weighs the same on every rank
        variable_seq_lengths=True,  # micro-batches are packs of any length
        moe_token_dispatcher_type="alltoall",  # variable_seq_lengths asks for it, dense models too
        batch_p2p_comm=device().type == "cuda",
        persist_layer_norm=fused,
        apply_rope_fusion=fused,
        bias_activation_fusion=fused,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        **options,
    )


def _layer_spec(facts: ModelFacts, fused: bool) -> Any:
    if fused:
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=facts.qk_norm)
    install_packed_rope()
    spec = get_gpt_layer_local_spec(qk_layernorm=facts.qk_norm, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = SDPACoreAttention
    return spec


def _mask_padding(gpt: GPTModel, facts: ModelFacts, place: Layout) -> None:
    """Give the padded rows of this rank's vocabulary a probability of exactly zero, and thereby a zero gradient."""
    rows = padded_vocab_size(facts.vocab_size, place.tp) // place.tp
    real = max(0, min(rows, facts.vocab_size - place.tp_rank * rows))
    if real == rows:
        return
    padding = (torch.arange(rows) >= real).to(device())

    def mask(_module: torch.nn.Module, _args: Any, output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
        logits, bias = output
        return logits.masked_fill(padding, PADDING_LOGIT), bias

    gpt.output_layer.register_forward_hook(mask)
