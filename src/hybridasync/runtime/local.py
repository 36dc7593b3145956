"""Workers of a plain script: started here, without torchrun, and gone with the block that started them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.to_thread
from torch._C._distributed_c10d import TCPStore

from hybridasync.config.models import Config
from hybridasync.config.resolved import write_resolved
from hybridasync.errors import WorkerLost
from hybridasync.observability.process import ProcessId, child_environment, log_tail, terminate, wait_ended
from hybridasync.runtime.start import RANK_PROGRAM, listen
from hybridasync.transport.rpc_endpoint import Membership

_LEAVE_S = 1.5
_TERMINATE_S = 1.0


@dataclass(frozen=True, slots=True)
class LocalJob:
    """The controller's membership, and the workers' processes by rank."""

    member: Membership
    processes: dict[int, subprocess.Popen[bytes]]
    logs: Path

    def check(self) -> None:
        """Raise WorkerLost when a worker has ended. For the time before they have joined."""
        for rank, process in self.processes.items():
            code = process.poll()
            if code is not None:
                tail = log_tail(self.logs / f"worker-{rank}.log")
                raise WorkerLost(rank, f"its process ended with code {code} before it joined\n{tail}".rstrip())


def serve_store(listener: socket.socket, *, shared: bool = False) -> TCPStore:
    """The rendezvous store on a bound socket, which it takes over. `shared`: later ones on its port are this one."""
    host, port = listener.getsockname()[:2]
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=shared,
        master_listen_fd=listener.detach(),
    )


@asynccontextmanager
async def spawn_local_workers(
    config: Config, run_dir: Path, *, program: Sequence[str] = RANK_PROGRAM
) -> AsyncIterator[LocalJob]:
    """Start parallel.num_workers processes, each in a session of its own; none is left after the block.

    Call it in the thread that stays as long as the workers: they die with it.
    """
    listener = listen(config.network.master_addr, config.network.master_port)
    host, port = listener.getsockname()[:2]
    store = serve_store(listener)
    size = config.parallel.num_workers + 1
    recipe = write_resolved(config, run_dir)
    command = [sys.executable, *program, str(recipe), "--run-dir", str(run_dir)]
    member = Membership(
        rank=0,
        world_size=size,
        attempt=0,
        store=store,
        interface=config.network.interface,
        start_timeout_s=config.network.start_timeout_s,
    )
    job = LocalJob(member, {}, run_dir / "logs")
    try:
        for rank in member.worker_ranks:
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": 0}
            rendezvous = {"MASTER_ADDR": host, "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
            told = {name: str(value) for name, value in (place | rendezvous).items()}
            job.processes[rank] = subprocess.Popen(  # noqa: ASYNC220  # a child of this very thread: see above
                command, env=child_environment(os.environ | told), stdin=subprocess.DEVNULL, start_new_session=True
            )
        yield job
    finally:
        # Shielded: a cancelled clean-up would leave processes behind.
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(_end, list(job.processes.values()))


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Those that were dismissed end by themselves in a moment; those that never joined need SIGTERM."""
    targets = [ProcessId.of(process.pid) for process in processes if process.poll() is None]
    terminate(wait_ended(targets, _LEAVE_S), grace_s=_TERMINATE_S)
    for process in processes:
        process.wait()
