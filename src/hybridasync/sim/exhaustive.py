"""Every order of events of the transaction protocol, for up to three transactions in two sessions.

A model of the controller and its restart, a network that loses, doubles and delays, the sequences of a sidecar around
the *real* transaction machine (`machine_table.py`), and an engine. The search visits every reachable state once.
Within a state anything may happen next that could: a message arrives or never does, a client gives up, a call goes on,
a client's leaving is noticed or isn't; and, as often as `Limits` allow, a message is doubled, the controller dies, the
sidecar dies, the engine fails or dies, a lease runs out, somebody else ends the pause.

What must hold is said by a reference that knows the events and no more of the machine than its answers: `judge.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from hybridasync.errors import LocalProtocolError
from hybridasync.sim.judge import Judge
from hybridasync.sim.machine_table import MachineTable, Outcome
from hybridasync.sim.protocol_state import Call, Client, Limits, Scope, Seen, State

SESSIONS = ("a" * 32, "b" * 32)
_ONE = ((0, 0),)
_TWO = ((0, 0), (0, 1))
_APART = ((0, 0), (1, 0))
_THREE = ((0, 0), (0, 1), (1, 0))  # the third one is of a controller that was started after the first one's end

SCOPES: Mapping[str, Scope] = MappingProxyType(
    {
        "three transactions, each end tried twice": Scope(_THREE, attempts=2),
        "three transactions of two controllers at once": Scope(_THREE, together=True),
        "two transactions, two faults": Scope(_TWO, Limits(faults=2)),
        "three transactions, a fault": Scope(_THREE, Limits(faults=1)),
        "one transaction, every fault": Scope(_ONE, Limits(faults=9)),
        "three transactions, a fault, an attached engine": Scope(_THREE, Limits(faults=1), owned=False),
        "one transaction, every fault, an attached engine": Scope(_ONE, Limits(faults=9), owned=False),
        "two transactions of two controllers at once, two faults": Scope(_APART, Limits(faults=2), together=True),
        "three transactions, two faults": Scope(_THREE, Limits(faults=2)),
    }
)
"""In all of them messages are lost and late, clients give up, and the sidecar notices it or not, at every moment.

