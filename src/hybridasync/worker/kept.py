"""Copies of the weights last published: what `keep_old_actor` takes old log-probs from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from hybridasync.errors import DataError


class KeptWeights:
    """Up to `depth` published versions of a module's parameters, on its device; the oldest one goes first."""

    def __init__(self, module: torch.nn.Module, *, depth: int) -> None:
        self._parameters = list(module.parameters())
        self._depth = depth
        self._copies: dict[int, list[Tensor]] = {}

    def keep(self, version: int) -> None:
        """Copy the current weights as published version `version`, which is never older than those kept."""
        self._copies.pop(version, None)
        reusable = [
            self._copies.pop(old) for old in sorted(self._copies)[: max(0, len(self._copies) + 1 - self._depth)]
        ]
        copies = reusable[-1] if reusable else [torch.empty_like(parameter) for parameter in self._parameters]
        with torch.no_grad():
            for copy, parameter in zip(copies, self._parameters, strict=True):
                copy.copy_(parameter)
        self._copies[version] = copies

    def version_for(self, sampled: int, *, step: int, exact: bool) -> int:
        """The kept version for tokens sampled from version `sampled`. Without `exact` the oldest kept one will do.

        Raises DataError if it isn't kept: the ratio would be against a policy that never sampled these tokens (U7).
        """
        if sampled in self._copies:
            return sampled
        if exact or not self._copies:
            kept = ", ".join(map(str, sorted(self._copies))) or "none"
            raise DataError(
                f"step {step}: a sample was made by weight version {sampled}, and keep_old_actor holds {kept}; "
                "use_tis or use_rollout_logprobs corrects for such samples"
            )
        return min(self._copies)

    @contextmanager
    def loaded(self, version: int) -> Iterator[None]:
        """The module computes with that version's weights; gradients and optimizer state aren't touched."""
        current = [parameter.data for parameter in self._parameters]
        try:
            for parameter, copy in zip(self._parameters, self._copies[version], strict=True):
                parameter.data = copy
            yield
        finally:
            for parameter, data in zip(self._parameters, current, strict=True):
                parameter.data = data
