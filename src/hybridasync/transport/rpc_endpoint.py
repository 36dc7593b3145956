"""Both ends' part of torch RPC: joining the job, and the worker's queue of calls. No Megatron, no event loop.

RPC carries small control messages only. It doesn't keep the order of calls in flight and runs handlers on a pool of
threads, so a handler here doesn't work: it files the call under the controller's sequence number, and the worker's MAIN
thread takes calls off the queue in that order (signal handlers and the CUDA context then are where Megatron expects
them). What is safe beside that goes by `beside`. Exceptions never travel through torch, which loses their type and
fields: every operation answers an envelope.

RPC has no authentication: whoever reaches its port may run code as this user. Keep network.interface private.
"""

from __future__ import annotations

import faulthandler
import json
import os
import pickle
import queue
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn, TypedDict

import torch
from torch._C._distributed_c10d import PrefixStore, Store  # torch.distributed has them too, but without types
from torch._C._distributed_rpc import _is_current_rpc_agent_set
from torch.distributed import rpc
from torch.distributed.rendezvous import register_rendezvous_handler

from hybridasync import errors
from hybridasync.observability.jsonl import complain
from hybridasync.observability.process import end_own_group

CONTROLLER = "controller"
SHUTDOWN = "shutdown"
LOST_CONTROLLER_EXIT_CODE = 1

_RENDEZVOUS_SCHEME = "hybridasync"
_RPC_THREADS = 4
"""Handlers only enqueue, so a few suffice; more would only add idle threads to every process."""


_GATE_TIMEOUT = timedelta(days=7)
"""Stores want a number."""


def worker_name(rank: int) -> str:
    """RPC name of a worker; `rank` is its rank in the job (1..N)."""
    return f"worker{rank}"


# --- joining -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Membership:
    """This process's place in the job. `store` is the job's rendezvous store, the same for all attempts."""

    rank: int  # 0 is the controller
    world_size: int  # workers + 1
    attempt: int  # restarts so far: old keys of the store must not be found again
    store: Store
    interface: str
    start_timeout_s: float

    def prefixed(self, name: str) -> Store:
        """A name space of the store for this attempt alone."""
        return PrefixStore(f"attempt_{self.attempt}/{name}", self.store)

    @property
    def worker_ranks(self) -> range:
        return range(1, self.world_size)


def choose_interface(interface: str) -> None:
    """Bind RPC and gloo to one network interface; must come before either is initialised."""
    os.environ["TP_SOCKET_IFNAME"] = interface
    os.environ["GLOO_SOCKET_IFNAME"] = interface


def report_joined(member: Membership) -> None:
    """Say that this rank has started, so that the controller can name one that hasn't."""
    member.prefixed("joined").set(str(member.rank), str(os.getpid()))


def report_failed(member: Membership, error: BaseException) -> None:
    """Say why this rank won't join."""
    member.prefixed("failed").set(str(member.rank), json.dumps(failure(error, rank=member.rank)))


def missing_workers(member: Membership) -> list[int]:
    """Ranks that haven't started yet."""
    joined = member.prefixed("joined")
    return [rank for rank in member.worker_ranks if not joined.check([str(rank)])]


def failed_worker(member: Membership) -> Envelope | None:
    """The envelope of a worker that gave up before it joined."""
    failed = member.prefixed("failed")
    for rank in member.worker_ranks:
        if failed.check([str(rank)]):
            envelope: Envelope = json.loads(failed.get(str(rank)))
            return envelope
    return None


def open_gate(member: Membership) -> None:
    """The controller lets all ranks go into RPC's barrier, which names nobody when it fails: see `missing_workers`."""
    member.prefixed("gate").set("open", "1")


def await_gate(member: Membership) -> None:
    """A worker waits until all others have started. Raises RuntimeError when the store is gone, and with it the job.

    Who is late is the controller's verdict, and before that it may prepare data for hours.
    """
    member.prefixed("gate").wait(["open"], _GATE_TIMEOUT)


def active() -> bool:
    """Whether this process is in RPC."""
    return _is_current_rpc_agent_set()


