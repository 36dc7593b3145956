"""The decoder computes what Hugging Face computes, whoever shares the batch."""

from __future__ import annotations

import asyncio
import math
import random
import struct
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine_models import EOS, VOCAB, reference_logprobs, saved_model, tiny_model
from transformers import PreTrainedModel

from hybridasync.engine.loop import DecoderThread, EngineDeadError
from hybridasync.engine.model import Decoder, KVCache
from hybridasync.engine.model_config import ModelConfig
from hybridasync.engine.requests import Group, Sampling
from hybridasync.engine.rows import Rows
from hybridasync.engine.sampling import RowSampling, sample, seeded_noise
from hybridasync.engine.scheduler import Limits, Scheduler
from hybridasync.engine.weights import WeightMismatchError, Weights, WeightStore
from hybridasync.errors import ConfigError
from hybridasync.weights.checksums import checksums
from hybridasync.weights.snapshot import read_tensors

CPU = torch.device("cpu")
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


ROOMY = Limits(64, 64 * 256)


class Bench:
    """A scheduler without its thread, and the groups that finished."""

    def __init__(self, path: Path, *, limits: Limits = ROOMY, dtype: torch.dtype = torch.float32) -> None:
        self.config = ModelConfig.from_directory(path)
        self.store = WeightStore(self.config, device=CPU, dtype=dtype)
        cache = KVCache(self.config, device=CPU, dtype=dtype)
        self.scheduler = Scheduler(
            Decoder(self.config, context_length=256, device=CPU, dtype=dtype),
            self.store.load(read_tensors(path)),
            Rows(cache, device=CPU, max_total_tokens=limits.max_total_tokens),
            limits=limits,
            generator=torch.Generator().manual_seed(3),
            version="default",
        )
        self.done: list[Group] = []
        self.count = 0

    def submit(self, prompt: list[int], sampling: Sampling, **changes: Any) -> Group:
        self.count += 1
        group = Group(f"g{self.count}", prompt, sampling, self.done.append, **changes)
        self.scheduler.submit([group])
        return group

    @torch.inference_mode()
    def run(self, steps: int | None = None) -> None:
        while self.scheduler.has_work() and (steps is None or steps > 0):
            self.scheduler.step()
            steps = None if steps is None else steps - 1


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(length * 1000 + seed).choices(range(3, VOCAB), k=length)


def worst(group: Group, model: PreTrainedModel) -> float:
    """Largest difference of a log-prob to Hugging Face's."""
    temperature = group.sampling.temperature or 1.0
    gaps = [0.0]
    for sequence in group.sequences:
        reference = reference_logprobs(model, list(group.input_ids), sequence.output_ids, temperature)
        gaps += [abs(a - b) for a, b in zip(sequence.output_logprobs, reference, strict=True)]
    return max(gaps)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen3", {}),
        ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
        ("llama", {"rope_parameters": LLAMA3_ROPE, "num_key_value_heads": 4}),
    ],
)
def test_greedy_tokens_and_logprobs_equal_hugging_face(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    """Prompts of different lengths decoded together give the tokens of `generate` and log-probs within 1e-5."""
    model = saved_model(tmp_path, kind, **changes)
    bench = Bench(tmp_path)
    prompts = [prompt_of(length) for length in (1, 5, 17, 30)]
    groups = [bench.submit(prompt, Sampling(12, temperature=0.0)) for prompt in prompts]
    bench.run()
    for prompt, group in zip(prompts, groups, strict=True):
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=12, min_new_tokens=12, do_sample=False, eos_token_id=None
        )
        assert group.sequences[0].output_ids == expected[0, len(prompt) :].tolist()
        assert worst(group, model) < 1e-5


