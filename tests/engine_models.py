"""Tiny models for tests of the engine, made once for each process and written as Hugging Face directories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

VOCAB = 70  # not a multiple of 64, so that padding shows
EOS = 2


def tiny_model(
    kind: str = "qwen3", *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> PreTrainedModel:
    """Two layers, large random weights, so that distributions differ between positions and between seeds."""
    torch.manual_seed(seed)
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": EOS,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
    }
    config = (Qwen3Config if kind == "qwen3" else LlamaConfig)(**{**shape, **changes})
    model = (Qwen3ForCausalLM if kind == "qwen3" else LlamaForCausalLM)(config).to(dtype).eval()
    with torch.no_grad():  # norms away from 1 and biases away from 0, so that forgetting one shows
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def saved_model(path: Path, kind: str = "qwen3", **arguments: Any) -> PreTrainedModel:
    model = tiny_model(kind, **arguments)
    model.save_pretrained(path)
    return model


@torch.no_grad()
def reference_logprobs(
    model: PreTrainedModel, prompt: list[int], output: list[int], temperature: float = 1.0
) -> list[float]:
    """Log-probs of the output tokens at the temperature, computed by Hugging Face in one pass."""
    logits = model(torch.tensor([prompt + output])).logits[0].float() / temperature
    picked = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return [picked[index, token].item() for index, token in enumerate(output)]
