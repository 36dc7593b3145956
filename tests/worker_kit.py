"""What tests of the Megatron side share: tiny Hugging Face models on disk, and one- and many-rank process groups."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridasync.config.models import Config

KINDS = ("llama", "qwen3")


def tiny_hf(kind: str, *, tied: bool, **changes: Any) -> Any:
    """A random fp32 Llama or Qwen3 of `transformers`: 2 layers, hidden 64, every weight large enough to matter."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16 if kind == "llama" else 32,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
        "rms_norm_eps": 1e-6,
        "attn_implementation": "eager",
        "initializer_range": 0.1,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }
    torch.manual_seed(settings.pop("seed", 0))
    model = LlamaForCausalLM(LlamaConfig(**settings)) if kind == "llama" else Qwen3ForCausalLM(Qwen3Config(**settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
    return model.float().eval()


def save_model(model: Any, path: Path, *, tokenizer: bool = True) -> Path:
    """Write the model as a Hugging Face directory, with a tokenizer of one token for each vocabulary entry."""
    model.save_pretrained(path)
    if tokenizer:
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from transformers import PreTrainedTokenizerFast

        words = {f"t{index}": index for index in range(model.config.vocab_size)}
        fast = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="t0")), eos_token="t2")
        fast.save_pretrained(path)
    return path


def tiny_config(model_dir: str | Path, **sections: Any) -> Config:
    """The shortest recipe that names this model; `sections` are added to it."""
    recipe: dict[str, Any] = {
        "model": {"hf_checkpoint": str(model_dir)},
        "rollout": {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "max_response_tokens": 8},
    }
    for name, values in sections.items():
        recipe[name] = {**recipe.get(name, {}), **values} if isinstance(values, dict) else values
    return Config.model_validate(recipe)


@contextmanager
def one_process() -> Iterator[None]:
    """A gloo group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def one_rank(seed: int = 0) -> Iterator[None]:
    """The same, with Megatron's groups over it."""
    from hybridasync.worker import parallel

    with one_process():
        try:
            parallel.init(1, 1, seed)
            yield
        finally:
            parallel.close()


def torchrun(script: Path, ranks: int, *args: str, timeout_s: float = 240) -> str:
    """Run `script` under torchrun and answer its output; fails the test with that output unless it exits with 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(ranks),
        "--master-port",
        str(port),
    ]
    root = str(Path(__file__).parents[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": root}
    done = subprocess.run(
        [*command, str(script), *args], capture_output=True, text=True, timeout=timeout_s, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return done.stdout
