"""A training worker's memory of what was decided about publications (R105a).

The controller alone knows whether engines serve a new version. It tells every worker once, with an epoch that only
grows, so that no worker acts on a decision that a newer one has overtaken.
"""

from __future__ import annotations

from hybridasync.errors import LocalProtocolError


class Decisions:
    """`epoch` is that of the last decision, `published` the version that engines serve, None before the first."""

    def __init__(self) -> None:
        self.epoch = -1
        self.published: int | None = None

    def take(self, epoch: int, version: int, *, commit: bool) -> None:
        """Raises LocalProtocolError for an epoch that isn't newer than the last one."""
        if epoch <= self.epoch:
            raise LocalProtocolError(f"a decision of epoch {epoch} came after that of epoch {self.epoch}")
        self.epoch = epoch
        if commit:
            self.published = version