def test_logprobs_hold_with_joins_leaves_and_row_moves(tmp_path: Path) -> None:
    """Requests that join and leave between any two tokens get exact log-probs, each at its own temperature."""
    model = saved_model(tmp_path)
    bench = Bench(tmp_path, limits=Limits(24, 24 * 128, max_prefill_tokens=64))
    chance = random.Random(5)
    groups = []
    for _ in range(30):
        sampling = Sampling(
            chance.randint(1, 30),
            temperature=chance.choice([0.0, 0.5, 1.0, 1.7]),
            top_p=chance.choice([1.0, 0.8]),
            n=chance.randint(1, 5),
            stop_token_ids=(EOS, chance.randint(3, 69)),
        )
        groups.append(bench.submit(prompt_of(chance.randint(1, 25), chance.randint(0, 9)), sampling))
        bench.run(steps=chance.randint(0, 6))
    bench.run()
    assert len(bench.done) == 30
    assert bench.scheduler.rows.used == 0
    assert max(worst(group, model) for group in groups) < 1e-5
    for group in groups:
        for sequence in group.sequences:
            *before, last = sequence.output_ids
            assert not set(before) & set(group.sampling.stop_token_ids)
            stopped = last in group.sampling.stop_token_ids
            limit = {"type": "length", "length": group.sampling.max_new_tokens}
            assert sequence.finish == ({"type": "stop", "matched": last} if stopped else limit)


def test_limits_bound_the_batch_and_the_cache(tmp_path: Path) -> None:
    """Never more rows than allowed, never more rows × positions than the budget, and everybody is served in the end."""
    saved_model(tmp_path)
    bench = Bench(tmp_path, limits=Limits(7, 150))
    groups = [bench.submit(prompt_of(5 + index), Sampling(10, n=9)) for index in range(4)]
    most = 0
    while bench.scheduler.has_work():
        bench.run(steps=1)
        most = max(most, bench.scheduler.rows.alive)
        needed = [s.tokens_needed for _, s in bench.scheduler.rows.living()]
        assert len(needed) * max(needed, default=0) <= 150
    assert 1 < most <= 7
    assert all(len(s.output_ids) == 10 for group in groups for s in group.sequences)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_spans_after_an_update_in_flight(tmp_path: Path, mode: Any) -> None:
    """After retract each span has the log-probs of its own version; in_place keeps the old keys and values."""
    old = saved_model(tmp_path / "old", seed=1)
    new = saved_model(tmp_path / "new", seed=2)
    bench = Bench(tmp_path / "old")
    group = bench.submit(prompt_of(6), Sampling(20, n=3))
    bench.run(steps=8)
    with torch.inference_mode():
        bench.scheduler.pause(mode)
    late = bench.submit(prompt_of(4), Sampling(3))
    bench.run()
    weights = bench.store.load(read_tensors(tmp_path / "new"))
    answer = bench.scheduler.install(weights, version="1", flush=mode == "retract")
    assert answer == (True, "Succeeded to update model weights.")
    assert not bench.done
    bench.scheduler.resume()
    bench.run()
    assert worst(late, new) < 1e-5
    for sequence in group.sequences:
        spans = sequence.spans(sequence.final_version, 20)
        assert spans == [{"version": "default", "start": 0, "end": 9}, {"version": "1", "start": 9, "end": 20}]
        assert sequence.retractions == (1 if mode == "retract" else 0)
        by_old = reference_logprobs(old, list(group.input_ids), sequence.output_ids)
        by_new = reference_logprobs(new, list(group.input_ids), sequence.output_ids)
        expected = by_old[:9] + by_new[9:]
        gap = max(abs(a - b) for a, b in zip(sequence.output_logprobs, expected, strict=True))
        assert gap < 1e-5 if mode == "retract" else gap > 1e-2


def test_input_logprobs(tmp_path: Path) -> None:
    """From the position asked for, at temperature 1; the first entry is empty, as in SGLang."""
    model = saved_model(tmp_path)
    bench = Bench(tmp_path)
    prompt = prompt_of(9)
    groups = [bench.submit(prompt, Sampling(1, temperature=0.5), logprob_start=start) for start in (0, 4, 8, 9, -1)]
    bench.run()
    reference = reference_logprobs(model, prompt[:1], prompt[1:])
    for group, start in zip(groups, (0, 4, 8), strict=False):
        assert group.input_logprobs is not None
        assert group.input_logprobs[0] is None
        assert group.input_logprobs[1:] == pytest.approx(reference[start:], abs=1e-5)
    assert groups[3].input_logprobs == []
    assert groups[4].input_logprobs is None