An attached engine outlives its sidecar, and its pause with it.
"""

QUICK = tuple(SCOPES)[:3]

Step = tuple[str, State, str | None]
"""What happens, what it leads to, and what is wrong about that."""


@dataclass(frozen=True, slots=True)
class Found:
    """`trace`: the events that lead to the violation."""

    states: int
    transitions: int
    machine_states: int
    violation: str | None = None
    trace: tuple[str, ...] = ()


@dataclass(slots=True)
class Search:
    """One search. `run` visits everything, or stops at the first violation."""

    scope: Scope
    table: MachineTable = field(default_factory=MachineTable)
    names: tuple[str, ...] = field(init=False)
    judge: Judge = field(init=False)

    def __post_init__(self) -> None:
        self.names = tuple(f"ha1:{SESSIONS[session]}:{number}" for session, number in self.scope.transactions)
        self.judge = Judge(self.scope, self.table, self.names)

    def run(self) -> Found:
        start = State(clients=(Client(),) * len(self.names), limits=self.scope.limits)
        seen = Seen()
        seen.add(start)
        path = [("", self._successors(start))]
        transitions = 0
        while path:
            try:
                step = next(path[-1][1], None)
            except LocalProtocolError as error:  # the machine contradicts itself
                step = ("a call goes on", start, str(error))
            if step is None:
                path.pop()
                continue
            transitions += 1
            label, state, violation = step
            violation = violation or self.judge.state(state)
            if violation is not None:
                trace = (*(entry for entry, _ in path[1:]), label)
                return Found(len(seen), transitions, len(self.table), violation, trace)
            if not seen.add(state):
                continue
            path.append((label, self._successors(state)))
        return Found(len(seen), transitions, len(self.table))

    def _successors(self, state: State) -> Iterator[Step]:
        yield from self._messages(state)
        for call in dict.fromkeys(state.calls):
            yield from self._call(state, call)
        for txn in range(len(self.names)):
            yield from self._client(state, txn)
        yield from self._faults(state)

    # The network

    def _messages(self, state: State) -> Iterator[Step]:
        for kind, txn in dict.fromkeys(state.network):
            waits = state.clients[txn].phase == ("asking" if kind == "pause" else "ending")
            attended = waits and not any(c.attended and (c.kind, c.txn) == (kind, txn) for c in state.calls)
            after = state.without_message((kind, txn))
            if kind == "end":
                after = after._replace(arrived=after.arrived | 1 << txn)
            yield from self._ask(after, Call(kind, txn, "arriving", attended), f"{kind} {txn} arrives")

    def _sent(self, state: State, kind: str, txn: int) -> Iterator[tuple[str, State]]:
        once = state.with_message((kind, txn))
        yield f"{kind} {txn} sent", once
        doubled = state.limits.spend("doubled")
        if doubled is not None:
            yield f"{kind} {txn} sent twice", once.with_message((kind, txn))._replace(limits=doubled)

    # The sidecar

    def _ask(self, state: State, call: Call, label: str) -> Iterator[Step]:
        """A call arrives, or one that waits for its turn asks again. `state` doesn't hold it."""
        if call.kind == "pause":
            machine, outcome = self.table.move(state.machine, "pause", self.names[call.txn])
        else:
            event = "end" if call.at == "arriving" else "end again"
            machine, outcome = self.table.move(state.machine, event, self.names[call.txn])
        if outcome == "wait":
            if call.at == "arriving" or machine != state.machine:
                yield label, state._replace(machine=machine).with_call(call._replace(at="queued")), None
            elif self.judge.nobody_works(state):
                yield label, state, f"{call.kind} {call.txn} waits for nobody"
            return
        after = state._replace(machine=machine)
        if outcome == "check":
            yield label, after.with_call(call._replace(at="checking")), None
        elif outcome == "send_resume":
            yield label, after.with_call(call._replace(at="ending")), None
        elif call.kind == "end" and outcome == "done":
            yield from self._ended(after, call, label)
        else:
            yield from self._answered(after, call, outcome, label=label)

    def _ended(self, state: State, call: Call, label: str) -> Iterator[Step]:
        """Nothing was to be resumed for this id; an engine that is paused by nobody is resumed before the answer."""
        if state.paused:
            machine, outcome = self.table.move(state.machine, "stray", None)
            if outcome == "send_resume":
                machine, _ = self.table.move(machine, "end", None)
                yield label, state._replace(machine=machine).with_call(call._replace(at="ending stray")), None
                return
        yield from self._answered(state, call, "done", label=label)

    def _call(self, state: State, call: Call) -> Iterator[Step]:
        rest = state.without_call(call)
        name = self.names[call.txn] if call.txn >= 0 and call.at != "ending stray" else None
        what = f"{call.kind} {call.txn} {call.at}"
        if call.at == "queued":
            yield from self._ask(rest, call, f"{call.kind} {call.txn} asks again")
        elif call.at == "checking":
            yield from self._checked(rest, call, what)
        elif call.at == "pausing":
            yield from self._pausing(rest, call, what)
        else:
            event = "rolled back" if call.at == "rolling back" else "ended"
            machine, _ = self.table.move(rest.machine, event, name)
            outcome: Outcome = "no" if call.at == "rolling back" else "done"
            yield from self._answered(
                rest._replace(machine=machine, paused=False), call, outcome, label=f"{what}: resumed"
            )
            limits = rest.limits.spend("engine")
            if limits is not None:
                machine, _ = self.table.move(rest.machine, "resume failed", name)
                failed = rest._replace(machine=machine, limits=limits)
                yield from self._answered(failed, call, "refused", label=f"{what}: the engine refuses")
        if not call.attended:
            yield from self._left(rest, call, name)

    def _checked(self, rest: State, call: Call, what: str) -> Iterator[Step]:
        limits = rest.limits.spend("not_ready")
        for event, left in (("ready", rest.limits), ("not ready", limits)):
            if left is None:
                continue
            machine, outcome = self.table.move(rest.machine, event, self.names[call.txn])
            after = rest._replace(machine=machine, limits=left)
            if outcome == "send_pause":
                yield f"{what}: {event}", after.with_call(call._replace(at="pausing", life=rest.life)), None
            else:
                yield from self._answered(after, call, outcome, label=f"{what}: {event}")

    def _pausing(self, rest: State, call: Call, what: str) -> Iterator[Step]:
        """The pause is with the engine, which does it; or fails, having done it, not, or doing it later."""
        name = self.names[call.txn]
        if call.life == rest.life:
            machine, outcome = self.table.move(rest.machine, "pause sent", name)
            after = rest._replace(machine=machine, paused=True)
            if outcome == "send_resume":
                yield f"{what}: superseded", after.with_call(call._replace(at="rolling back")), None
            else:
                yield from self._answered(after, call, outcome, label=f"{what}: paused")
        limits = rest.limits if call.life != rest.life else rest.limits.spend("engine")
        if limits is None:
            return
        machine, _ = self.table.move(rest.machine, "pause failed", name)
        failed = rest._replace(machine=machine, limits=limits).with_call(call._replace(at="rolling back"))
        yield f"{what}: failed", failed, None
        if call.life == rest.life:
            yield f"{what}: done, and reported as failed", failed._replace(paused=True), None
            yield f"{what}: failed, to be done later", failed._replace(late_pause=1), None
            machine, _ = self.table.move(rest.machine, "pause not sent", name)
            after = rest._replace(machine=machine, limits=limits)
            yield from self._answered(after, call, "no", label=f"{what}: not sent")

    def _left(self, rest: State, call: Call, name: str | None) -> Iterator[Step]:
        """The client went away, and the sidecar notices. A pause on its way to the engine is waited for."""
        if call.at == "queued":
            machine = self.table.move(rest.machine, "withdraw", name)[0] if call.kind == "pause" else rest.machine
            yield f"{call.kind} {call.txn} withdrawn", rest._replace(machine=machine), None
        elif call.at in ("checking", "pausing") and call.life in (rest.life, 0):
            machine, outcome = self.table.move(rest.machine, "abandon", name)
            after = rest._replace(machine=machine, paused=rest.paused or call.at == "pausing")
            if outcome == "send_resume":
                after = after.with_call(call._replace(at="rolling back"))
            yield f"{call.kind} {call.txn} abandoned", after, None

    # The controller

    def _answered(self, state: State, call: Call, outcome: Outcome, *, label: str) -> Iterator[Step]:
        wrong = self.judge.answer(state, call, outcome)
        if call.kind == "end" and outcome == "done":
            state = state._replace(acknowledged=state.acknowledged | 1 << call.txn)
        if not call.attended:
            yield label, state, wrong
        elif call.kind == "end":
            if outcome == "done":
                yield label, state.with_client(call.txn, Client("settled")), wrong
            else:
                for told, after in self._again(state, call.txn):
                    yield f"{label}, {told}", after, wrong
        elif outcome == "paused":
            yield label, state.with_client(call.txn, state.clients[call.txn]._replace(phase="holding")), wrong
        elif outcome == "not_ready":
            for told, after in self._sent(state, "pause", call.txn):
                yield f"{label}, {told}", after, wrong
        else:
            yield label, state.with_client(call.txn, state.clients[call.txn]._replace(phase="owing")), wrong

    def _client(self, state: State, txn: int) -> Iterator[Step]:
        client = state.clients[txn]
        if client.phase == "idle" and self._may_begin(state, txn):
            session = self.scope.transactions[txn][0]
            begun = state.with_client(txn, Client("asking"))._replace(live=max(state.live, session))
            for told, after in self._sent(begun, "pause", txn):
                yield told, after, None
        elif client.phase == "asking":
            left = state.leave("pause", txn)
            yield f"pause {txn} given up", left.with_client(txn, client._replace(phase="owing")), None
        elif client.phase in ("holding", "owing"):
            ending = state.with_client(txn, client._replace(phase="ending"))
            for told, after in self._sent(ending, "end", txn):
                yield told, after, None
        elif client.phase == "ending":
            for told, after in self._again(state.leave("end", txn), txn):
                yield f"end {txn} given up, {told}", after, None

    def _again(self, state: State, txn: int) -> Iterator[tuple[str, State]]:
        """After an end that wasn't confirmed: another one, and in the end a fence, which takes the id along."""
        client = state.clients[txn]
        if client.attempts + 1 < self.scope.attempts:
            once_more = state.with_client(txn, client._replace(attempts=client.attempts + 1))
            yield from self._sent(once_more, "end", txn)
        else:
            machine, outcome = self.table.move(state.machine, "end", self.names[txn])
            fenced = self._engine_dies(state.with_client(txn, Client("settled"))._replace(machine=machine))
            if outcome == "send_resume":  # the engine's death was its resume
                fenced = fenced._replace(machine=self.table.move(fenced.machine, "ended", self.names[txn])[0])
            yield f"fenced for {txn}", fenced._replace(arrived=fenced.arrived | 1 << txn)

    def _may_begin(self, state: State, txn: int) -> bool:
        """One transaction after the other, within a session; a new controller first pays what the old one owed."""
        session = self.scope.transactions[txn][0]
        others = [
            (self.scope.transactions[other][0], client.phase)
            for other, client in enumerate(state.clients)
            if other != txn
        ]
        mine = [client.phase for other, client in enumerate(state.clients[:txn]) if self._session(other) == session]
        if any(phase != "settled" for phase in mine):
            return False
        if self.scope.together:
            return True
        if session < state.live:
            return False
        return all(phase in ("idle", "settled") for of, phase in others if of != session)

    def _session(self, txn: int) -> int:
        return self.scope.transactions[txn][0]

    # What else may happen

    def _faults(self, state: State) -> Iterator[Step]:
        if state.late_pause == 1:
            yield "the engine pauses late", state._replace(late_pause=2, paused=True), None
        elif state.late_pause == 2 and state.paused:
            machine, outcome = self.table.move(state.machine, "stray", None)
            if outcome == "send_resume":
                machine, _ = self.table.move(machine, "end", None)
                watch = Call("lease", -1, "ending stray", attended=False)
                yield "the stray pause is found", state._replace(machine=machine).with_call(watch), None
        yield from self._leases(state)
        limits = state.limits.spend("engine")
        if limits is not None:
            yield "the engine dies", self._engine_dies(state._replace(limits=limits)), None
        limits = state.limits.spend("sidecar")
        if limits is not None:
            yield "the sidecar dies", self._sidecar_dies(state._replace(limits=limits)), None
        limits = state.limits.spend("controller")
        if limits is not None and not self.scope.together and state.live == 0:
            yield "the controller dies", self._controller_dies(state._replace(limits=limits)), None
        limits = state.limits.spend("foreign")
        for txn, client in enumerate(state.clients):
            if limits is not None and client.phase in ("asking", "holding", "owing"):
                ended = state.with_client(txn, client._replace(broken=True))._replace(limits=limits)
                yield f"somebody else ends {txn}", ended.with_message(("end", txn)), None

    def _leases(self, state: State) -> Iterator[Step]:
        expired = self.table.expire(state.machine)
        if expired is None:
            return
        machine, name, lapsed = expired
        limits = state.limits.spend("lease") if lapsed else state.limits  # a resume that failed is tried again anyway
        if limits is None:
            return
        txn = self.names.index(name) if name is not None else -1
        after = state._replace(machine=machine, limits=limits)
        if txn >= 0:
            client = after.clients[txn]
            after = after._replace(arrived=after.arrived | 1 << txn)
            if client.phase not in ("idle", "settled"):
                after = after.with_client(txn, client._replace(broken=True))
        at = "ending" if txn >= 0 else "ending stray"
        yield f"the lease of {txn} runs out", after.with_call(Call("lease", txn, at, attended=False)), None

    def _engine_dies(self, state: State) -> State:
        phase, holder = self.judge.holder(state)
        if holder is not None and phase in ("paused", "recovery_required"):
            state = state._replace(arrived=state.arrived | 1 << self.names.index(holder))
        machine, _ = self.table.move(state.machine, "engine lost", None)
        return state._replace(machine=machine, paused=False, life=state.life + 1, late_pause=0).broken()

    def _sidecar_dies(self, state: State) -> State:
        after = state._replace(machine=0, calls=(), arrived=0, acknowledged=0, forgetful=True).broken()
        return self._engine_dies(after) if self.scope.owned else after

    def _controller_dies(self, state: State) -> State:
        for txn, client in enumerate(state.clients):
            if client.phase not in ("idle", "settled"):
                state = state.with_client(txn, Client("owing"))
        calls = tuple(sorted(call._replace(attended=False) for call in state.calls))
        return state._replace(calls=calls, live=1)
