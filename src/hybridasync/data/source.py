"""Prompts of a run: a data set read once into ids, and an endless stream over it with an exact position."""

from __future__ import annotations

import hashlib
import json
import random
from collections import deque
from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

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

    def ordered(self, *, seed: int, shuffle: bool) -> Order:
        return Order(self, seed=seed, shuffle=shuffle)

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
        prompt_row(index, row, text, ids=ids, data=data, setting=setting)
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


def prompt_row(
    index: int, row: Row, text: PromptText, *, ids: tuple[int, ...], data: DataSection, setting: str
) -> PromptRow:
    """What a run keeps of a row: ids, label and the fields that rewards may want. Raises ConfigError."""
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


class Order:
    """A data set without end: every epoch is a full pass in an order of its own, then it wraps."""

    def __init__(self, dataset: PromptDataset, *, seed: int, shuffle: bool) -> None:
        self.name = dataset.name
        self._dataset = dataset
        self._seed = seed
        self._shuffle = shuffle
        self._epoch: tuple[int, list[int]] = (-1, [])

    def at(self, position: int, *, uid: int | None = None) -> Prompt:
        """Draw number `position`. `uid` is its number in the whole stream where that is of several data sets."""
        epoch, offset = divmod(position, len(self._dataset))
        return self._dataset.prompt(self._order(epoch)[offset], uid=position if uid is None else uid, epoch=epoch)

    def positions(self, draws: int) -> dict[str, dict[str, int]]:
        """Where the first `draws` leave the data set."""
        epoch, offset = divmod(draws, len(self._dataset))
        return {self.name: {"epoch": epoch, "offset": offset}}

    def _order(self, epoch: int) -> list[int]:
        if self._epoch[0] != epoch:
            order = list(range(len(self._dataset)))
            if self._shuffle:
                random.Random(f"epoch:{self._seed}:{epoch}").shuffle(order)
            self._epoch = (epoch, order)
        return self._epoch[1]


class DrawOrder(Protocol):
    """Which prompt a draw is; the same one whenever it is asked for."""

    def at(self, uid: int, /) -> Prompt | None:
        """None once there are no more."""
        ...

    def positions(self, draws: int, /) -> dict[str, dict[str, int]]:
        """For people: where the first `draws` leave each data set."""
        ...


class Prompts(Protocol):
    """What a stream draws from: a data set, a mixture of several, or a function."""

    @property
    def name(self) -> str: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def summary(self) -> str: ...

    def ordered(self, *, seed: int, shuffle: bool) -> DrawOrder: ...


class PromptStream:
    """`ports.PromptSource`: draws without end, or up to `num_epoch` passes.

    A prompt's uid is the number of its draw: unique and increasing across wraps (R118, R119), so that the next uid is
    the whole position, in each data set of a mixture too.
    """

    def __init__(self, dataset: Prompts, *, seed: int, shuffle: bool = True, num_epoch: int | None = None) -> None:
        self._dataset = dataset
        self._order = dataset.ordered(seed=seed, shuffle=shuffle)
        self._size = len(dataset) if isinstance(dataset, Sized) else None
        self._seed = seed
        self._shuffle = shuffle
        self._end = None if num_epoch is None or self._size is None else num_epoch * self._size
        self._next_uid = 0
        self._again = deque[int]()  # drawn before a restart and not trained on

    def draw(self) -> Prompt | None:
        """The next prompt; None after `num_epoch` passes, or when the function has no more."""
        if self._again:
            return self._order.at(self._again.popleft())
        if self._end is not None and self._next_uid >= self._end:
            return None
        prompt = self._order.at(self._next_uid)
        self._next_uid += prompt is not None
        return prompt

    def state(self, unused: Iterable[int] = ()) -> dict[str, Any]:
        """The position, as JSON. A restored stream draws the prompts with uids `unused`, then what comes next here.

        What waits to be drawn again counts as unused without being named.
        """
        return {
            "format": STATE_FORMAT,
            "dataset": self._dataset.name,
            "fingerprint": self._dataset.fingerprint,
            "size": self._size,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "next_uid": self._next_uid,
            "unused": sorted({*unused, *self._again}),
            "positions": self._order.positions(self._next_uid),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position, or raise CheckpointError (unreadable), ConfigError (of other data) and stay."""
        next_uid, unused = _checked_position(state)
        for key, mine in (
            ("size", self._size),
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