def test_nothing_may_be_asked_for(tmp_path: Path) -> None:
    """`max_new_tokens` 0 prefills and makes no token."""
    saved_model(tmp_path)
    bench = Bench(tmp_path)
    group = bench.submit(prompt_of(5), Sampling(0), logprob_start=0)
    bench.run()
    assert group.sequences[0].output_ids == []
    assert group.sequences[0].finish == {"type": "length", "length": 0}
    assert len(group.input_logprobs or []) == 5


def test_bf16_stays_close(tmp_path: Path) -> None:
    """In bf16 log-probs are Hugging Face's bf16 ones up to rounding."""
    model = saved_model(tmp_path, dtype=torch.bfloat16)
    bench = Bench(tmp_path, dtype=torch.bfloat16)
    group = bench.submit(prompt_of(12), Sampling(20, n=4))
    bench.run()
    assert worst(group, model) < 0.3


def test_broken_weights_end_requests_and_leave_no_trace(tmp_path: Path) -> None:
    """NaN weights abort requests with a reason; after good weights come back the engine is exact again."""
    model = saved_model(tmp_path)
    bench = Bench(tmp_path)
    good = bench.scheduler.weights
    broken = {name: tensor.clone() for name, tensor in good.named.items()}
    broken["model.layers.0.input_layernorm.weight"][0] = torch.nan
    first = bench.submit(prompt_of(20), Sampling(5, n=2))
    bench.run(steps=1)
    bench.scheduler.weights = Weights(broken, bench.config)
    second = bench.submit(prompt_of(30), Sampling(5))
    bench.run()
    for group in (first, second):
        assert all(s.finish and s.finish["type"] == "abort" for s in group.sequences)
        assert all(len(s.output_ids) == len(s.output_logprobs) for s in group.sequences)
    bench.scheduler.weights = good
    third = bench.submit(prompt_of(3), Sampling(10, n=3))
    bench.run()
    assert worst(third, model) < 1e-5


@pytest.mark.parametrize("seeded", [False, True])
def test_sampling_follows_the_distribution(seeded: bool) -> None:
    """Plain, top-k, top-p, min-p and greedy rows of one batch each follow their own truncated distribution."""
    logits = torch.log(torch.tensor([0.5, 0.25, 0.15, 0.1]))
    draws, kinds = 4000, 5
    rows = RowSampling(
        inverse_temperature=torch.ones(draws * kinds),
        greedy=torch.tensor([False, False, False, False, True] * draws),
        top_k=torch.tensor([1 << 30, 2, 1 << 30, 1 << 30, 1 << 30] * draws),
        top_p=torch.tensor([2.0, 2.0, 0.7, 2.0, 2.0] * draws),
        min_p=torch.tensor([0.0, 0.0, 0.0, 0.25, 0.0] * draws),
        seed=torch.arange(draws * kinds),
        seeded=torch.full((draws * kinds,), seeded) & torch.tensor([True, True, True, True, False] * draws),
        position=torch.full((draws * kinds,), 7),
        any_greedy=True,
        any_filter=True,
        any_seeded=seeded,
    )
    tokens, logprobs = sample(logits.expand(draws * kinds, 4), rows, torch.Generator().manual_seed(0))
    assert torch.allclose(logprobs, logits[tokens], atol=1e-6)
    expected = (
        [0.5, 0.25, 0.15, 0.1],
        [2 / 3, 1 / 3, 0, 0],
        [2 / 3, 1 / 3, 0, 0],
        [5 / 9, 5 / 18, 1 / 6, 0],
        [1, 0, 0, 0],
    )
    for kind, wanted in enumerate(expected):
        frequency = torch.bincount(tokens[kind::kinds], minlength=4) / draws
        assert torch.allclose(frequency, torch.tensor(wanted, dtype=torch.float), atol=0.03)
        assert not frequency[torch.tensor(wanted) == 0].any()


