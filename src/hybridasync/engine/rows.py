"""The rows of the decoding batch: per-row state in tensors, so that a step costs the same Python for 1 and for 512.

Rows [0, used) take part in a step. A row that finished stays as a dead one until a newcomer takes it or until a
quarter of the rows is dead; then the living close ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from hybridasync.engine.model import KVCache
from hybridasync.engine.requests import GeneratedSequence
from hybridasync.engine.sampling import TOP_K_ALL, RowSampling

_NO_TOKEN = -1
_NO_TOP_P = 2.0  # a cumulative sum may exceed 1 by rounding, never 2
_POSITIONS_STEP = 16
_ROWS_STEP = 16


@dataclass(slots=True)
class RowState:
    """[R] or [R, …] tensors."""

    length: torch.Tensor  # tokens in the cache; the last sampled one isn't there yet
    last: torch.Tensor
    count: torch.Tensor  # tokens sampled in this stay
    limit: torch.Tensor  # tokens that may be sampled in this stay
    alive: torch.Tensor
    inverse_temperature: torch.Tensor
    greedy: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    seeded: torch.Tensor
    stops: torch.Tensor  # [R, stop ids], padded with -1
    out_ids: torch.Tensor  # [R, tokens]
    out_logprobs: torch.Tensor  # [R, tokens]

    def resize(self, name: str, rows: int, width: int = 0) -> None:
        old: torch.Tensor = getattr(self, name)
        shape = (rows,) if old.dim() == 1 else (rows, max(width, old.shape[1]))
        if tuple(old.shape) == shape:
            return
        new = old.new_full(shape, _NO_TOKEN if name == "stops" else 0)
        new[tuple(slice(0, size) for size in old.shape)] = old
        setattr(self, name, new)


@dataclass(frozen=True, slots=True)
class Leaving:
    """What rows made until now; parallel lists."""

    rows: list[int]
    sequences: list[GeneratedSequence]
    stopped: list[bool]
    broken: list[bool]


class Rows:
    def __init__(self, cache: KVCache, *, device: torch.device, max_total_tokens: int) -> None:
        self.cache = cache
        self.max_total_tokens = max_total_tokens
        self.device = device
        self.used = 0
        self.alive = 0
        self.longest = 0  # upper bound of the cached tokens of a row
        self.sequences: list[GeneratedSequence | None] = []
        self.any_streaming = False
        self._flags = (False, False, False)
        integer = torch.zeros(0, dtype=torch.int64, device=device)
        real, truth = torch.zeros(0, device=device), torch.zeros(0, dtype=torch.bool, device=device)
        wide = integer.view(0, 1)
        self.state = RowState(
            length=integer,
            last=integer,
            count=integer,
            limit=integer,
            alive=truth,
            inverse_temperature=real,
            greedy=truth,
            top_k=integer,
            top_p=real,
            min_p=real,
            seed=integer,
            seeded=truth,
            stops=wide,
            out_ids=wide,
            out_logprobs=real.view(0, 1),
        )

    @property
    def any_seeded(self) -> bool:
        return self._flags[2]

    def living(self) -> list[tuple[int, GeneratedSequence]]:
        return [(row, sequence) for row, sequence in enumerate(self.sequences) if sequence is not None]

    def place(self, sequences: Sequence[GeneratedSequence], contexts: Sequence[int]) -> torch.Tensor:
        """Give each sequence a row; `contexts` are their lengths in tokens. Answers the rows [M]."""
        holes = [row for row, sequence in enumerate(self.sequences) if sequence is None][: len(sequences)]
        fresh = len(sequences) - len(holes)
        taken = [*holes, *range(self.used, self.used + fresh)]
        self.used += fresh
        self.sequences.extend([None] * fresh)
        limits = [s.group.sampling.max_new_tokens - len(s.output_ids) for s in sequences]
        stops = [s.group.sampling.stop_token_ids for s in sequences]
        self._make_room(max(limits, default=0), max((len(ids) for ids in stops), default=0))
        rows = torch.tensor(taken, device=self.device)
        self._write_parameters(rows, sequences, stops)
        state = self.state
        state.length[rows] = torch.tensor(contexts, device=self.device)
        state.limit[rows] = torch.tensor(limits, device=self.device)
        state.count[rows] = 0
        state.alive[rows] = True
        for row, sequence in zip(taken, sequences, strict=True):
            self.sequences[row] = sequence
        self.alive += len(sequences)
        self.longest = max(self.longest, *contexts)
        self.cache.reserve(state.length.shape[0], self._rounded(self.longest + 1))
        self._refresh_flags()
        return rows

    def record(self, rows: torch.Tensor | slice, tokens: torch.Tensor, logprobs: torch.Tensor) -> Leaving | None:
        """Note the sampled tokens of `rows`; answers those that ended, None if none did."""
        state = self.state
        alive = state.alive[rows]
        count = state.count[rows]
        index = rows if isinstance(rows, torch.Tensor) else torch.arange(rows.start, rows.stop, device=self.device)
        state.out_ids[index, count] = tokens
        state.out_logprobs[index, count] = logprobs
        state.last[rows] = tokens
        count = count + alive
        state.count[rows] = count
        stopped = (tokens[:, None] == state.stops[rows]).any(-1)
        broken = ~torch.isfinite(logprobs)
        ended = alive & (stopped | broken | (count >= state.limit[rows]))
        if not bool(ended.any()):
            return None
        leaving = index[ended].tolist()
        sequences = [sequence for row in leaving if (sequence := self.sequences[row]) is not None]
        return Leaving(leaving, sequences, stopped[ended].tolist(), broken[ended].tolist())

    def advance(self) -> None:
        """The step wrote one more token of each living row into the cache."""
        self.state.length[: self.used] += self.state.alive[: self.used]
        self.longest += 1

    def make_step_room(self) -> int:
        """Cache positions that the next step looks at, after making sure that they exist."""
        positions = self._rounded(self.longest + 1)
        if positions > self.cache.positions:
            generous = min(self._rounded(positions * 3 // 2), self.max_total_tokens // self.cache.rows)
            self.cache.reserve(self.cache.rows, max(positions, generous))
        return positions

    def release(self, rows: list[int]) -> None:
        """Hand what the rows made to their sequences and free them."""
        index = torch.tensor(rows, device=self.device)
        state = self.state
        counts: list[int] = state.count[index].tolist()
        width = max(counts, default=0)
        ids = state.out_ids[index, :width].tolist()
        logprobs = state.out_logprobs[index, :width].tolist()
        for row, count, row_ids, row_logprobs in zip(rows, counts, ids, logprobs, strict=True):
            sequence = self.sequences[row]
            if sequence is not None:
                sequence.output_ids += row_ids[:count]
                sequence.output_logprobs += row_logprobs[:count]
            self.sequences[row] = None
        state.alive[index] = False
        state.length[index] = 0
        state.count[index] = 0
        self.alive -= len(rows)
        self._compact()

    def wipe(self, rows: list[int]) -> None:
        """Zero the cache of rows that hold NaN: a masked position contributes 0 × its value, which must be finite."""
        index = torch.tensor(rows, device=self.device)
        self.cache.keys[:, index] = 0
        self.cache.values[:, index] = 0

    def counts(self) -> list[int]:
        """Tokens sampled in this stay, of each row in use."""
        counts: list[int] = self.state.count[: self.used].tolist()
        return counts

    def cached_tokens(self) -> int:
        return int(self.state.length[: self.used].sum())

    def sampling(self, rows: torch.Tensor | slice) -> RowSampling:
        state = self.state
        return RowSampling(
            state.inverse_temperature[rows],
            state.greedy[rows],
            state.top_k[rows],
            state.top_p[rows],
            state.min_p[rows],
            state.seed[rows],
            state.seeded[rows],
            state.length[rows] - 1,
            *self._flags,
        )

    def _write_parameters(
        self, rows: torch.Tensor, sequences: Sequence[GeneratedSequence], stops: Sequence[tuple[int, ...]]
    ) -> None:
        state = self.state
        given = [sequence.group.sampling for sequence in sequences]
        greedy = [s.temperature == 0 for s in given]
        temperatures = [1.0 if s.temperature == 0 else 1.0 / s.temperature for s in given]
        width = state.stops.shape[1]
        padded = [[*ids, *[_NO_TOKEN] * (width - len(ids))] for ids in stops]
        state.greedy[rows] = torch.tensor(greedy, device=self.device)
        state.inverse_temperature[rows] = torch.tensor(temperatures, device=self.device)
        state.top_k[rows] = torch.tensor([s.top_k for s in given], device=self.device)
        state.top_p[rows] = torch.tensor([s.top_p if s.top_p < 1 else _NO_TOP_P for s in given], device=self.device)
        state.min_p[rows] = torch.tensor([float(s.min_p) for s in given], device=self.device)
        state.seed[rows] = torch.tensor([s.seed or 0 for s in given], dtype=torch.int64, device=self.device)
        state.seeded[rows] = torch.tensor([s.seeded for s in given], device=self.device)
        state.stops[rows] = torch.tensor(padded, device=self.device)

    def _make_room(self, tokens: int, stops: int) -> None:
        capacity = self.state.length.shape[0]
        if self.used > capacity:
            capacity = -(-max(self.used, capacity * 5 // 4) // _ROWS_STEP) * _ROWS_STEP
        for column in fields(self.state):
            width = stops if column.name == "stops" else tokens if column.name.startswith("out_") else 0
            self.state.resize(column.name, capacity, max(width, 1))

    def _compact(self) -> None:
        if self.alive == 0:
            self.used, self.longest = 0, 0
            self.sequences.clear()
        elif (self.used - self.alive) * 4 >= self.used:
            self._close_ranks()
        if self.used:
            self.longest = int(self.state.length[: self.used].max())
        self._refresh_flags()

    def _close_ranks(self) -> None:
        holes = [row for row in range(self.alive) if self.sequences[row] is None]
        movers = [row for row in range(self.alive, self.used) if self.sequences[row] is not None]
        if movers:
            source, target = torch.tensor(movers, device=self.device), torch.tensor(holes, device=self.device)
            for column in fields(self.state):
                tensor: torch.Tensor = getattr(self.state, column.name)
                tensor[target] = tensor[source]
            self.state.alive[source] = False
            self.state.length[source] = 0
            self.state.count[source] = 0
            self.cache.move(source, target, self._rounded(self.longest))
            for old, new in zip(movers, holes, strict=True):
                self.sequences[new] = self.sequences[old]
        self.used = self.alive
        del self.sequences[self.used :]

    def _refresh_flags(self) -> None:
        groups = {sequence.group for sequence in self.sequences if sequence is not None}
        self.any_streaming = any(group.stream is not None for group in groups)
        given = [group.sampling for group in groups]
        self._flags = (
            any(s.temperature == 0 for s in given),
            any(s.top_p < 1 or s.min_p > 0 or s.top_k < TOP_K_ALL for s in given),
            any(s.seeded for s in given),
        )

    @staticmethod
    def _rounded(positions: int) -> int:
        return -(-positions // _POSITIONS_STEP) * _POSITIONS_STEP
