import random

import pytest

from hybridasync.errors import LocalProtocolError
from hybridasync.protocol.ledger import RolloutLedger, Starved
from hybridasync.types import Group, Prompt


def prompt(uid: int) -> Prompt:
    return Prompt(uid, uid, 0, "d", (1, 2), "t", "l")


def group(uid: int, partition: int = 0) -> Group:
    return Group(prompt(uid), (), partition)


def fill(ledger: RolloutLedger, first: int = 0) -> list[int]:
    uids = []
    while ledger.may_admit():
        ledger.admit(prompt(first + len(uids)))
        uids.append(first + len(uids))
    return uids


def test_c19_zero_staleness_admits_one_batch_and_no_more() -> None:
    """With max_staleness 0 a step's groups may be in flight, and the next ones wait until the step is finished."""
    ledger = RolloutLedger(batch_size=8, max_staleness=0, num_rollout=2)
    assert fill(ledger) == list(range(8))
    for uid in range(8):
        ledger.completed(group(uid), keep=True)
    assert len(ledger.take(0) or ()) == 8
    assert not ledger.may_admit()
    ledger.finish(0)
    assert ledger.may_admit()


def test_c19_a_blocked_trainer_leaves_the_submitted_groups_constant() -> None:
    """Lag 1, 4 prompts a step: at most (1 + 1) * 4 groups are submitted and not consumed, however long a step takes."""
    ledger = RolloutLedger(batch_size=4, max_staleness=1, num_rollout=9)
    assert len(fill(ledger)) == 8 == ledger.slots
    for uid in range(8):
        ledger.completed(group(uid), keep=True)
    assert not ledger.may_admit()


def test_c19_a_run_shorter_than_the_lag_admits_only_its_own_steps() -> None:
    """One step with max_staleness 2 makes one batch."""
    ledger = RolloutLedger(batch_size=4, max_staleness=2, num_rollout=1)
    assert len(fill(ledger)) == 4


def test_c20_a_batch_that_never_fills_stops_after_its_budget() -> None:
    """B=4 and max_gen_batches=3: exactly 12 prompts, then the counts 0 of 4 kept and 12 filtered."""
    ledger = RolloutLedger(batch_size=4, max_staleness=0, num_rollout=2, max_gen_batches=3)
    used = 0
    while ledger.may_admit():
        ledger.admit(prompt(used))
        ledger.completed(group(used), keep=False)
        used += 1
    assert used == 12
    assert ledger.take(0) == Starved(0, 0, 4, 12, 0, False)


def test_c21_accepted_groups_survive_the_end_of_the_data() -> None:
    """P0 accepted, P1 filtered, P2 accepted late, no more prompts: one batch with P0 and P2."""
    ledger = RolloutLedger(batch_size=3, max_staleness=0, num_rollout=1)
    fill(ledger)
    ledger.exhausted = True
    ledger.completed(group(0), keep=True)
    ledger.completed(group(1), keep=False)
    assert ledger.take(0) is None
    ledger.completed(group(2), keep=True)
    batch = ledger.take(0)
    assert isinstance(batch, tuple)
    assert [g.prompt.uid for g in batch] == [0, 2]


def test_c14_finished_groups_wait_for_the_next_batch() -> None:
    """Ten ready groups and batches of four: 4, 4, then 2 that stay, each once, oldest first."""
    ledger = RolloutLedger(batch_size=4, max_staleness=2, num_rollout=9)
    fill(ledger)
    for uid in range(10):
        ledger.completed(group(uid), keep=True)
    seen: list[int] = []
    for step in range(2):
        batch = ledger.take(step)
        assert isinstance(batch, tuple)
        seen += [g.prompt.uid for g in batch]
    assert seen == list(range(8))
    assert ledger.take(2) is None
    assert ledger.complete == 2


def test_staleness_never_passes_the_bound_whatever_the_order_of_completion() -> None:
    """Over random completion orders every trained group has a partition lag of at most max_staleness."""
    for seed in range(50):
        rng = random.Random(seed)
        ledger = RolloutLedger(batch_size=3, max_staleness=rng.randint(0, 3), num_rollout=12)
        partitions: dict[int, int] = {}
        uid = 0
        flying: list[int] = []
        for step in range(12):
            while True:
                while ledger.may_admit():
                    partitions[uid] = ledger.admit(prompt(uid))
                    flying.append(uid)
                    uid += 1
                batch = ledger.take(step)
                if batch is not None:
                    break
                done = flying.pop(rng.randrange(len(flying)))
                ledger.completed(group(done, partitions[done]), keep=rng.random() > 0.2)
            assert isinstance(batch, tuple)
            assert len(batch) == 3
            assert all(0 <= step - g.partition <= ledger.max_staleness for g in batch)
            ledger.finish(step)
        assert ledger.counts["trained"] == 36


def test_a_ledger_names_the_groups_that_a_resumed_run_must_draw_again() -> None:
    """What was in flight or waiting at a checkpoint is pending, in the order drawn, and nothing else."""
    ledger = RolloutLedger(batch_size=2, max_staleness=1, num_rollout=5)
    fill(ledger)
    for uid in (0, 1, 3):
        ledger.completed(group(uid), keep=True)
    ledger.take(0)
    ledger.finish(0)
    assert ledger.pending() == [2, 3]
    again = RolloutLedger(batch_size=2, max_staleness=1, num_rollout=5)
    again.restore(ledger.state())
    assert again.finished == 1
    assert fill(again, first=10) == [10, 11, 12, 13]


def test_a_group_can_be_completed_only_once() -> None:
    """Completing a group that isn't in flight is our own bug, and says so."""
    ledger = RolloutLedger(batch_size=1, max_staleness=0, num_rollout=1)
    fill(ledger)
    ledger.completed(group(0), keep=True)
    with pytest.raises(LocalProtocolError):
        ledger.completed(group(0), keep=True)
