"""What is due after which step, against a brute force that shares no code with the schedule."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridasync.schedule import Schedule, periodic

PERIODS = range(1, 13)
LENGTHS = range(1, 41)


def multiples(of: int | None, length: int) -> set[int]:
    """Steps after which a multiple of `of` steps is done, by counting up."""
    return set() if of is None else set(range(of - 1, length, of))


def brute(*, num_rollout: int, interval: int, every: int | None, epoch: int | None) -> tuple[set[int], set[int]]:
    """(published, evaluated) steps by sets of multiples."""
    evaluated = set() if every is None else multiples(every, num_rollout) | multiples(epoch, num_rollout)
    return multiples(interval, num_rollout) | {num_rollout - 1} | evaluated, evaluated


def due(schedule: Schedule) -> tuple[list[int], list[int]]:
    steps = range(schedule.num_rollout)
    return [s for s in steps if schedule.publish_due(s)], [s for s in steps if schedule.eval_due(s)]


def test_r9_an_evaluation_never_comes_without_a_publication() -> None:
    """R9: for K, E, P in 1..12 (and no E, no P) and N up to 40, both agree with a brute force, and eval ⇒ publish."""
    optional = (None, *PERIODS)
    for interval, every, epoch in product(PERIODS, optional, optional):
        for length in LENGTHS:
            schedule = Schedule(length, interval, every, epoch)
            published, evaluated = due(schedule)
            expected = brute(num_rollout=length, interval=interval, every=every, epoch=epoch)
            assert (set(published), set(evaluated)) == expected, (interval, every, epoch, length)
            assert set(evaluated) <= set(published)


@given(
    num_rollout=st.integers(1, 400),
    interval=st.integers(1, 500),
    every=st.none() | st.integers(1, 500),
    epoch=st.none() | st.integers(1, 500),
    at_end=st.booleans(),
)
def test_r9_holds_for_any_periods_and_with_a_final_evaluation(num_rollout: int, interval: int, **other: Any) -> None:
    """R9: drawn at random, with eval_at_end too; the last step is always published, evaluated only if asked."""
    schedule = Schedule(num_rollout, interval, other["every"], other["epoch"], eval_at_end=other["at_end"])
    published, evaluated = due(schedule)
    assert set(evaluated) <= set(published)
    assert published[-1] == num_rollout - 1
    if other["at_end"] and other["every"] is not None:
        assert evaluated[-1] == num_rollout - 1
    assert len(set(evaluated)) == len(evaluated)


@pytest.mark.parametrize(
    ("schedule", "published"),
    [
        (Schedule(5), [0, 1, 2, 3, 4]),  # R1
        (Schedule(6, 2), [1, 3, 5]),  # R3
        (Schedule(5, 3), [2, 4]),  # R4
        (Schedule(20, 20, None, 4), [19]),  # R5, R8: no evaluation, no epoch rule
        (Schedule(20, 20, 10), [9, 19]),  # R6
        (Schedule(8, 5, 10, 4), [3, 4, 7]),  # R7
        (Schedule(25, 7, 10, 4), [3, 6, 7, 9, 11, 13, 15, 19, 20, 23, 24]),  # the original case of R9
    ],
)
def test_r1_r8_the_published_steps(schedule: Schedule, published: list[int]) -> None:
    """R1, R3-R8: every K-th completed step, the last one, and what evaluation adds where it is configured."""
    assert due(schedule)[0] == published


def test_r7_only_a_configured_evaluation_brings_epoch_ends_in() -> None:
    """R5, R6, R7: steps 0, 2, 3 and 9 of the tables, with evaluation and without."""
    assert not Schedule(20, 2, 10).publish_due(0)
    assert Schedule(20, 20, 10).publish_due(9)
    assert [Schedule(20, 5, 10, 4).publish_due(step) for step in (2, 3)] == [False, True]
    assert not Schedule(20, 20, None, 4).publish_due(9)


def test_r48_the_last_step_forces_no_evaluation() -> None:
    """R48: E=10, N=25: steps 9 and 19, not 24; with P=4 epoch ends too; N=20 can't tell the two rules apart."""
    assert due(Schedule(25, 1, 10))[1] == [9, 19]
    assert due(Schedule(25, 1, 10, 4))[1] == [3, 7, 9, 11, 15, 19, 23]
    assert not Schedule(25, 1, 10, 4).eval_due(2)


def test_c29_the_final_evaluation_is_asked_for_and_never_doubled() -> None:
    """C29, U6: with eval_at_end step 24 of 25 as well; of 20 steps 9 and 19, each once."""
    assert due(Schedule(25, 1, 10, eval_at_end=True))[1] == [9, 19, 24]
    assert due(Schedule(20, 1, 10, eval_at_end=True))[1] == [9, 19]
    assert due(Schedule(20, 1, None, eval_at_end=True))[1] == []


def test_c29_publications_are_counted_with_the_initial_one() -> None:
    """C29, R13: 20 steps are 21 publications with interval 1, 11 with 2, and 13 with 2 and an evaluation each 5."""
    initial = 1
    assert initial + len(due(Schedule(20))[0]) == 21
    assert initial + len(due(Schedule(20, 2))[0]) == 11
    published = [step + 1 for step in due(Schedule(20, 2, 5))[0]]
    assert published == [2, 4, 5, 6, 8, 10, 12, 14, 15, 16, 18, 20]


@pytest.mark.parametrize("interval", [0, -1, True, False, 2.0, "2", None])
def test_r2_an_interval_is_a_positive_integer(interval: Any) -> None:
    """R2: zero and negative intervals, truth values and other types are refused by the schedule itself."""
    with pytest.raises(ValueError, match=r"must be (a )?positive"):
        Schedule(5, interval)
    if interval is not None:
        for name in ("eval_interval", "steps_per_epoch", "save_interval"):
            with pytest.raises(ValueError, match=rf"{name} must be (a )?positive"):
                Schedule(5, **{name: interval})


def test_r2_the_message_says_must_be_positive() -> None:
    """R2: 0 and -3 are answered with "must be positive" and the value."""
    for interval in (0, -3):
        with pytest.raises(ValueError, match=f"update_weights_interval must be positive, got {interval}"):
            Schedule(5, interval)


def test_r10_the_helper_alone() -> None:
    """R10: without an interval nothing is due; `num_rollout` forces the last step, None leaves it alone."""
    assert not periodic(4, None, steps_per_epoch=5, num_rollout=5)
    assert periodic(4, 3, steps_per_epoch=None, num_rollout=5)
    assert not periodic(4, 3, steps_per_epoch=None, num_rollout=None)
    assert periodic(4, 3, steps_per_epoch=5, num_rollout=None)


def test_a_checkpoint_comes_after_every_interval_and_after_the_last_step() -> None:
    """Every S-th step and the last one; without an interval the last one alone."""
    assert [s for s in range(7) if Schedule(7, save_interval=3).save_due(s)] == [2, 5, 6]
    assert [s for s in range(7) if Schedule(7).save_due(s)] == [6]
