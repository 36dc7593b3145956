"""Several data sets as one stream, and prompts that a function makes: exact positions in each."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.test_data_source import dataset, drawn

from hybridasync.config.load import validate
from hybridasync.config.models import DataSection
from hybridasync.data.generated import Generated
from hybridasync.data.mixture import Mixture
from hybridasync.data.sort_digits import write_model
from hybridasync.data.source import PromptStream
from hybridasync.data.tokenizer import TextTokenizer, load_tokenizer
from hybridasync.errors import ConfigError, DataError
from hybridasync.runtime.inputs import read_inputs


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    directory = tmp_path_factory.mktemp("model")
    write_model(directory, seed=0, layers=1, hidden=16, heads=2, context_length=64)
    return load_tokenizer(directory)


def mixture(*sizes: int, weights: tuple[float, ...]) -> Mixture:
    return Mixture(tuple(dataset(size, f"set{i}") for i, size in enumerate(sizes)), weights)


def test_shares_hold_at_every_moment() -> None:
    """Weights 3 to 1: of any eight draws in a row six are of the first data set, and none is ever further behind."""
    prompts = drawn(PromptStream(mixture(10, 10, weights=(3.0, 1.0)), seed=0), 400)
    sources = [prompt.source for prompt in prompts]
    assert Counter(sources) == {"set0": 300, "set1": 100}
    for count in range(1, 401):
        assert abs(sources[:count].count("set0") - 0.75 * count) <= 1


@given(
    sizes=st.lists(st.integers(1, 7), min_size=2, max_size=4),
    seed=st.integers(0, 3),
    stop=st.integers(0, 40),
    data=st.data(),
)
def test_r116_a_mixture_resumes_exactly_in_every_data_set(
    sizes: list[int], seed: int, stop: int, data: st.DataObject
) -> None:
    """Wherever it stops, a restored stream goes on with the same prompts; uids count up; each set wraps by itself."""
    weights = tuple(data.draw(st.floats(0.1, 10)) for _ in sizes)
    whole = drawn(PromptStream(mixture(*sizes, weights=weights), seed=seed), 60)
    assert [prompt.uid for prompt in whole] == list(range(60))
    for index, size in enumerate(sizes):
        rows = [prompt.row for prompt in whole if prompt.source == f"set{index}"]
        for start in range(0, len(rows) - size + 1, size):
            assert sorted(rows[start : start + size]) == list(range(size))
    first = PromptStream(mixture(*sizes, weights=weights), seed=seed)
    drawn(first, stop)
    state = json.loads(json.dumps(first.state([uid for uid in (1, 3) if uid < stop])))
    restored = PromptStream(mixture(*sizes, weights=weights), seed=seed)
    restored.restore(state)
    again = [whole[uid] for uid in (1, 3) if uid < stop]
    assert drawn(restored, len(again) + 10) == [*again, *whole[stop : stop + 10]]
    assert len(state["positions"]) == len(sizes)


def test_a_mixture_of_other_weights_or_files_is_other_data() -> None:
    """R117: a position in another mixture is refused, whichever of weights and files changed."""
    saved = PromptStream(mixture(4, 5, weights=(1.0, 1.0)), seed=0).state()
    for other in (mixture(4, 5, weights=(1.0, 2.0)), mixture(4, 6, weights=(1.0, 1.0)), dataset(9)):
        with pytest.raises(ConfigError, match="of other prompts"):
            PromptStream(other, seed=0).restore(saved)


def test_epochs_of_a_mixture_are_as_many_draws_as_there_are_prompts() -> None:
    """Sizes 2 and 3, two epochs: ten draws; without weights of its own each data set comes by its size."""
    stream = PromptStream(mixture(2, 3, weights=(2.0, 3.0)), seed=0, num_epoch=2)
    prompts = drawn(stream, 11)
    assert prompts[10] is None
    assert Counter(prompt.source for prompt in prompts[:10]) == {"set0": 4, "set1": 6}


def rows(index: int, seed: int) -> dict[str, Any] | None:
    """Three prompts, which depend on number and seed."""
    return {"prompt": f"sort {index}{seed}=", "label": f"{index}", "level": index} if index < 3 else None


def test_r39_a_function_makes_the_prompts(tokenizer: TextTokenizer) -> None:
    """R39: prompt number n is asked for once it is drawn; the position is exact; None ends the stream."""
    made = Generated("m:rows", rows, DataSection(), tokenizer, 63)
    stream = PromptStream(made, seed=7)
    first, second = drawn(stream, 2)
    assert (first.text, first.label, first.extra, first.uid) == ("sort 07=", "0", {"level": 0}, 0)
    restored = PromptStream(made, seed=7)
    restored.restore(json.loads(json.dumps(stream.state([1]))))
    again, third, end = drawn(restored, 3)
    assert (again, third.text, end) == (second, "sort 27=", None)
    with pytest.raises(ConfigError, match="seed was 7"):
        PromptStream(made, seed=8).restore(stream.state())


def test_a_made_prompt_must_leave_room_for_a_response(tokenizer: TextTokenizer) -> None:
    """A prompt that is too long is an error that names its number: nobody knows which one to take instead."""
    made = Generated(
        "m:rows", lambda index, _seed: {"prompt": "7" * (index + 3), "label": ""}, DataSection(), tokenizer, 4
    )
    stream = PromptStream(made, seed=0)
    stream.draw()
    with pytest.raises(DataError, match="m:rows, prompt 1 has 5 tokens; at most 4"):
        drawn(stream, 2)


def test_a_run_reads_the_files_of_its_mixture(tmp_path: Path) -> None:
    """prompt_data and extra_prompt_data with weights become one stream; sizes add up; by default sizes are weights."""
    write_model(tmp_path / "model", seed=0, layers=1, hidden=16, heads=2, context_length=64)
    for name, count in (("a", 3), ("b", 5)):
        lines = [json.dumps({"prompt": f"sort {i}=", "label": str(i)}) for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    recipe = {
        "model": {"hf_checkpoint": str(tmp_path / "model"), "megatron_to_hf_mode": "bridge"},
        "data": {
            "prompt_data": str(tmp_path / "a.jsonl"),
            "extra_prompt_data": [str(tmp_path / "b.jsonl")],
            "weights": [1.0, 1.0],
        },
        "rollout": {"num_epoch": 1, "rollout_batch_size": 4, "n_samples_per_prompt": 2, "max_response_tokens": 8},
    }
    inputs = read_inputs(validate(recipe, source="test"), tmp_path / "run")
    assert inputs.sizing.num_rollout == 2
    assert Counter(prompt.source for prompt in drawn(inputs.source(), 8)) == {"train": 4, "b-1": 4}
    assert any("50.0% of the draws" in note for note in inputs.notes)
