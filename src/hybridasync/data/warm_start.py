"""The supervised phase's data: prompts with the responses to learn."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hybridasync.config.models import DataSection
from hybridasync.data.jsonl import Row, read_rows
from hybridasync.data.prompts import prompt_text
from hybridasync.data.tokenizer import TextTokenizer
from hybridasync.errors import ConfigError
from hybridasync.types import TrainBatch, TrainSample

SETTING = "warm_start.data"
PROMPT, RESPONSE = "prompt", "response"


@dataclass(frozen=True, slots=True)
class SupervisedDataset:
    """Sequences to learn; the loss is on the response and its EOS."""

    path: str
    samples: tuple[TrainSample, ...]
    loaded: int
    filtered: int
    context_length: int

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def summary(self) -> str:
        """One line for the log."""
        return (
            f"warm start: {self.loaded} rows loaded from {self.path}, {self.filtered} filtered "
            f"(longer than {self.context_length} tokens), {len(self.samples)} left"
        )


def load_warm_start(
    path: str | Path, *, data: DataSection, tokenizer: TextTokenizer, context_length: int
) -> SupervisedDataset:
    """Read rows with `prompt` and `response`. Prompts are made as those of `data`; the EOS is added to the response.

    Rows that don't fit the context are filtered with a count. Raises ConfigError as `load_prompts` does.
    """
    rows = read_rows(path, setting=SETTING)
    texts = [prompt_text(row, data=data, tokenizer=tokenizer, setting=SETTING, key=PROMPT) for row in rows]
    prompts = tokenizer.encode_prompts([text.model_input for text in texts])
    responses = tokenizer.encode_responses([_response(row) for row in rows])
    samples = tuple(
        TrainSample(
            group=index,
            input_ids=prompt + response,
            response_start=len(prompt),
            rollout_logprobs=(),
            advantage=1.0,
        )
        for index, (prompt, response) in enumerate(zip(prompts, responses, strict=True))
        if len(prompt) + len(response) <= context_length
    )
    dataset = SupervisedDataset(str(path), samples, len(rows), len(rows) - len(samples), context_length)
    if not samples:
        raise ConfigError(f"no row is left ({dataset.summary})", setting=SETTING)
    return dataset


def warm_start_batches(
    dataset: SupervisedDataset, *, steps: int, batch_size: int, seed: int, first_step: int = 0
) -> Iterator[TrainBatch]:
    """Batches of steps `first_step` to `steps` - 1: shuffled passes over the data, as many as are needed."""
    order: list[int] = []
    epoch = -1
    for step in range(first_step, steps):
        samples = []
        for position in range(step * batch_size, (step + 1) * batch_size):
            wanted, offset = divmod(position, len(dataset))
            if wanted != epoch:
                epoch, order = wanted, list(range(len(dataset)))
                random.Random(f"warm-start:{seed}:{epoch}").shuffle(order)
            samples.append(dataset.samples[order[offset]])
        yield TrainBatch(step=step, loss="sft", samples=tuple(samples))


def _response(row: Row) -> str:
    value = row.fields.get(RESPONSE)
    if not isinstance(value, str):
        raise ConfigError(f"{row.place}: no field {RESPONSE!r} with a string", setting=SETTING)
    return value
