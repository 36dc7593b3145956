"""Entry point of the console script. It imports the command line only once Ctrl-C is taken care of."""

from __future__ import annotations

import os
import signal
from types import FrameType

INTERRUPTED = 130


def main() -> None:
    """Run the command line. Importing it takes a moment, in which Ctrl-C must not show Python's traceback."""
    signal.signal(signal.SIGINT, _leave)
    from hybridasync_cli.main import app

    signal.signal(signal.SIGINT, signal.default_int_handler)
    app()


def _leave(_number: int, _frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)
