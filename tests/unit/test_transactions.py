"""Requirements R70 to R97: the transaction machine, alone and inside the sidecar's sequences with a fake engine."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest
from tests.sidecar_kit import LEASE_S, A, B, Rig, txn
from tests.virtual_clock import virtual

from hybridasync.errors import LocalProtocolError, NotSent, Rejected
from hybridasync.protocol.transaction_id import MalformedTransactionError, TransactionId
from hybridasync.protocol.transactions import (
    ENDED,
    NOT_READY,
    PAUSED,
    RECOVERY_RETRY_S,
    Action,
    CapacityReachedError,
    RecoveryRequiredError,
    TransactionMachine,
)
from hybridasync.sidecar.control import EngineDownError


@pytest.fixture
def rig() -> Rig:
    return Rig()


async def settle() -> None:
    for _ in range(5):
        await anyio.lowlevel.checkpoint()


async def test_r70_status_says_who_paused_since_when_and_for_how_much_longer(rig: Rig) -> None:
    """R70: holder, transaction, age and lease of a pause are visible."""
    assert (await rig.control.status()).txn is None
    await rig.pause(txn(7))
    status = await rig.control.status()
    assert (status.state, status.txn, status.holder, status.weight_version) == ("paused", txn(7), A, "3")
    assert status.since is not None and status.since > 1.6e9
    assert status.lease_left_s is not None and LEASE_S - 30 < status.lease_left_s <= LEASE_S


async def test_r71_a_normal_pause_checks_and_then_pauses(rig: Rig) -> None:
    """R71: the check comes first, the engine is paused once, the state is `paused`."""
    gate = rig.hold("check")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(rig.keep, "pause", rig.pause, txn(0))
        await rig.engine.reached["check"].wait()
        assert (rig.machine.state, rig.engine.flags) == ("running", [])
        gate.set()
    assert rig.answers["pause"] is True
    assert (rig.machine.state, rig.engine.flags) == ("paused", [True])


@pytest.mark.parametrize(("name", "retained"), [(txn(0), True), (None, False)])
async def test_r72_not_ready_leaves_the_engine_running(rig: Rig, name: str | None, retained: bool) -> None:
    """R72, R58: 0 while requests are in flight; the same id may ask again; an untagged call leaves no transaction."""
    rig.engine.busy = 2
    assert not await rig.pause(name)
    assert (rig.machine.state, rig.engine.flags, rig.machine.retains(name)) == ("running", [], retained)
    rig.engine.busy = 0
    assert await rig.pause(name)


async def test_r73_a_pause_that_fails_is_rolled_back_and_reported(rig: Rig) -> None:
    """R73: the engine is resumed, the state is `running`, the original error comes out, and a retry may succeed."""
    failure = Rejected("e", "pause", 500)
    rig.engine.failures["pause"] = [failure]
    with pytest.raises(Rejected) as raised:
        await rig.pause(txn(0))
    assert raised.value is failure
    assert (rig.machine.state, rig.engine.flags) == ("running", [True, False])
    assert await rig.pause(txn(0))


async def test_r74_a_rollback_that_fails_keeps_the_pause_on_record(rig: Rig) -> None:
    """R74: recovery is required, the original error comes out, and an end isn't blocked."""
    rig.engine.failures["pause"] = [Rejected("e", "pause", 500)]
    rig.engine.failures["resume"] = [Rejected("e", "resume", 500)]
    with pytest.raises(Rejected, match="pause"):
        await rig.pause(txn(0))
    assert rig.machine.state == "recovery_required"
    with pytest.raises(RecoveryRequiredError):
        await rig.pause(txn(0))
    with anyio.fail_after(30):
        await rig.control.end(txn(0))
    assert rig.machine.state == "running"


async def test_r75_an_end_retries_the_rollback_until_it_succeeds(rig: Rig) -> None:
    """R75: the flags go True, False, False, False; in between the end fails and the pause stays on record."""
    rig.engine.failures["pause"] = [Rejected("e", "pause", 500)]
    rig.engine.failures["resume"] = [Rejected("e", "resume", 500), Rejected("e", "resume", 500)]
    with pytest.raises(Rejected):
        await rig.pause(txn(0))
    with pytest.raises(RecoveryRequiredError, match="Failed to recover weight-update transaction"):
        await rig.control.end(txn(0))
    assert rig.machine.state == "recovery_required"
    await rig.control.end(txn(0))
    assert (rig.machine.state, rig.engine.flags) == ("running", [True, False, False, False])


