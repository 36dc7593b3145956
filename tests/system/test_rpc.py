"""transport/rpc.py and rpc_endpoint.py between real processes: this one is the controller of a plain script."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import anyio
import job
import pytest
import pytest_asyncio
from rpc_program import QUICK

from hybridasync.errors import (
    CheckpointError,
    ConfigError,
    DivergedError,
    LocalProtocolError,
    StepOutcomeUnknown,
    TrainerError,
    WorkerLost,
)
from hybridasync.observability.process import ProcessId, descendants, wait_ended
from hybridasync.runtime.controller import connect
from hybridasync.transport.rpc import Patience, RpcTrainer

pytestmark = pytest.mark.slow


@asynccontextmanager
async def connected(directory: Path, patience: Patience = QUICK, **network: object) -> AsyncIterator[RpcTrainer]:
    config = job.config(network={"start_timeout_s": 60.0, **network})
    async with connect(config, directory, patience=patience, program=(job.PROGRAM,)) as trainer:
        yield trainer


@pytest_asyncio.fixture(scope="class", loop_scope="class")
async def trainer(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RpcTrainer]:
    """A healthy group of two workers, shared by the tests that leave it healthy. A process has one RPC at a time."""
    async with connected(tmp_path_factory.mktemp("shared")) as shared:
        yield shared


@pytest.mark.asyncio(loop_scope="class")
class TestHealthyGroup:
    async def test_concurrent_calls_run_in_one_order_on_every_rank(self, trainer: RpcTrainer) -> None:
        """200 collectives asked for at once: right sums, and all ranks ran them in the order asked for."""
        sums: dict[int, float] = {}

        async def add(number: int) -> None:
            sums[number] = await trainer.call("train_step", "sum", number)

        async with anyio.create_task_group() as callers:
            for number in range(200):
                callers.start_soon(add, number)
        assert sums == {number: 2.0 * number for number in range(200)}
        assert await trainer.call("train_step", "order") == list(range(200))

    async def test_c08_a_training_step_and_an_export_never_overlap(self, trainer: RpcTrainer) -> None:
        """Asked for as early as can be: one order on all ranks; none begins before every rank has ended the last."""
        async with anyio.create_task_group() as callers:
            for number in range(20):
                callers.start_soon(trainer.call, "train_step", "timed", "train")
                if number % 2:
                    callers.start_soon(trainer.call, "export_weights", "timed", "export")
        spans = await trainer.call("train_step", "spans")
        orders = [[name for name, _, _ in rank] for rank in spans]
        assert orders[0] == orders[1] and sorted(orders[0]) == ["export"] * 10 + ["train"] * 20
        for before, after in pairwise(zip(*spans, strict=True)):
            assert max(end for _, _, end in before) <= min(start for _, start, _ in after)

    async def test_operations_run_in_the_main_thread_of_megatrons_world(self, trainer: RpcTrainer) -> None:
        """A worker is rank 0..N-1 of N, computes in its main thread, and has the controller's configuration."""
        assert await trainer.call("train_step", "thread") == (True, "0", "2")
        assert await trainer.call("train_step", "config") == job.config()

    @pytest.mark.parametrize(
        ("kind", "expected", "message"),
        [
            ("config", ConfigError, "model.dtype: no such thing"),
            ("diverged", DivergedError, "loss is nan"),
            ("checkpoint", CheckpointError, "disk full"),
            ("two", TrainerError, "('ü', 2)"),
            ("exit", TrainerError, "SystemExit on worker rank"),
            ("unpicklable", TrainerError, "cannot pickle '_thread.lock' object"),
        ],
    )
    async def test_errors_keep_their_kind(
        self, trainer: RpcTrainer, kind: str, expected: type[Exception], message: str
    ) -> None:
        """What workers raise arrives as our error with its text, a surprise with its traceback; the group goes on."""
        with pytest.raises(expected) as caught:
            await trainer.call("train_step", "raise", kind)
        assert type(caught.value) is expected
        assert message in str(caught.value)
        if isinstance(caught.value, ConfigError):
            assert caught.value.setting == "model.dtype"
        notes = getattr(caught.value, "__notes__", [])
        if isinstance(caught.value, ConfigError | DivergedError | CheckpointError):
            assert notes == []
        else:
            assert "On worker rank" in notes[0] and "Traceback" in notes[0]
        assert await trainer.call("train_step", "sum", 1) == 2

    async def test_unchanging_error_of_one_rank_leaves_the_group_usable(self, trainer: RpcTrainer) -> None:
        """A checkpoint that one rank can't write is an error, but training may go on."""
        with pytest.raises(CheckpointError):
            await trainer.call("train_step", "raise", "checkpoint", 2)
        assert await trainer.call("train_step", "sum", 1) == 2

    async def test_cancelled_call_is_finished_before_the_next(self, trainer: RpcTrainer) -> None:
        """Cancelling returns at once, the late answer is dropped, and the next call waits for the first."""
        before = await trainer.call("train_step", "count")
        started = time.monotonic()
        with anyio.move_on_after(0.2) as scope:
            await trainer.call("train_step", "count", 3.0)
        assert scope.cancelled_caught and time.monotonic() - started < 2.9  # not by the call's end
        assert await trainer.call("train_step", "count") == before + 2

    async def test_failure_of_a_cancelled_call_isn_t_lost(self, trainer: RpcTrainer) -> None:
        """A diverged step whose caller gave up is told to the next caller, with where it comes from."""
        with anyio.move_on_after(0.1):
            await trainer.call("train_step", "later", 2.0, "raise", "diverged")
        with pytest.raises(DivergedError) as caught:
            await trainer.call("train_step", "sum", 1)
        assert "earlier call, train_step" in caught.value.__notes__[-1]
        assert await trainer.call("train_step", "sum", 1) == 2

    async def test_unknown_operation_is_our_bug(self, trainer: RpcTrainer) -> None:
        """A name that isn't registered is LocalProtocolError, and nothing ran."""
        with pytest.raises(LocalProtocolError, match="no operation 'rm'"):
            await trainer.call("rm")

    async def test_number_used_twice_is_refused(self, trainer: RpcTrainer) -> None:
        """A call with a sequence number that ran already is an error on the worker: a step never runs twice."""
        before = await trainer.call("train_step", "count")
        trainer._seq -= 1
        with pytest.raises(LocalProtocolError, match="sent twice"):
            await trainer.call("train_step", "count")
        assert await trainer.call("train_step", "count") == before + 1

    async def test_heartbeat_says_what_a_worker_does(self, trainer: RpcTrainer) -> None:
        """Pings are answered while the main thread is busy."""
        async with anyio.create_task_group() as busy:
            busy.start_soon(trainer.call, "train_step", "count", 4.0)
            with anyio.move_on_after(15):  # the last ping may be from before the call
                while (doing := {state["operation"] for state in trainer.status().values()}) != {"train_step"}:  # noqa: ASYNC110
                    await anyio.sleep(0.05)
        assert doing == {"train_step"}


