"""What a Hugging Face model directory says of its model, and whether we can train it. Needs no torch, no Megatron."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from hybridasync.errors import ConfigError

SUPPORTED_ARCHITECTURES: Mapping[str, str] = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A causal language model as its `config.json` describes it."""

    path: str
    architecture: str  # one of SUPPORTED_ARCHITECTURES
    vocab_size: int  # rows of the embedding, without any padding
    context_length: int  # positions, prompt and completion together
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tied_embeddings: bool
    norm_eps: float
    rope_theta: float
    rope_llama3_factor: float | None  # Llama 3.1's frequency scaling; None: plain RoPE
    eos_token_ids: tuple[int, ...]  # of generation_config.json and config.json together
    pad_token_id: int | None
    dtype: str | None  # of the stored weights, as config.json says

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised per head (Qwen3)."""
        return SUPPORTED_ARCHITECTURES[self.architecture] == "qwen3"


def check_model_dir(path: str | Path, tp: int, pp: int, *, setting: str = "model.hf_checkpoint") -> ModelFacts:
    """Read and check everything that can be known before a process is started.

    Raises ConfigError, naming `setting`, for a directory that is missing or has no tokenizer or weights, for an
    architecture that isn't supported, weights of other shapes than config.json says, and shapes that don't divide by
    `tp` and `pp`.
    """
    facts = read_model_facts(path, setting=setting)
    if not any((Path(path) / file).is_file() for file in TOKENIZER_FILES):
        raise ConfigError(
            f"{path} has no tokenizer (looked for {', '.join(TOKENIZER_FILES)}); "
            "copy the tokenizer files of the model into it",
            setting=setting,
        )
    check_layout(facts, tp, pp)
    check_weights(facts, setting=setting)
    return facts


def read_model_facts(path: str | Path, *, setting: str = "model.hf_checkpoint") -> ModelFacts:
    """The facts of the model in directory `path`. Raises ConfigError."""
    directory = Path(path)
    if not directory.is_dir():
        raise ConfigError(
            f"{path} is not a directory; give a local Hugging Face model directory "
            "(config.json, *.safetensors, tokenizer files)",
            setting=setting,
        )
    config = _read_json(directory / "config.json", setting)
    architecture = _architecture(config, directory, setting)
    _refuse_variants(config, directory, setting)
    try:
        return _facts(directory, config, architecture=architecture, setting=setting)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{directory / 'config.json'} lacks or garbles {error}", setting=setting) from error


def _facts(directory: Path, config: Mapping[str, Any], *, architecture: str, setting: str) -> ModelFacts:
    heads = int(config["num_attention_heads"])
    hidden = int(config["hidden_size"])
    theta, llama3_factor = _rope(config, directory, setting)
    generation = directory / "generation_config.json"
    eos = _ids(config.get("eos_token_id"))
    if generation.is_file():
        eos += _ids(_read_json(generation, setting).get("eos_token_id"))
    pad = config.get("pad_token_id")
    return ModelFacts(
        path=str(directory),
        architecture=architecture,
        vocab_size=int(config["vocab_size"]),
        context_length=int(config["max_position_embeddings"]),
        hidden_size=hidden,
        intermediate_size=int(config["intermediate_size"]),
        num_layers=int(config["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_llama3_factor=llama3_factor,
        eos_token_ids=tuple(dict.fromkeys(eos)),
        pad_token_id=None if pad is None else int(pad),
        dtype=config.get("dtype") or config.get("torch_dtype"),
    )


def _read_json(file: Path, setting: str) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(
            f"{file.parent} has no {file.name}; it isn't a Hugging Face model directory", setting=setting
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} can't be read: {error}", setting=setting) from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file} isn't a JSON object", setting=setting)
    return value


def _architecture(config: Mapping[str, Any], directory: Path, setting: str) -> str:
    given = config.get("architectures") or []
    for name in given:
        if name in SUPPORTED_ARCHITECTURES:
            return str(name)
    raise ConfigError(
        f"{directory} is of architecture {', '.join(map(str, given)) or config.get('model_type', 'unknown')}; "
        f"supported are {', '.join(SUPPORTED_ARCHITECTURES)}",
        setting=setting,
    )


def _refuse_variants(config: Mapping[str, Any], directory: Path, setting: str) -> None:
    """Options of the supported architectures that would silently change the function computed."""
    wanted: dict[str, tuple[object, ...]] = {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "use_sliding_window": (False,),
        "partial_rotary_factor": (1.0,),
    }
    for key, allowed in wanted.items():
        if (value := config.get(key)) is not None and value not in allowed:
            raise ConfigError(
                f"{directory / 'config.json'} says {key} = {json.dumps(value)}; "
                f"only {json.dumps(allowed[0])} is supported",
                setting=setting,
            )


def _rope(config: Mapping[str, Any], directory: Path, setting: str) -> tuple[float, float | None]:
    """RoPE base and Llama 3 scaling factor; both spellings, `rope_parameters` (transformers 5) and `rope_scaling`."""
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind == "llama3" and all(rope.get(key) == value for key, value in _LLAMA3_ROPE.items()):
        return theta, float(rope["factor"])
    raise ConfigError(
        f"{directory / 'config.json'} scales RoPE by {kind} ({rope}); "
        f"supported are the default and llama3 with {_LLAMA3_ROPE}",
        setting=setting,
    )


def _ids(value: object) -> list[int]:
    if value is None:
        return []
    return [int(item) for item in value] if isinstance(value, list) else [int(str(value))]


def check_layout(facts: ModelFacts, tp: int, pp: int) -> None:
    """Raise ConfigError unless the model divides by `tp` and its layers by `pp`."""
    divided = {
        "attention heads": facts.num_heads,
        "key-value heads": facts.num_kv_heads,
        "intermediate size": facts.intermediate_size,
    }
    for what, size in divided.items():
        if size % tp:
            raise ConfigError(
                f"{tp} doesn't divide the {size} {what} of {facts.path}; {_that_divide(divided.values())} would do",
                setting="parallel.tensor_model_parallel_size",
            )
    if facts.num_layers % pp:
        raise ConfigError(
            f"{pp} doesn't divide the {facts.num_layers} layers of {facts.path}; "
            f"{_that_divide([facts.num_layers])} would do",
            setting="parallel.pipeline_model_parallel_size",
        )


def _that_divide(sizes: Any) -> str:
    numbers = list(sizes)
    return ", ".join(str(n) for n in range(1, min(numbers) + 1) if all(size % n == 0 for size in numbers))


def parameter_shapes(facts: ModelFacts) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Hugging Face name and shape of each parameter, in the order of export. A tied head isn't listed."""
    hidden, head_dim = facts.hidden_size, facts.head_dim
    q_rows, kv_rows = facts.num_heads * head_dim, facts.num_kv_heads * head_dim
    yield "model.embed_tokens.weight", (facts.vocab_size, hidden)
    for layer in range(facts.num_layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "self_attn.q_proj.weight", (q_rows, hidden)
        yield prefix + "self_attn.k_proj.weight", (kv_rows, hidden)
        yield prefix + "self_attn.v_proj.weight", (kv_rows, hidden)
        if facts.qk_norm:
            yield prefix + "self_attn.q_norm.weight", (head_dim,)
            yield prefix + "self_attn.k_norm.weight", (head_dim,)
        yield prefix + "self_attn.o_proj.weight", (hidden, q_rows)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        yield prefix + "mlp.gate_proj.weight", (facts.intermediate_size, hidden)
        yield prefix + "mlp.up_proj.weight", (facts.intermediate_size, hidden)
        yield prefix + "mlp.down_proj.weight", (hidden, facts.intermediate_size)
    yield "model.norm.weight", (hidden,)
    if not facts.tied_embeddings:
        yield "lm_head.weight", (facts.vocab_size, hidden)


def parameter_count(facts: ModelFacts) -> int:
    """Parameters of the whole model; tied embeddings count once."""
    total = 0
    for _, shape in parameter_shapes(facts):
        size = 1
        for length in shape:
            size *= length
        total += size
    return total


def weight_file_of(path: str | Path, *, setting: str = "model.hf_checkpoint") -> dict[str, str]:
    """Tensor name → file name inside the directory, from the index if there is one. Raises ConfigError."""
    directory = Path(path)
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        weight_map = _read_json(index, setting).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ConfigError(f"{index} has no weight_map", setting=setting)
        return {str(name): str(file) for name, file in weight_map.items()}
    single = directory / "model.safetensors"
    if not single.is_file():
        raise ConfigError(
            f"{directory} has no weights (neither model.safetensors nor model.safetensors.index.json); "
            "save them as safetensors",
            setting=setting,
        )
    try:
        with safe_open(str(single), framework="np") as handle:
            return dict.fromkeys(handle.keys(), single.name)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{single} can't be read: {error}", setting=setting) from error


def check_weights(facts: ModelFacts, *, setting: str = "model.hf_checkpoint") -> None:
    """Raise ConfigError unless every parameter is there in the shape that config.json says. Reads headers only."""
    files = weight_file_of(facts.path, setting=setting)
    wanted: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for name, shape in parameter_shapes(facts):
        if name not in files:
            raise ConfigError(f"{facts.path} has no weight {name}, which its config.json asks for", setting=setting)
        wanted.setdefault(files[name], []).append((name, shape))
    for file, entries in wanted.items():
        try:
            with safe_open(str(Path(facts.path) / file), framework="np") as handle:
                for name, shape in entries:
                    if (found := tuple(handle.get_slice(name).get_shape())) != shape:
                        raise ConfigError(
                            f"{facts.path}: {name} has shape {list(found)}, but config.json makes it {list(shape)}",
                            setting=setting,
                        )
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{Path(facts.path) / file} can't be read: {error}", setting=setting) from error
