"""A worker rank's life: join, serve the controller's calls in the main thread, leave. No orphan, whatever happens."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Protocol

import torch
import torch.distributed as dist

from hybridasync.config.models import Config, NetworkSection
from hybridasync.errors import ConfigError
from hybridasync.observability.jsonl import complain
from hybridasync.observability.process import die_with_parent, end_own_group
from hybridasync.runtime.environment import Environment
from hybridasync.runtime.interface import check_interface
from hybridasync.transport import rpc_endpoint
from hybridasync.transport.rpc_endpoint import Endpoint, Membership, Operation

OPERATIONS = (
    "setup",
    "start_phase",
    "train_step",
    "logprobs",
    "export_weights",
    "write_weights",
    "export_published",
    "clear_cache",
    "decide",
    "reference_logprobs",
    "save_checkpoint",
    "load_checkpoint",
    "export_hf",
    "memory",
)

_TELL_S = 1.0
"""A rank that gives up waits so long: the controller reads the reason before torchrun ends the job for its exit."""

_FLUSH_S = 0.2
"""RPC sends the last answer in the background."""


class WorkerService(Protocol):
    """What a worker serves beside OPERATIONS."""

    def close(self) -> None: ...


WorkerFactory = Callable[[Config], WorkerService]


def serve_worker(
    network: NetworkSection,
    *,
    factory: WorkerFactory | None = None,
    log: Path | None = None,
    environment: Environment | None = None,
) -> int:
    """Serve until the controller says shutdown; answers the exit code. Ends the process if the controller vanishes.

    `log`: file that gets this process's output. `factory` makes the service out of the controller's configuration once
    the workers' process group exists; default is `hybridasync.worker.service.Worker`.
    """
    die_with_parent(signal.SIGKILL)  # it has nothing to put right; what the controller owes, the controller does
    if log is not None:
        redirect_output(log)
    place = environment or Environment.read()
    member = place.membership(network)
    endpoint = Endpoint(place.rank)
    try:
        check_interface(network)
        _join(member, endpoint)
    except Exception as error:  # noqa: BLE001  # told to the controller and then turned into an exit code
        rpc_endpoint.report_failed(member, error)
        complain(f"worker rank {place.rank} can't join: {error}")
        time.sleep(_TELL_S)
        return error.exit_code if isinstance(error, ConfigError) else 1
    _serve(member, endpoint, place, factory=factory or _megatron_worker)
    return 0


def redirect_output(log: Path) -> None:
    """Everything that this process and its libraries write goes to `log`, the terminal is the controller's."""
    log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _join(member: Membership, endpoint: Endpoint) -> None:
    rpc_endpoint.choose_interface(member.interface)
    rpc_endpoint.install(endpoint)
    rpc_endpoint.report_joined(member)
    rpc_endpoint.await_gate(member)
    rpc_endpoint.initialise(member)
    endpoint.end_with_controller()
    # The launcher signals every rank. The controller alone decides what a signal means: it may still want a checkpoint,
    # and it lets the workers go. Should it die instead, `end_with_controller` ends them.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _let_pass)
        signal.siginterrupt(number, False)


def _let_pass(_number: int, _frame: FrameType | None) -> None:
    """Instead of SIG_IGN, which a worker's own children would inherit."""


def _serve(member: Membership, endpoint: Endpoint, place: Environment, *, factory: WorkerFactory) -> None:
    operations: dict[str, Operation] = {}

    def configure(config: Config) -> int:
        _start_process_group(member, place, config)
        service = factory(config)
        operations.update({name: getattr(service, name) for name in OPERATIONS})
        operations[rpc_endpoint.SHUTDOWN] = service.close
        return os.getpid()

    operations["configure"] = configure
    operations[rpc_endpoint.SHUTDOWN] = lambda: None
    endpoint.serve(operations)
    time.sleep(_FLUSH_S)
    end_own_group()


def _start_process_group(member: Membership, place: Environment, config: Config) -> None:
    """The workers' own world, in a name space of its own in the store."""
    os.environ.update(place.for_megatron())
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # ranks share the cores
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=member.prefixed("megatron"),
        rank=member.rank - 1,
        world_size=member.world_size - 1,
        timeout=timedelta(seconds=config.network.rpc_timeout_s),
    )


def _megatron_worker(config: Config) -> WorkerService:
    from hybridasync.worker.service import Worker  # Megatron takes seconds to import: not before the job has joined

    return Worker(config)
