"""Mistakes outside of the recipe are found before anything is started."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hybridasync.config.load import load
from hybridasync.config.models import Config
from hybridasync.config.pipeline import resolve
from hybridasync.data.sort_digits import prepare
from hybridasync.errors import ConfigError
from hybridasync.runtime.preflight import preflight

Maker = Callable[..., Config]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory and data files, as a user would have them."""
    folder = tmp_path_factory.mktemp("made")
    prepare(folder, 0, digits=3, warm_start_rows=16, eval_prompts=8)
    return folder


@pytest.fixture
def recipe(made: Path) -> Maker:
    def make(*overrides: str) -> Config:
        paths = (
            f"model.hf_checkpoint={made}/model",
            f"data.prompt_data={made}/train.jsonl",
            f"warm_start.data={made}/warm_start.jsonl",
            f"eval.eval_prompt_data={made}/eval.jsonl",
        )
        return resolve(load("quickstart", ["prepare.function=none", *paths, *overrides])).config

    return make


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield int(server.getsockname()[1])


def refusal(config: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        preflight(config)
    return str(caught.value)


def test_a_good_setup_passes(recipe: Maker) -> None:
    """Model, data, reward and ports in order: nothing is said."""
    assert preflight(recipe()) is None  # type: ignore[func-returns-value]


def test_what_a_recipe_prepares_is_not_looked_for_yet() -> None:
    """Paths in the prepared folder are checked once they have been made; the function itself is checked now."""
    preflight(resolve(load("quickstart")).config)
    message = refusal(resolve(load("quickstart", ["prepare.function=hybridasync.nowhere:make"])).config)
    assert message.startswith("prepare.function: ")


def test_a_model_that_cannot_be_used_is_refused(recipe: Maker, made: Path, tmp_path: Path) -> None:
    """A missing directory, another architecture, a missing tokenizer, a layout that doesn't divide."""
    assert "model.hf_checkpoint: " in refusal(recipe(f"model.hf_checkpoint={tmp_path}/none"))
    config = json.loads((made / "model" / "config.json").read_text())
    other = tmp_path / "gpt2"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({**config, "architectures": ["GPT2LMHeadModel"]}))
    assert "GPT2LMHeadModel" in refusal(recipe(f"model.hf_checkpoint={other}"))
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text(json.dumps(config))
    assert "has no tokenizer" in refusal(recipe(f"model.hf_checkpoint={bare}"))
    layout = ("parallel.num_workers=16", "parallel.tensor_model_parallel_size=16")
    assert refusal(recipe(*layout)).startswith("parallel.tensor_model_parallel_size: ")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "doesn't exist"),
        (b"", "is empty"),
        (b'{"prompt": "a", "label": "b"}\nnot json\n', "line 2"),
        (b'{"question": "a", "label": "b"}\n', "no field 'prompt'; it has 'question', 'label'"),
        (b'{"prompt": "\xff", "label": "b"}\n', "line 1"),
    ],
)
def test_data_that_cannot_be_used_is_refused(
    recipe: Maker, tmp_path: Path, content: bytes | None, expected: str
) -> None:
    """A data set that is missing, empty, not JSONL, without the field or in another encoding names file and line."""
    file = tmp_path / "prompts.jsonl"
    if content is not None:
        file.write_bytes(content)
    message = refusal(recipe(f"data.prompt_data={file}"))
    assert message.startswith("data.prompt_data: ") and expected in message and "prompts.jsonl" in message


def test_a_reward_function_is_imported_before_the_start(
    recipe: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reward that can't be imported, isn't there or can't be called is refused now, not after the first rollout."""
    module = f"rewards_{random.Random(3).randrange(10**9)}"
    (tmp_path / f"{module}.py").write_text("good = lambda response, label: 1.0\nnumber = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    preflight(recipe(f"reward.function={module}:good"))
    for function in ("nowhere:score", f"{module}:other", f"{module}:number", "made_up"):
        assert refusal(recipe(f"reward.function={function}")).startswith("reward.function: ")


def test_a_taken_port_is_named(recipe: Maker, taken_port: int) -> None:
    """A port that something else listens on is refused by its setting and its number."""
    for setting in ("engine.port", "engine.sidecar_port", "network.master_port"):
        assert refusal(recipe(f"{setting}={taken_port}")).startswith(f"{setting}: port {taken_port} is taken")


def test_everything_in_the_way_is_said_at_once(recipe: Maker, tmp_path: Path) -> None:
    """A missing interface, interpreter, model and data make one message."""
    message = refusal(
        recipe(
            "network.interface=none0",
            "engine.kind=sglang",
            f"engine.python={tmp_path}/python",
            f"model.hf_checkpoint={tmp_path}/m",
            f"data.prompt_data={tmp_path}/d",
        )
    )
    assert message.startswith("4 things are in the way:")
    for setting in ("network.interface", "engine.python", "model.hf_checkpoint", "data.prompt_data"):
        assert f"  {setting}: " in message


def test_preflight_needs_no_torch() -> None:
    """A mistake is told within a second or two: nothing heavy is imported for it."""
    code = (
        "import sys; from hybridasync.config.load import load; from hybridasync.config.pipeline import resolve\n"
        "from hybridasync.runtime.preflight import preflight; preflight(resolve(load('quickstart')).config)\n"
        "sys.exit(bool({'torch', 'megatron', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
