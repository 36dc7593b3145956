"""The id that a pause and its end share (R59)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hybridasync.errors import OperatingError

# ASCII digits only, no sign, no leading zero (R95). 18 digits fit a 64-bit integer.
_ID = re.compile(r"ha1:([0-9a-f]{32}):(0|[1-9][0-9]{0,17})")


class MalformedTransactionError(OperatingError, ValueError):
    """The id isn't `ha1:<32 hex>:<canonical decimal>`."""


@dataclass(frozen=True, slots=True, order=True)
class TransactionId:
    """`sequence` is 0, 1, 2, … within a `session`, which is 32 hex characters drawn once by each controller process."""

    session: str
    sequence: int

    @classmethod
    def parse(cls, text: str) -> TransactionId:
        """Raises MalformedTransactionError."""
        match = _ID.fullmatch(text)
        if match is None:
            raise MalformedTransactionError(f"a transaction id is ha1:<32 hex>:<decimal>, got {text[:80]!r}")
        return cls(match[1], int(match[2]))

    def __str__(self) -> str:
        return f"ha1:{self.session}:{self.sequence}"
