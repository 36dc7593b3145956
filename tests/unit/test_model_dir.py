"""A model directory that can't be trained is refused at once, in words that say what would do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from hybridasync.data.model_dir import check_model_dir, parameter_count, parameter_shapes, read_model_facts
from hybridasync.errors import ConfigError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 10,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e5,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "eos_token_id": 2,
}


def write(path: Path, *, tokenizer: bool = True, weights: bool = True, **changes: Any) -> Path:
    path.mkdir(exist_ok=True)
    config = {key: value for key, value in {**LLAMA, **changes}.items() if value is not None}
    (path / "config.json").write_text(json.dumps(config))
    if tokenizer:
        (path / "tokenizer.json").write_text("{}")
    if weights:
        shapes = parameter_shapes(read_model_facts(path))
        save_file({name: np.zeros(shape, np.float32) for name, shape in shapes}, path / "model.safetensors")
    return path


def test_facts(tmp_path: Path) -> None:
    """Facts are config.json's, with the end-of-sequence tokens of generation_config.json added."""
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    facts = check_model_dir(write(tmp_path), 2, 4)
    assert (facts.vocab_size, facts.context_length, facts.head_dim, facts.eos_token_ids) == (10, 64, 4, (2, 5))
    assert (facts.rope_theta, facts.norm_eps, facts.qk_norm, facts.tied_embeddings) == (1e5, 1e-5, False, False)
    layer = 16 + 16 * 16 + 2 * 8 * 16 + 16 * 16 + 16 + 3 * 24 * 16
    assert parameter_count(facts) == 2 * 10 * 16 + 4 * layer + 16


def test_qwen3_in_the_spelling_of_transformers_5(tmp_path: Path) -> None:
    """`rope_parameters` and an explicit head_dim are read, and queries and keys have norms."""
    rope = {"rope_theta": 1e6, "rope_type": "default"}
    changes = {"architectures": ["Qwen3ForCausalLM"], "rope_theta": None, "rope_parameters": rope, "head_dim": 8}
    facts = check_model_dir(write(tmp_path, **changes, tie_word_embeddings=True), 1, 1)
    assert (facts.rope_theta, facts.qk_norm, facts.head_dim, facts.tied_embeddings) == (1e6, True, 8, True)
    assert "lm_head.weight" not in dict(parameter_shapes(facts))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM; supported are LlamaForCausalLM, Qwen3"),
        ({"architectures": None}, "architecture llama; supported"),
        ({"attention_bias": True}, "attention_bias = true; only false"),
        ({"hidden_act": "gelu"}, 'hidden_act = "gelu"; only "silu"'),
        ({"use_sliding_window": True}, "use_sliding_window = true; only false"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "scales RoPE by yarn"),
        ({"hidden_size": None}, "lacks or garbles 'hidden_size'"),
        ({"vocab_size": "many"}, "lacks or garbles .*many"),
    ],
)
def test_unsupported_models(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """What would compute another function than the model's is refused, naming the key and what is supported."""
    with pytest.raises(ConfigError, match=message) as raised:
        check_model_dir(write(tmp_path, weights=False, **changes), 1, 1)
    assert raised.value.setting == "model.hf_checkpoint"


@pytest.mark.parametrize(
    ("tp", "pp", "message"),
    [
        (4, 1, r"tensor_model_parallel_size: 4 doesn't divide the 2 key-value heads .*; 1, 2 would do"),
        (3, 1, r"tensor_model_parallel_size: 3 doesn't divide the 4 attention heads"),
        (1, 3, r"pipeline_model_parallel_size: 3 doesn't divide the 4 layers .*; 1, 2, 4 would do"),
    ],
)
def test_shapes_that_do_not_divide(tmp_path: Path, tp: int, pp: int, message: str) -> None:
    """The message says which size doesn't divide, and which sizes would."""
    with pytest.raises(ConfigError, match=message):
        check_model_dir(write(tmp_path), tp, pp)


def test_directories_that_are_no_models(tmp_path: Path) -> None:
    """Missing directory, configuration, tokenizer or weights: each says what is missing."""
    with pytest.raises(ConfigError, match=r"model\.ref_load: .*nowhere is not a directory"):
        check_model_dir(tmp_path / "nowhere", 1, 1, setting="model.ref_load")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"empty has no config\.json"):
        check_model_dir(tmp_path / "empty", 1, 1)
    with pytest.raises(ConfigError, match=r"has no tokenizer .*copy the tokenizer files"):
        check_model_dir(write(tmp_path / "mute", tokenizer=False), 1, 1)
    with pytest.raises(ConfigError, match=r"has no weights .*safetensors"):
        check_model_dir(write(tmp_path / "light", weights=False), 1, 1)
    (tmp_path / "light" / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json can't be read"):
        check_model_dir(tmp_path / "light", 1, 1)


def test_weights_that_are_not_the_configured_ones(tmp_path: Path) -> None:
    """A missing tensor, another shape and a truncated file are found without loading anything."""
    path = write(tmp_path, tie_word_embeddings=True)
    (path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(ConfigError, match=r"has no weight lm_head\.weight"):
        check_model_dir(path, 1, 1)
    (path / "config.json").write_text(json.dumps({**LLAMA, "tie_word_embeddings": True, "vocab_size": 11}))
    with pytest.raises(ConfigError, match=r"embed_tokens\.weight has shape \[10, 16\], but config\.json makes it \[11"):
        check_model_dir(path, 1, 1)
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ConfigError, match=r"model\.safetensors can't be read"):
        check_model_dir(path, 1, 1)


def test_needs_no_torch() -> None:
    """The controller and the command line check models without loading torch or Megatron."""
    code = "import sys, hybridasync.data.model_dir; sys.exit(bool({'torch', 'megatron'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