async def test_r76_an_end_during_the_check_cancels_the_pause(rig: Rig) -> None:
    """R76: the end waits for the check, the pause answers 0 without pausing, the engine runs."""
    gate = rig.hold("check")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(rig.keep, "pause", rig.pause, txn(0))
        await rig.engine.reached["check"].wait()
        tasks.start_soon(rig.keep, "end", rig.control.end, txn(0))
        await settle()
        assert "end" not in rig.answers
        gate.set()
    assert rig.answers == {"pause": False, "end": None}
    assert (rig.machine.state, rig.engine.flags) == ("running", [])


async def test_r77_an_end_during_the_pause_waits_for_it_and_resumes(rig: Rig) -> None:
    """R77, R103 (and case C01-A): pause and resume reach the engine in this order; afterwards it runs."""
    gate = rig.hold("pause")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(rig.keep, "pause", rig.pause, txn(0))
        await rig.engine.reached["pause"].wait()
        tasks.start_soon(rig.keep, "end", rig.control.end, txn(0))
        await settle()
        assert (rig.engine.flags, "end" in rig.answers) == ([True], False)
        gate.set()
    assert rig.answers["end"] is None
    assert (rig.machine.state, rig.engine.flags, rig.engine.paused) == ("running", [True, False], False)


async def test_r78_an_end_before_its_pause_leaves_a_tombstone(rig: Rig) -> None:
    """R78: the late pause answers 0 and doesn't even check."""
    await rig.control.end(txn(0))
    assert not await rig.pause(txn(0))
    assert (rig.machine.state, rig.engine.flags, rig.engine.asked) == ("running", [], 0)


async def test_r79_a_completed_id_never_pauses_again(rig: Rig) -> None:
    """R79: a replay of a completed transaction answers 0."""
    await rig.pause(txn(0))
    await rig.control.end(txn(0))
    assert not await rig.pause(txn(0))
    assert rig.engine.flags == [True, False]


async def test_r80_the_late_end_of_an_older_transaction_changes_nothing(rig: Rig) -> None:
    """R80 (case C01-D): a newer pause stays until its own end."""
    await rig.pause(txn(1))
    await rig.control.end(txn(0))
    assert rig.machine.state == "paused" and rig.machine.holder is not None
    assert (rig.machine.holder.txn, rig.engine.flags) == (txn(1), [True])


async def test_r81_an_untagged_end_cannot_resume_a_tagged_pause(rig: Rig) -> None:
    """R81: a plain client's end leaves the controller's pause alone."""
    await rig.pause(txn(0))
    await rig.control.end(None)
    assert (rig.machine.state, rig.engine.flags) == ("paused", [True])


async def test_r82_duplicate_ends_resume_once(rig: Rig) -> None:
    """R82: both ends succeed, the engine is resumed once."""
    await rig.pause(txn(0))
    gate = rig.hold("resume")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(rig.keep, 1, rig.control.end, txn(0))
        tasks.start_soon(rig.keep, 2, rig.control.end, txn(0))
        await settle()
        gate.set()
    assert rig.answers == {1: None, 2: None}
    assert rig.engine.flags == [True, False]


async def test_r83_a_newer_pause_waits_for_the_active_one(rig: Rig) -> None:
    """R83: it proceeds, and answers 1, once the other has ended."""
    await rig.pause(txn(0))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(rig.keep, "newer", rig.pause, txn(1))
        await settle()
        assert "newer" not in rig.answers
        await rig.control.end(txn(0))
    assert rig.answers["newer"] is True
    assert rig.engine.flags == [True, False, True]


async def test_r84_an_older_pause_that_queued_behind_a_newer_one_is_refused(rig: Rig) -> None:
    """R84: it is looked at again once the newer has completed, and answers 0."""
    await rig.pause(txn(1))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(rig.keep, "older", rig.pause, txn(0))
        await settle()
        await rig.control.end(txn(1))
    assert rig.answers["older"] is False
    assert rig.engine.flags == [True, False]


