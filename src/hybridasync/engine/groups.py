"""Process groups that weights are received over: what SGLang's routes for them do, for one rank. Every call blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from hybridasync.weights.buckets import bucket_bytes, unflatten
from hybridasync.weights.group import close_group, open_group, reach_store, start_broadcast

JOIN_TIMEOUT = timedelta(seconds=120)
"""Also that of one broadcast: the last net. A sender that dies closes its connections, which is an error at once."""

Named = list[tuple[str, torch.Tensor]]


class GroupError(ValueError):
    """No such group, one that can't be joined, or a broadcast that broke off."""


@dataclass(frozen=True, slots=True)
class Announced:
    """What a request says of a bucket."""

    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[Sequence[int]]


class UpdateGroups:
    """The groups of one engine by name."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._groups: dict[str, tuple[Any, torch.device]] = {}

    def join(self, name: str, address: tuple[str, int], *, rank: int, world_size: int, backend: str) -> None:
        """Wait until every rank has joined. Raises GroupError."""
        if name in self._groups:
            raise GroupError(f"the group {name} exists already")
        try:
            store = reach_store(*address, world_size=world_size, timeout=JOIN_TIMEOUT)
            group = open_group(store, rank, world_size, name=name, backend=backend, timeout=JOIN_TIMEOUT)
        except (RuntimeError, ValueError, TypeError) as error:
            raise GroupError(str(error)) from error
        self._groups[name] = group, self._device if backend == "nccl" else torch.device("cpu")

    def leave(self, name: str) -> None:
        """Raises GroupError."""
        if name not in self._groups:
            raise GroupError("The group to be destroyed does not exist.")
        group, _ = self._groups.pop(name)
        close_group(group)

    def receive(self, name: str, announced: Announced, *, flattened: bool) -> Named:
        """One broadcast for the bucket as a whole, or one for each of its tensors. Raises GroupError."""
        if name not in self._groups:
            raise GroupError(f"Group {name} not in {list(self._groups)}. Call `init_weights_update_group` first.")
        group, device = self._groups[name]
        try:
            flat = torch.empty(
                bucket_bytes(announced.names, announced.dtypes, announced.shapes), dtype=torch.uint8, device=device
            )
            named = unflatten(flat, announced.names, announced.dtypes, shapes=announced.shapes)
            for part in [flat] if flattened else [tensor for _, tensor in named]:
                start_broadcast(group, part).wait()
        except (RuntimeError, ValueError, TypeError) as error:  # TypeError: a size beyond what fits into 64 bits
            raise GroupError(str(error)) from error
        return named
