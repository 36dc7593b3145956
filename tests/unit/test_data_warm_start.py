import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from hybridasync.config.models import DataSection
from hybridasync.data.sort_digits import write_model
from hybridasync.data.tokenizer import TextTokenizer, load_tokenizer
from hybridasync.data.warm_start import SupervisedDataset, load_warm_start, warm_start_batches
from hybridasync.errors import ConfigError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    directory = tmp_path_factory.mktemp("model")
    write_model(directory, seed=0, layers=1, hidden=16, heads=2, context_length=32)
    return load_tokenizer(directory)


def load(tmp_path: Path, tokenizer: TextTokenizer, *rows: Mapping[str, object]) -> SupervisedDataset:
    path = tmp_path / "warm.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_warm_start(path, data=DataSection(), tokenizer=tokenizer, context_length=32)


def test_loss_positions_are_the_response_and_its_eos(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    """The prompt is encoded as for RL; the response follows with the EOS, advantage 1, no rollout log-probs."""
    (sample,) = load(tmp_path, tokenizer, {"prompt": "sort 21=", "response": "12"}).samples
    prompt = tokenizer.encode_prompts(["sort 21="])[0]
    assert sample.input_ids[: sample.response_start] == prompt
    assert sample.input_ids[sample.response_start :] == tokenizer.encode_responses(["12"])[0]
    assert sample.input_ids[-1] == tokenizer.eos_id
    assert (sample.advantage, sample.rollout_logprobs, sample.masked) == (1.0, (), False)


def test_rows_beyond_the_context_are_filtered_with_a_count(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    """Prompt, response and EOS must fit; nothing left is refused."""
    fits, too_long = {"prompt": "1" * 15, "response": "1" * 15}, {"prompt": "1" * 15, "response": "1" * 16}
    data = load(tmp_path, tokenizer, fits, too_long)
    assert len(data) == 1 and "2 rows loaded" in data.summary and "1 filtered" in data.summary
    with pytest.raises(ConfigError, match="no row is left"):
        load(tmp_path, tokenizer, too_long)


def test_a_row_without_response_is_named(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    """The message has setting, line and field."""
    with pytest.raises(ConfigError, match=r"warm_start.data: .*line 1: no field 'response'"):
        load(tmp_path, tokenizer, {"prompt": "x"})


def test_batches_are_full_shuffled_and_can_be_resumed(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    """Every batch is full, a pass has each row once, the seed decides the order, and a later start is the same tail."""
    data = load(tmp_path, tokenizer, *({"prompt": "p", "response": str(i)} for i in range(7)))
    batches = list(warm_start_batches(data, steps=5, batch_size=4, seed=0))
    assert [batch.step for batch in batches] == [0, 1, 2, 3, 4]
    assert all(len(batch.samples) == 4 and batch.loss == "sft" for batch in batches)
    groups = [sample.group for batch in batches for sample in batch.samples]
    assert sorted(groups[:7]) == sorted(groups[7:14]) == list(range(7))
    assert groups[:7] != groups[7:14]
    assert list(warm_start_batches(data, steps=5, batch_size=4, seed=0, first_step=3)) == batches[3:]
    assert list(warm_start_batches(data, steps=5, batch_size=4, seed=1)) != batches