def initialise(member: Membership) -> None:
    """Join RPC. Blocks until every rank does so, `start_timeout_s` seconds at the most."""
    choose_interface(member.interface)
    _Rendezvous.member = member
    if not _Rendezvous.registered:
        register_rendezvous_handler(_RENDEZVOUS_SCHEME, _rendezvous)  # type: ignore[no-untyped-call]
        _Rendezvous.registered = True
    # torch counts initialisations and barriers of a process and puts the counts into its keys. Ranks needn't have the
    # same history (a script may make one run after the other, each with new workers); our stores are distinct anyway.
    rpc._init_counter = 0
    rpc.api._all_gather_sequence_id.clear()
    rpc.api._all_gather_sequence_id_to_states.clear()
    # uv and basic: the default transports busy-poll a core in every process.
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"{_RENDEZVOUS_SCHEME}://",
        num_worker_threads=_RPC_THREADS,
        rpc_timeout=member.start_timeout_s,
        _transports=["uv"],
        _channels=["basic"],
    )
    name = worker_name(member.rank) if member.rank else CONTROLLER
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You are using a Backend")  # torch's own use of a raw gloo group
        rpc.init_rpc(  # type: ignore[no-untyped-call]
            name, rank=member.rank, world_size=member.world_size, rpc_backend_options=options
        )


class _Rendezvous:
    """torch finds a rendezvous by a URL scheme, registered once per process: what it answers has to live here."""

    member: Membership
    registered = False


def _rendezvous(_url: str, **_options: object) -> Iterator[tuple[Store, int, int]]:
    member = _Rendezvous.member
    yield member.prefixed("rpc"), member.rank, member.world_size


# --- envelopes -----------------------------------------------------------------------------------------------------


class Envelope(TypedDict, total=False):
    """What an operation answers: `value` when ok, else what is known of the error, as plain text."""

    ok: bool
    rank: int
    value: bytes  # pickled
    type: str  # nearest class of errors.py, or the exception's own name
    message: str
    traceback: str
    retryable: bool  # nothing was changed on this rank
    setting: str | None


_UNCHANGING = (errors.ConfigError, errors.CheckpointError, errors.DataError)


def success(value: object, *, rank: int) -> Envelope:
    """Raises what pickle raises."""
    return {"ok": True, "rank": rank, "value": pickle.dumps(value, pickle.HIGHEST_PROTOCOL)}


def failure(error: BaseException, *, rank: int) -> Envelope:
    kind = next((cls for cls in type(error).__mro__ if cls.__module__ == errors.__name__), type(error))
    setting = getattr(error, "setting", None)
    message = str(error)
    return {
        "ok": False,
        "rank": rank,
        "type": kind.__name__,
        "message": message.removeprefix(f"{setting}: ") if setting else message,
        "traceback": "".join(traceback.format_exception(error)),
        "retryable": isinstance(error, _UNCHANGING),
        "setting": setting,
    }


def to_error(envelope: Envelope, *, step: int | None = None) -> Exception:
    """The error that a worker's envelope stands for; with the remote traceback as a note where nobody foresaw it."""
    kind, message, rank = envelope["type"], envelope["message"], envelope["rank"]
    error: Exception
    if kind == "ConfigError":
        return errors.ConfigError(message, setting=envelope["setting"])
    if kind == "DivergedError":
        return errors.DivergedError(message, step=step)
    if kind == "CheckpointError":
        return errors.CheckpointError(message)
    if kind == "DataError":
        return errors.DataError(message)
    if kind == "LocalProtocolError":
        error = errors.LocalProtocolError(message)
    else:
        error = errors.TrainerError(f"{kind} on worker rank {rank}: {message}", step=step)
    error.add_note(f"On worker rank {rank}:\n{envelope['traceback'].rstrip()}")
    return error


# --- the worker's end ----------------------------------------------------------------------------------------------

Operation = Callable[..., object]


@dataclass(frozen=True, slots=True)
class _Call:
    seq: int
    name: str
    payload: bytes  # pickled tuple of arguments
    answer: torch.futures.Future[Envelope]


