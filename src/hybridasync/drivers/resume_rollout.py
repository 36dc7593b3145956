"""Engines that a dead run, or anyone, left paused: find them, end their pauses, and say what is still paused (R104).

status ─▶ end what is owed (3 attempts) ─▶ status ─▶ [still paused, and forced] fence ─▶ status
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import anyio

from hybridasync.errors import EngineError, Rejected
from hybridasync.ports import Sidecar
from hybridasync.types import SidecarStatus

END_ATTEMPTS = 3
"""R98, with a second between."""

RETRY_PAUSE_S = 1.0

SETTLING_S = 2.0
"""A sidecar that is just resuming its engine by itself is given so long before its state counts."""

PAUSED_STATES = frozenset({"pausing", "paused", "ending", "recovery_required"})

UNAUTHORIZED = 401

Scope = Literal["nothing", "owed", "all"]


@dataclass(frozen=True, slots=True)
class Orders:
    """What may be done.

    `owed` are transactions whose end this run owes. `scope`: end nothing, what is owed, or whatever holds the engine.
    `force` fences an engine that doesn't resume. `reserve` says why the rest is left alone.
    """

    owed: tuple[str, ...] = ()
    scope: Scope = "owed"
    force: bool = False
    reserve: str = ""


@dataclass(slots=True)
class Report:
    """One engine, as it was found (`before`) and as it was left (`after`); None: it didn't answer, see `detail`."""

    engine: str
    owed: tuple[str, ...] = ()  # transactions whose end the run owes
    before: SidecarStatus | None = None
    after: SidecarStatus | None = None
    done: list[str] = field(default_factory=list)
    settled: dict[str, str] = field(default_factory=dict)  # transaction → how
    detail: str = ""

    @property
    def paused(self) -> bool:
        """Whether it is paused, or may be: what doesn't answer can't be trusted to run."""
        return self.after is None or self.after.state in PAUSED_STATES


async def resume_engine(sidecar: Sidecar, orders: Orders) -> Report:
    """End the pauses of one engine as far as the orders go. Raises nothing that an engine or a sidecar may cause."""
    report = Report(sidecar.name, orders.owed)
    report.before = report.after = await _status(sidecar, report)
    for txn in _to_end(report.before, orders):
        if await _ended(sidecar, txn, report) and txn is not None:
            report.settled[txn] = "ended"
    if report.done:
        report.after = await _settled_status(sidecar, report)
    unresolved = [txn for txn in orders.owed if txn not in report.settled] if orders.scope != "nothing" else []
    if orders.force and (report.paused or unresolved) and await _fenced(sidecar, orders, report):
        report.settled |= dict.fromkeys(orders.owed, "fenced")
        report.after = await _settled_status(sidecar, report)
    if not report.done:
        report.done.append(_left_alone(report, orders))
    return report


async def resume_engines(work: Sequence[tuple[Sidecar, Orders]]) -> list[Report]:
    """All at once: one that hangs delays no other."""
    reports: dict[int, Report] = {}

    async def one(index: int, sidecar: Sidecar, orders: Orders) -> None:
        reports[index] = await resume_engine(sidecar, orders)

    async with anyio.create_task_group() as tasks:
        for index, (sidecar, orders) in enumerate(work):
            tasks.start_soon(one, index, sidecar, orders)
    return [reports[index] for index in range(len(work))]


def _to_end(status: SidecarStatus | None, orders: Orders) -> list[str | None]:
    """What is owed is ended even where nothing seems paused: the pause may still be on its way (R78)."""
    if orders.scope == "nothing":
        return []
    wanted: list[str | None] = list(orders.owed)
    if orders.scope == "all" and status is not None and status.state in PAUSED_STATES and status.txn not in wanted:
        wanted.append(status.txn)
    return wanted


async def _ended(sidecar: Sidecar, txn: str | None, report: Report) -> bool:
    for attempt in range(END_ATTEMPTS):
        try:
            await sidecar.end(txn)
        except EngineError as error:
            report.detail = str(error)
            if attempt + 1 < END_ATTEMPTS:
                await anyio.sleep(RETRY_PAUSE_S)
        else:
            report.done.append("ended")
            return True
    report.done.append("end failed")
    return False


async def _fenced(sidecar: Sidecar, orders: Orders, report: Report) -> bool:
    try:
        await sidecar.fence(orders.owed)
    except EngineError as error:
        report.done.append("fence failed")
        report.detail = str(error)
        return False
    report.done.append("fenced")
    return True


async def _settled_status(sidecar: Sidecar, report: Report) -> SidecarStatus | None:
    status = await _status(sidecar, report)
    with anyio.move_on_after(SETTLING_S):
        while status is not None and status.state in ("pausing", "ending"):
            await anyio.sleep(SETTLING_S / 10)
            status = await _status(sidecar, report)
    return status


async def _status(sidecar: Sidecar, report: Report) -> SidecarStatus | None:
    try:
        status = await sidecar.status()
    except EngineError as error:
        report.detail = str(error)
        if isinstance(error, Rejected) and error.status == UNAUTHORIZED:
            report.detail += " (it has another token: see --token-file)"
        return None
    report.detail = status.detail or report.detail
    return status


def _left_alone(report: Report, orders: Orders) -> str:
    if report.before is None:
        return "no answer"
    if not report.paused:
        return "nothing to do"
    return orders.reserve or "left"
