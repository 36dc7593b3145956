"""The quick start's model and data: sort the digits of a number, "sort 5291=" to "1259".

The model is a random Qwen3 with a character tokenizer. Its supervised warm start learns a *mixed* corpus (some
answers right, some descending, some merely reversed), so that the policy can do several things and RL has one of
them to select.
Everything is written without torch, so that it takes a second.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path

from hybridasync.errors import ConfigError

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
# 60 characters fill the vocabulary to 64: an id without text would vanish when a response is decoded for its reward.
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz+-*=,>?: \n./<()[]{}!'\"_#"
VOCABULARY = (*SPECIAL, *CHARACTERS)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)
RIGHT_SHARE, DESCENDING_SHARE = 0.30, 0.45  # of the warm start's answers; the remaining 25 % are reversed
MAX_TRAIN_ROWS = 20_000
INITIAL_STD = 0.02


def prepare(
    directory: Path,
    seed: int,
    *,
    digits: int = 4,
    layers: int = 2,
    hidden: int = 128,
    heads: int = 4,
    context_length: int = 128,
    warm_start_rows: int = 150 * 128,
    eval_prompts: int = 256,
) -> None:
    """Write model/, train.jsonl, eval.jsonl and warm_start.jsonl to `directory`; the same seed gives the same bytes.

    One in ten inputs is held out; eval.jsonl has only such, and the same ones for each seed.
    Raises ConfigError for arguments that make no model.
    """
    _check(digits=digits, layers=layers, hidden=hidden, heads=heads, context_length=context_length)
    rng = random.Random(f"sort-digits:{seed}")
    keys = range(10**digits)
    held = [key for key in keys if held_out(key)]
    train = [key for key in keys if not held_out(key)]
    rng.shuffle(train)
    random.Random(10**6).shuffle(held)
    directory.mkdir(parents=True, exist_ok=True)
    _write_rows(directory / "train.jsonl", (_row(key, digits) for key in train[:MAX_TRAIN_ROWS]))
    _write_rows(directory / "eval.jsonl", (_row(key, digits) for key in held[:eval_prompts]))
    corpus = (_warm_start_row(rng.choice(train), digits, rng) for _ in range(warm_start_rows))
    _write_rows(directory / "warm_start.jsonl", corpus)
    write_model(
        directory / "model", seed=seed, layers=layers, hidden=hidden, heads=heads, context_length=context_length
    )


def held_out(key: int) -> bool:
    """Whether the number `key` is kept for evaluation: one in ten, scattered by a multiplicative hash."""
    return (key * 2654435761 >> 7) % 10 == 0


def _check(*, digits: int, layers: int, hidden: int, heads: int, context_length: int) -> None:
    given = {"digits": digits, "layers": layers, "hidden": hidden, "heads": heads, "context_length": context_length}
    for name, value in given.items():
        if not isinstance(value, int):  # a recipe may hold anything
            raise ConfigError(f"{name} wants an integer, got {value!r}", setting="prepare.args")
    problems = [
        (not 2 <= digits <= 6, f"digits must be from 2 to 6, got {digits}"),
        (layers < 1, f"layers must be positive, got {layers}"),
        (heads < 2 or heads % 2 != 0, f"heads must be even (two share a key-value head), got {heads}"),
        (heads > 0 and hidden % (2 * heads) != 0, f"hidden must be divisible by 2 × heads, got {hidden} and {heads}"),
        (context_length < 2 * digits + 8, f"context_length {context_length} has no room for prompt and answer"),
    ]
    for wrong, message in problems:
        if wrong:
            raise ConfigError(message, setting="prepare.args")


def _question(key: int, digits: int) -> tuple[str, str]:
    number = f"{key:0{digits}d}"
    return number, "".join(sorted(number))


def _row(key: int, digits: int) -> dict[str, str]:
    number, answer = _question(key, digits)
    return {"prompt": f"sort {number}=", "label": answer}


def _warm_start_row(key: int, digits: int, rng: random.Random) -> dict[str, str]:
    number, answer = _question(key, digits)
    chance = rng.random()
    if chance >= RIGHT_SHARE + DESCENDING_SHARE:
        answer = number[::-1]
    elif chance >= RIGHT_SHARE:
        answer = answer[::-1]
    return {"prompt": f"sort {number}=", "response": answer}


def _write_rows(path: Path, rows: Iterable[Mapping[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_model(directory: Path, *, seed: int, layers: int, hidden: int, heads: int, context_length: int) -> None:
    """Write a random Qwen3ForCausalLM (fp32, tied embeddings) and its character tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    config = _model_config(layers=layers, hidden=hidden, heads=heads, context_length=context_length)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    generation = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
    _write_weights(directory / "model.safetensors", config, seed)
    write_tokenizer(directory, context_length)


def _model_config(*, layers: int, hidden: int, heads: int, context_length: int) -> dict[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "float32",
        "torch_dtype": "float32",
        "vocab_size": len(VOCABULARY),
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": INITIAL_STD,
        "layer_types": ["full_attention"] * layers,
        "max_position_embeddings": context_length,
        "max_window_layers": layers,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


def _weight_shapes(config: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    def size(name: str) -> int:
        return int(str(config[name]))

    hidden, inner, head = size("hidden_size"), size("intermediate_size"), size("head_dim")
    queries, keys = size("num_attention_heads") * head, size("num_key_value_heads") * head
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (size("vocab_size"), hidden),
        "model.norm.weight": (hidden,),
    }
    for index in range(size("num_hidden_layers")):
        layer = f"model.layers.{index}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (queries, hidden),
            f"{layer}.self_attn.k_proj.weight": (keys, hidden),
            f"{layer}.self_attn.v_proj.weight": (keys, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, queries),
            f"{layer}.self_attn.q_norm.weight": (head,),
            f"{layer}.self_attn.k_norm.weight": (head,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.mlp.gate_proj.weight": (inner, hidden),
            f"{layer}.mlp.up_proj.weight": (inner, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, inner),
        }
    return shapes


def _write_weights(path: Path, config: Mapping[str, object], seed: int) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    generator = np.random.Generator(np.random.PCG64(seed))
    weights = {
        name: np.ones(shape, np.float32)
        if len(shape) == 1
        else INITIAL_STD * generator.standard_normal(shape, np.float32)
        for name, shape in _weight_shapes(config).items()
    }
    save_file(weights, path, metadata={"format": "pt"})


def write_tokenizer(directory: Path, context_length: int) -> None:
    """Write the character tokenizer as a Hugging Face fast tokenizer that puts one BOS in front."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    ids = {token: index for index, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", ids["<bos>"])]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
