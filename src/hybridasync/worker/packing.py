"""Samples → micro-batches: packed sequences, balanced over data-parallel ranks, without a loop over tokens.

Every rank packs the same samples with the same deterministic rule and keeps its own part, so nothing is exchanged.

The samples of a group have their prompt in common. Where the attention can do that (`share_prompts`), a prompt is
packed once, with the responses behind it: a *family*. It is computed once and gets the gradients of all its responses,
which is exact, since a prompt token sees no response. Elsewhere each sample is a family of its own.
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


MAX_SHARING = 4
# Attention still works on whole sequences, prompt and response. Its share of the activations is bounded by counting a
# family with at least a quarter of the tokens that it would have unshared.


@dataclass(frozen=True, slots=True)
class Sequences:
    """The B sequences of a pack in which prompts are shared, V tokens in all when each has its prompt to itself."""

    lengths: Indices  # [B]
    tokens: Tensor  # [V] place in the pack
    owned: Tensor  # [V] false where the token is the prompt of an earlier sequence


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """F families laid end to end: T positions in all, R of which predict a response token.

    The last token of a response predicts nothing and is left out.
    """

    input_ids: Tensor  # [1, T]
    position_ids: Tensor  # [1, T], place of each token in its sequence
    cu_seqlens: Tensor  # [F + 1] int32, where the families start and end
    max_seqlen: int  # of a sequence, its prompt included
    predictors: Tensor  # [P] positions in 0..T whose logits predict a response token; the end of a prompt several times
    targets: Tensor  # [P] the tokens they predict
    slots: Tensor  # [P] place of each of these tokens among the response tokens of all the samples packed
    sequences: Sequences | None = None  # None: each family is one sequence


@dataclass(frozen=True, slots=True)
class SampleTable:
    """The samples of an update as flat arrays. Each has at least one prompt and one response token."""

    input_ids: Indices  # all tokens, end to end
    offsets: Indices  # [S] where each sample starts in input_ids
    lengths: Indices  # [S] tokens of each sample
    response_starts: Indices  # [S]
    prompts: list[int]  # [S] number of the sample's prompt; equal for equal prompts
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
        numbers: dict[tuple[int, ...], int] = {}
        prompts = [numbers.setdefault(s.input_ids[: s.response_start], len(numbers)) for s in samples]
        return cls(ids, np.cumsum(lengths) - lengths, lengths, starts, prompts)


@dataclass(slots=True)
class Family:
    """Samples with one prompt that are packed together. `unshared` is what they would need without sharing it."""

    samples: list[int]
    tokens: int
    unshared: int

    @property
    def cost(self) -> int:
        return self.cost_with(0, 0)

    def cost_with(self, prompt: int, response: int) -> int:
        """Its cost with one more sample of so many tokens."""
        return max(self.tokens + response, -(-(self.unshared + prompt + response) // MAX_SHARING))

    def add(self, sample: int, *, prompt: int, response: int) -> None:
        self.samples.append(sample)
        self.tokens += response
        self.unshared += prompt + response


def families_of(table: SampleTable, *, capacity: int, most: int) -> list[Family]:
    """The samples by prompt, at most `most` in a family. A family of more than one costs at most `capacity` tokens."""
    families: list[Family] = []
    current: dict[int, Family] = {}
    prompts, fed = table.response_starts.tolist(), (table.response_lengths - 1).tolist()
    for sample, number in enumerate(table.prompts):
        prompt, response = prompts[sample], fed[sample]
        family = current.get(number)
        if family is None or len(family.samples) >= most or family.cost_with(prompt, response) > capacity:
            current[number] = family = Family([], prompt, 0)
            families.append(family)
        family.add(sample, prompt=prompt, response=response)
    return families


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


def pack(
    table: SampleTable, *, rank: int, ranks: int, capacity: int, device: torch.device, share_prompts: bool = False
) -> list[MicroBatch]:
    """The micro-batches of data-parallel rank `rank`, on `device`. `capacity` is in tokens."""
    # A group that is more than a rank's fair share would leave other ranks without work.
    fair_share = -(-len(table.prompts) // ranks)
    families = families_of(table, capacity=capacity, most=fair_share if share_prompts else 1)
    bins = plan([family.cost for family in families], ranks=ranks, capacity=capacity)[rank]
    return [_pack_one(table, [families[index] for index in chosen], device) for chosen in bins]


def _pack_one(table: SampleTable, families: Sequence[Family], device: torch.device) -> MicroBatch:
    if not families:
        return _without_loss(table, device)
    sizes = np.asarray([len(family.samples) for family in families], dtype=np.int64)
    chosen = np.fromiter(chain.from_iterable(family.samples for family in families), np.int64, int(sizes.sum()))
    leads = _ramps(sizes) == 0  # the first of each family brings the prompt
    prompts, responses = table.response_starts[chosen], table.response_lengths[chosen]
    skipped = np.where(leads, 0, prompts)
    own = prompts - skipped + responses - 1
    starts = np.cumsum(own) - own
    prompt_starts = np.repeat(starts[leads], sizes)
    response_starts = starts + prompts - skipped
    positions = np.repeat(skipped, own) + _ramps(own)
    ids = table.input_ids[np.repeat(table.offsets[chosen], own) + positions]
    ramp = _ramps(responses)
    predictors = np.repeat(response_starts - 1, responses) + ramp
    first = ramp == 0
    predictors[first] = prompt_starts + prompts - 1
    lengths = prompts + responses - 1
    shared = None
    if not leads.all():
        place = _ramps(lengths)
        in_prompt = place < np.repeat(prompts, lengths)
        tokens = place + np.repeat(response_starts - prompts, lengths)
        tokens[in_prompt] = (place + np.repeat(prompt_starts, lengths))[in_prompt]
        owned = ~in_prompt | np.repeat(leads, lengths)
        shared = Sequences(lengths, torch.from_numpy(tokens), torch.from_numpy(owned))
    return MicroBatch(
        input_ids=torch.from_numpy(ids)[None].to(device),
        position_ids=torch.from_numpy(positions)[None].to(device),
        cu_seqlens=torch.from_numpy(np.append(starts[leads], own.sum()).astype(np.int32)).to(device),
        max_seqlen=int(lengths.max()),
        predictors=torch.from_numpy(predictors).to(device),
        targets=torch.from_numpy(table.input_ids[np.repeat(table.offsets[chosen] + prompts, responses) + ramp]).to(
            device
        ),
        slots=torch.from_numpy(np.repeat(table.slots[chosen], responses) + ramp).to(device),
        sequences=shared,
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
