"""The training workers over torch RPC: the controller's adapter of the port `Trainer`.

Collective calls go to every worker, one call at a time, each with the next sequence number. All outcomes are collected
before anything is decided: a dead worker outranks a timeout, which outranks an error that a worker reported. After an
outcome that may differ between ranks the group is *fenced*: nothing is sent to it any more, and nothing is ever sent
twice, because a step that is repeated is a step too many.

This is the one file of the controller that meets other threads: torch answers on threads of its own, and they only
hand the answer to the event loop.
"""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import anyio
import torch
from torch.distributed import rpc

from hybridasync import errors
from hybridasync.observability.process import log_tail
from hybridasync.transport import rpc_endpoint
from hybridasync.transport.rpc_endpoint import Envelope, Membership, to_error
from hybridasync.types import StepResult, TrainBatch, TrainerInfo, TrainSample, WeightSnapshot

_JOIN_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Patience:
    """How long the controller waits for what. Seconds."""

    call_s: float = 1800.0  # one collective call (network.rpc_timeout_s)
    ping_interval_s: float = 2.0
    ping_s: float = 10.0  # answer to one ping; imports of large libraries hold the GIL for seconds
    ping_misses: int = 3  # in a row; a worker that is only stopped in a debugger for a moment isn't lost
    after_loss_s: float = 5.0  # for the others' outcomes, once one is dead: most fail by themselves at once
    after_error_s: float = 30.0  # the same, once one reported an error: the others may still be writing a file
    decide_s: float = 20.0  # a decision about a publication: workers copy their weights at the most
    close_s: float = 10.0

    @property
    def worker_silence_s(self) -> float:
        """After so long without a ping a worker takes the controller for dead: longer than the reverse takes."""
        return 2 * (self.ping_interval_s + self.ping_s) * self.ping_misses


async def join(member: Membership, *, check: Callable[[], None] | None = None) -> None:
    """The controller's entry into RPC. Within `start_timeout_s` it is done or raises.

    `check` is called while waiting and raises if it knows that a worker has ended. Raises WorkerLost with the rank that
    never started, or the error that a worker reported.
    """
    if rpc_endpoint.active():
        raise errors.ConfigError("this process has a run already; torch RPC can hold one at a time")
    rpc_endpoint.choose_interface(member.interface)
    with anyio.move_on_after(member.start_timeout_s):
        while missing := rpc_endpoint.missing_workers(member):
            _raise_if_failed(member)
            if check is not None:
                check()
            await anyio.sleep(_JOIN_POLL_S)
    if missing:
        ranks = ", ".join(map(str, missing))
        raise errors.WorkerLost(
            missing[0], f"didn't start within {member.start_timeout_s:g} s (missing ranks: {ranks})"
        )
    _raise_if_failed(member)
    rpc_endpoint.open_gate(member)
    try:
        with anyio.fail_after(member.start_timeout_s):
            await _in_daemon_thread(lambda: rpc_endpoint.initialise(member))
    except (TimeoutError, RuntimeError) as error:
        raise errors.TrainerError(f"the workers started, but RPC didn't come up: {error or 'no answer'}") from error


def _raise_if_failed(member: Membership) -> None:
    envelope = rpc_endpoint.failed_worker(member)
    if envelope is not None:
        raise to_error(envelope)


