"""What torchrun tells a rank, and what Megatron should be told instead.

Rank 0 of the job is the controller; workers are ranks 1..N. Megatron's world is the workers alone, so each of them
sees itself one rank lower, and the local rank is shifted on the node that has the controller.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore

from hybridasync.config.models import NetworkSection
from hybridasync.errors import ConfigError, TrainerError
from hybridasync.transport.rpc_endpoint import Membership

REQUIRED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


_OF_TORCHRUN = frozenset({*REQUIRED, "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"})


def without_torchrun(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for a process that is no rank of the job.

    With TORCHELASTIC_USE_AGENT_STORE, for one, a group that SGLang opens by itself waits for a store that nobody hosts.
    """
    return {
        name: value
        for name, value in environ.items()
        if name not in _OF_TORCHRUN and not name.startswith(("TORCHELASTIC_", "ROLE_"))
    }


def is_torchrun(environ: Mapping[str, str] | None = None) -> bool:
    """Whether this process is a rank of a job that a launcher started."""
    return all(name in (os.environ if environ is None else environ) for name in REQUIRED)


def workers_here(num_workers: int) -> int:
    """How many of the job's workers are on the controller's node, worker rank 1 first. For the controller."""
    return Environment.read().local_world_size - 1 if is_torchrun() else num_workers


@dataclass(frozen=True, slots=True)
class Environment:
    """One rank's place in the job, as the launcher states it."""

    rank: int  # 0: controller
    world_size: int  # workers + 1
    local_rank: int
    local_world_size: int
    node_rank: int
    attempt: int  # restarts so far
    master_addr: str
    master_port: int
    hosts_store: bool  # True: nobody else hosts the rendezvous store, rank 0 has to

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> Environment:
        """Raises ConfigError when a variable is missing or no number, or when there is no worker."""
        env = os.environ if environ is None else environ
        missing = [name for name in REQUIRED if name not in env]
        if missing:
            raise ConfigError(f"start this with torchrun or `hybridasync train`: {', '.join(missing)} not set")
        try:
            found = cls(
                rank=int(env["RANK"]),
                world_size=int(env["WORLD_SIZE"]),
                local_rank=int(env["LOCAL_RANK"]),
                local_world_size=int(env.get("LOCAL_WORLD_SIZE", env["WORLD_SIZE"])),
                node_rank=int(env.get("GROUP_RANK", "0")),
                attempt=int(env.get("TORCHELASTIC_RESTART_COUNT", "0")),
                master_addr=env["MASTER_ADDR"],
                master_port=int(env["MASTER_PORT"]),
                hosts_store=env["RANK"] == "0" and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            )
        except ValueError as error:
            raise ConfigError(f"the launcher's environment is no good: {error}") from error
        if found.world_size < 2:
            raise ConfigError("a job needs a controller and at least one worker: start num_workers + 1 processes")
        return found

    def open_store(self, timeout_s: float) -> Store:
        """Connect to the rendezvous store. Raises TrainerError when it doesn't answer within `timeout_s`."""
        try:
            return TCPStore(
                self.master_addr,
                self.master_port,
                is_master=self.hosts_store,
                wait_for_workers=False,
                timeout=timedelta(seconds=timeout_s),
            )
        except RuntimeError as error:
            raise TrainerError(f"no rendezvous store at {self.master_addr}:{self.master_port}: {error}") from error

    def membership(self, network: NetworkSection) -> Membership:
        """This rank's ticket for RPC and for the workers' group."""
        return Membership(
            rank=self.rank,
            world_size=self.world_size,
            attempt=self.attempt,
            store=self.open_store(network.start_timeout_s),
            interface=network.interface,
            start_timeout_s=network.start_timeout_s,
        )

    def for_megatron(self) -> dict[str, str]:
        """The variables of a worker's rank in the workers' own world."""
        shift = 1 if self.node_rank == 0 else 0
        return {
            "RANK": str(self.rank - 1),
            "WORLD_SIZE": str(self.world_size - 1),
            "LOCAL_RANK": str(self.local_rank - shift),
            "LOCAL_WORLD_SIZE": str(self.local_world_size - shift),
        }