def murmur3(data: bytes) -> int:
    """MurmurHash3 for 32 bits, of whole words, as it is written down."""
    word, result = 0xFFFFFFFF, 0
    for start in range(0, len(data), 4):
        block = int.from_bytes(data[start : start + 4], "little") * 0xCC9E2D51 & word
        block = ((block << 15 | block >> 17) & word) * 0x1B873593 & word
        result ^= block
        result = ((result << 13 | result >> 19) & word) * 5 + 0xE6546B64 & word
    result ^= len(data)
    result = (result ^ result >> 16) * 0x85EBCA6B & word
    result = (result ^ result >> 13) * 0xC2B2AE35 & word
    return result ^ result >> 16


def test_seeded_noise_is_sglangs() -> None:
    """The Gumbel transform of MurmurHash3 over 8 bytes of seed, 4 of position and 4 of token."""
    assert murmur3(b"test") == 0xBA6BD213  # a vector of the reference implementation
    cases = [(0, 0), (42, 17), (2**63 - 1, 5), (-7, 131071)]
    seeds, positions = (torch.tensor(column) for column in zip(*cases, strict=True))
    noise = seeded_noise(seeds, positions, 5)
    for row, (seed, position) in enumerate(cases):
        for token in range(5):
            packed = struct.pack("<qII", seed, position, token)
            uniform = murmur3(packed) / 0xFFFFFFFF
            assert noise[row, token].item() == pytest.approx(-math.log(-math.log(uniform)), abs=1e-12)


SEEDED = Sampling(24, n=1, seed=5)


def outcome(group: Group) -> tuple[list[int], list[float]]:
    return group.sequences[0].output_ids, group.sequences[0].output_logprobs


@pytest.mark.parametrize("length", [1, 3, 31, 33])
def test_a_seeded_sample_is_the_same_in_any_company(tmp_path: Path, length: int) -> None:
    """Alone, in a crowd of others that come and go, and among its equals: the same tokens and log-probs, bit by bit."""
    saved_model(tmp_path)
    alone = Bench(tmp_path)
    single = alone.submit(prompt_of(length), SEEDED)
    alone.run()
    crowded = Bench(tmp_path)
    for other in range(9):
        crowded.submit(prompt_of(2 + 7 * other), Sampling(4 + other, n=1 + other % 3))
    crowded.run(3)
    among = [crowded.submit(prompt_of(length), replace(SEEDED, seed=seed)) for seed in (4, 5, 6)]
    crowded.submit(prompt_of(length + 1), replace(SEEDED, seed=7))
    crowded.run(5)
    late = crowded.submit(prompt_of(length), SEEDED)
    crowded.run()
    assert outcome(among[1]) == outcome(late) == outcome(single)
    assert len({tuple(outcome(group)[0]) for group in among}) == 3