async def _in_daemon_thread(function: Callable[[], None]) -> None:
    """Run what may block for ever; a cancelled wait leaves the thread behind, and it doesn't hold up the exit."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def finish(error: BaseException | None) -> None:
        if not done.done():
            done.set_result(None) if error is None else done.set_exception(error)

    def run() -> None:
        outcome: BaseException | None = None
        try:
            function()
        except BaseException as error:  # noqa: BLE001  # carried over to the awaiting task
            outcome = error
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(finish, outcome)

    threading.Thread(target=run, daemon=True).start()
    await done


@dataclass(slots=True)
class _Broadcast:
    """One call to all workers, and what has come of it."""

    seq: int
    name: str
    waiting: set[int]
    deadline: float  # in the loop's time
    step: int | None = None
    answers: dict[int, Envelope] = field(default_factory=dict)  # in the order of arrival
    settled: anyio.Event = field(default_factory=anyio.Event)
    grace: asyncio.TimerHandle | None = None

    def record(self, rank: int, answer: Envelope | None) -> None:
        """`answer` None: the worker is lost."""
        if self.settled.is_set() or rank not in self.waiting:
            return
        self.waiting.discard(rank)
        if answer is not None:
            self.answers[rank] = answer
        if not self.waiting:
            self.settle()

    def settle(self) -> None:
        if self.grace is not None:
            self.grace.cancel()
        self.settled.set()

    def failures(self) -> list[Envelope]:
        return [answer for answer in self.answers.values() if not answer["ok"]]


class RpcTrainer:
    """All workers as one. Made after `join`, inside the running event loop; `close` it."""

    def __init__(self, ranks: Sequence[int], *, patience: Patience | None = None, logs: Path | None = None) -> None:
        """`logs`: folder with the workers' worker-<rank>.log, whose last lines explain a loss."""
        self._ranks = tuple(ranks)
        self._patience = patience or Patience()
        self._logs = logs
        self._loop = asyncio.get_running_loop()
        self._group = anyio.Lock()
        self._seq = 0
        self._current: _Broadcast | None = None  # in flight, possibly given up by its caller
        self._beside: _Broadcast | None = None  # the same, of what one rank does beside those calls
        self._lost: dict[int, str] = {}  # rank → why
        self._someone_lost = anyio.Event()
        self._fence: Exception | None = None
        self._misses = dict.fromkeys(ranks, 0)
        self._status: dict[int, dict[str, Any]] = {}
        self._beat: asyncio.TimerHandle | None = None
        self._closing = False
        self._dismissed: set[int] = set()  # they end by themselves
        for rank in self._ranks:
            self._remote(rank, rpc_endpoint.lifeline, done=self._on_lifeline)
        self._ping_all()

    # --- the port ---------------------------------------------------------------------------------------------------

    async def setup(self) -> TrainerInfo:
        info: TrainerInfo = await self.call("setup")
        return info

    async def start_phase(self, phase: str, total_steps: int) -> None:
        await self.call("start_phase", phase, total_steps)

    async def train_step(self, batch: TrainBatch) -> StepResult:
        result: StepResult = await self.call("train_step", batch, step=batch.step)
        return result

    async def logprobs(self, samples: Sequence[TrainSample]) -> list[list[float]]:
        values: list[list[float]] = await self.call("logprobs", samples)
        return values

    async def export_weights(self, version: int, path: str) -> WeightSnapshot:
        if self._beside is not None:  # given up, and still writing what this call would replace
            abandoned = self._beside
            await self._settle_beside(abandoned)
            if not abandoned.settled.is_set():
                raise self._fenced(self._unknown(abandoned))
        snapshot: WeightSnapshot = await self.call("export_weights", version, path)
        return snapshot

    async def write_weights(self, version: int, path: str) -> WeightSnapshot:
        snapshot: WeightSnapshot = await self.call_beside("write_weights", version, path)
        return snapshot

    async def export_published(self, version: int, path: str) -> int:
        written: int = await self.call("export_published", version, path)
        return written

    async def decide(self, epoch: int, *, version: int, commit: bool) -> None:
        """R105a. A call that was given up and still runs has `decide_s` to end; a training step takes what it takes."""
        async with self._group:
            training = self._current is not None and self._current.step is not None
            await self._finish_abandoned(within_s=None if training else self._patience.decide_s)
            self._refuse_if_unusable(None)
            broadcast = self._send("decide", (epoch, version, commit), self._patience.decide_s)
            await self._settle(broadcast)
            self._tear_down(broadcast)
            self._conclude(broadcast)

    async def reference_logprobs(self, samples: Sequence[TrainSample]) -> list[list[float]]:
        values: list[list[float]] = await self.call("reference_logprobs", samples)
        return values

    async def save_checkpoint(self, path: str) -> None:
        await self.call("save_checkpoint", path)

    async def load_checkpoint(self, path: str) -> None:
        await self.call("load_checkpoint", path)

    async def export_hf(self, path: str) -> None:
        await self.call("export_hf", path)

    async def clear_cache(self) -> None:
        await self.call("clear_cache")

    async def memory(self) -> Mapping[str, float]:
        values: Mapping[str, float] = await self.call("memory")
        return values

    async def close(self) -> None:
        """Let the workers go, and leave RPC. Bounded, can't be cancelled, never raises, may be repeated."""
        if self._closing:
            return
        self._closing = True
        # Shielded: workers that nobody dismissed would be left to the launcher's SIGKILL.
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(self._patience.close_s):
                await self._dismiss()
            if self._beat is not None:
                self._beat.cancel()
            for rank in set(self._ranks) - self._dismissed - set(self._lost):
                self._remote(rank, rpc_endpoint.abandon, "the controller closed the job", done=_ignore)
            with anyio.move_on_after(self._patience.close_s), suppress(RuntimeError):
                await _in_daemon_thread(lambda: rpc.shutdown(graceful=False))

    # --- beyond the port --------------------------------------------------------------------------------------------

    async def watch(self) -> NoReturn:
        """Wait until a worker is lost and raise WorkerLost, without a call in flight too. For a supervisor's task."""
        await self._someone_lost.wait()
        raise self._loss(None)

    def status(self) -> Mapping[int, Mapping[str, Any]]:
        """Rank → what the worker said of itself at the last ping: pid, operation, seconds (in it), calls."""
        return dict(self._status)

    async def call(self, name: str, *arguments: object, step: int | None = None, timeout_s: float | None = None) -> Any:
        """Carry out a named operation on every worker; answers the lowest rank's value.

        Given up (cancelled) while in flight, the call goes on: the next one first waits for its end. Raises WorkerLost,
        StepOutcomeUnknown after `timeout_s` (default call_s), or what the workers report (see `to_error`).
        """
        async with self._group:
            await self._finish_abandoned()
            self._refuse_if_unusable(step)
            broadcast = self._send(name, arguments, timeout_s or self._patience.call_s)
            broadcast.step = step
            await self._settle(broadcast)
            return self._conclude(broadcast)

    async def call_beside(self, name: str, *arguments: object) -> Any:
        """Carry out an operation on the lowest rank, on a thread of RPC. For what may run beside a collective call."""
        self._refuse_if_unusable(None)
        rank, payload = self._ranks[0], pickle.dumps(arguments, pickle.HIGHEST_PROTOCOL)
        broadcast = _Broadcast(-1, name, waiting={rank}, deadline=self._loop.time() + self._patience.call_s)
        self._beside = broadcast

        def done(rank: int, answer: object, error: BaseException | None) -> None:
            if error is not None:
                self._mark_lost(rank, _reason(error))
            broadcast.record(rank, None if error else answer)  # type: ignore[arg-type]  # `beside` answers nothing else

        self._remote(rank, rpc_endpoint.beside, name, payload, done=done)
        await self._settle_beside(broadcast)
        return self._conclude(broadcast)

    async def _settle_beside(self, broadcast: _Broadcast) -> None:
        with anyio.move_on_after(broadcast.deadline - self._loop.time()):
            await broadcast.settled.wait()
        self._beside = None

    # --- one call ---------------------------------------------------------------------------------------------------

    def _send(self, name: str, arguments: tuple[object, ...], timeout_s: float) -> _Broadcast:
        payload = pickle.dumps(arguments, pickle.HIGHEST_PROTOCOL)
        seq, self._seq = self._seq, self._seq + 1
        broadcast = _Broadcast(seq, name, waiting=set(self._ranks), deadline=self._loop.time() + timeout_s)
        self._current = broadcast
        for rank in self._ranks:
            self._remote(
                rank, rpc_endpoint.call, seq, name, payload, done=partial(self._on_answer, broadcast=broadcast)
            )
        return broadcast

    async def _settle(self, broadcast: _Broadcast) -> None:
        with anyio.move_on_after(broadcast.deadline - self._loop.time()):
            await broadcast.settled.wait()
        broadcast.settle()  # late answers are dropped from here on
        self._current = None

    async def _finish_abandoned(self, *, within_s: float | None = None) -> None:
        """`within_s`: the workers are taken for lost if it hasn't ended by then."""
        abandoned = self._current
        if abandoned is None:
            return
        if within_s is not None:
            abandoned.deadline = min(abandoned.deadline, self._loop.time() + within_s)
        await self._settle(abandoned)
        if within_s is not None:
            self._tear_down(abandoned)
        try:
            self._conclude(abandoned)
        except Exception as error:
            if self._fence is None and all(answer["retryable"] for answer in abandoned.failures()):
                return  # nothing happened, and nobody waits for it
            error.add_note(f"This is the outcome of an earlier call, {abandoned.name}, that was cancelled in flight.")
            raise

    def _conclude(self, broadcast: _Broadcast) -> Any:
        failures = broadcast.failures()
        if self._lost:
            error: Exception = self._loss(broadcast.step)
            for envelope in failures:
                error.add_note(f"worker rank {envelope['rank']} then had {envelope['type']}: {envelope['message']}")
            raise self._fenced(error)
        if failures:
            error = to_error(min(failures, key=lambda e: e["type"] not in vars(errors)), step=broadcast.step)
            alike = len({envelope["type"] for envelope in failures}) == 1 and len(failures) == len(self._ranks)
            unchanged = all(envelope["retryable"] for envelope in failures) and not broadcast.waiting
            raise error if alike or unchanged else self._fenced(error)
        if broadcast.waiting:
            raise self._fenced(self._unknown(broadcast))
        return pickle.loads(broadcast.answers[self._ranks[0]]["value"])

    def _refuse_if_unusable(self, step: int | None) -> None:
        if self._closing:
            raise errors.TrainerError("the workers were dismissed", step=step)
        if self._lost:
            raise self._fenced(self._loss(step))
        if self._fence is not None:
            reason = f"the workers can't be used after an earlier failure: {self._fence}"
            raise errors.StepOutcomeUnknown(reason, step=step) from self._fence

    def _fenced(self, error: Exception) -> Exception:
        self._fence = self._fence or error
        return error

    def _unknown(self, broadcast: _Broadcast) -> errors.StepOutcomeUnknown:
        doing = [
            f"rank {rank} ({state['operation'] or 'idle'} for {state['seconds']:.0f} s at the last ping)"
            if (state := self._status.get(rank))
            else f"rank {rank}"
            for rank in sorted(broadcast.waiting)
        ]
        text = f"{broadcast.name} wasn't answered in time by {', '.join(doing)}; it isn't repeated"
        return errors.StepOutcomeUnknown(text, step=broadcast.step)

    # --- workers that come to grief -----------------------------------------------------------------------------------

    def _loss(self, step: int | None) -> errors.WorkerLost:
        rank = min(self._lost)
        others = sorted(set(self._lost) - {rank})
        detail = self._lost[rank] + (f" (lost too: ranks {', '.join(map(str, others))})" if others else "")
        tail = log_tail(self._logs / f"worker-{rank}.log") if self._logs else ""
        return errors.WorkerLost(rank, f"{detail}; the last lines of its log:\n{tail}" if tail else detail, step=step)

    def _mark_lost(self, rank: int, reason: str) -> None:
        if rank in self._lost:
            return
        self._lost[rank] = reason
        if not self._closing:
            self._someone_lost.set()
        if self._beside is not None:
            self._beside.record(rank, None)
        if self._current is not None:
            self._current.record(rank, None)
            self._hurry(self._patience.after_loss_s)

    def _tear_down(self, broadcast: _Broadcast) -> None:
        """Who didn't answer in time is lost, and ends: the others may wait for it in a collective."""
        for rank in sorted(broadcast.waiting - self._lost.keys()):
            reason = f"no answer to {broadcast.name} in time"
            self._mark_lost(rank, reason)
            self._remote(rank, rpc_endpoint.abandon, reason, done=_ignore)

    def _hurry(self, seconds: float) -> None:
        """Don't wait until the deadline for the other ranks: they may hang in a collective that one rank left."""
        current = self._current
        if current is not None and not current.settled.is_set() and current.grace is None:
            current.grace = self._loop.call_later(seconds, current.settle)

    def _on_answer(self, rank: int, answer: object, error: BaseException | None, *, broadcast: _Broadcast) -> None:
        if error is not None:
            self._mark_lost(rank, _reason(error))
            return
        envelope: Envelope = answer  # type: ignore[assignment]  # `call` answers nothing else
        broadcast.record(rank, envelope)
        if not envelope["ok"]:
            self._hurry(self._patience.after_error_s)

    def _on_lifeline(self, rank: int, _answer: object, error: BaseException | None) -> None:
        self._mark_lost(rank, _reason(error))

    # --- heartbeat ----------------------------------------------------------------------------------------------------

    def _ping_all(self) -> None:
        for rank in self._ranks:
            if rank not in self._lost:
                silence = self._patience.worker_silence_s
                self._remote(rank, rpc_endpoint.ping, silence, done=self._on_ping, timeout_s=self._patience.ping_s)
        self._beat = self._loop.call_later(self._patience.ping_interval_s, self._ping_all)

    def _on_ping(self, rank: int, answer: object, error: BaseException | None) -> None:
        if error is None:
            self._misses[rank] = 0
            self._status[rank] = answer  # type: ignore[assignment]  # `ping` answers nothing else
            return
        self._misses[rank] += 1
        if self._misses[rank] >= self._patience.ping_misses:
            self._mark_lost(rank, f"no answer to {self._misses[rank]} pings")

    # --- the bridge ---------------------------------------------------------------------------------------------------

    def _remote(
        self,
        rank: int,
        function: Callable[..., object],
        *arguments: object,
        done: Callable[[int, object, BaseException | None], None],
        timeout_s: float = 0,  # 0: torch waits without limit; the deadline is the controller's
    ) -> None:
        """Call a remote function; `done(rank, answer, error)` runs on the event loop."""

        def answered(future: torch.futures.Future[object]) -> None:
            answer: object = None
            error: BaseException | None = None
            try:
                answer = future.value()
            except BaseException as caught:  # noqa: BLE001  # on torch's thread: handed over to the loop
                error = caught
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(done, rank, answer, error)

        try:
            future = rpc.rpc_async(rpc_endpoint.worker_name(rank), function, args=arguments, timeout=timeout_s)
        except RuntimeError as error:
            self._loop.call_soon(done, rank, None, error)
            return
        future.add_done_callback(answered)

    async def _dismiss(self) -> None:
        """Send `shutdown` if the group can still take it, and wait for the answers or the workers' end."""
        async with self._group:
            if self._current is not None:
                await self._settle(self._current)
            if self._lost or self._fence is not None:
                return
            farewell = self._send(rpc_endpoint.SHUTDOWN, (), self._patience.close_s)
            try:
                await self._settle(farewell)
            finally:
                self._dismissed = set(farewell.answers)


def _ignore(_rank: int, _answer: object, _error: BaseException | None) -> None:
    pass


def _reason(error: BaseException | None) -> str:
    """torch has only RuntimeErrors: what happened is in the text."""
    text = str(error).partition("\n")[0]
    closed = any(word in text for word in ("EOF", "EPIPE", "ECONNRESET", "ECONNREFUSED"))
    return "its process ended (connection closed)" if closed else f"the call failed: {text}"
