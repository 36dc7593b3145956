"""The rollout ledger: which groups are being made, for which step, and when another may start.

A group's *partition* is the number of steps that were finished when it was admitted; `step - partition` is its lag.
Admission stops at `(finished + max_staleness + 1) * batch_size` groups in all, so at most
`(max_staleness + 1) * batch_size` are submitted and not yet consumed (C19). A batch takes the oldest complete groups
first, and waits where leaving the others behind would make one of them pass the bound; so nothing that was made is
thrown away for its age.

    admit ──▶ in flight ──▶ complete ──▶ taken (trained)
                 │              └──▶ filtered   (its place is free again)
                 └──▶ dropped(reason)           (the same)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hybridasync.errors import LocalProtocolError
from hybridasync.types import Group, Prompt


@dataclass(slots=True)
class _Entry:
    prompt: Prompt
    partition: int
    group: Group | None = None  # None while in flight


@dataclass(frozen=True, slots=True)
class Starved:
    """A batch that can't be filled: `max_gen_batches` are used up, or the data ended. Counts since the last batch."""

    step: int
    kept: int
    wanted: int
    filtered: int
    dropped: int
    exhausted: bool


@dataclass(slots=True)
class RolloutLedger:
    """See the module. All methods are synchronous decisions; the caller waits and retries after any change."""

    batch_size: int
    max_staleness: int
    num_rollout: int
    max_gen_batches: int = 10
    finished: int = 0  # steps that are trained and, where due, published
    exhausted: bool = False  # the prompt source has nothing more
    counts: Counter[str] = field(default_factory=Counter)  # admitted, filtered, dropped, trained
    _entries: dict[int, _Entry] = field(default_factory=dict)
    _since_take: Counter[str] = field(default_factory=Counter)  # the same, since the last batch
    _steps_taken: int = 0

    @property
    def in_flight(self) -> int:
        return sum(entry.group is None for entry in self._entries.values())

    @property
    def complete(self) -> int:
        return len(self._entries) - self.in_flight

    @property
    def slots(self) -> int:
        return (self.max_staleness + 1) * self.batch_size

    def may_admit(self) -> bool:
        """Whether another group may be admitted now."""
        steps = min(self.finished + self.max_staleness + 1, self.num_rollout)
        in_budget = self._since_take["admitted"] < self.max_gen_batches * self.batch_size
        return in_budget and self._placed < steps * self.batch_size

    @property
    def wants_more(self) -> bool:
        """Whether groups of later steps are still to be admitted, now or once places are free."""
        return not self.exhausted and self._placed < self.num_rollout * self.batch_size

    def admit(self, prompt: Prompt) -> int:
        """Reserve a place and return the partition. The caller has asked `may_admit` just before."""
        if not self.may_admit() or prompt.uid in self._entries:
            raise LocalProtocolError(f"prompt {prompt.uid} can't be admitted: no place is free, or it is in flight")
        self._count("admitted")
        self._entries[prompt.uid] = _Entry(prompt, self.finished)
        return self.finished

    def completed(self, group: Group, *, keep: bool) -> None:
        """All samples of a group are scored. `keep` False filters it and frees its place."""
        entry = self._flying(group.prompt.uid)
        if keep:
            entry.group = group
        else:
            self._free(group.prompt.uid, "filtered")

    def dropped(self, uid: int) -> None:
        """A group that can't be made; another takes its place."""
        self._flying(uid)
        self._free(uid, "dropped")

    def take(self, step: int) -> tuple[Group, ...] | Starved | None:
        """The batch of `step`; None while it isn't ready, Starved if it can't get ready any more.

        With the data at its end a smaller batch is taken rather than lost (C21).
        """
        ready = [entry for entry in self._entries.values() if entry.group is not None]
        ready = sorted(ready, key=lambda entry: (entry.partition, entry.prompt.uid))[: self.batch_size]
        if len(ready) == self.batch_size and self._in_time(step, ready):
            return self._taken(ready)
        if self.in_flight or (not self.exhausted and self.may_admit()):
            return None
        if self.exhausted and ready:
            return self._taken(ready)
        count = self._since_take
        return Starved(step, len(ready), self.batch_size, count["filtered"], count["dropped"], self.exhausted)

    def finish(self, step: int) -> None:
        """`step` is trained and, where due, published: its places may be used for later partitions."""
        if step != self.finished:
            raise LocalProtocolError(f"step {step} finished out of order, expected {self.finished}")
        self.finished = step + 1

    def pending(self) -> list[int]:
        """Uids of the groups that are admitted and not trained on: a resumed run draws these prompts first."""
        return sorted(self._entries)

    def state(self) -> dict[str, Any]:
        """What a checkpoint after a finished step needs, besides `pending`."""
        return {"finished": self.finished, "counts": dict(self.counts)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on after `state`, with nothing in flight."""
        self.finished = self._steps_taken = int(state["finished"])
        self.counts = Counter(state["counts"])

    @property
    def _placed(self) -> int:
        """Places in use: a full batch for each step taken, however many groups it had, and the live groups."""
        return self._steps_taken * self.batch_size + len(self._entries)

    def _in_time(self, step: int, batch: list[_Entry]) -> bool:
        """Whether all groups left behind by this batch can still be trained on within the bound."""
        left = Counter(entry.partition for entry in self._entries.values())
        left.subtract(entry.partition for entry in batch)
        behind = 0
        for partition in sorted(left):
            behind += left[partition]
            if behind > max(0, partition + self.max_staleness - step) * self.batch_size:
                return False
        return True

    def _count(self, what: str) -> None:
        self.counts[what] += 1
        self._since_take[what] += 1

    def _taken(self, entries: list[_Entry]) -> tuple[Group, ...]:
        for entry in entries:
            del self._entries[entry.prompt.uid]
        self.counts["trained"] += len(entries)
        self._steps_taken += 1
        self._since_take.clear()
        return tuple(entry.group for entry in entries if entry.group is not None)

    def _flying(self, uid: int) -> _Entry:
        entry = self._entries.get(uid)
        if entry is None or entry.group is not None:
            raise LocalProtocolError(f"group {uid} isn't in flight")
        return entry

    def _free(self, uid: int, how: str) -> None:
        del self._entries[uid]
        self._count(how)
