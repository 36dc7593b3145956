"""The adaptive interval: a pure function of what was measured, within its bounds, and steady."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridasync.protocol.pace import CLEARLY, SHARE, WINDOW, Pace, choose_interval, share
from hybridasync.schedule import Schedule

SECONDS = st.floats(0, 1e4, allow_nan=False)


@pytest.mark.parametrize(
    ("cost", "work", "expected"),
    [
        (0.0, 4.0, 1),
        (0.12, 4.0, 1),  # 2.9 %
        (0.13, 4.0, 2),  # 3.1 % at 1
        (0.69, 3.7, 7),  # the reference system's: 15.7 % at 1, 3 % needs more than 6
        (9.0, 1.0, 8),  # never enough: the largest
    ],
)
def test_the_smallest_interval_that_is_cheap_enough(cost: float, work: float, expected: int) -> None:
    """At most 3 % of the time, else as many steps as are allowed; and the reason has the numbers."""
    choice = choose_interval([cost], [work], current=1, k_min=1, k_max=8)
    assert choice.interval == expected and f"{cost:.3g} s" in choice.reason and f"{work:.3g} s" in choice.reason
    assert ("isn't above 8" in choice.reason) == (cost == 9.0)


def test_nothing_measured_is_the_smallest() -> None:
    """Before the first publication that counts, K is k_min."""
    assert choose_interval([], [1.0], current=3, k_min=2, k_max=8).interval == 2


@settings(max_examples=300, deadline=None)
@given(
    costs=st.lists(SECONDS, min_size=1, max_size=9),
    works=st.lists(SECONDS, min_size=1, max_size=9),
    bounds=st.tuples(st.integers(1, 9), st.integers(0, 8), st.integers(0, 8)),
)
def test_it_is_pure_within_bounds_and_steady(
    costs: list[float], works: list[float], bounds: tuple[int, int, int]
) -> None:
    """Equal inputs, equal choice; k_min <= K <= k_max; asked again with the same measurements, K stays."""
    k_min, k_max, current = bounds[0], bounds[0] + bounds[1], bounds[0] + min(bounds[1:])
    choice = choose_interval(costs, works, current=current, k_min=k_min, k_max=k_max)
    assert choice == choose_interval(list(costs), list(works), current=current, k_min=k_min, k_max=k_max)
    assert k_min <= choice.interval <= k_max
    again = choose_interval(costs, works, current=choice.interval, k_min=k_min, k_max=k_max)
    assert again.interval == choice.interval


def test_it_goes_down_only_where_that_is_clearly_enough() -> None:
    """Just below the limit at K - 1 it stays; below three quarters of it, it goes down."""
    just, clearly = (limit / (1 - limit) for limit in (SHARE * 0.99, SHARE * CLEARLY * 0.99))  # at K = 1, work 1 s
    stays = choose_interval([just], [1.0], current=2, k_min=1, k_max=4)
    assert stays.interval == 2 and "1 would just do" in stays.reason
    assert choose_interval([clearly], [1.0], current=2, k_min=1, k_max=4).interval == 1
    assert share(just, 1.0, 1) < SHARE


def test_old_measurements_are_forgotten() -> None:
    """A slow start, or a single slow publication among fast ones, doesn't count for ever."""
    pace = Pace(1, 8)
    pace.worked(1.0)
    assert pace.tried(1, 5.0) is not None and pace.interval == 8
    for completed in range(2, 2 + WINDOW):
        pace.tried(completed, 0.001)
    assert pace.interval == 1
    assert pace.tried(20, 5.0) is None and len(pace.costs_s) == WINDOW


def test_a_failed_publication_counts_from_but_is_not_measured() -> None:
    """The next try comes K steps later, as with a fixed interval."""
    pace = Pace(2, 4)
    pace.worked(1.0)
    assert pace.tried(6, None) is None
    assert (pace.published, pace.costs_s, pace.interval) == (6, [], 2)


def test_a_resumed_run_goes_on_with_its_interval() -> None:
    """The state goes through JSON and gives the same decisions; bounds that changed hold at once."""
    pace = Pace(1, 8)
    pace.worked(1.0)
    pace.tried(3, 0.1)
    state = json.loads(json.dumps(pace.state()))
    same, narrower = Pace(1, 8), Pace(1, 2)
    same.restore(state)
    narrower.restore(state)
    assert same == pace and pace.interval == 4
    assert (narrower.interval, narrower.published) == (2, 3)


@settings(max_examples=200, deadline=None)
@given(
    interval=st.integers(1, 9),
    published=st.integers(0, 30),
    evaluation=st.tuples(st.none() | st.integers(1, 9), st.none() | st.integers(1, 9)),
    length=st.integers(1, 40),
)
def test_r9_an_evaluation_finds_published_weights_at_any_pace(
    interval: int, published: int, evaluation: tuple[int | None, int | None], length: int
) -> None:
    """R9: whatever interval is in effect, evaluation is due only where publication is, and so is the last step."""
    schedule = Schedule(length, 9, evaluation[0], evaluation[1])
    for step in range(length):
        due = schedule.publish_due(step, interval=interval, published=min(published, step))
        assert due or not schedule.eval_due(step)
        assert due or step != length - 1
        assert due or step + 1 - min(published, step) < interval
