"""What was published last, as the engines hold it: what a delta is the difference to.

It lies in the memory of the first rank's host, once, in the engines' type, and only with `publication.delta`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hybridasync.weights.delta import Change, change_of

SAMPLE = 0.1
"""Share of the weights after which it shows whether nearly all of them changed, as in fp32 under Adam."""

NEARLY_ALL = 0.9
"""From this share of the size on a delta isn't worth its trouble."""


class PublishedCopy:
    """`version` is the one whose weights are held, None while they are of none as a whole.

    `is_base`: engines may have them, so that the next version can be told as a difference.
    """

    def __init__(self) -> None:
        self.version: int | None = None
        self.is_base = False
        self._held: dict[str, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._held.values())

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._held.items()

    def decided(self, version: int, *, commit: bool) -> None:
        """What became of the publication of `version`. If no engine took it, nobody could apply a difference to it."""
        self.is_base = commit and version == self.version

    def replace(self, version: int) -> Replacement:
        """Begin to take over `version`. Until `Replacement.finish` the copy is of no version."""
        replacement = Replacement(self, self._held, version, base=self.version if self.is_base else None)
        self.version, self.is_base = None, False
        return replacement


class Replacement:
    """Takes one tensor after the other, and collects what differs as long as that is smaller than everything."""

    def __init__(self, copy: PublishedCopy, held: dict[str, torch.Tensor], version: int, *, base: int | None) -> None:
        self._copy = copy
        self._held = held
        self._version = version
        self.base = base
        self.changes: dict[str, Change] | None = None if base is None else {}
        self._limit = copy.nbytes
        self._seen = self._size = 0  # bytes compared, and what their differences take

    def take(self, name: str, tensor: torch.Tensor) -> None:
        """`tensor` is on the CPU; it is copied, so that training may go on with it."""
        old = self._held.get(name)
        if old is None or old.shape != tensor.shape or old.dtype != tensor.dtype:
            self._held[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
            self.changes = None
            return
        if self.changes is not None:
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
        self._copy.version = self._version
