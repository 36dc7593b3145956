"""Samples → micro-batches: packed sequences, balanced over data-parallel ranks, without a loop over tokens.

Every rank packs the same samples with the same deterministic rule and keeps its own part, so nothing is exchanged.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybridasync.errors import DataError
from hybridasync.types import TrainSample

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """B sequences laid end to end: T positions in all, R of which predict a response token.

    The last token of a sequence predicts nothing and is left out.
    """

    input_ids: Tensor  # [1, T]
    position_ids: Tensor  # [1, T], starting at 0 in each sequence
    cu_seqlens: Tensor  # [B + 1] int32, where the sequences start and end
    max_seqlen: int
    predictors: Tensor  # [R] positions in 0..T whose logits predict a response token
    targets: Tensor  # [R] the tokens they predict
    slots: Tensor  # [R] place of each of these tokens among the response tokens of all the samples packed


@dataclass(frozen=True, slots=True)
class SampleTable:
    """The samples of an update as flat arrays. Each has at least one prompt and one response token."""

    input_ids: Indices  # all tokens, end to end
    offsets: Indices  # [S] where each sample starts in input_ids
    lengths: Indices  # [S] tokens of each sample
    response_starts: Indices  # [S]
    response_lengths: Indices = field(init=False)  # [S]
    slots: Indices = field(init=False)  # [S] place of the first response token among all response tokens

    def __post_init__(self) -> None:
        response_lengths = self.lengths - self.response_starts
        object.__setattr__(self, "response_lengths", response_lengths)
        object.__setattr__(self, "slots", np.cumsum(response_lengths) - response_lengths)

    @classmethod
    def of(cls, samples: Sequence[TrainSample]) -> SampleTable:
        """Raises DataError for a sample without a prompt token: nothing would predict its first token."""
        lengths = np.fromiter((len(s.input_ids) for s in samples), np.int64, len(samples))
        starts = np.fromiter((s.response_start for s in samples), np.int64, len(samples))
        if np.any(starts < 1) or np.any(starts >= lengths):
            bad = samples[int(np.argmax((starts < 1) | (starts >= lengths)))]
            raise DataError(
                f"sample of prompt {bad.group} has {bad.response_start} prompt tokens of {len(bad.input_ids)} in all; "
                "at least one prompt and one response token are needed"
            )
        ids = np.fromiter(chain.from_iterable(s.input_ids for s in samples), np.int64, int(lengths.sum()))
        return cls(ids, np.cumsum(lengths) - lengths, lengths, starts)


def split_over_ranks(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices of the samples of each data-parallel rank: longest first, each to the rank with the fewest tokens."""
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    loads = [(0, rank) for rank in range(ranks)]
    parts: list[list[int]] = [[] for _ in range(ranks)]
    for index in order:
        load, rank = heapq.heappop(loads)
        parts[rank].append(index)
        heapq.heappush(loads, (load + lengths[index], rank))
    return parts


def fill_bins(order: Sequence[int], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """First-fit of the indices in `order` into bins of `capacity` tokens; a longer one has a bin of its own."""
    bins: list[list[int]] = []
    room: list[int] = []
    smallest = min((lengths[index] for index in order), default=0)
    unfilled: list[int] = []
    for index in order:
        need = lengths[index]
        for candidate in unfilled:
            if room[candidate] >= need:
                break
        else:
            candidate = len(bins)
            bins.append([])
            room.append(capacity)
            unfilled.append(candidate)
        bins[candidate].append(index)
        room[candidate] -= need
        if room[candidate] < smallest:
            unfilled.remove(candidate)
    return bins


def plan(lengths: Sequence[int], *, ranks: int, capacity: int) -> list[list[list[int]]]:
    """For each rank its micro-batches, each a list of sample indices, longest first.

    All ranks get the same number, as pipeline schedules and gradient reductions want it; an empty list stands for a
    micro-batch without loss.
    """
    plans = [fill_bins(part, lengths, capacity) for part in split_over_ranks(lengths, ranks)]
    count = max(len(bins) for bins in plans)
    return [bins + [[] for _ in range(count - len(bins))] for bins in plans]


def pack(table: SampleTable, *, rank: int, ranks: int, capacity: int, device: torch.device) -> list[MicroBatch]:
    """The micro-batches of data-parallel rank `rank`, on `device`. `capacity` is in tokens."""
    fed = table.lengths - 1
    bins = plan(fed.tolist(), ranks=ranks, capacity=capacity)[rank]
    return [_pack_one(table, np.asarray(chosen, dtype=np.int64), device) for chosen in bins]


def _pack_one(table: SampleTable, chosen: Indices, device: torch.device) -> MicroBatch:
    if not chosen.size:
        return _without_loss(table, device)
    fed = table.lengths[chosen] - 1
    starts = np.cumsum(fed) - fed
    positions = _ramps(fed)
    tokens = np.repeat(table.offsets[chosen], fed) + positions
    responses = table.response_lengths[chosen]
    ramp = _ramps(responses)
    predictors = np.repeat(starts + table.response_starts[chosen] - 1, responses) + ramp
    return MicroBatch(
        input_ids=torch.from_numpy(table.input_ids[tokens])[None].to(device),
        position_ids=torch.from_numpy(positions)[None].to(device),
        cu_seqlens=torch.from_numpy(np.append(starts, fed.sum()).astype(np.int32)).to(device),
        max_seqlen=int(fed.max()),
        predictors=torch.from_numpy(predictors).to(device),
        targets=torch.from_numpy(table.input_ids[tokens[predictors] + 1]).to(device),
        slots=torch.from_numpy(np.repeat(table.slots[chosen], responses) + ramp).to(device),
    )


def _without_loss(table: SampleTable, device: torch.device) -> MicroBatch:
    """One real token that predicts nothing: the pass takes part in every collective and adds zero to the gradients."""
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    return MicroBatch(
        input_ids=torch.from_numpy(table.input_ids[:1].copy())[None].to(device),
        position_ids=torch.zeros(1, 1, dtype=torch.int64, device=device),
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32, device=device),
        max_seqlen=1,
        predictors=nothing,
        targets=nothing,
        slots=nothing,
    )


def _ramps(lengths: Indices) -> Indices:
    """0..n-1 for each n, end to end."""
    starts = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum()), dtype=np.int64) - np.repeat(starts, lengths)
