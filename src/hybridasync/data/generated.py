"""Prompts without a data set: a function makes prompt number n (`rollout.rollout_global_dataset = false`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hybridasync.config.models import DataSection
from hybridasync.data.jsonl import Row
from hybridasync.data.prompts import prompt_text
from hybridasync.data.source import prompt_row
from hybridasync.data.tokenizer import TextTokenizer
from hybridasync.errors import DataError
from hybridasync.types import Prompt

PromptFunction = Callable[[int, int], Mapping[str, object] | None]
"""(index, seed) → the fields of a row, None once there are no more. The same answer for the same arguments."""

SETTING = "data.prompt_function"


@dataclass(frozen=True, slots=True)
class Generated:
    """Prompts that a function makes when they are drawn. Nobody knows how many there are."""

    name: str
    function: PromptFunction
    data: DataSection
    tokenizer: TextTokenizer
    max_prompt_tokens: int

    @property
    def fingerprint(self) -> str:
        return self.name

    @property
    def summary(self) -> str:
        return f"prompts are made by {self.name}, of {self.max_prompt_tokens} tokens at the most"

    def ordered(self, *, seed: int, shuffle: bool) -> GeneratedOrder:
        """`shuffle` has no meaning for prompts that don't exist yet."""
        return GeneratedOrder(self, seed)


class GeneratedOrder:
    """Draw n is prompt n: the number of draws is the whole position."""

    def __init__(self, made: Generated, seed: int) -> None:
        self._made = made
        self._seed = seed

    def at(self, uid: int) -> Prompt | None:
        """Raises DataError for a prompt that leaves no room for a response, ConfigError for fields that are missing."""
        fields = self._made.function(uid, self._seed)
        if fields is None:
            return None
        row = Row(uid + 1, f"{self._made.name}, prompt {uid}", json.loads(json.dumps(dict(fields), default=str)))
        data, tokenizer = self._made.data, self._made.tokenizer
        text = prompt_text(row, data=data, tokenizer=tokenizer, setting=SETTING)
        (ids,) = tokenizer.encode_prompts([text.model_input])
        if len(ids) > self._made.max_prompt_tokens:
            raise DataError(f"{row.place} has {len(ids)} tokens; at most {self._made.max_prompt_tokens} leave room")
        made = prompt_row(uid, row, text, ids=ids, data=data, setting=SETTING)
        return Prompt(uid, made.row, 0, self._made.name, made.input_ids, made.text, made.label, made.extra)

    def positions(self, draws: int) -> dict[str, dict[str, int]]:
        return {self._made.name: {"offset": draws}}
