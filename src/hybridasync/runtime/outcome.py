"""How a run ended: the controller's exit code and message, past torchrun, which turns every failure into 1.

Exit codes: 0 done · 1 failed · 2 the user's mistake · 3 an owed resume wasn't acknowledged · 128 + signal: interrupted.
"""

from __future__ import annotations

import contextlib
import json
import signal
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from hybridasync.errors import CompensationFailed, ConfigError, HybridAsyncError, leaves
from hybridasync.observability.summary import Status

FILE_NAME = ".exit.json"
RESERVED_BYTES = 4096
_BYTES_PER_CHARACTER = 16
"""At most 12 as JSON escapes; the rest is room for the other fields."""
SIGNAL_EXIT = 128
"""A run ended by signal n exits with 128 + n, as shells do."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the controller left behind. `message` was already shown on its terminal."""

    code: int
    message: str = ""

    @property
    def status(self) -> Status:
        """As summary.json has it."""
        if self.code == 0:
            return "completed"
        return "interrupted" if self.code > SIGNAL_EXIT else "failed"

    @property
    def summary(self) -> dict[str, object]:
        """What summary.json says of the end besides."""
        return {"exit_code": self.code} | ({"error": self.message} if self.message else {})


def of_signal(number: int) -> Outcome:
    return Outcome(SIGNAL_EXIT + number, f"stopped by {signal.Signals(number).name}")


def reserve(run_dir: Path) -> None:
    """Begin without an outcome, but with room for one: the disk may be full by the end. Raises OSError."""
    (run_dir / FILE_NAME).write_bytes(b" " * RESERVED_BYTES)


def write(run_dir: Path, outcome: Outcome) -> None:
    """Complete, or on a full disk into what was reserved, the message cut short. Raises OSError."""
    part, final = run_dir / f"{FILE_NAME}.part", run_dir / FILE_NAME
    try:
        part.write_text(json.dumps(asdict(outcome)), encoding="utf-8")
        part.replace(final)
    except OSError:
        short = Outcome(outcome.code, outcome.message[: RESERVED_BYTES // _BYTES_PER_CHARACTER])
        with final.open("r+b") as file:
            file.write(json.dumps(asdict(short)).encode().ljust(RESERVED_BYTES))
        with contextlib.suppress(OSError):
            part.unlink()


def read(run_dir: Path) -> Outcome | None:
    """None when the controller ended without a word."""
    try:
        return Outcome(**json.loads((run_dir / FILE_NAME).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def clear(run_dir: Path) -> None:
    (run_dir / FILE_NAME).unlink(missing_ok=True)


def of_error(error: BaseException) -> Outcome:
    """The worst of an error's leaves decides. Only what nobody foresaw is shown with its traceback."""
    found = leaves(error)
    for kind in (CompensationFailed, ConfigError, HybridAsyncError):
        for leaf in found:
            if isinstance(leaf, kind):
                return Outcome(leaf.exit_code, "\n".join([str(leaf), *getattr(leaf, "__notes__", ())]))
    if any(isinstance(leaf, KeyboardInterrupt) for leaf in found):
        return Outcome(130, "interrupted")
    return Outcome(1, "".join(traceback.format_exception(error)))
