"""What the decoder needs to know of a model, read from a Hugging Face directory."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hybridasync.errors import ConfigError
from hybridasync.weights.snapshot import SnapshotError, read_config

ARCHITECTURES = {"LlamaForCausalLM": False, "Qwen3ForCausalLM": True}  # name → has query and key norms


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shapes and constants of a Llama or Qwen3 decoder."""

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    context_length: int
    tied: bool
    qk_norm: bool
    attention_bias: bool
    mlp_bias: bool
    inv_freq: tuple[float, ...]  # [head_dim / 2] rotary frequencies
    eos_token_ids: tuple[int, ...]

    @property
    def kv_elements_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim

    @classmethod
    def from_directory(cls, path: str | Path) -> ModelConfig:
        """Raises ConfigError: no such directory, not a model, or not one that this decoder computes."""
        if not Path(path).is_dir():
            raise ConfigError(f"no such directory: {path}", setting="--model-path")
        try:
            raw = read_config(path)
            return cls._parse(raw, _eos_ids(Path(path), raw))
        except (SnapshotError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            detail = f"config.json lacks {error}" if isinstance(error, KeyError) else str(error)
            raise ConfigError(f"{path}: {detail}", setting="--model-path") from error

    @classmethod
    def _parse(cls, raw: Mapping[str, Any], eos: tuple[int, ...]) -> ModelConfig:
        architecture = next(iter(raw.get("architectures") or ()), "none given")
        if architecture not in ARCHITECTURES:
            known = ", ".join(sorted(ARCHITECTURES))
            raise ConfigError(f"architecture {architecture} isn't supported; {known} are", setting="--model-path")
        if raw.get("hidden_act", "silu") != "silu":
            raise ConfigError(f"hidden_act {raw['hidden_act']} isn't supported; silu is", setting="--model-path")
        if raw.get("use_sliding_window"):
            raise ConfigError("sliding window attention isn't supported", setting="--model-path")
        heads = int(raw["num_attention_heads"])
        head_dim = int(raw.get("head_dim") or int(raw["hidden_size"]) // heads)
        return cls(
            architecture=architecture,
            model_type=str(raw.get("model_type", "")),
            vocab_size=int(raw["vocab_size"]),
            hidden_size=int(raw["hidden_size"]),
            intermediate_size=int(raw["intermediate_size"]),
            layers=int(raw["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=head_dim,
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            context_length=int(raw.get("max_position_embeddings", 2048)),
            tied=bool(raw.get("tie_word_embeddings", False)),
            qk_norm=ARCHITECTURES[architecture],
            attention_bias=bool(raw.get("attention_bias", False)),
            mlp_bias=bool(raw.get("mlp_bias", False)),
            inv_freq=_inv_freq(raw, head_dim),
            eos_token_ids=eos,
        )


def _eos_ids(path: Path, raw: Mapping[str, Any]) -> tuple[int, ...]:
    """Union of the lists of config.json and generation_config.json."""
    found: set[int] = set()
    sources = [raw]
    generation = path / "generation_config.json"
    if generation.is_file():
        try:
            value = json.loads(generation.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ConfigError(f"{generation}: {error}", setting="--model-path") from error
        sources.append(value if isinstance(value, dict) else {})
    for source in sources:
        ids = source.get("eos_token_id")
        found.update(ids if isinstance(ids, list) else [] if ids is None else [int(ids)])
    return tuple(sorted(found))


def _inv_freq(raw: Mapping[str, Any], head_dim: int) -> tuple[float, ...]:
    """Rotary frequencies; the two rope types in use with these models: default and llama3."""
    rope: Mapping[str, Any] = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    frequencies = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if kind == "llama3":
        frequencies = _llama3(frequencies, rope)
    elif kind != "default":
        raise ConfigError(f"rope type {kind} isn't supported; default and llama3 are", setting="--model-path")
    return tuple(frequencies.tolist())


def _llama3(frequencies: torch.Tensor, rope: Mapping[str, Any]) -> torch.Tensor:
    """Llama 3.1's scaling: long waves are slowed by `factor`, short ones kept, those between blended."""
    factor, low, high = (float(rope[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    original = float(rope["original_max_position_embeddings"])
    wavelength = 2 * math.pi / frequencies
    smooth = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * frequencies / factor + smooth * frequencies
