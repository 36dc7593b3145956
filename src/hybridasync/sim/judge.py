"""The reference of the exhaustive search: what must be true of answers and states, whatever the machine thinks.

An end that was confirmed holds for its id and all older ones of its session, for ever. A pause that was confirmed holds
until its end arrives, or until something that the client learns of. Nothing else is owed to anybody: when no debt is
open and no call is under way, the engine runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hybridasync.sim.machine_table import MachineTable, Outcome
from hybridasync.sim.protocol_state import WORKING, Call, Scope, State

NOTHING_OWED = ("idle", "settled")


@dataclass(slots=True)
class Judge:
    """Each method answers what is wrong, or None."""

    scope: Scope
    table: MachineTable
    names: tuple[str, ...]
    _held: dict[int, tuple[str, str | None]] = field(default_factory=dict)

    def answer(self, state: State, call: Call, outcome: Outcome) -> str | None:
        """What a call is told; `state` is that in the moment of the answer."""
        if call.kind == "pause" and outcome == "paused":
            if self._ended(call.txn, state.acknowledged) and not state.forgetful:
                return f"pause {call.txn} is confirmed after its end was"
            if not state.paused or self.holder(state) != ("paused", self.names[call.txn]):
                return f"pause {call.txn} is confirmed, and doesn't hold"
        elif call.kind == "pause" and outcome == "ended" and not self._ended(call.txn, state.arrived):
            return f"pause {call.txn} is told of an end that never came"
        elif call.kind == "end" and outcome == "done" and self.holder(state)[1] == self.names[call.txn]:
            return f"end {call.txn} is confirmed while it holds the engine"
        return None

    def state(self, state: State) -> str | None:
        """What must be so at every moment."""
        working = [call for call in state.calls if call.at in WORKING]
        if len(working) > 1:
            return "two calls act on one engine"
        phase, holder = self.holder(state)
        txn = self.names.index(holder) if holder is not None else None
        if phase == "paused" and not state.paused:
            return "it counts as paused, and runs"
        if phase == "paused" and txn is not None and state.acknowledged >> txn & 1:
            return f"it is held by {txn}, whose end was confirmed"
        for index, client in enumerate(state.clients):
            if client.phase == "holding" and not client.broken and (not state.paused or txn != index):
                return f"{index} was resumed, and nobody told its client"
        if working or state.late_pause == 2:
            return None
        if state.paused and phase not in ("paused", "recovery_required") and not state.forgetful:
            return f"the engine is paused, and its sidecar says {phase}"
        if phase == "paused" and not state.forgetful and (txn is None or state.clients[txn].phase in NOTHING_OWED):
            return f"it is paused by {txn}, which nobody owes"
        return None

    def nobody_works(self, state: State) -> bool:
        """Whether a call that waits now would wait for ever."""
        idle = self.holder(state)[0] == "running"
        return idle and not any(call.at in WORKING for call in state.calls)

    def holder(self, state: State) -> tuple[str, str | None]:
        """What the machine says of the engine, and who holds it."""
        if state.machine not in self._held:
            self._held[state.machine] = self.table.held(state.machine)
        return self._held[state.machine]

    def _ended(self, txn: int, ends: int) -> bool:
        """Whether one of `ends` (bits) is of this id, or of a newer one of its session."""
        session, number = self.scope.transactions[txn]
        return any(
            ends >> other & 1 and of == session and later >= number
            for other, (of, later) in enumerate(self.scope.transactions)
        )