async def test_c34_slow_step_runs_once(tmp_path: Path) -> None:
    """A step that takes longer than every control timeout counts once; one past its deadline isn't repeated."""
    patience = replace(QUICK, call_s=30, ping_s=2)
    before = descendants(os.getpid())  # other tests of this process may have left theirs
    async with connected(tmp_path, patience) as trainer:
        assert [await trainer.call("train_step", "count", 2.5) for _ in range(2)] == [1, 2]
        with pytest.raises(StepOutcomeUnknown, match=r"rank 1 \(train_step for"):
            await trainer.call("train_step", "count", 15, step=7, timeout_s=3)  # pings in between say what it does
        started = time.monotonic()
        with pytest.raises(StepOutcomeUnknown, match="earlier failure"):
            await trainer.call("train_step", "count")
        assert time.monotonic() - started < 5  # far from the end of the step that is still under way
    assert not descendants(os.getpid()) - before


async def test_c34_killed_worker_is_named(tmp_path: Path) -> None:
    """SIGKILL during a step and between steps: WorkerLost names the rank at once, and closing doesn't hang."""
    async with connected(tmp_path) as trainer:
        started = time.monotonic()
        with pytest.raises(WorkerLost) as caught:
            await trainer.call("train_step", "end", 2, -signal.SIGKILL, step=3)
        assert (caught.value.rank, caught.value.step) == (2, 3)
        assert "its process ended" in str(caught.value) and "| last words of a worker" in str(caught.value)
        with pytest.raises(WorkerLost):
            await trainer.call("train_step", "count")
        with anyio.fail_after(1), pytest.raises(WorkerLost):
            await trainer.watch()
        leaving = time.monotonic()
    assert leaving - started < 5 and time.monotonic() - leaving < 10


async def test_r105a_a_worker_that_does_not_answer_a_decision_is_ended(tmp_path: Path) -> None:
    """R105a: one rank hangs in a call that was given up: the decision is bounded, and no process is left behind."""
    async with connected(tmp_path, replace(QUICK, decide_s=2.0)) as trainer:
        pids = await trainer.call("train_step", "pid")
        processes = {ProcessId.of(pid) for pid in pids.values()}
        with anyio.move_on_after(0.3):
            await trainer.call("export_weights", "hang", 2)
        with (
            anyio.fail_after(12),
            pytest.raises(WorkerLost, match="rank 2 is lost: no answer to export_weights in time"),
        ):
            await trainer.decide(0, version=1, commit=False)
        assert not wait_ended({process for process in processes if process.pid == pids[2]}, 5)
    assert not wait_ended(processes, 5)


