"""Becomes the engine: arms the parent-death signal, then replaces itself by the command.

    python -m hybridasync.sidecar.child COMMAND [ARGUMENT …]

A process of its own, because a foreign engine doesn't arm the signal and code between fork and exec isn't safe beside
threads.
"""

from __future__ import annotations

import os
import signal
import sys

from hybridasync.observability.process import die_with_parent

NOT_FOUND = 127


def main() -> int:
    command = sys.argv[1:]
    die_with_parent(signal.SIGKILL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
    return NOT_FOUND


if __name__ == "__main__":
    sys.exit(main())
