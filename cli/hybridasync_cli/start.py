"""Entry point of the console script. It imports the command line only once Ctrl-C is taken care of."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130


def main() -> None:
    """Run the command line. Importing and building it takes a moment, in which Ctrl-C must not show a traceback."""
    signal.signal(signal.SIGINT, _leave)
    from hybridasync_cli.main import app

    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        app()
    except KeyboardInterrupt:  # before a command began, which sees to it by itself
        sys.exit(INTERRUPTED)


def _leave(_number: int, _frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)