async def test_r105a_a_training_step_that_was_given_up_may_end_before_a_decision(tmp_path: Path) -> None:
    """The decision about a publication beside it waits for that step as for any other, and loses nobody."""
    async with connected(tmp_path, replace(QUICK, decide_s=2.0)) as trainer:
        with anyio.move_on_after(0.3):
            await trainer.call("train_step", "count", 4.0, step=1)
        await trainer.decide(0, version=1, commit=True)
        assert await trainer.call("train_step", "count") == 2


async def test_an_operation_beside_a_call_waits_for_nothing(tmp_path: Path) -> None:
    """The main threads are in a step: the lowest rank answers at once, on another thread, and an error is just that."""
    async with connected(tmp_path) as trainer:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(trainer.call, "train_step", "count", 3.0)
            await anyio.sleep(0.3)
            with anyio.fail_after(2):
                assert await trainer.call_beside("write_weights", "thread") == (False, "0", "2")
                with pytest.raises(CheckpointError):
                    await trainer.call_beside("write_weights", "raise", "checkpoint")
        assert await trainer.call("train_step", "count") == 2


async def test_an_export_waits_for_files_that_were_given_up_and_are_still_written(tmp_path: Path) -> None:
    """Whoever cancels the writing leaves it running: the weights that it writes aren't replaced meanwhile."""
    async with connected(tmp_path) as trainer:
        started = time.monotonic()
        with anyio.move_on_after(0.3):
            await trainer.call_beside("write_weights", "later", 2.0, "nothing")
        await trainer.export_weights("nothing", "")
        assert time.monotonic() - started > 1.9


async def test_c34_a_worker_that_dies_while_it_writes_is_named(tmp_path: Path) -> None:
    """SIGKILL beside a call: WorkerLost with its rank, at once."""
    async with connected(tmp_path) as trainer:
        with anyio.fail_after(10), pytest.raises(WorkerLost) as caught:
            await trainer.call_beside("write_weights", "end", 1, -signal.SIGKILL)
        assert caught.value.rank == 1


async def test_loss_is_noticed_without_a_call(tmp_path: Path) -> None:
    """`watch` raises when an idle worker stops answering pings, as one on a vanished machine does."""
    async with connected(tmp_path) as trainer:
        pids = await trainer.call("train_step", "pid")
        os.kill(pids[1], signal.SIGSTOP)
        with anyio.fail_after(15), pytest.raises(WorkerLost, match="rank 1 is lost: no answer to 2 pings"):
            await trainer.watch()
    assert not wait_ended({ProcessId.of(pid) for pid in pids.values() if _exists(pid)}, 5)


async def test_hanging_rank_doesn_t_hide_another_s_error(tmp_path: Path) -> None:
    """One rank raises while the other waits in a collective: the error comes after the grace time, not the deadline."""
    async with connected(tmp_path) as trainer:
        started = time.monotonic()
        with pytest.raises(DivergedError):
            await trainer.call("train_step", "mixed", timeout_s=15)
        assert time.monotonic() - started < 10
        with pytest.raises(StepOutcomeUnknown, match="loss is nan"):
            await trainer.call("train_step", "count")


@pytest.mark.parametrize("code", [0, 7])
async def test_c34_worker_that_never_joins_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """A worker process that ends before it joins: the start fails at once with its rank."""
    monkeypatch.setenv("ABSENT", "2")
    monkeypatch.setenv("ABSENT_CODE", str(code))
    started = time.monotonic()
    with pytest.raises(WorkerLost, match=f"rank 2 is lost: its process ended with code {code} before it joined"):
        async with connected(tmp_path):
            pass
    assert time.monotonic() - started < 30


async def test_worker_that_can_t_join_says_why(tmp_path: Path) -> None:
    """A wrong interface is the user's mistake, and names the setting and what there is."""
    with pytest.raises(ConfigError, match=r"network.interface: this machine has no .* 'nosuch0'; it has .*lo"):
        async with connected(tmp_path, interface="nosuch0"):
            pass


async def test_taken_port_is_named(tmp_path: Path) -> None:
    """A rendezvous port that something else holds is a ConfigError before any process starts."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"network.master_port: can't listen on 127.0.0.1:{port}"):
            async with connected(tmp_path, master_port=port):
                pass


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
