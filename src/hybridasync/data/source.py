"""Prompts of a run: a data set read once into ids, and an endless stream over it with an exact position."""

from __future__ import annotations

import hashlib
import json
import random
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridasync.config.models import DataSection
from hybridasync.data.jsonl import Row, read_rows
from hybridasync.data.prompts import PromptText, prompt_text
from hybridasync.data.tokenizer import TextTokenizer
from hybridasync.errors import CheckpointError, ConfigError
from hybridasync.types import Prompt

STATE_FORMAT = 1


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One usable row of the data set."""

    row: int  # 0-based record of the file
    input_ids: tuple[int, ...]
    text: str
    label: str
    extra: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PromptDataset:
    """The usable prompts of one file, in its order."""

    name: str
    path: str
    rows: tuple[PromptRow, ...]
    loaded: int  # records in the file
    filtered: int  # of these, too long for the context
    max_prompt_tokens: int
    fingerprint: str  # of ids and labels: changes with the data, the tokenizer, the template or the filter

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def summary(self) -> str:
        """One line for the log."""
        return (
            f"{self.name}: {self.loaded} prompts loaded from {self.path}, {self.filtered} filtered "
            f"(longer than {self.max_prompt_tokens} tokens), {len(self.rows)} left"
        )

    def prompt(self, index: int, *, uid: int, epoch: int) -> Prompt:
        row = self.rows[index]
        return Prompt(
            uid=uid,
            row=row.row,
            epoch=epoch,
            source=self.name,
            input_ids=row.input_ids,
            text=row.text,
            label=row.label,
            extra=row.extra,
        )

    def prompts(self, limit: int | None = None) -> list[Prompt]:
        """The first `limit` prompts (default: all) in the file's order, for evaluation; `uid` is the position."""
        return [self.prompt(index, uid=index, epoch=0) for index in range(len(self.rows[:limit]))]


def load_prompts(
    path: str | Path,
    *,
    data: DataSection,
    tokenizer: TextTokenizer,
    context_length: int,
    name: str = "train",
    setting: str = "data.prompt_data",
) -> PromptDataset:
    """Read and encode the prompts of a JSONL or Parquet file, without those that leave no room for a response (C54).

    Raises ConfigError: file missing, empty or malformed (with the line), no such field, nothing left by the filter.
    """
    limit = context_length - 1
    if data.max_prompt_tokens is not None:
        limit = min(limit, data.max_prompt_tokens)
    rows = read_rows(path, setting=setting)
    texts = [prompt_text(row, data=data, tokenizer=tokenizer, setting=setting) for row in rows]
    encoded = tokenizer.encode_prompts([text.model_input for text in texts])
    usable = tuple(
        _prompt_row(index, row, text, ids=ids, data=data, setting=setting)
        for index, (row, text, ids) in enumerate(zip(rows, texts, encoded, strict=True))
        if len(ids) <= limit
    )
    dataset = PromptDataset(
        name=name,
        path=str(path),
        rows=usable,
        loaded=len(rows),
        filtered=len(rows) - len(usable),
        max_prompt_tokens=limit,
        fingerprint=_fingerprint(usable),
    )
    if not usable:
        raise ConfigError(f"no prompt is left ({dataset.summary})", setting=setting)
    return dataset


def _prompt_row(
    index: int, row: Row, text: PromptText, *, ids: tuple[int, ...], data: DataSection, setting: str
) -> PromptRow:
    if not ids:
        raise ConfigError(f"{row.place}: the prompt is empty", setting=setting)
    used = {data.prompt_key, data.label_key}
    extra = {key: value for key, value in row.fields.items() if key not in used}
    return PromptRow(index, ids, text.shown, _label(row, data.label_key, setting=setting), extra)


def _label(row: Row, key: str, *, setting: str) -> str:
    """The gold answer as text. `label_key = ""` is for data without answers."""
    if key == "":
        return ""
    value = row.fields.get(key)
    if value is None:
        raise ConfigError(
            f"{row.place}: no field {key!r} with the gold answer (data.label_key); it has "
            f"{', '.join(map(repr, row.fields)) or 'none'}",
            setting=setting,
        )
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _fingerprint(rows: Iterable[PromptRow]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps([row.row, row.input_ids, row.label]).encode())
    return digest.hexdigest()


