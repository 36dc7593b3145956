"""Packing: every response token once, ranks balanced, the same number of micro-batches everywhere."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from hybridasync.errors import DataError
from hybridasync.types import TrainSample
from hybridasync.worker.packing import MicroBatch, SampleTable, families_of, fill_bins, pack, plan, split_over_ranks

CPU = torch.device("cpu")


def make_sample(prompt: int, response: int, *, first: int = 0) -> TrainSample:
    """Tokens first, first + 1, ...; so each token tells where it came from."""
    return TrainSample(1, tuple(range(first, first + prompt + response)), prompt, (-1.0,) * response, 1.0)


def random_samples(seed: int, count: int) -> list[TrainSample]:
    rng = random.Random(seed)
    return [make_sample(rng.randint(1, 9), rng.randint(1, 30), first=100 * i) for i in range(count)]


def pack_all(samples: list[TrainSample], *, ranks: int, capacity: int) -> list[list[MicroBatch]]:
    return pack_with(samples, ranks=ranks, capacity=capacity, share_prompts=False)


def pack_with(samples: list[TrainSample], *, ranks: int, capacity: int, share_prompts: bool) -> list[list[MicroBatch]]:
    table = SampleTable.of(samples)
    return [
        pack(table, rank=rank, ranks=ranks, capacity=capacity, device=CPU, share_prompts=share_prompts)
        for rank in range(ranks)
    ]


def sequences_of(batch: MicroBatch) -> list[list[int]]:
    """Where the tokens of each sequence lie in the pack."""
    if batch.sequences is None:
        places = list(range(batch.input_ids.numel()))
        bounds = batch.cu_seqlens.tolist()
        return [places[start:end] for start, end in pairwise(bounds)]
    return [part.tolist() for part in batch.sequences.tokens.split(batch.sequences.lengths.tolist())]


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


def grouped_samples(seed: int) -> list[TrainSample]:
    """Five groups of one to six responses each, interleaved; one response of a single token among them."""
    rng = random.Random(seed)
    prompts = [tuple(rng.randrange(50) for _ in range(rng.randint(1, 12))) for _ in range(5)]
    samples = []
    for group, prompt in enumerate(prompts):
        for member in range(rng.randint(1, 6)):
            response = tuple(rng.randrange(50) for _ in range(1 if member == 0 else rng.randint(1, 9)))
            samples.append(TrainSample(group, prompt + response, len(prompt), (-1.0,) * len(response), 1.0))
    rng.shuffle(samples)
    return samples


@pytest.mark.parametrize(("ranks", "capacity"), [(1, 10_000), (1, 30), (2, 10_000), (3, 25)])
@pytest.mark.parametrize("share_prompts", [True, False])
def test_sequences_are_the_samples_and_predict_their_responses(ranks: int, capacity: int, share_prompts: bool) -> None:
    """Sharing or not: each sample is one sequence of the pack, and its response has its predictors and slots."""
    samples = grouped_samples(ranks * capacity)
    starts = [0]
    for sample in samples:
        starts.append(starts[-1] + len(sample.rollout_logprobs))
    by_slot = dict(zip(starts, samples, strict=False))
    seen = 0
    for batch in (
        b for rank in pack_with(samples, ranks=ranks, capacity=capacity, share_prompts=share_prompts) for b in rank
    ):
        ids, positions = batch.input_ids[0].tolist(), batch.position_ids[0].tolist()
        firsts = [index for index, slot in enumerate(batch.slots.tolist()) if slot in by_slot]
        for places, first in zip(sequences_of(batch), firsts, strict=bool(firsts)):
            sample = by_slot[batch.slots.tolist()[first]]
            response = sample.input_ids[sample.response_start :]
            span = slice(first, first + len(response))
            assert [ids[place] for place in places] == list(sample.input_ids[:-1])
            assert [positions[place] for place in places] == list(range(len(places)))
            assert batch.predictors[span].tolist() == places[sample.response_start - 1 :]
            assert tuple(batch.targets[span].tolist()) == response
            assert batch.slots[span].diff().eq(1).all()
            seen += 1
    assert seen == len(samples)


def test_a_shared_prompt_is_packed_once() -> None:
    """Prompt of 10 and four responses of 3: 10 + 4 * 2 tokens instead of 4 * 12, each owned by one sequence."""
    samples = [TrainSample(1, (*range(10), 20 + i, 30, 40), 10, (-1.0,) * 3, 1.0) for i in range(4)]
    ((batch,),) = pack_with(samples, ranks=1, capacity=100, share_prompts=True)
    assert batch.input_ids.numel() == 18
    assert batch.max_seqlen == 12
    assert batch.sequences is not None
    owned = batch.sequences.tokens[batch.sequences.owned]
    assert sorted(owned.tolist()) == list(range(18))


def test_sharing_keeps_to_the_limits() -> None:
    """A family that would exceed the token limit, or a rank's fair share, is split; each part brings its prompt."""
    samples = [TrainSample(1, (*range(10), 20 + i, 30, 40), 10, (-1.0,) * 3, 1.0) for i in range(8)]
    for ranks, capacity in ((1, 16), (2, 100)):
        batches = [b for rank in pack_with(samples, ranks=ranks, capacity=capacity, share_prompts=True) for b in rank]
        assert len(batches) > 1
        assert all(batch.slots.numel() > 0 for batch in batches)
        assert all(batch.input_ids.numel() <= min(capacity, 18) for batch in batches)
    long = [TrainSample(1, (*range(100), 200 + i), 100, (-1.0,), 1.0) for i in range(100)]
    families = families_of(SampleTable.of(long), capacity=500, most=100)
    assert max(len(family.samples) for family in families) == 20
