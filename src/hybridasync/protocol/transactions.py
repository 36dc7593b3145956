"""Which pause belongs to whom: the transaction machine of a sidecar (requirements R70 to R97).

A pause and its end carry the same id, so that a resume that overtakes its own pause, a pause that arrives after its
client gave up, and the late end of an older publication are all recognised for what they are (case C01).

The machine only decides. Each method is synchronous, changes the machine's own fields and returns what the caller must
do next; the caller does it, reports how it went, and wakes whoever was told to `WAIT` after each change.

    request_pause ─ CHECK ─▶ checked ─ SEND_PAUSE ─▶ pause_sent ─▶ Answer(True)
         │ WAIT, Answer         │ Answer(False)         │ SEND_RESUME ─▶ rolled_back | resume_failed
         │                      └ abandon               └ pause_failed, pause_not_sent, abandon
    request_end ── SEND_RESUME ─▶ ended | resume_failed
         └ WAIT, DONE

Calls without an id (plain clients) share one untagged transaction, which leaves no trace once it is over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType
from typing import Literal

from hybridasync.errors import LocalProtocolError, OperatingError
from hybridasync.protocol.transaction_id import TransactionId
from hybridasync.types import SidecarState

TRANSACTION_CAP = 1024
SESSION_CAP = 1024

SESSION_RETENTION_S = 86_400.0
"""Longer than any request can live: a session that was silent for so long has no late pause under way (R92)."""

RECOVERY_RETRY_S = 5.0
"""After a resume that failed the sidecar tries again by itself: its client may be dead."""

Phase = Literal[
    "waiting",  # known; nothing was done: queued for its turn, or told "not ready"
    "checking",  # is the engine drained?
    "pausing",  # the pause is on its way to the engine
    "paused",
    "rolling_back",  # a resume is on its way, on behalf of the pause
    "ending",  # a resume is on its way, on behalf of the end
    "recovery_required",  # a resume failed: the engine may still be paused
    "completed",  # a tombstone: it never pauses again
]

MOVES: Mapping[Phase, frozenset[Phase]] = MappingProxyType(
    {
        "waiting": frozenset({"checking", "completed"}),
        "checking": frozenset({"waiting", "pausing", "completed"}),
        "pausing": frozenset({"paused", "rolling_back", "completed"}),
        "paused": frozenset({"ending", "rolling_back", "completed"}),
        "rolling_back": frozenset({"completed", "recovery_required"}),
        "ending": frozenset({"completed", "recovery_required"}),
        "recovery_required": frozenset({"ending", "completed"}),
        "completed": frozenset(),
    }
)

STATES: Mapping[Phase, SidecarState] = MappingProxyType(
    {
        "checking": "running",
        "pausing": "pausing",
        "paused": "paused",
        "rolling_back": "ending",
        "ending": "ending",
        "recovery_required": "recovery_required",
    }
)


class CapacityReachedError(OperatingError):
    """No room for another session or transaction, and nothing that may be forgotten."""


class RecoveryRequiredError(OperatingError):
    """The engine couldn't be resumed: the transaction has to be ended before anything else."""


class Action(Enum):
    """What the caller has to do next."""

    WAIT = auto()  # for any change of the machine, then ask again
    CHECK = auto()  # whether the engine is ready, and report with `checked`
    SEND_PAUSE = auto()  # and report with `pause_sent`, `pause_failed` or `pause_not_sent`
    SEND_RESUME = auto()  # and report with `rolled_back` or `ended`, or else `resume_failed`
    DONE = auto()


@dataclass(frozen=True, slots=True)
class Answer:
    """What a pause call answers its client."""

    paused: bool
    reason: str


