"""torchrun as a child of the launcher: it dies with it, holds the rendezvous port from the start, and is quiet.

`python -m hybridasync.runtime.agent --listen-fd FD --log FILE -- <torchrun's arguments>`
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from hybridasync.observability.process import PARENT_PID_VARIABLE, die_with_parent

FAILURES = "torchrun.failures.json"
"""Beside the log: rank → exit code, as of subprocess, of those whose end made torchrun stop the job."""


def main(argv: Sequence[str] | None = None) -> None:
    """Be torchrun on a port that is bound already."""
    die_with_parent(signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until torchrun takes it: there is no rank to signal yet
    parser = argparse.ArgumentParser(prog="hybridasync.runtime.agent")
    parser.add_argument("--listen-fd", type=int, required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("torchrun", nargs="+")
    arguments = parser.parse_args(argv)
    # Python's streams alone: the ranks inherit the descriptors, and rank 0 keeps the terminal.
    log = arguments.log.open("a", buffering=1, encoding="utf-8")
    sys.stdout = sys.stderr = log

    from torch.distributed import run  # only now: torch's loggers keep the stream that they find
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from hybridasync.runtime.local import serve_store

    listener = socket.socket(fileno=arguments.listen_fd)
    host, port = listener.getsockname()[:2]
    store = serve_store(listener, shared=True)
    os.environ[PARENT_PID_VARIABLE] = str(os.getpid())
    failures = arguments.log.with_name(FAILURES)
    failures.unlink(missing_ok=True)
    try:
        run.main(["--master-addr", host, "--master-port", str(port), *arguments.torchrun])
    except ChildFailedError as error:
        failures.write_text(json.dumps({rank: failure.exitcode for rank, failure in error.failures.items()}))
        raise
    del store  # kept until here: torchrun's store is this one


if __name__ == "__main__":
    main()
