import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridasync.config.models import DataSection
from hybridasync.data.sort_digits import write_model
from hybridasync.data.source import PromptDataset, PromptRow, PromptStream, load_prompts
from hybridasync.data.tokenizer import TextTokenizer, load_tokenizer
from hybridasync.errors import CheckpointError, ConfigError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    directory = tmp_path_factory.mktemp("model")
    write_model(directory, seed=0, layers=1, hidden=16, heads=2, context_length=64)
    return load_tokenizer(directory)


def write(tmp_path: Path, *rows: Mapping[str, object]) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(path: Path, tokenizer: TextTokenizer, context_length: int = 64, **data: Any) -> PromptDataset:
    return load_prompts(path, data=DataSection(**data), tokenizer=tokenizer, context_length=context_length)


def dataset(size: int, name: str = "toy") -> PromptDataset:
    rows = tuple(PromptRow(i, (i + 5,), str(i), str(i)) for i in range(size))
    return PromptDataset(name, "toy.jsonl", rows, size, 0, 10, f"{name}{size}")


def drawn(stream: PromptStream, count: int) -> list[Any]:
    return [stream.draw() for _ in range(count)]


# --- loading


def test_rows_become_prompts(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    """Ids, text, label and the remaining fields are those of the row; labels that aren't text become it."""
    path = write(tmp_path, {"q": "sort 12=", "a": 12, "level": 3}, {"q": "sort 21=", "a": "12"})
    data = load(path, tokenizer, prompt_key="q", label_key="a")
    first, second = data.prompts()
    assert first.input_ids == tokenizer.encode_prompts(["sort 12="])[0]
    assert (first.text, first.label, first.extra, first.row) == ("sort 12=", "12", {"level": 3}, 0)
    assert (second.label, second.uid) == ("12", 1)
    assert [p.uid for p in data.prompts(limit=1)] == [0]


def test_c54_prompts_as_long_as_the_context_are_filtered_with_a_count(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    """Context 64: prompts of 10, 40 and 63 tokens stay, those of 64 and 70 go, and the log line says so."""
    path = write(tmp_path, *({"prompt": "7" * (length - 1), "label": "7"} for length in (10, 40, 63, 64, 70)))
    data = load(path, tokenizer)
    assert [len(row.input_ids) for row in data.rows] == [10, 40, 63]
    assert [row.row for row in data.rows] == [0, 1, 2]
    assert "5 prompts loaded" in data.summary and "2 filtered" in data.summary and "3 left" in data.summary
    assert len(load(path, tokenizer, max_prompt_tokens=40)) == 2


def test_c54_nothing_left_is_refused(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    """A filter that leaves no prompt is the user's mistake, with the counts."""
    path = write(tmp_path, {"prompt": "7" * 80, "label": "7"})
    with pytest.raises(ConfigError, match=r"no prompt is left .*1 prompts loaded .* 1 filtered .* 0 left"):
        load(path, tokenizer)


def test_templates_go_around_prompts(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    """{prompt} is replaced as text (braces of LaTeX stay); the chat template comes last; rewards see no template."""
    path = write(tmp_path, {"prompt": "12", "label": "12"})
    plain = load(path, tokenizer, prompt_template="sort {prompt}{x}=")
    assert plain.rows[0].text == "sort 12{x}="
    chat = load(path, tokenizer, prompt_template="sort {prompt}", apply_chat_template=True)
    assert chat.rows[0].input_ids == tokenizer.encode_prompts(["sort 12="])[0]
    assert chat.rows[0].text == "sort 12"


def test_chat_messages_are_rendered(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    """A list of messages goes through the chat template, a begun assistant turn is continued."""
    turns = [{"role": "user", "content": "sort 12"}, {"role": "assistant", "content": "="}]
    data = load(write(tmp_path, {"prompt": turns, "label": "12"}), tokenizer)
    assert data.rows[0].input_ids == tokenizer.encode_prompts(["sort 12="])[0]


@pytest.mark.parametrize(
    ("row", "data", "says"),
    [
        ({"question": "x", "label": "1"}, {}, "line 2: no field 'prompt' with the prompt; it has 'question', 'label'"),
        ({"prompt": None, "label": "1"}, {}, "line 2: no field 'prompt'"),
        ({"prompt": "x", "answer": "1"}, {}, "line 2: no field 'label' with the gold answer"),
        ({"prompt": 5, "label": "1"}, {}, "line 2: field 'prompt' must be a string or a list of"),
        ({"prompt": ["hello"], "label": "1"}, {}, "line 2: field 'prompt' must be a string or a list of"),
        ({"prompt": [], "label": "1"}, {}, "line 2: field 'prompt' must be a string or a list of"),
        (
            {"prompt": [{"role": "user", "content": "x"}], "label": "1"},
            {"prompt_template": "{prompt}"},
            "line 2: data.p",
        ),
        ({"prompt": "x", "label": "1"}, {"prompt_template": "nothing"}, r"must contain \{prompt\}"),
    ],
)
def test_unusable_rows_are_named(
    tmp_path: Path, tokenizer: TextTokenizer, row: dict[str, Any], data: dict[str, Any], says: str
) -> None:
    """Each message has the line, the field and what was found."""
    with pytest.raises(ConfigError, match=says):
        load(write(tmp_path, {"prompt": "ok", "label": "1"}, row), tokenizer, **data)


def test_data_without_answers_can_be_had(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    """label_key "" is for reward functions that need no gold answer."""
    assert load(write(tmp_path, {"prompt": "x"}), tokenizer, label_key="").rows[0].label == ""


def test_fingerprint_changes_with_what_the_model_sees(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    """Another template, another order or another label is another data set; the same file is the same."""
    rows = [{"prompt": "12", "label": "a"}, {"prompt": "21", "label": "b"}]
    original = load(write(tmp_path, *rows), tokenizer).fingerprint
    assert load(write(tmp_path, *rows), tokenizer).fingerprint == original
    assert load(write(tmp_path, *rows[::-1]), tokenizer).fingerprint != original
    assert load(write(tmp_path, rows[0], {**rows[1], "label": "c"}), tokenizer).fingerprint != original
    assert load(write(tmp_path, *rows), tokenizer, prompt_template="{prompt}=").fingerprint != original


# --- the stream


@given(size=st.integers(1, 9), count=st.integers(1, 60), seed=st.integers(0, 3), shuffle=st.booleans())
def test_r118_r119_every_epoch_is_a_full_pass_and_uids_increase(
    size: int, count: int, seed: int, shuffle: bool
) -> None:
    """However many prompts are drawn, uids count up, and each epoch has each row once."""
    prompts = drawn(PromptStream(dataset(size), seed=seed, shuffle=shuffle), count)
    assert [p.uid for p in prompts] == list(range(count))
    assert [p.epoch for p in prompts] == [i // size for i in range(count)]
    for start in range(0, count - size + 1, size):
        assert sorted(p.row for p in prompts[start : start + size]) == list(range(size))
    if not shuffle:
        assert [p.row for p in prompts] == [i % size for i in range(count)]


def test_r118_a_batch_larger_than_the_data_wraps_as_often_as_needed() -> None:
    """Size 3, batch 16: sixteen prompts, epochs 0 to 5, each epoch shuffled anew."""
    prompts = drawn(PromptStream(dataset(3), seed=0), 16)
    assert [p.epoch for p in prompts] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3 + [5]
    orders = {tuple(p.row for p in prompts[start : start + 3]) for start in range(0, 15, 3)}
    assert len(orders) > 1


def test_c30_five_batches_of_four_from_three_prompts_are_even() -> None:
    """C30 (a): N=3, B=4, five steps: 20 draws over epochs, 7, 7 and 6 of each prompt."""
    counts = Counter(prompt.row for prompt in drawn(PromptStream(dataset(3), seed=1), 20))
    assert sorted(counts.values()) == [6, 7, 7]


@given(size=st.integers(1, 9), before=st.integers(0, 40), after=st.integers(0, 40), shuffle=st.booleans())
def test_r116_a_restored_stream_goes_on_with_the_next_prompt(size: int, before: int, after: int, shuffle: bool) -> None:
    """State through JSON into a fresh stream: the same prompts follow as if nothing had happened."""
    stream = PromptStream(dataset(size), seed=7, shuffle=shuffle)
    drawn(stream, before)
    state = json.loads(json.dumps(stream.state()))
    restored = PromptStream(dataset(size), seed=7, shuffle=shuffle)
    restored.restore(state)
    assert drawn(restored, after) == drawn(stream, after)


def test_num_epoch_ends_the_stream() -> None:
    """Two passes over three rows are six prompts, then None, and None again; a restored one ends too."""
    stream = PromptStream(dataset(3), seed=0, num_epoch=2)
    assert [p.uid for p in drawn(stream, 6)] == list(range(6))
    assert drawn(stream, 2) == [None, None]
    restored = PromptStream(dataset(3), seed=0, num_epoch=2)
    restored.restore(stream.state())
    assert restored.draw() is None


@given(size=st.integers(1, 9), before=st.integers(1, 40), share=st.integers(0, 2**40), shuffle=st.booleans())
def test_r116_prompts_that_were_not_trained_on_are_drawn_again_first(
    size: int, before: int, share: int, shuffle: bool
) -> None:
    """Uids given as unused come back as the same prompts, once, then the next one; a second restart keeps the rest."""
    stream = PromptStream(dataset(size), seed=7, shuffle=shuffle)
    unused = [prompt for prompt in drawn(stream, before) if share >> prompt.uid & 1]
    restored = PromptStream(dataset(size), seed=7, shuffle=shuffle)
    restored.restore(json.loads(json.dumps(stream.state(prompt.uid for prompt in unused[::-1]))))
    again = PromptStream(dataset(size), seed=7, shuffle=shuffle)
    first = drawn(restored, 1)
    again.restore(json.loads(json.dumps(restored.state())))
    expected = [*unused, *drawn(stream, 3)]
    assert [*first, *drawn(again, len(expected) - 1)] == expected


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"format": 99},
        {"format": 1, "size": 3},
        None,
        [1],
        {**PromptStream(dataset(3), seed=0).state(), "next_uid": "4"},
        {**PromptStream(dataset(3), seed=0).state(), "next_uid": -1},
    ],
)
def test_r117_an_unreadable_position_is_an_error_that_says_what_to_do(state: Any) -> None:
    """No silent restart from the first prompt."""
    stream = PromptStream(dataset(3), seed=0)
    stream.draw()
    with pytest.raises(CheckpointError, match="resume from an older checkpoint, or start a new run"):
        stream.restore(state)
    assert stream.state()["next_uid"] == 1


@pytest.mark.parametrize(
    ("other", "differs"),
    [
        (PromptStream(dataset(4), seed=0), "size"),
        (PromptStream(dataset(3, "other"), seed=0), "fingerprint"),
        (PromptStream(dataset(3), seed=1), "seed"),
        (PromptStream(dataset(3), seed=0, shuffle=False), "shuffle"),
    ],
)
def test_r117_a_position_in_other_data_is_refused(other: PromptStream, differs: str) -> None:
    """The message names what differs and both values."""
    with pytest.raises(ConfigError, match=f"is of other prompts: {differs} was .* is now .*Resume with"):
        PromptStream(dataset(3), seed=0).restore(other.state())
