"""Recipes and overrides become a Config, or an error that names every mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridasync.config.load import load
from hybridasync.config.names import STACK_NAMES, nearest, settings
from hybridasync.config.pipeline import resolve
from hybridasync.config.recipes import find_recipe, shipped_recipes
from hybridasync.errors import ConfigError

MINIMAL = """
[model]
hf_checkpoint = "model"
[data]
prompt_data = "train.jsonl"
[rollout]
num_rollout = 4
rollout_batch_size = 8
n_samples_per_prompt = 8
max_response_tokens = 16
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(MINIMAL, encoding="utf-8")
    return str(path)


def refusal(recipe: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(recipe, overrides)
    return str(caught.value)


def test_a_minimal_recipe_gets_every_default(recipe: str) -> None:
    """A recipe needs only what has no default."""
    config = load(recipe)
    assert config.mode == "hybrid"
    assert config.publication.update_weights_interval == 1
    assert config.rollout.max_staleness == 0
    assert config.optimizer.lr == 1e-6


@pytest.mark.parametrize("name", [one.name for one in shipped_recipes()])
def test_every_recipe_that_ships_resolves(name: str) -> None:
    """Recipes that ship are found by name, say in one line what they are, and pass every check without a warning."""
    resolved = resolve(load(name))
    assert resolved.warnings == ()
    assert next(one.summary for one in shipped_recipes() if one.name == name)


def test_the_recipes_are_the_promised_ones() -> None:
    """Six recipes ship."""
    quick = {"quickstart", "quickstart-fast", "quickstart-sglang"}
    promised = {*quick, "smollm2-arithmetic", "gsm8k-qwen3-0.6b-2gpu", "bench-publication"}
    assert {one.name for one in shipped_recipes()} == promised


def test_recipes_are_found_in_an_installed_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder inside the package comes first: a wheel has no source checkout around it."""
    inside = tmp_path / "hybridasync" / "_recipes"
    inside.mkdir(parents=True)
    (inside / "only.toml").write_text("# The only one.\n" + MINIMAL, encoding="utf-8")
    monkeypatch.setattr("hybridasync.config.recipes._PACKAGE", tmp_path / "hybridasync")
    assert [one.summary for one in shipped_recipes()] == ["The only one."]
    assert find_recipe("only") == inside / "only.toml"


def test_an_unknown_recipe_lists_what_there_is_and_the_nearest() -> None:
    """A typo in a recipe's name is answered with the list and the nearest name."""
    message = refusal("quikstart")
    assert "Did you mean quickstart?" in message
    assert all(one.name in message and one.summary in message for one in shipped_recipes())


@pytest.mark.parametrize("given", ["nowhere/recipe.toml", "", "."])
def test_a_path_that_is_no_recipe_is_refused(given: str) -> None:
    """A missing file, an empty name and a directory are each a ConfigError that lists the recipes."""
    assert "quickstart" in refusal(given)


def test_a_syntax_error_is_told_with_its_line(tmp_path: Path) -> None:
    """TOML mistakes name the file, the line and the column."""
    path = tmp_path / "bad.toml"
    path.write_text("[model]\nhf_checkpoint = \n", encoding="utf-8")
    assert "bad.toml" in refusal(str(path)) and "line 2" in refusal(str(path))


def test_a_recipe_in_another_encoding_is_refused(tmp_path: Path) -> None:
    """A recipe that isn't UTF-8 is a clear error; a byte order mark is harmless."""
    path = tmp_path / "latin.toml"
    path.write_bytes(b'[model]\nhf_checkpoint = "mod\xe8le"\n')
    assert "isn't UTF-8" in refusal(str(path))
    path.write_bytes(b"\xef\xbb\xbf" + MINIMAL.encode())
    assert load(str(path)).model.hf_checkpoint == "model"


def test_all_errors_of_a_recipe_are_reported_at_once(recipe: str) -> None:
    """One start shows every mistake: unknown, misspelt, mistyped and missing."""
    Path(recipe).write_text(
        'mode = "hybird"\n[model]\n[rollout]\nmax_stalenes = 1\nrollout_batch_size = "8"\n[optimiser]\nlr = 1\n',
        encoding="utf-8",
    )
    message = refusal(recipe)
    assert "has 7 errors" in message
    for part in (
        'mode: wants one of sync, hybrid, fully_async, got "hybird"',
        "model.hf_checkpoint: this setting is required",
        "rollout.max_stalenes: unknown setting; did you mean rollout.max_staleness?",
        'rollout.rollout_batch_size: wants an integer > 0, got "8" (a string)',
        "rollout.n_samples_per_prompt: this setting is required",
        "rollout.max_response_tokens: this setting is required",
        "optimiser: unknown setting; did you mean [optimizer]?",
    ):
        assert part in message, message


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rollout.n_samples_per_prompt=0", "wants an integer > 0, got 0"),
        ("rollout.rollout_batch_size=0", "wants an integer > 0, got 0"),
        ("parallel.tensor_model_parallel_size=0", "wants an integer > 0, got 0"),
        ("parallel.max_tokens_per_micro_batch=0", "wants an integer > 0, got 0"),
        ("parallel.micro_batch_size=0", "did you mean parallel.max_tokens_per_micro_batch?"),
        ("eval.eval_interval=0", "--set eval.eval_interval=none"),
        ("checkpoint.save_interval=-1", "wants an integer > 0, got -1"),
        ("rollout.temperature=0", "greedy rollouts have no distribution"),
        ("rollout.max_staleness=-1", "wants an integer >= 0, got -1"),
        ("publication.bucket_mib=1e308", "wants a number > 0 and <= 65536, got 1e+308"),
        ("seed=4294967296", "wants an integer >= 0 and <= 2147483647, got 4294967296"),
        ("data.weights=many", 'wants a list of numbers, got "many"'),
        ("rollout.max_stalenes=1", "did you mean rollout.max_staleness?"),
    ],
)
def test_c37_impossible_values_name_the_key_and_the_value(recipe: str, override: str, expected: str) -> None:
    """C37: each zero, negative or unknown setting is a ValueError with its key and what would do."""
    message = refusal(recipe, override)
    assert message.startswith(override.partition("=")[0]) and expected in message


