"""What was published last, as the engines hold it: written while training goes on, and what a delta differs from.

It lies in the memory of the first rank's host, once, in the engines' type. Where memory doesn't allow for it there is
none, and training waits until weights are written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hybridasync.observability.resources import free_memory
from hybridasync.weights.checksums import Checksums
from hybridasync.weights.delta import Change, change_of

SAMPLE = 0.1
"""Share of the weights after which it shows whether nearly all of them changed, as in fp32 under Adam."""

NEARLY_ALL = 0.9
"""From this share of the size on a delta isn't worth its trouble."""

ROOM = 3
"""A copy is made where that many times its size is free: for itself, the files, and an engine that reads them."""


class PublishedCopy:
    """`version` is the one whose weights are held, None while they are of none as a whole.

    `is_base`: engines may have them, so that the next version can be told as a difference.
    """

    def __init__(self, *, compared: bool) -> None:
        """`compared`: deltas are wanted, so that there has to be a copy."""
        self._compared = compared
        self.version: int | None = None
        self.is_base = False
        self._held: dict[str, torch.Tensor] = {}
        self._room_for, self._roomy = 0, False
        self.taken: Taken | None = None  # still to be written

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._held.values())

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._held.items()

    def fits(self, size: int) -> bool:
        """Whether a copy of `size` bytes is there, or can be. Asked once for a size: it doesn't come and go."""
        if not self._compared and self._room_for != size:
            self._room_for, self._roomy = size, free_memory() >= ROOM * size
        return self._compared or self._roomy

    def decided(self, version: int, *, commit: bool) -> None:
        """What became of the publication of `version`. If no engine took it, nobody could apply a difference to it."""
        self.is_base = self._compared and commit and version == self.version

    def replace(self, version: int, dtype: torch.dtype) -> Replacement:
        """Begin to take over `version`. Until `Replacement.finish` the copy is of no version."""
        base = self.version if self.is_base else None
        replacement = Replacement(self, self._held, version, dtype=dtype, base=base)
        self.version, self.is_base = None, False
        return replacement


class Replacement:
    """Takes one tensor after the other, and collects what differs as long as that is smaller than everything."""

    def __init__(
        self,
        copy: PublishedCopy,
        held: dict[str, torch.Tensor],
        version: int,
        *,
        dtype: torch.dtype,
        base: int | None,
    ) -> None:
        self._copy = copy
        self._held = held
        self.version = version
        self._dtype = dtype
        self.base = base
        self.changes: dict[str, Change] | None = None if base is None else {}
        self._limit = copy.nbytes
        self._seen = self._size = 0  # bytes compared, and what their differences take

    def take(self, name: str, tensor: torch.Tensor) -> None:
        """`tensor` is copied, so that training may go on with it."""
        tensor, old = tensor.detach(), self._held.get(name)
        if old is None or old.shape != tensor.shape or old.dtype != self._dtype:
            self._held[name] = torch.empty(tensor.shape, dtype=self._dtype).copy_(tensor)
            self.changes = None
            return
        if self.changes is not None:
            tensor = tensor.to("cpu", self._dtype)
            self._compare(name, old, tensor)
        old.copy_(tensor)

    def _compare(self, name: str, old: torch.Tensor, tensor: torch.Tensor) -> None:
        self._seen += old.nbytes
        if self.changes is not None and (change := change_of(old, tensor)) is not None:
            self.changes[name] = change
            self._size += change.nbytes
        if self._seen >= self._limit * SAMPLE and self._size >= self._seen * NEARLY_ALL:
            self.changes = None  # not smaller than everything, so that the rest needn't be compared

    def finish(self) -> None:
        """All of them came, and what was to be written of them is written."""
        self._copy.version = self.version


@dataclass(frozen=True, slots=True)
class Taken:
    """What a copy was replaced with, and how that is to be written."""

    replacement: Replacement
    config: dict[str, Any]  # the model's, with the type of the weights
    dtype: torch.dtype
    sums: Checksums  # of a GPU's bytes already, else still to be fed
