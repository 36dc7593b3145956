"""The transaction machine against every order of events: exhaustively for three transactions, at random for more."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hybridasync.protocol.transactions import (
    Action,
    Answer,
    CapacityReachedError,
    RecoveryRequiredError,
    TransactionMachine,
)

A = "a" * 32
B = "b" * 32
FOREVER_S = 1e9


@dataclass
class Call:
    """One HTTP call inside the sidecar, step by step as control.py runs it."""

    txn: str | None
    kind: str  # "pause" or "end"
    at: str = "arriving"  # arriving, checking, pausing, resuming, done
    rollback: bool = False
    waited: bool = False
    answer: bool | None = None
    failed: bool = False


@dataclass
class World:
    """The machine, one engine, and the calls under way. `ended` are the ids whose end was acknowledged."""

    machine: TransactionMachine = field(default_factory=TransactionMachine)
    calls: list[Call] = field(default_factory=list)
    engine_paused: bool = False
    ended: set[str | None] = field(default_factory=set)

    def key(self) -> str:
        return f"{vars(self.machine)}|{self.calls}|{self.engine_paused}"

    def step(self, call: Call, *, ready: bool = True, engine_fails: bool = False) -> bool:
        """Let `call` take its next step; False: it has to wait for another one."""
        if call.kind == "end":
            return self._end(call, engine_fails)
        machine = self.machine
        if call.at == "arriving":
            try:
                step = machine.request_pause(call.txn, 0.0)
            except (RecoveryRequiredError, CapacityReachedError):
                call.at, call.failed = "done", True
                return True
            if step is Action.WAIT:
                return False
            self._follow(call, step)
        elif call.at == "checking":
            self._follow(call, machine.checked(call.txn, ready))
        elif call.at == "pausing" and engine_fails:
            self.engine_paused = True  # the worst case: it happened, and was reported as a failure
            call.failed = True
            self._follow(call, machine.pause_failed(call.txn, 0.0))
        elif call.at == "pausing":
            self.engine_paused = True
            self._follow(call, machine.pause_sent(call.txn, 0.0, FOREVER_S))
        else:
            self._resume(call, engine_fails)
        return True

    def cancel(self, call: Call) -> None:
        """The client goes away. A pause on its way to the engine is carried out before it is undone."""
        call.failed = True
        if call.at == "arriving":
            self.machine.withdraw(call.txn)
            call.at = "done"
        elif call.at in ("checking", "pausing"):
            self.engine_paused = self.engine_paused or call.at == "pausing"
            if self.machine.abandon(call.txn, 0.0) is Action.SEND_RESUME:
                call.at, call.rollback = "resuming", True
            else:
                call.at = "done"

    def _end(self, call: Call, engine_fails: bool) -> bool:
        if call.at == "arriving":
            action = self.machine.request_end(call.txn, 0.0, again=call.waited)
            if action is Action.WAIT:
                moved = not call.waited
                call.waited = True
                return moved
            call.at = "done" if action is Action.DONE else "resuming"
            if action is Action.DONE:
                self.ended.add(call.txn)
        else:
            self._resume(call, engine_fails)
        return True

    def _follow(self, call: Call, step: Action | Answer) -> None:
        if isinstance(step, Answer):
            call.at, call.answer = "done", step.paused
        elif step is Action.SEND_RESUME:
            call.at, call.rollback = "resuming", True
        else:
            call.at = {Action.CHECK: "checking", Action.SEND_PAUSE: "pausing"}[step]

    def _resume(self, call: Call, engine_fails: bool) -> None:
        call.at = "done"
        if engine_fails:
            call.failed = True
            self.machine.resume_failed(call.txn, 0.0)
            return
        self.engine_paused = False
        if call.rollback:
            self.machine.rolled_back(call.txn)
        else:
            self.machine.ended(call.txn)
            self.ended.add(call.txn)

    def check(self) -> None:
        """What must hold at every moment."""
        working = [c for c in self.calls if c.at in ("checking", "pausing", "resuming")]
        assert len(working) <= 1, "two calls act on one engine"
        state = self.machine.state
        if self.engine_paused and not working:
            assert state in ("paused", "recovery_required"), f"paused, but the state is {state}"
        if state == "paused":
            assert self.machine.holder is not None and self.engine_paused
            assert self.machine.holder.txn is None or self.machine.holder.txn not in self.ended, "held by an ended id"

    def pending(self) -> list[Call]:
        return [c for c in self.calls if c.at != "done"]


def successors(world: World, cancels: bool) -> Iterator[World]:
    for index, call in enumerate(world.calls):
        if call.at == "done":
            continue
        branches = ["step"]
        if call.kind == "pause" and cancels:
            branches.append("cancel")
        for branch in branches:
            after = copy.deepcopy(world)
            if branch == "cancel":
                if call.at == "resuming":
                    continue
                after.cancel(after.calls[index])
            elif not after.step(after.calls[index]):
                continue
            yield after


@pytest.mark.parametrize(
    ("names", "cancels"),
    [
        ((f"ha1:{A}:0",), True),
        ((f"ha1:{A}:0", f"ha1:{A}:1"), True),
        ((f"ha1:{A}:0", f"ha1:{B}:0"), True),
        ((f"ha1:{A}:0", None), True),
        ((f"ha1:{A}:0", f"ha1:{A}:1", f"ha1:{B}:0"), False),
        ((f"ha1:{A}:0", f"ha1:{A}:1", f"ha1:{A}:2"), False),
    ],
)
def test_no_order_of_pauses_and_ends_leaves_the_engine_paused(names: tuple[str | None, ...], cancels: bool) -> None:
    """Every interleaving of pause, end and cancellation of each id finishes, and with a running engine."""
    calls = [Call(name, kind) for name in names for kind in ("pause", "end")]
    start = World(calls=calls)
    seen = {start.key()}
    stack = [start]
    finished = 0
    while stack:
        world = stack.pop()
        world.check()
        nexts = list(successors(world, cancels))
        if not nexts:
            assert not world.pending(), f"calls wait for each other: {world.pending()}"
            finished += 1
            # An untagged end that came before its pause may have cancelled nothing yet; then nothing is paused either.
            assert not world.engine_paused and world.machine.state == "running"
        for after in nexts:
            if (key := after.key()) not in seen:
                seen.add(key)
                stack.append(after)
    assert finished > 1


class Transactions(RuleBasedStateMachine):
    """Pauses, ends, duplicates, cancellations and refusals of the engine, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(TransactionMachine(transaction_cap=6, session_cap=2))

    ids = st.builds(lambda session, number: f"ha1:{session}:{number}", st.sampled_from([A, B]), st.integers(0, 3))

    @rule(txn=st.one_of(st.none(), ids), kind=st.sampled_from(["pause", "end"]))
    def call(self, txn: str | None, kind: str) -> None:
        if len(self.world.pending()) < 4:
            self.world.calls.append(Call(txn, kind))

    @precondition(lambda self: self.world.pending())
    @rule(data=st.data(), ready=st.booleans(), engine_fails=st.sampled_from([False, False, False, True]))
    def step(self, data: st.DataObject, ready: bool, engine_fails: bool) -> None:
        call = data.draw(st.sampled_from(self.world.pending()))
        self.world.step(call, ready=ready, engine_fails=engine_fails)

    @precondition(lambda self: any(c.kind == "pause" and c.at != "resuming" for c in self.world.pending()))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        calls = [c for c in self.world.pending() if c.kind == "pause" and c.at != "resuming"]
        self.world.cancel(data.draw(st.sampled_from(calls)))

    @rule()
    def engine_dies(self) -> None:
        if not any(c.at in ("checking", "pausing", "resuming") for c in self.world.pending()):
            self.world.machine.engine_lost()
            self.world.engine_paused = False

    @invariant()
    def holds(self) -> None:
        self.world.check()
        assert self.world.machine.transactions <= 7 and self.world.machine.sessions <= 2

    def teardown(self) -> None:
        """Once every call has finished and every id is ended, the engine runs (I1)."""
        world = self.world
        names = [None, *(f"ha1:{s}:{n}" for s in (A, B) for n in range(4))]
        self._run_all()
        for _ in range(2):  # twice: an untagged pause may have waited for the ends of the others
            world.calls = world.pending() + [Call(name, "end") for name in names]
            self._run_all()
        assert not world.pending()
        assert world.machine.state == "running" and not world.engine_paused

    def _run_all(self) -> None:
        while any(self.world.step(call) for call in self.world.pending()):
            self.world.check()


TestTransactions = Transactions.TestCase
TestTransactions.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_the_world_is_not_blind() -> None:
    """The checks above do find a machine that forgets to look again after the pause was sent (R86)."""
    world = World(calls=[Call(f"ha1:{A}:0", "pause"), Call(f"ha1:{A}:1", "end")])
    pause = world.calls[0]
    for _ in range(2):
        world.step(pause)
    assert pause.at == "pausing"
    world.step(world.calls[1])
    broken = replace(pause)
    world.step(pause)
    assert (pause.at, pause.rollback) == ("resuming", True)
    world.calls[0] = broken
    broken.at = "done"
    with pytest.raises(AssertionError, match="paused, but"):
        world.check()