async def test_r85_a_pause_superseded_during_its_check_is_refused(rig: Rig) -> None:
    """R85: the end of a newer transaction arrives during the check; the older pause answers 0 without pausing."""
    gate = rig.hold("check")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(rig.keep, "older", rig.pause, txn(0))
        await rig.engine.reached["check"].wait()
        await rig.control.end(txn(1))
        gate.set()
    assert rig.answers["older"] is False
    assert (rig.machine.state, rig.engine.flags) == ("running", [])


async def test_r86_a_pause_superseded_after_it_was_sent_is_undone_before_it_answers(rig: Rig) -> None:
    """R86: flags True, False, and only then the answer 0."""
    gate = rig.hold("pause")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(rig.keep, "older", rig.pause, txn(0))
        await rig.engine.reached["pause"].wait()
        await rig.control.end(txn(1))
        gate.set()
    assert rig.answers["older"] is False
    assert (rig.machine.state, rig.engine.flags) == ("running", [True, False])


async def test_r87_the_same_step_can_be_tried_again_with_a_new_transaction(rig: Rig) -> None:
    """R87: a new id pauses after the previous one has ended."""
    await rig.pause(txn(0))
    await rig.control.end(txn(0))
    assert await rig.pause(txn(1))


@pytest.mark.parametrize(("point", "flags"), [("check", []), ("pause", [True, False])])
async def test_r88_a_cancelled_pause_is_undone_first(rig: Rig, point: str, flags: list[bool]) -> None:
    """R88: cancelled, even twice, the rollback comes before the cancellation goes on; a later end is harmless."""
    gate = rig.hold(point)
    resume = rig.hold("resume")
    ended = anyio.Event()
    scope = anyio.CancelScope()

    async def call() -> None:
        with scope:
            await rig.pause(txn(0))
        ended.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call)
        await rig.engine.reached[point].wait()
        scope.cancel()
        gate.set()
        await settle()
        assert ended.is_set() == (point == "check")
        tasks.cancel_scope.cancel()
        resume.set()
    assert (rig.machine.state, rig.engine.flags, rig.engine.paused) == ("running", flags, False)
    assert not rig.machine.retains(txn(0))
    await rig.control.end(txn(0))
    assert rig.engine.flags == flags


async def test_r88_a_cancelled_queue_place_is_given_back(rig: Rig) -> None:
    """R88: a pause that waits for its turn and is cancelled leaves no transaction."""
    await rig.pause(txn(0))
    with anyio.move_on_after(0.05):
        await rig.pause(txn(0, B))
    assert not rig.machine.retains(txn(0, B))
    assert rig.engine.flags == [True]


async def test_r89_the_untagged_pair_works_for_many_cycles(rig: Rig) -> None:
    """R89: early ends cancel exactly one late pause, however often they came; later cycles are unaffected."""
    for _ in range(20):
        assert await rig.pause(None)
        await rig.control.end(None)
    rig.engine.flags.clear()
    for _ in range(3):
        await rig.control.end(None)
    assert not await rig.pause(None)
    assert await rig.pause(None)
    await rig.control.end(None)
    assert await rig.pause(None)
    assert rig.engine.flags == [True, False, True]


def paused_machine(name: str | None, machine: TransactionMachine, now: float = 0.0) -> None:
    assert machine.request_pause(name, now) is Action.CHECK
    assert machine.checked(name, True) is Action.SEND_PAUSE
    assert machine.pause_sent(name, now, LEASE_S) is PAUSED


def end(name: str | None, machine: TransactionMachine, now: float = 0.0) -> None:
    if machine.request_end(name, now) is Action.SEND_RESUME:
        machine.ended(name)


def session(number: int) -> str:
    return f"{number:032x}"


def test_r90_tombstones_are_capped_and_the_watermark_still_refuses() -> None:
    """R90: of 1025 ends 1024 are kept; the oldest is gone and its late pause still answers 0."""
    machine = TransactionMachine()
    for sequence in range(1025):
        end(txn(sequence), machine)
    assert machine.transactions == 1024
    assert not machine.retains(txn(0)) and machine.retains(txn(1))
    assert machine.request_pause(txn(0), 0.0) is ENDED
    assert machine.transactions == 1024


def test_r91_a_session_too_many_is_refused_and_the_others_stay() -> None:
    """R91: the 1025th session doesn't fit."""
    machine = TransactionMachine()
    for number in range(1024):
        end(txn(0, session(number)), machine)
    with pytest.raises(CapacityReachedError):
        machine.request_pause(txn(0, session(1024)), 1.0)
    with pytest.raises(CapacityReachedError):
        machine.request_end(txn(0, session(1024)), 1.0)
    assert machine.sessions == 1024
    assert all(machine.retains(txn(0, session(number))) for number in range(1024))


