"""The task of the publication benchmark: a model of about 10 M parameters whose answers all have the full length.

Constant work is what makes steps comparable: a random model would end its answers at random.
"""

from __future__ import annotations

import json
from pathlib import Path

from hybridasync.data.sort_digits import write_model

EOS = 2
CONSTANT, NEVER = 0.02, -100.0
"""Channel 0 of the residual stream: every token but the end of text puts CONSTANT there and no layer writes to it."""


def prepare(
    directory: Path,
    seed: int,
    *,
    layers: int = 6,
    hidden: int = 384,
    heads: int = 6,
    prompts: int = 16,
    model_seed: int = 0,
    context_length: int = 128,
) -> None:
    """Write model/ and prompts.jsonl. `seed` is of the run and unused: all trials have one model and one data set."""
    del seed
    directory.mkdir(parents=True, exist_ok=True)
    write_model(
        directory / "model", seed=model_seed, layers=layers, hidden=hidden, heads=heads, context_length=context_length
    )
    _never_ends(directory / "model" / "model.safetensors")
    rows = ({"prompt": f"count {number:02d}>", "label": ""} for number in range(prompts))
    (directory / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def reward(response: str) -> float:
    """The share of digits: something that samples of a group differ in, so that every step changes the weights."""
    return sum(character.isdigit() for character in response) / max(1, len(response))


def _never_ends(path: Path) -> None:
    """Make the end of text so improbable that no answer ends before the cap, whatever a short training changes."""
    from safetensors.numpy import load_file, save_file

    weights = load_file(path)
    for name, value in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            value[0, :] = 0.0
    embedding = weights["model.embed_tokens.weight"]
    embedding[:, 0] = CONSTANT
    embedding[EOS, 0] = NEVER
    save_file(weights, path, metadata={"format": "pt"})
