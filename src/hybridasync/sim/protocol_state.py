"""A state of the exhaustive search: everything that two histories must share to have the same future."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

WORKING = ("checking", "pausing", "rolling back", "ending", "ending stray")
"""A call in one of these acts on the engine, or is about to."""


class Call(NamedTuple):
    """A request inside the sidecar. `attended`: its client still waits for the answer."""

    kind: str  # "pause", "end" or "lease"
    txn: int  # -1: nobody's
    at: str  # "queued" or one of WORKING
    attended: bool
    life: int = 0  # of the engine that a pause was sent to


class Client(NamedTuple):
    """One transaction as its controller sees it; the journal has its debt from "asking" until "settled"."""

    phase: str = "idle"  # idle, asking, holding, owing, ending, settled
    attempts: int = 0
    broken: bool = False  # its pause may end by itself: a lease, a death, an end that somebody else sent


class Limits(NamedTuple):
    """So often each fault may still happen; `faults` bounds all of them together."""

    faults: int = 0
    doubled: int = 2
    controller: int = 1  # its death
    sidecar: int = 1  # its death: it forgets everything
    engine: int = 1  # a refusal, a failure or its death
    lease: int = 1
    not_ready: int = 1
    foreign: int = 1  # an end by resume-rollout, while the transaction lives

    def spend(self, kind: str) -> Limits | None:
        """None: it can't happen any more."""
        left: int = getattr(self, kind)
        if not left or not self.faults:
            return None
        return self._replace(**{kind: left - 1, "faults": self.faults - 1})


class State(NamedTuple):
    clients: tuple[Client, ...]
    limits: Limits
    machine: int = 0  # number in the table
    paused: bool = False  # what is true of the engine
    life: int = 0  # of the engine: grows when it is started anew
    calls: tuple[Call, ...] = ()  # sorted: equal ones can't be told apart
    network: tuple[tuple[str, int], ...] = ()  # (kind, txn) of each message that may still arrive, sorted
    live: int = 0  # the session of the controller that lives
    arrived: int = 0  # bits of the transactions whose end, lease or engine's death reached the sidecar
    acknowledged: int = 0  # of those whose end it confirmed
    forgetful: bool = False  # the sidecar died: a pause from before may come late, and only its lease ends it
    late_pause: int = 0  # 1: the engine may yet do a pause that it reported as failed; 2: it did

    def with_call(self, call: Call) -> State:
        return self._replace(calls=tuple(sorted((*self.calls, call))))

    def without_call(self, call: Call) -> State:
        index = self.calls.index(call)
        return self._replace(calls=self.calls[:index] + self.calls[index + 1 :])

    def with_message(self, message: tuple[str, int]) -> State:
        return self._replace(network=tuple(sorted((*self.network, message))))

    def without_message(self, message: tuple[str, int]) -> State:
        index = self.network.index(message)
        return self._replace(network=self.network[:index] + self.network[index + 1 :])

    def with_client(self, txn: int, client: Client) -> State:
        return self._replace(clients=(*self.clients[:txn], client, *self.clients[txn + 1 :]))

    def leave(self, kind: str, txn: int) -> State:
        """The client of this call doesn't wait any more."""
        gone = [c._replace(attended=False) if (c.kind, c.txn) == (kind, txn) else c for c in self.calls]
        return self._replace(calls=tuple(sorted(gone)))

    def broken(self) -> State:
        """No client may rely on its pause any more."""
        clients = (c._replace(broken=c.phase not in ("idle", "settled")) for c in self.clients)
        return self._replace(clients=tuple(clients))


class Seen:
    """A set of states in about 100 bytes each: equal parts of states get one number, and a state is those numbers."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}
        self._keys: set[int] = set()

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, state: State) -> bool:
        """Whether it is new."""
        flags = state.paused | state.forgetful << 1 | state.late_pause << 2 | state.live << 4
        key = flags | state.arrived << 8 | state.acknowledged << 16 | state.life << 24 | state.machine << 32
        numbers = self._numbers
        for place, part in enumerate((state.clients, state.calls, state.network, state.limits)):
            key |= numbers.setdefault((place, part), len(numbers)) << 64 + 32 * place
        before = len(self._keys)
        self._keys.add(key)
        return len(self._keys) > before


@dataclass(frozen=True, slots=True)
class Scope:
    """What is searched. `owned`: the sidecar started its engine, and takes it along when it dies."""

    transactions: tuple[tuple[int, int], ...]  # session, sequence
    limits: Limits = field(default_factory=Limits)
    owned: bool = True
    together: bool = False  # both sessions at once, as of two controllers
    attempts: int = 1  # ends before a fence; the controller's third would add states, but no new kind of them
