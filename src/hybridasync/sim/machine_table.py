"""The real transaction machine as a table: state and event give the next state and what the caller must do.

Each pair is computed once, by the machine itself, so that an exhaustive search asks it a few thousand times and not
a few million. Time is left out: everything happens at once, and a lease runs out when the search wants it to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from hybridasync.protocol import transactions
from hybridasync.protocol.transaction_id import TransactionId
from hybridasync.protocol.transactions import Action, Answer, RecoveryRequiredError, TransactionMachine
from hybridasync.types import SidecarState

Outcome = Literal["wait", "check", "send_pause", "send_resume", "done", "paused", "not_ready", "ended", "refused", "no"]

Tagged = tuple[TransactionId, transactions.Phase, bool]
Frozen = tuple[tuple[Tagged, ...], Tagged | None, bool, tuple[tuple[str, int], ...], TransactionId | None, bool]
"""Tagged transactions, the untagged one, whether its end came first, watermarks, the active one, if there is one."""

_ACTIONS: dict[Action, Outcome] = {
    Action.WAIT: "wait",
    Action.CHECK: "check",
    Action.SEND_PAUSE: "send_pause",
    Action.SEND_RESUME: "send_resume",
    Action.DONE: "done",
}
_ANSWERS: dict[Answer, Outcome] = {
    transactions.PAUSED: "paused",
    transactions.NOT_READY: "not_ready",
    transactions.ENDED: "ended",
}
_LEASED = ("paused", "recovery_required")


class MachineTable:
    """States are numbered in the order in which they are met; 0 is that of a new sidecar."""

    def __init__(self) -> None:
        self._numbers: dict[Frozen, int] = {}
        self._states: list[Frozen] = []
        self._moves: dict[tuple[int, str, str | None], tuple[int, Outcome]] = {}
        self._expiries: dict[int, tuple[int, str | None, bool] | None] = {}
        self._number(_frozen(TransactionMachine()))

    def __len__(self) -> int:
        return len(self._states)

    def move(self, state: int, event: str, txn: str | None) -> tuple[int, Outcome]:
        """The next state, and what the machine answers. `event` is a key of EVENTS."""
        found = self._moves.get((state, event, txn))
        if found is None:
            machine = _thawed(self._states[state])
            outcome = _outcome(lambda: EVENTS[event](machine, txn))
            found = self._moves[state, event, txn] = self._number(_frozen(machine)), outcome
        return found

    def expire(self, state: int) -> tuple[int, str | None, bool] | None:
        """The lease of whoever holds the engine runs out: next state, transaction to resume, whether it was paused."""
        if state not in self._expiries:
            machine = _thawed(self._states[state])
            expired = machine.take_expired(1.0)
            found = None if expired is None else (self._number(_frozen(machine)), expired.txn, expired.lapsed)
            self._expiries[state] = found
        return self._expiries[state]

    def held(self, state: int) -> tuple[SidecarState, str | None]:
        """What the machine says of the engine, and who holds it."""
        machine = _thawed(self._states[state])
        return machine.state, machine.holder.txn if machine.holder else None

    def _number(self, frozen: Frozen) -> int:
        number = self._numbers.setdefault(frozen, len(self._states))
        if number == len(self._states):
            self._states.append(frozen)
        return number


EVENTS: dict[str, Callable[[TransactionMachine, str | None], object]] = {
    "pause": lambda machine, txn: machine.request_pause(txn, 0.0),
    "end": lambda machine, txn: machine.request_end(txn, 0.0),
    "end again": lambda machine, txn: machine.request_end(txn, 0.0, again=True),
    "ready": lambda machine, txn: machine.checked(txn, True),
    "not ready": lambda machine, txn: machine.checked(txn, False),
    "pause sent": lambda machine, txn: machine.pause_sent(txn, 0.0, 1.0),
    "pause failed": lambda machine, txn: machine.pause_failed(txn, 0.0),
    "pause not sent": lambda machine, txn: machine.pause_not_sent(txn),
    "withdraw": lambda machine, txn: machine.withdraw(txn),
    "abandon": lambda machine, txn: machine.abandon(txn, 0.0),
    "rolled back": lambda machine, txn: machine.rolled_back(txn),
    "ended": lambda machine, txn: machine.ended(txn),
    "resume failed": lambda machine, txn: machine.resume_failed(txn, 0.0),
    "engine lost": lambda machine, _: machine.engine_lost(),
    "stray": lambda machine, _: Action.SEND_RESUME if machine.adopt_stray(0.0) else Action.DONE,
}


def _outcome(call: Callable[[], object]) -> Outcome:
    try:
        answer = call()
    except RecoveryRequiredError:
        return "refused"
    if isinstance(answer, Action):
        return _ACTIONS[answer]
    return _ANSWERS[answer] if isinstance(answer, Answer) else "no"


# The machine's own fields, because a copy through its public methods would have to replay a history.


def _frozen(machine: TransactionMachine) -> Frozen:
    tagged = sorted((key, record.phase, record.end_requested) for key, record in machine._tagged.items())
    untagged, active = machine._untagged, machine._active
    return (
        tuple(tagged),
        None if untagged is None else (_NOBODY, untagged.phase, untagged.end_requested),
        machine._untagged_end,
        tuple(sorted((name, session.watermark) for name, session in machine._sessions.items())),
        active.key if active else None,
        active is not None,
    )


_NOBODY = TransactionId("", -1)


def _thawed(frozen: Frozen) -> TransactionMachine:
    tagged, untagged, untagged_end, sessions, active, is_active = frozen
    machine = TransactionMachine()
    for key, phase, end_requested in tagged:
        machine._tagged[key] = _record(key, phase, end_requested)
    if untagged is not None:
        machine._untagged = _record(None, untagged[1], untagged[2])
    machine._untagged_end = untagged_end
    for name, watermark in sessions:
        machine._sessions[name] = transactions._Session(0.0, watermark)
    if is_active:
        machine._active = machine._untagged if active is None else machine._tagged[active]
    return machine


def _record(key: TransactionId | None, phase: transactions.Phase, end_requested: bool) -> transactions._Transaction:
    lease = 0.0 if phase in _LEASED else None
    return transactions._Transaction(key, phase, end_requested=end_requested, since=0.0, lease_until=lease)
