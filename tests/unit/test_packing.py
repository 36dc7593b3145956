"""Packing: every response token once, ranks balanced, the same number of micro-batches everywhere."""

from __future__ import annotations

import random

import pytest
import torch

from hybridasync.errors import DataError
from hybridasync.types import TrainSample
from hybridasync.worker.packing import MicroBatch, SampleTable, fill_bins, pack, plan, split_over_ranks

CPU = torch.device("cpu")


def make_sample(prompt: int, response: int, *, first: int = 0) -> TrainSample:
    """Tokens first, first + 1, ...; so each token tells where it came from."""
    return TrainSample(1, tuple(range(first, first + prompt + response)), prompt, (-1.0,) * response, 1.0)


def random_samples(seed: int, count: int) -> list[TrainSample]:
    rng = random.Random(seed)
    return [make_sample(rng.randint(1, 9), rng.randint(1, 30), first=100 * i) for i in range(count)]


def pack_all(samples: list[TrainSample], *, ranks: int, capacity: int) -> list[list[MicroBatch]]:
    table = SampleTable.of(samples)
    return [pack(table, rank=rank, ranks=ranks, capacity=capacity, device=CPU) for rank in range(ranks)]


def test_one_sequence_is_laid_out_as_expected() -> None:
    """Prompt 10 11, response 12 13 14: four tokens are fed, positions 1, 2, 3 predict the response."""
    ((batch,),) = pack_all([make_sample(2, 3, first=10)], ranks=1, capacity=100)
    assert batch.input_ids.tolist() == [[10, 11, 12, 13]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3]]
    assert batch.cu_seqlens.tolist() == [0, 4]
    assert batch.predictors.tolist() == [1, 2, 3]
    assert batch.targets.tolist() == [12, 13, 14]
    assert batch.slots.tolist() == [0, 1, 2]


@pytest.mark.parametrize(("ranks", "capacity"), [(1, 10_000), (1, 64), (2, 64), (3, 17), (4, 40)])
def test_every_response_token_is_predicted_exactly_once(ranks: int, capacity: int) -> None:
    """Whatever the split, slots are a permutation, and each target is the token that its slot stands for."""
    samples = random_samples(ranks * capacity, 23)
    expected = [token for s in samples for token in s.input_ids[s.response_start :]]
    found: dict[int, int] = {}
    for batches in pack_all(samples, ranks=ranks, capacity=capacity):
        for batch in batches:
            flat = batch.input_ids[0]
            for predictor, target, slot in zip(batch.predictors, batch.targets, batch.slots, strict=True):
                assert int(flat[predictor]) == int(target) - 1
                assert int(slot) not in found
                found[int(slot)] = int(target)
            assert batch.input_ids.numel() == int(batch.cu_seqlens[-1])
            assert batch.max_seqlen == int(batch.cu_seqlens.diff().max())
    assert [found[slot] for slot in range(len(expected))] == expected


def test_micro_batches_keep_to_the_token_limit_and_their_number_is_equal() -> None:
    """No bin exceeds the capacity, ranks have equal counts, and the padding ones carry no loss."""
    samples = [make_sample(2, 9, first=100 * i) for i in range(5)]
    batches = pack_all(samples, ranks=3, capacity=10)
    assert [len(rank) for rank in batches] == [2, 2, 2]
    assert all(batch.input_ids.numel() <= 10 for rank in batches for batch in rank)
    padding = [batch for rank in batches for batch in rank if not batch.slots.numel()]
    assert [batch.input_ids.shape for batch in padding] == [(1, 1)]


def test_more_ranks_than_samples_leaves_ranks_with_padding_alone() -> None:
    """A rank without a sample still has a micro-batch for the collectives."""
    batches = pack_all([make_sample(1, 2)], ranks=2, capacity=10)
    assert [batch.slots.numel() for rank in batches for batch in rank] == [2, 0]


def test_a_sample_longer_than_the_limit_goes_alone() -> None:
    """It is neither cut nor dropped."""
    bins = fill_bins([0, 1, 2], [50, 4, 4], 10)
    assert bins == [[0], [1, 2]]


def test_ranks_are_balanced_by_tokens() -> None:
    """The loads of four ranks differ by less than the longest sample."""
    rng = random.Random(1)
    lengths = [rng.randint(1, 200) for _ in range(100)]
    loads = [sum(lengths[i] for i in part) for part in split_over_ranks(lengths, 4)]
    assert max(loads) - min(loads) < max(lengths)


def test_the_plan_is_deterministic() -> None:
    """The same lengths give the same plan, ties included: every rank computes it for itself."""
    lengths = [5] * 20 + [7] * 3
    assert plan(lengths, ranks=2, capacity=12) == plan(list(lengths), ranks=2, capacity=12)


@pytest.mark.parametrize(("prompt", "response"), [(0, 3), (3, 0)])
def test_a_sample_without_prompt_or_response_is_refused(prompt: int, response: int) -> None:
    """Nothing predicts its first token, or there is nothing to predict."""
    with pytest.raises(DataError, match="at least one prompt and one response token"):
        SampleTable.of([make_sample(2, 2), make_sample(prompt, response)])