class Endpoint:
    """Calls in the controller's order. RPC threads `submit`, the main thread `serve`s."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._lock = threading.Lock()
        self._next = 0
        self._early: dict[int, _Call] = {}  # arrived before one with a lower number
        self._due: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._operations: Mapping[str, Operation] = {}
        self._busy: tuple[str, float] | None = None
        self._dismissed = False

    def submit(self, seq: int, name: str, payload: bytes) -> torch.futures.Future[Envelope]:
        """File a call. A number that was used already is answered with LocalProtocolError and never runs again."""
        call = _Call(seq, name, payload, torch.futures.Future())
        with self._lock:
            if seq < self._next or seq in self._early:
                error = errors.LocalProtocolError(f"call {seq} ({name}) was sent twice; the next one is {self._next}")
                call.answer.set_result(failure(error, rank=self.rank))
                return call.answer
            self._early[seq] = call
            while (due := self._early.pop(self._next, None)) is not None:
                self._next += 1
                self._due.put(due)
        return call.answer

    def serve(self, operations: Mapping[str, Operation]) -> None:
        """Carry out calls in the calling thread until one named SHUTDOWN, which is carried out too if it is there."""
        self._operations = operations
        while True:
            call = self._due.get()
            self._busy = (call.name, time.monotonic())
            self._dismissed = call.name == SHUTDOWN
            call.answer.set_result(self._run(call.name, call.payload))
            self._busy = None
            if self._dismissed:
                return

    def end_with_controller(self) -> None:
        """Guard: end this process as soon as the connection to the controller breaks. After `initialise`."""

        def broken(_: object) -> None:
            if self._dismissed:
                end_own_group()
                os._exit(0)
            leave("the controller is gone")

        rpc.rpc_async(CONTROLLER, lifeline, timeout=0).add_done_callback(broken)

    def status(self) -> dict[str, object]:
        busy = self._busy
        return {
            "rank": self.rank,
            "pid": os.getpid(),
            "operation": busy[0] if busy else None,
            "seconds": time.monotonic() - busy[1] if busy else 0.0,
            "calls": self._next,
        }

    def beside(self, name: str, payload: bytes) -> Envelope:
        """Carry out an operation in the calling thread, whatever the main thread is busy with."""
        return self._run(name, payload)

    def _run(self, name: str, payload: bytes) -> Envelope:
        try:
            if name not in self._operations:
                raise errors.LocalProtocolError(f"no operation {name!r}; there are {', '.join(self._operations)}")
            return success(self._operations[name](*pickle.loads(payload)), rank=self.rank)
        except BaseException as error:  # noqa: BLE001  # SystemExit too: the controller waits for an answer
            answer = failure(error, rank=self.rank)
            complain(answer["traceback"])  # into the log: the controller shows it only where it's a surprise
            return answer


class _Process:
    """A remote function is found by its name, so what it acts on can't be passed to it: it lives here."""

    endpoint: Endpoint | None = None
    held: list[torch.futures.Future[None]] = []  # noqa: RUF012  # never answered; see `lifeline`


def install(endpoint: Endpoint) -> None:
    """Make `endpoint` the one that this process's remote functions act on. Before `initialise`."""
    _Process.endpoint = endpoint


def _endpoint() -> Endpoint:
    if _Process.endpoint is None:
        raise errors.LocalProtocolError("this process isn't a worker")
    return _Process.endpoint


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def call(seq: int, name: str, payload: bytes) -> torch.futures.Future[Envelope]:
    """Remote: file an operation under its sequence number."""
    return _endpoint().submit(seq, name, payload)


def beside(name: str, payload: bytes) -> Envelope:
    """Remote: carry out an operation that is safe beside others at once, on a thread of RPC."""
    return _endpoint().beside(name, payload)


def ping(silence_s: float) -> dict[str, object]:
    """Remote: what this worker is doing. Unless the next one comes within `silence_s` seconds, the worker ends itself.

    The C timer of faulthandler works even when a collective hangs or the GIL is held, and leaves all stacks in the log.
    """
    faulthandler.dump_traceback_later(silence_s, exit=True, file=sys.__stderr__ or sys.stderr)
    return _endpoint().status()


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def lifeline() -> torch.futures.Future[None]:
    """Remote: never answers, so that its caller learns of this process's end at once, by the connection's."""
    never: torch.futures.Future[None] = torch.futures.Future()
    _Process.held.append(never)
    return never


def abandon(reason: str) -> NoReturn:
    """Remote: end this worker now, whatever its main thread is stuck in. All stacks go to the log."""
    faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr)
    leave(reason)


def leave(reason: str, *, code: int = LOST_CONTROLLER_EXIT_CODE) -> NoReturn:
    """End the process and its children, from any thread."""
    complain(f"worker ends: {reason}")
    end_own_group()
    os._exit(code)
