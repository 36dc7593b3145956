"""Process groups between the sender of weights and the ranks of one engine, made as SGLang makes its side.

They stand beside the default group of a process, which there needn't be. torch has no public way to that: its helper is
what SGLang and every trainer for it call, so both sides agree on the names in the store.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import Backend, _new_process_group_helper, _world

SENDER_RANK = 0

GroupBackend = Literal["gloo", "nccl"]


def serve_store(address: str, timeout: timedelta) -> TCPStore:
    """A rendezvous store at a free port of `address` alone: torch by itself would listen on all interfaces."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    port = listener.getsockname()[1]
    return TCPStore(address, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach())


def reach_store(address: str, port: int, *, world_size: int, timeout: timedelta) -> TCPStore:
    """The store of the other side. Raises RuntimeError (torch's DistNetworkError) where nobody serves it in time."""
    return TCPStore(address, port, world_size, False, timeout)


def open_group(store: TCPStore, rank: int, world_size: int, *, name: str, backend: str, timeout: timedelta) -> Any:
    """Join the group. Blocks until every rank has joined, `timeout` at most. Raises RuntimeError, ValueError."""
    group, _ = _new_process_group_helper(
        world_size,
        rank,
        [],
        Backend(backend),
        PrefixStore(name, store),
        group_name=name,  # type: ignore[arg-type]
        backend_options=None,
        timeout=timeout,
    )
    _world.pg_group_ranks[group] = {member: member for member in range(world_size)}
    return group


def start_broadcast(group: Any, tensor: torch.Tensor) -> Any:
    """Send or receive `tensor`; answers at once with torch's Work."""
    return dist.broadcast(tensor, src=SENDER_RANK, group=group, async_op=True)


def close_group(group: Any) -> None:
    """Leave. Waits for nothing that is under way."""
    dist.destroy_process_group(group)