def test_r92_idle_sessions_are_reclaimed_at_capacity() -> None:
    """R92, U12: sessions silent for over a day make room, transactions and watermarks too; a living one stays."""
    machine = TransactionMachine()
    for number in range(1024):
        end(txn(5, session(number)), machine)
    end(txn(6, session(0)), machine, 80_000.0)
    assert machine.request_pause(txn(0, session(1024)), 86_401.0) is Action.CHECK
    assert (machine.sessions, machine.transactions) == (2, 2)
    assert machine.retains(txn(6, session(0))) and not machine.retains(txn(5, session(1)))


def test_r93_an_end_that_waited_does_not_bring_a_reclaimed_session_back() -> None:
    """R93: asked again after the session is gone, it is done and creates nothing."""
    machine = TransactionMachine(session_cap=1)
    assert machine.request_pause(txn(0), 0.0) is Action.CHECK
    assert machine.request_end(txn(0), 0.0) is Action.WAIT
    assert machine.checked(txn(0), True) is ENDED
    end(txn(0, B), machine, 90_000.0)
    assert machine.request_end(txn(0), 90_000.0, again=True) is Action.DONE
    assert machine.sessions == 1 and not machine.retains(txn(0))


def test_r94_what_must_be_recovered_is_never_forgotten() -> None:
    """R94: with no room but for unfinished transactions, one of them to be recovered, a new pause is refused."""
    machine = TransactionMachine(transaction_cap=4)
    paused_machine(txn(0), machine)
    assert machine.request_end(txn(0), 0.0) is Action.SEND_RESUME
    machine.resume_failed(txn(0), 0.0)
    for sequence in (1, 2, 3):
        assert machine.request_pause(txn(sequence), 0.0) is Action.WAIT
    with pytest.raises(CapacityReachedError):
        machine.request_pause(txn(4), 0.0)
    with pytest.raises(CapacityReachedError):
        machine.request_pause(txn(0, B), 1e6)
    assert (machine.transactions, machine.state) == (4, "recovery_required")
    assert machine.request_end(txn(9), 0.0) is Action.DONE  # an end is never refused for lack of room
    assert machine.request_pause(txn(8), 0.0) is ENDED


MALFORMED = [
    "ha1:" + A + ":" + number for number in ("+1", "01", " 1", "-0", "١", "1 ", "", "1.0", "0x1", "1\n", "1" * 19)
] + ["ha2:" + A + ":0", "ha1:" + "A" * 32 + ":0", "ha1:" + "a" * 31 + ":0", "", "null", A]


@pytest.mark.parametrize("text", MALFORMED)
def test_r95_malformed_ids_are_refused(text: str) -> None:
    """R95: only canonical ASCII decimals; nothing is created."""
    machine = TransactionMachine()
    for ask in (machine.request_pause, machine.request_end):
        with pytest.raises(MalformedTransactionError):
            ask(text, 0.0)
    assert (machine.transactions, machine.sessions) == (0, 0)


def test_r95_floods_of_foreign_ids_leave_nothing_behind() -> None:
    """R95: 1100 raw ids, no state; "0" is legal."""
    machine = TransactionMachine()
    for number in range(1100):
        with pytest.raises(MalformedTransactionError):
            machine.request_pause(session(number), 0.0)
    assert (machine.transactions, machine.sessions) == (0, 0)
    assert TransactionId.parse(txn(0)) == TransactionId(A, 0) and str(TransactionId(A, 0)) == txn(0)


def test_r96_active_and_unfinished_transactions_are_never_evicted() -> None:
    """R96: a flood of ends evicts tombstones only; a day of silence doesn't reclaim a session that holds a pause."""
    machine = TransactionMachine(transaction_cap=8, session_cap=8)
    paused_machine(txn(0), machine)
    assert machine.request_pause(txn(0, B), 0.0) is Action.WAIT
    for number in range(50):
        end(txn(0, session(number % 6)), machine)
        end(txn(number, session(0)), machine)
    assert machine.retains(txn(0)) and machine.retains(txn(0, B))
    for number in range(100, 107):
        end(txn(0, session(number)), machine, 100_000.0)
    assert machine.holder is not None and machine.holder.txn == txn(0)
    end(txn(0), machine, 100_000.0)
    assert machine.state == "running"