@pytest.mark.parametrize("kept", [True, False])
def test_a_seeded_sample_goes_on_as_it_would_have(tmp_path: Path, kept: bool) -> None:
    """Retracted in the middle, or ended and continued from its tokens: what follows is what would have followed."""
    saved_model(tmp_path)
    whole = Bench(tmp_path)
    expected = whole.submit(prompt_of(9), replace(SEEDED, stop_token_ids=()))
    whole.run()
    bench = Bench(tmp_path)
    first = bench.submit(prompt_of(9), SEEDED)
    bench.run(10)
    with torch.inference_mode():
        bench.scheduler.pause("retract" if kept else "abort")
        bench.scheduler.resume()
    bench.run()
    ids, logprobs = outcome(first)
    assert kept or 0 < len(ids) < 24
    if not kept:
        rest = bench.submit([*prompt_of(9), *ids], replace(SEEDED, max_new_tokens=24 - len(ids)))
        bench.run()
        ids, logprobs = ids + outcome(rest)[0], logprobs + outcome(rest)[1]
    assert ids == outcome(expected)[0]
    assert logprobs == pytest.approx(outcome(expected)[1], abs=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_engine_checksums_equal_those_of_the_directory(tmp_path: Path, tied: bool) -> None:
    """Fused and held by the engine or read from files: the same checksums."""
    saved_model(tmp_path, "llama", attention_bias=True, tie_word_embeddings=tied)
    weights = Bench(tmp_path).scheduler.weights
    assert weights.checksums() == checksums(read_tensors(tmp_path), tie_word_embeddings=tied)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    """Missing and unknown names, wrong shapes and types are named; a partial update leaves the old set as it was."""
    model = saved_model(tmp_path)
    bench = Bench(tmp_path)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    norm = "model.layers.1.input_layernorm.weight"
    for change, match in (
        ({norm: None}, "are missing"),
        ({"model.extra": torch.ones(3)}, "no parameter"),
        ({norm: torch.ones(7)}, "shape"),
        ({norm: torch.ones(32, dtype=torch.int64)}, "type"),
    ):
        altered = {name: tensor for name, tensor in {**state, **change}.items() if tensor is not None}
        with pytest.raises(WeightMismatchError, match=match):
            bench.store.load(altered.items())
    before = bench.scheduler.weights.checksums()
    key = "model.layers.0.self_attn.k_proj.weight"
    updated = bench.store.updated(bench.scheduler.weights, [(key, state[key] + 1)])
    assert bench.scheduler.weights.checksums() == before
    assert updated.checksums() == checksums({**state, key: state[key] + 1}.items(), tie_word_embeddings=False)


def test_models_that_the_decoder_cannot_compute_are_refused(tmp_path: Path) -> None:
    """An unknown architecture, rope type or directory is a ConfigError that says so."""
    with pytest.raises(ConfigError, match="no such directory"):
        ModelConfig.from_directory(tmp_path / "missing")
    tiny_model().config.save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    for old, new, match in (
        ("Qwen3ForCausalLM", "GPT2LMHeadModel", "GPT2LMHeadModel isn't supported"),
        ('"rope_type": "default"', '"rope_type": "yarn"', "yarn isn't supported"),
        ('"vocab_size"', '"vocabulary"', "lacks 'vocab_size'"),
    ):
        config = text if "architectures" in text else text.replace("{", '{"architectures": ["Qwen3ForCausalLM"],', 1)
        (tmp_path / "config.json").write_text(config.replace(old, new))
        with pytest.raises(ConfigError, match=match):
            ModelConfig.from_directory(tmp_path)


async def test_a_step_that_fails_ends_its_requests_and_not_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory in a step: its requests get the reason, the next ones are exact; three in a row end the engine."""
    model = saved_model(tmp_path)
    bench = Bench(tmp_path)
    thread = DecoderThread(bench.scheduler)
    thread.start()

    async def served() -> Group:
        done: Future[Group] = Future()
        group = Group(f"r{id(done)}", prompt_of(5), Sampling(4), done.set_result)
        thread.call(lambda scheduler: scheduler.submit([group]))
        return await asyncio.wait_for(asyncio.wrap_future(done), 20)

    def failing(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("out of memory")

    try:
        with monkeypatch.context() as patch:
            patch.setattr(bench.scheduler.decoder, "step", failing)
            finish = (await served()).sequences[0].finish
        assert finish is not None
        assert (finish["type"], finish["status_code"]) == ("abort", 500)
        assert "out of memory" in finish["message"]
        assert worst(await served(), model) < 1e-5
        monkeypatch.setattr(bench.scheduler.decoder, "step", failing)
        for _ in range(3):
            await served()
        with pytest.raises(EngineDeadError, match="out of memory"):
            await asyncio.wrap_future(thread.call(lambda scheduler: scheduler.loads()))
    finally:
        thread.stop()