@pytest.mark.parametrize("value", ["0", "-2", "true", "1.5", '"2"'])
def test_the_interval_must_be_a_positive_integer(recipe: str, value: str) -> None:
    """R2: an interval that isn't a positive integer is refused, booleans included."""
    message = refusal(recipe, f"publication.update_weights_interval={value}")
    assert message.startswith("publication.update_weights_interval: ")
    if value in ("0", "-2"):
        assert "must be positive" in message


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("optimizer.lr=true", "a number > 0, got true"),
        ("optimizer.lr=nan", "a number > 0, got nan"),
        ("data.weights=[0.5, true]", "a list of numbers, got [0.5, true]"),
        ("optimizer.lr=fast", 'got "fast" (a string)'),
        ("algorithm.use_tis=1", "true or false, got 1"),
        ("algorithm.use_tis=yes", "true or false"),
        ("engine.url=[1]", "a list of strings, got 1"),
        ("engine.env={A=1}", "a table, got 1 in 'A'"),
        ("rollout=3", "is a section"),
        ("algorithm.advantage=gae", "one of grpo, dr_grpo"),
    ],
)
def test_wrong_types_say_what_would_do(recipe: str, override: str, wanted: str) -> None:
    """A wrongly typed setting is named, with what was given and what it takes."""
    assert wanted in refusal(recipe, override)


def test_off_is_spelt_by_leaving_out(recipe: str) -> None:
    """C37: a setting that may be left out is switched off with `none`, over whatever the recipe says."""
    on = ["eval.eval_interval=10", "checkpoint.save_interval=5"]
    config = load(recipe, [*on, "eval.eval_interval=none", "checkpoint.save_interval=none"])
    assert config.eval.eval_interval is None and config.checkpoint.save_interval is None
    assert "wants an integer" in refusal(recipe, "rollout.rollout_batch_size=none")


def test_overrides_take_toml_values_and_bare_strings(recipe: str) -> None:
    """`--set` takes numbers, lists, quoted and bare strings, in order; a string setting keeps digits as text."""
    config = load(
        recipe,
        [
            "optimizer.lr=1e-3",
            "mode=fully_async",
            "seed=7",
            'data.prompt_key="question"',
            "data.label_key=2026",
            "data.prompt_data=a = b.jsonl",
            "engine.url=http://a:1",
            'engine.args=["--x", "1"]',
            "prepare.args.digits=5",
            "prepare.args.name=sorted",
            "optimizer.lr=2e-3",
        ],
    )
    assert (config.optimizer.lr, config.mode, config.seed) == (2e-3, "fully_async", 7)
    assert (config.data.prompt_key, config.data.label_key) == ("question", "2026")
    assert config.data.prompt_data == "a = b.jsonl"
    assert config.engine.url == ("http://a:1",) and config.engine.args == ("--x", "1")
    assert config.prepare.args == {"digits": 5, "name": "sorted"}


@pytest.mark.parametrize("override", ["optimizer.lr", "=3", ".lr=3", "optimizer.=3", "mode.x=3"])
def test_a_malformed_override_is_refused(recipe: str, override: str) -> None:
    """An override without a key or a value, or into what isn't a section, says what it wants."""
    assert refusal(recipe, *(["mode=sync"] if override == "mode.x=3" else []), override)


def test_a_known_name_in_the_wrong_place_is_told_the_right_one() -> None:
    """Names of other stacks, and settings of other sections, lead to the setting that is meant."""
    assert nearest("rollout.lr") == "optimizer.lr"
    assert nearest("lr") == "optimizer.lr"
    assert nearest("rollout.rollout_max_response_len") == "rollout.max_response_tokens"
    assert nearest("model.model_path") == "model.hf_checkpoint"
    assert nearest("algorithm.zzz") is None


def test_every_option_name_leads_to_a_setting() -> None:
    """The table of option names has no dead entry."""
    assert set(STACK_NAMES.values()) <= settings().keys()