async def test_r97_of_several_engines_exactly_those_that_were_paused_are_resumed() -> None:
    """R97: one of three refuses its pause; the ends of the others resume them, its own is harmless."""
    rigs = [Rig() for _ in range(3)]
    rigs[1].engine.failures["pause"] = [NotSent("e", "pause")]
    async with anyio.create_task_group() as tasks:
        for rig in rigs:
            tasks.start_soon(rig.keep, "pause", rig.pause, txn(0))
    assert [rig.answers["pause"] is True for rig in rigs] == [True, False, True]
    assert isinstance(rigs[1].answers["pause"], EngineDownError)
    for rig in rigs:
        await rig.control.end(txn(0))
    assert [rig.engine.flags for rig in rigs] == [[True, False], [True], [True, False]]
    assert all(rig.machine.state == "running" for rig in rigs)


@virtual
async def test_a_lease_that_runs_out_ends_the_pause_and_marks_the_weights_torn() -> None:
    """Nobody renews: the sidecar resumes by itself, and the next end of an owner clears the mark."""
    rig = Rig()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(rig.control.run)
        await rig.control.pause(txn(0), "retract", 0.05)
        rig.control.renew(txn(0), 0.2)
        await anyio.sleep(0.1)
        assert rig.machine.state == "paused"
        await anyio.sleep(0.3)
        assert (rig.machine.state, rig.engine.flags, rig.control.torn) == ("running", [True, False], True)
        await rig.control.end(txn(0))
        assert rig.control.torn
        await rig.pause(txn(1))
        await rig.control.end(txn(1))
        assert not rig.control.torn
        tasks.cancel_scope.cancel()


def test_a_failed_resume_is_tried_again_without_a_client() -> None:
    """A resume that the engine refused is due again some seconds later; then it isn't a lapsed lease."""
    machine = TransactionMachine()
    paused_machine(txn(0), machine)
    assert machine.take_expired(LEASE_S - 1) is None
    expired = machine.take_expired(LEASE_S)
    assert expired is not None and expired.lapsed and machine.state == "ending"
    machine.resume_failed(txn(0), LEASE_S)
    assert machine.take_expired(LEASE_S) is None
    again = machine.take_expired(LEASE_S + RECOVERY_RETRY_S)
    assert again is not None and not again.lapsed
    machine.ended(txn(0))
    assert machine.state == "running" and machine.lease_deadline() is None


async def test_an_engine_that_nobody_holds_is_resumed_by_any_end(rig: Rig) -> None:
    """After a restart of the sidecar no transaction is known, yet the engine is paused: the owed end resumes it."""
    rig.engine.paused = True
    assert (await rig.control.status()).state == "paused"
    await rig.control.end(txn(4))
    assert (rig.engine.flags, rig.machine.state, rig.machine.idle) == ([False], "running", True)


def test_a_lost_engine_is_not_paused_any_more() -> None:
    """When the process goes, its pause goes with it; the late end is harmless."""
    machine = TransactionMachine()
    paused_machine(txn(0), machine)
    machine.engine_lost()
    assert machine.state == "running"
    assert machine.request_end(txn(0), 0.0) is Action.DONE
    assert machine.request_pause(txn(0), 0.0) is ENDED


def test_reports_out_of_order_are_our_own_bug() -> None:
    """A transition that the table doesn't have raises LocalProtocolError, which no policy swallows."""
    machine = TransactionMachine()
    with pytest.raises(LocalProtocolError):
        machine.pause_sent(txn(0), 0.0, LEASE_S)
    paused_machine(txn(0), machine)
    with pytest.raises(LocalProtocolError):
        machine.checked(txn(0), True)


def test_waiting_pauses_of_one_session_do_not_pile_up() -> None:
    """A pause that was told "not ready" and never asked again is forgotten once its session goes on."""
    machine = TransactionMachine(transaction_cap=4)
    for sequence in range(20):
        assert machine.request_pause(txn(sequence), 0.0) is Action.CHECK
        assert machine.checked(txn(sequence), False) is NOT_READY
        if sequence % 2:
            end(txn(sequence), machine)
    assert machine.transactions <= 4