class PromptStream:
    """`ports.PromptSource` over one data set: every epoch is a full pass in an order of its own, then it wraps.

    A prompt's uid is its position in the endless stream, epoch × size + offset: unique and increasing across wraps
    (R118, R119), so that the next uid is the whole position.
    """

    def __init__(
        self, dataset: PromptDataset, *, seed: int, shuffle: bool = True, num_epoch: int | None = None
    ) -> None:
        self._dataset = dataset
        self._seed = seed
        self._shuffle = shuffle
        self._num_epoch = num_epoch
        self._next_uid = 0
        self._again = deque[int]()  # drawn before a restart and not trained on
        self._order: tuple[int, list[int]] = (-1, [])

    def __len__(self) -> int:
        return len(self._dataset)

    def draw(self) -> Prompt | None:
        """The next prompt; None after `num_epoch` passes."""
        if self._again:
            return self._at(self._again.popleft())
        if self._num_epoch is not None and self._next_uid >= self._num_epoch * len(self):
            return None
        prompt = self._at(self._next_uid)
        self._next_uid += 1
        return prompt

    def _at(self, uid: int) -> Prompt:
        epoch, offset = divmod(uid, len(self))
        return self._dataset.prompt(self._epoch_order(epoch)[offset], uid=uid, epoch=epoch)

    def _epoch_order(self, epoch: int) -> list[int]:
        if self._order[0] != epoch:
            order = list(range(len(self)))
            if self._shuffle:
                random.Random(f"epoch:{self._seed}:{epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._order[1]

    def state(self, unused: Iterable[int] = ()) -> dict[str, Any]:
        """The position, as JSON. A restored stream draws the prompts with uids `unused`, then what comes next here.

        What waits to be drawn again counts as unused without being named.
        """
        epoch, offset = divmod(self._next_uid, len(self))
        return {
            "format": STATE_FORMAT,
            "dataset": self._dataset.name,
            "fingerprint": self._dataset.fingerprint,
            "size": len(self),
            "seed": self._seed,
            "shuffle": self._shuffle,
            "next_uid": self._next_uid,
            "unused": sorted({*unused, *self._again}),
            "epoch": epoch,
            "offset": offset,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position, or raise CheckpointError (unreadable), ConfigError (of other data) and stay."""
        next_uid, unused = _checked_position(state)
        for key, mine in (
            ("size", len(self)),
            ("fingerprint", self._dataset.fingerprint),
            ("seed", self._seed),
            ("shuffle", self._shuffle),
        ):
            if state[key] != mine:
                raise ConfigError(
                    f"the checkpoint's data position is of other prompts: {key} was {state[key]!r}, is now {mine!r}. "
                    f"Resume with the data file, tokenizer, template and seed of the first start, "
                    f"or start a new run in another run.dir",
                    setting="data.prompt_data",
                )
        self._next_uid = next_uid
        self._again = deque(unused)


def _checked_position(state: Mapping[str, Any]) -> tuple[int, list[int]]:
    remedy = "resume from an older checkpoint, or start a new run in another run.dir"
    if not isinstance(state, Mapping) or state.get("format") != STATE_FORMAT:
        raise CheckpointError(f"the checkpoint's data position isn't readable (format {STATE_FORMAT} needed): {remedy}")
    missing = [key for key in ("size", "fingerprint", "seed", "shuffle", "next_uid", "unused") if key not in state]
    if missing:
        raise CheckpointError(f"the checkpoint's data position lacks {', '.join(missing)}: {remedy}")
    next_uid, unused = state["next_uid"], state["unused"]
    known = type(next_uid) is int and next_uid >= 0
    if not known or not isinstance(unused, list) or not all(type(u) is int and 0 <= u < next_uid for u in unused):
        raise CheckpointError(
            f"the checkpoint's data position makes no sense (next {next_uid!r}, unused {unused!r}): {remedy}"
        )
    return next_uid, unused
