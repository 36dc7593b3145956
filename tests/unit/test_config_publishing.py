"""Settings of publications: the adaptive interval and its bounds, and what excludes what."""

from __future__ import annotations

from typing import Any

import pytest

from hybridasync.config.load import validate
from hybridasync.config.models import Config
from hybridasync.config.names import value_of
from hybridasync.config.pipeline import Resolved, resolve
from hybridasync.errors import ConfigError

AUTO: dict[str, Any] = {"update_weights_interval": "auto"}


def resolved(publication: dict[str, Any], *, staleness: int = 0, mode: str = "hybrid", **more: Any) -> Resolved:
    values = {
        "mode": mode,
        "model": {"hf_checkpoint": "model"},
        "data": {"prompt_data": "prompts.jsonl"},
        "rollout": {
            "num_rollout": 10,
            "rollout_batch_size": 4,
            "n_samples_per_prompt": 2,
            "max_response_tokens": 8,
            "max_staleness": staleness,
        },
        "publication": publication,
        "algorithm": {"use_tis": True},
    }
    return resolve(validate({**values, **more}, source="test"))


def publication_of(config: Config, *names: str) -> tuple[Any, ...]:
    return tuple(value_of(config, f"publication.{name}") for name in names)


@pytest.mark.parametrize(("staleness", "k_max"), [(0, 1), (1, 2), (2, 3), (3, 4), (9, 4)])
def test_the_largest_interval_keeps_within_the_staleness_budget(staleness: int, k_max: int) -> None:
    """auto never skips more publications than the engines run ahead, and the guard counts with the largest K."""
    found = resolved(AUTO, staleness=staleness)
    assert publication_of(found.config, "update_weights_interval", "k_min", "k_max") == ("auto", 1, k_max)
    assert found.bounds.max_version_lag == staleness + k_max - 1
    assert found.bounds.publications is None


def test_a_written_k_max_beyond_the_budget_is_lowered_and_said() -> None:
    """A value that was written and doesn't run is in the list of changes, with its reason."""
    found = resolved({**AUTO, "k_max": 5}, staleness=1)
    change = next(one for one in found.changes if one.setting == "publication.k_max")
    assert (change.wrote, change.runs, change.filled_in) == (5, 2, False) and "max_staleness 1" in change.why


def test_k_min_above_what_is_allowed_is_refused() -> None:
    """K has to lie between k_min and both k_max and max_staleness + 1."""
    for publication, staleness in (({"k_min": 3, "k_max": 2}, 5), ({"k_min": 3}, 1)):
        with pytest.raises(ConfigError, match="k_min"):
            resolved({**AUTO, **publication}, staleness=staleness)


def test_auto_needs_a_correction_as_k_max_does() -> None:
    """The off-policy guard takes auto for its largest interval."""
    uncorrected = {"algorithm": {"use_tis": False}}
    with pytest.raises(ConfigError, match=r"update_weights_interval 2 \(up to k_max steps\)"):
        resolved(AUTO, staleness=1, **uncorrected)
    assert resolved(AUTO, staleness=0, **uncorrected).bounds.max_version_lag == 0


def test_mode_sync_publishes_each_step() -> None:
    """In mode sync auto is 1, said as any other change."""
    found = resolved(AUTO, mode="sync")
    assert publication_of(found.config, "update_weights_interval") == (1,) and found.bounds.publications == 11


def test_bounds_of_auto_without_auto_do_nothing() -> None:
    """k_min and k_max beside a fixed interval are warned of."""
    assert "has no effect" in resolved({"k_max": 2}).warnings[0]


@pytest.mark.parametrize("given", ["automatic", 0, -1, True, 1.5, "2"])
def test_an_interval_is_a_positive_integer_or_auto(given: Any) -> None:
    """Anything else is refused once, with what would do."""
    with pytest.raises(ConfigError) as caught:
        resolved({"update_weights_interval": given})
    message = str(caught.value)
    assert message.count("update_weights_interval") == 1 and "an integer > 0 or auto" in message


def test_blocking_prepares_nothing_before_the_pause() -> None:
    """blocking switches staging off; it excludes deltas, and so does staging that is off."""
    found = resolved({"blocking": True})
    assert publication_of(found.config, "blocking", "staged") == (True, False)
    assert found.config == resolve(found.config).config
    with pytest.raises(ConfigError, match="exclude each other"):
        resolved({"blocking": True, "delta": True})
    with pytest.raises(ConfigError, match=r"needs publication\.staged"):
        resolved({"staged": False, "delta": True})
    engine = {"engine": {"kind": "sglang", "python": "python"}}
    assert any("SGLang has no route" in text for text in resolved({"delta": True}, **engine).warnings)