PAUSED = Answer(True, "paused")
NOT_READY = Answer(False, "the engine still has requests in flight")
ENDED = Answer(False, "the transaction has ended")


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds the engine: `txn` None is an untagged caller. Times are on the clock of the caller (seconds)."""

    txn: str | None
    session: str | None
    since: float | None
    lease_until: float | None


@dataclass(frozen=True, slots=True)
class Expired:
    """A transaction that the sidecar has to resume by itself; `lapsed` False: a retry of a resume that failed."""

    txn: str | None
    lapsed: bool


@dataclass(slots=True)
class _Transaction:
    key: TransactionId | None
    phase: Phase = "waiting"
    end_requested: bool = False
    since: float | None = None
    lease_until: float | None = None

    def move(self, phase: Phase) -> None:
        if phase not in MOVES[self.phase]:
            raise LocalProtocolError(f"transaction {self.key}: {self.phase} can't become {phase}")
        self.phase = phase


@dataclass(slots=True)
class _Session:
    last_seen: float
    watermark: int = -1  # the highest completed sequence; this and everything below never pauses again


class TransactionMachine:
    """One engine's transactions. At most one is active, that is: has touched the engine or is about to."""

    def __init__(
        self,
        *,
        transaction_cap: int = TRANSACTION_CAP,
        session_cap: int = SESSION_CAP,
        retention_s: float = SESSION_RETENTION_S,
    ) -> None:
        self._transaction_cap = transaction_cap
        self._session_cap = session_cap
        self._retention_s = retention_s
        self._tagged: dict[TransactionId, _Transaction] = {}  # in the order of their arrival
        self._untagged: _Transaction | None = None
        self._untagged_end = False  # an end came before its pause; it cancels one pause, however often it came (R89)
        self._sessions: dict[str, _Session] = {}
        self._active: _Transaction | None = None

    # What a client asks

    def request_pause(self, txn: str | None, now: float) -> Action | Answer:
        """A pause call arrives, or asks again after a WAIT.

        From CHECK on the call owns the attempt: it must report each outcome, and `abandon` when it is cancelled. A call
        that is cancelled during a WAIT does `withdraw`.
        Raises MalformedTransactionError, CapacityReachedError, RecoveryRequiredError.
        """
        key = _parsed(txn)
        if key is None and self._untagged_end:
            self._untagged_end = False
            return ENDED
        record = self._find(key)
        if record is None:
            if self._superseded(key):
                return ENDED
            record = self._register(key, now)
        self._touch(key, now)
        if record.phase == "completed":
            return ENDED
        if record.phase == "paused":
            return PAUSED
        if record.phase == "recovery_required":
            raise RecoveryRequiredError(f"transaction {txn} couldn't be rolled back: end it first")
        if record.phase != "waiting":
            return Action.WAIT  # another call of the same transaction is at work
        if self._superseded(key):
            self._complete(record)
            return ENDED
        if self._active is not None:
            return Action.WAIT
        self._active = record
        record.move("checking")
        return Action.CHECK

    def request_end(self, txn: str | None, now: float, *, again: bool = False) -> Action:
        """An end call arrives; `again` after a WAIT. Raises MalformedTransactionError, CapacityReachedError.

        A call that waited doesn't create anything: its session may have been reclaimed meanwhile (R93).
        """
        key = _parsed(txn)
        record = self._find(key)
        if record is None:
            if not again:
                self._entomb(key, now)
            return Action.DONE
        self._touch(key, now)
        if record.phase == "completed":
            return Action.DONE
        if record.phase == "waiting":
            self._complete(record)
            self._untagged_end = self._untagged_end or key is None  # for the call that is queued
            return Action.DONE
        if record.phase in ("paused", "recovery_required"):
            record.move("ending")
            return Action.SEND_RESUME
        record.end_requested = True
        return Action.WAIT

    def renew(self, txn: str | None, now: float, lease_s: float) -> bool:
        """Extend the lease; False when `txn` holds no pause. Raises MalformedTransactionError."""
        record = self._find(_parsed(txn))
        if record is None or record.phase != "paused":
            return False
        record.lease_until = now + lease_s
        self._touch(record.key, now)
        return True

    # How it went

    def checked(self, txn: str | None, ready: bool) -> Action | Answer:
        """The engine was asked whether it is ready to be paused."""
        record = self._owned(txn, "checking")
        if record.end_requested or self._superseded(record.key):
            self._complete(record)
            return ENDED
        if not ready:
            record.move("waiting")
            self._active = None
            if record.key is None:
                self._forget(record)
            return NOT_READY
        record.move("pausing")
        return Action.SEND_PAUSE

    def pause_sent(self, txn: str | None, now: float, lease_s: float) -> Action | Answer:
        """The engine confirmed the pause. If it isn't wanted any more it is undone before the call answers (R86)."""
        record = self._owned(txn, "pausing")
        record.since = now
        if record.end_requested or self._superseded(record.key):
            record.move("rolling_back")
            return Action.SEND_RESUME
        record.move("paused")
        record.lease_until = now + lease_s
        return PAUSED

    def pause_failed(self, txn: str | None, now: float) -> Action:
        """The engine refused, or nobody knows: what may have been done is undone (R73)."""
        record = self._owned(txn, "pausing")
        record.since = now
        record.move("rolling_back")
        return Action.SEND_RESUME

    def pause_not_sent(self, txn: str | None) -> None:
        """The pause provably never reached the engine: nothing is owed."""
        self._close(self._owned(txn, "pausing"))

    def withdraw(self, txn: str | None) -> None:
        """A queued pause call was cancelled. Another one that is queued with the same id simply registers anew."""
        record = self._find(_parsed(txn))
        if record is not None and record.phase == "waiting":
            self._forget(record)

    def abandon(self, txn: str | None, now: float) -> Action:
        """The owner of the attempt was cancelled. SEND_RESUME if it may have paused the engine (R88), else DONE."""
        record = self._owned(txn, "checking", "pausing")
        if record.phase == "checking":
            self._close(record)
            return Action.DONE
        record.since = now
        record.move("rolling_back")
        return Action.SEND_RESUME

    def rolled_back(self, txn: str | None) -> None:
        self._close(self._owned(txn, "rolling_back"))

    def ended(self, txn: str | None) -> None:
        self._complete(self._owned(txn, "ending"))

    def resume_failed(self, txn: str | None, now: float) -> None:
        """The engine may still be paused. It stays with this transaction until an end succeeds (R74, R75)."""
        record = self._owned(txn, "rolling_back", "ending")
        record.move("recovery_required")
        record.lease_until = now + RECOVERY_RETRY_S

    # What happens without a client

    def lease_deadline(self) -> float | None:
        """When `take_expired` has to be called next."""
        if self._active is None or self._active.phase not in ("paused", "recovery_required"):
            return None
        return self._active.lease_until

    def take_expired(self, now: float) -> Expired | None:
        """The transaction whose lease has run out, if any: the caller must SEND_RESUME for it, as for an end."""
        deadline = self.lease_deadline()
        record = self._active
        if record is None or deadline is None or now < deadline:
            return None
        lapsed = record.phase == "paused"
        record.move("ending")
        return Expired(_text(record.key), lapsed)

    def adopt_stray(self, now: float) -> bool:
        """The engine is paused and no transaction holds it: make it an untagged one that has to be ended.

        False: a transaction became active meanwhile, whose own end will resume the engine.
        """
        if self._active is not None:
            return False
        self._untagged = self._active = _Transaction(None, "recovery_required", since=now, lease_until=now)
        return True

    def engine_lost(self) -> None:
        """The engine's process is gone, and its pause with it."""
        if self._active is not None and self._active.phase in ("paused", "recovery_required"):
            self._complete(self._active)

    # What can be seen

    @property
    def state(self) -> SidecarState:
        return "running" if self._active is None else STATES[self._active.phase]

    @property
    def holder(self) -> Holder | None:
        """The active transaction, once it has touched the engine."""
        record = self._active
        if record is None or record.phase == "checking":
            return None
        session = record.key.session if record.key else None
        return Holder(_text(record.key), session, record.since, record.lease_until)

    @property
    def idle(self) -> bool:
        return self._active is None

    @property
    def transactions(self) -> int:
        """Retained transactions, tombstones included."""
        return len(self._tagged) + (self._untagged is not None)

    @property
    def sessions(self) -> int:
        return len(self._sessions)

    def retains(self, txn: str | None) -> bool:
        return self._find(_parsed(txn)) is not None

    # Bookkeeping

    def _find(self, key: TransactionId | None) -> _Transaction | None:
        return self._untagged if key is None else self._tagged.get(key)

    def _owned(self, txn: str | None, *phases: Phase) -> _Transaction:
        record = self._find(_parsed(txn))
        if record is None or record is not self._active or record.phase not in phases:
            raise LocalProtocolError(f"transaction {txn} isn't in {' or '.join(phases)}: {record}")
        return record

    def _superseded(self, key: TransactionId | None) -> bool:
        """Whether this sequence or a later one of its session has completed."""
        session = self._sessions.get(key.session) if key else None
        return key is not None and session is not None and key.sequence <= session.watermark

    def _touch(self, key: TransactionId | None, now: float) -> None:
        if key is not None:
            self._sessions[key.session].last_seen = now

    def _close(self, record: _Transaction) -> None:
        """End an attempt that left nothing behind. Without an end it may be tried again with the same id."""
        if record.end_requested or self._superseded(record.key):
            self._complete(record)
        else:
            self._forget(record)

    def _complete(self, record: _Transaction) -> None:
        record.move("completed")
        if record is self._active:
            self._active = None
        if record.key is None:
            self._forget(record)
        else:
            self._raise_watermark(record.key)

    def _forget(self, record: _Transaction) -> None:
        if record is self._active:
            self._active = None
        if record.key is None:
            self._untagged = None
        else:
            del self._tagged[record.key]

    def _raise_watermark(self, key: TransactionId) -> None:
        session = self._sessions[key.session]
        session.watermark = max(session.watermark, key.sequence)
        for (
            other
        ) in self._tagged.values():  # a pause that was told "not ready" and is now too old to be asked for again
            if other.phase == "waiting" and self._superseded(other.key):
                other.move("completed")

    def _register(self, key: TransactionId | None, now: float) -> _Transaction:
        record = _Transaction(key)
        if key is None:
            self._untagged = record
            return record
        self._make_room(key, now)
        self._sessions.setdefault(key.session, _Session(now)).last_seen = now
        self._tagged[key] = record
        return record

    def _entomb(self, key: TransactionId | None, now: float) -> None:
        """An end without its pause: the pause, should it still come, must not pause anything (R78)."""
        if key is None:
            self._untagged_end = True
        elif not self._superseded(key):
            try:
                record = self._register(key, now)
            except CapacityReachedError:
                if key.session not in self._sessions:
                    raise
                self._raise_watermark(key)  # refuses the late pause as well as a tombstone does
            else:
                self._complete(record)

    def _make_room(self, key: TransactionId, now: float) -> None:
        """Forget what may be forgotten until `key` fits; nothing is created if it can't (R90 to R96)."""
        full = len(self._tagged) >= self._transaction_cap
        new_session = key.session not in self._sessions
        if full or (new_session and len(self._sessions) >= self._session_cap):
            self._reclaim_idle(key.session, now)
        if new_session and len(self._sessions) >= self._session_cap:
            raise CapacityReachedError(f"{self._session_cap} sessions are known and none is idle")
        if len(self._tagged) >= self._transaction_cap:
            oldest = next((k for k, record in self._tagged.items() if record.phase == "completed"), None)
            if oldest is None:
                raise CapacityReachedError(f"{self._transaction_cap} transactions are unfinished")
            del self._tagged[oldest]

    def _reclaim_idle(self, keep: str, now: float) -> None:
        busy = {k.session for k, record in self._tagged.items() if record.phase not in ("waiting", "completed")}
        idle = {name for name, session in self._sessions.items() if now - session.last_seen > self._retention_s}
        gone = idle - busy - {keep}
        self._sessions = {name: session for name, session in self._sessions.items() if name not in gone}
        self._tagged = {k: record for k, record in self._tagged.items() if k.session not in gone}


def _parsed(txn: str | None) -> TransactionId | None:
    return None if txn is None else TransactionId.parse(txn)


def _text(key: TransactionId | None) -> str | None:
    return None if key is None else str(key)
