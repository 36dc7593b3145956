"""Statistics of paired trials, and the thresholds that people state."""

from __future__ import annotations

import pytest

from hybridasync.bench.accept import parse
from hybridasync.bench.stats import Arm, compare
from hybridasync.errors import ConfigError

VARIANTS = ("zero_kl", "optimized", "staged-delta")
MEASURES = ("response_tok_s", "pause_ms")


def arm(*rates: float) -> Arm:
    """Steps of one second each."""
    return Arm([100 * rate for rate in rates], [1.0] * len(rates))


def test_an_arm_is_a_ratio_of_sums() -> None:
    """Throughput is tokens by time, not a mean of rates; a mean over nothing is 0."""
    assert Arm([100, 100], [1, 3]).value == 50
    assert Arm([0, 0], [0, 0]).value == 0


def test_ratio_is_the_geometric_mean_of_pairs() -> None:
    """Pairs of 2 and 8 give 4, each is shown, and constant steps leave only the pairs to scatter."""
    found = compare([(arm(2, 2), arm(1, 1)), (arm(8, 8), arm(1, 1))], "ratio")
    assert found.estimate == pytest.approx(4)
    assert found.pairs == pytest.approx((2, 8))
    assert (found.low, found.high) == pytest.approx((2, 8))


def test_difference_is_the_mean_of_pairs() -> None:
    """100 and 300 give 200."""
    found = compare([(arm(2), arm(1)), (arm(4), arm(1))], "difference")
    assert found.estimate == pytest.approx(200)
    assert (found.low, found.high) == pytest.approx((100, 300))


def test_one_pair_of_constant_steps_has_no_width() -> None:
    """Nothing scatters, so that the interval is the estimate."""
    found = compare([(arm(3, 3, 3), arm(2, 2, 2))], "ratio")
    assert (found.low, found.estimate, found.high) == pytest.approx((1.5, 1.5, 1.5))


def test_steps_within_a_pair_scatter_as_the_bootstrap_of_their_mean_does() -> None:
    """One pair against a constant: the interval is near mean ± 1.96 s/√n of the steps (normal theory)."""
    steps = [90.0, 110.0] * 50
    found = compare([(Arm(steps, [1.0] * 100), Arm([0.0] * 100, [1.0] * 100))], "difference")
    assert found.low == pytest.approx(100 - 1.96, abs=0.35)
    assert found.high == pytest.approx(100 + 1.96, abs=0.35)


def test_the_same_numbers_give_the_same_interval() -> None:
    """The draws are fixed, so that a report can be made again."""
    pairs = [(arm(1, 2, 3), arm(2, 1, 2)), (arm(3, 1, 2), arm(1, 2, 2))]
    assert compare(pairs, "ratio") == compare(pairs, "ratio")


def test_a_ratio_of_nothing_is_refused() -> None:
    """A value of 0 has no ratio, and without pairs there is nothing to say."""
    with pytest.raises(ValueError, match="positive"):
        compare([(arm(1), arm(0))], "ratio")
    with pytest.raises(ValueError, match="no pair"):
        compare([], "difference")


def test_conditions_are_read_as_people_write_them() -> None:
    """A ratio or one variant alone, a measure on either side, hyphens in names, response throughput by default."""
    ratio = parse("optimized/zero_kl >= 1.05", variants=VARIANTS, measures=MEASURES)
    assert (ratio.first, ratio.second, ratio.measure) == ("optimized", "zero_kl", "response_tok_s")
    assert ratio.holds(1.05)
    assert not ratio.holds(1.04)
    alone = parse(" staged-delta.pause_ms<=10 ", variants=VARIANTS, measures=MEASURES)
    assert (alone.first, alone.second, alone.measure, alone.threshold) == ("staged-delta", None, "pause_ms", 10)
    assert parse("zero_kl/optimized.pause_ms > 1", variants=VARIANTS, measures=MEASURES).measure == "pause_ms"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("optimized/zero_kl = 1", "wants VARIANT"),
        ("", "wants VARIANT"),
        ("optimised/zero_kl > 1", "'optimised' doesn't take part; variants are zero_kl"),
        ("optimized.speed > 1", "no measure 'speed'; there are response_tok_s, pause_ms"),
        ("optimized.pause_ms/zero_kl.response_tok_s > 1", "same measure"),
        ("optimized/zero_kl >= fast", "'fast' is no number"),
    ],
)
def test_a_wrong_condition_says_what_would_do(text: str, says: str) -> None:
    """The message has the option, what was given, and an example."""
    with pytest.raises(ConfigError, match="--accept") as error:
        parse(text, variants=VARIANTS, measures=MEASURES)
    assert says in str(error.value)
    assert "optimized/zero_kl >= 1.05" in str(error.value)
