import json
from pathlib import Path

import pytest

from hybridasync.data.sort_digits import write_model
from hybridasync.data.tokenizer import load_tokenizer
from hybridasync.errors import ConfigError

BOS, EOS = 1, 2


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    write_model(directory, seed=0, layers=1, hidden=16, heads=2, context_length=64)
    return directory


def edit(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_c46_prompts_start_with_exactly_one_bos(model: Path) -> None:
    """One BOS: for a plain text, for a text that brings one, for a template with and one without BOS."""
    tokenizer = load_tokenizer(model)
    with_bos = tokenizer.render_chat([{"role": "user", "content": "sort 12"}])
    edit(model / "tokenizer_config.json", chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}=")
    without_bos = load_tokenizer(model).render_chat([{"role": "user", "content": "sort 12"}])
    assert with_bos == "<bos>sort 12=" and without_bos == "sort 12="
    expected, *others = tokenizer.encode_prompts(["sort 12=", "<bos>sort 12=", with_bos, without_bos])
    assert expected[0] == BOS and expected.count(BOS) == 1
    assert all(ids == expected for ids in others)


def test_c46_a_tokenizer_without_bos_gets_none(model: Path) -> None:
    """Where the tokenizer doesn't add BOS (Qwen's doesn't), we don't either."""
    edit(model / "tokenizer.json", post_processor=None)
    tokenizer = load_tokenizer(model)
    assert tokenizer.bos_id is None
    assert BOS not in tokenizer.encode_prompts(["sort 12="])[0]


def test_c46_every_eos_id_is_honoured(model: Path) -> None:
    """The ids of tokenizer, generation config and config are one set, the tokenizer's first."""
    edit(model / "generation_config.json", eos_token_id=[5, 40])
    edit(model / "config.json", eos_token_id=41)
    assert load_tokenizer(model).eos_ids == (EOS, 5, 40, 41)


def test_responses_end_with_eos_and_decode_without_it(model: Path) -> None:
    """What is learnt has the EOS; what rewards see hasn't; every id of the vocabulary has a text or is special."""
    tokenizer = load_tokenizer(model)
    (ids,) = tokenizer.encode_responses(["12 ?"])
    assert ids[-1] == EOS and ids[0] != BOS
    assert tokenizer.decode(ids) == "12 ?"
    assert tokenizer.decode([]) == ""
    assert [i for i in range(64) if tokenizer.decode([i]) == ""] == [0, BOS, EOS, 3]


def test_a_begun_turn_is_continued(model: Path) -> None:
    """A last message of the assistant isn't closed and gets no generation prompt."""
    messages = [{"role": "user", "content": "sort 12"}, {"role": "assistant", "content": "= 1"}]
    assert load_tokenizer(model).render_chat(messages) == "<bos>sort 12= 1"


def test_a_template_that_refuses_is_a_value_error(model: Path) -> None:
    """Templates call raise_exception; the loader turns it into a message with the line."""
    edit(model / "tokenizer_config.json", chat_template="{{ raise_exception('only users') }}")
    with pytest.raises(ValueError, match="only users"):
        load_tokenizer(model).render_chat([{"role": "system", "content": "x"}])


def test_unusable_directories_are_refused(model: Path, tmp_path: Path) -> None:
    """Missing directory, no tokenizer, a broken one, one without EOS: each says which setting and what."""
    with pytest.raises(ConfigError, match=r"model.hf_checkpoint: model directory .* doesn't exist"):
        load_tokenizer(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="no usable tokenizer"):
        load_tokenizer(tmp_path)
    for name in ("generation_config.json", "config.json"):
        edit(model / name, eos_token_id=None)
    edit(model / "tokenizer_config.json", eos_token=None)
    with pytest.raises(ConfigError, match="names no end-of-sequence token"):
        load_tokenizer(model)
    (model / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="no usable tokenizer"):
        load_tokenizer(model)
