"""What torchrun jobs and local workers start with. Without torch, so that the launcher is quick."""

from __future__ import annotations

import socket

from hybridasync.errors import ConfigError

RANK_PROGRAM = ("-m", "hybridasync.runtime.rank")
"""Arguments of the interpreter that make it a rank."""


def listen(address: str, port: int) -> socket.socket:
    """A bound socket for the rendezvous store: a port that is held can't be taken between choice and use.

    Raises ConfigError naming network.master_port or network.master_addr.
    """
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
    except (OSError, OverflowError) as error:
        listener.close()
        setting = "network.master_port" if port else "network.master_addr"
        raise ConfigError(f"can't listen on {address}:{port}: {error}", setting=setting) from error
    listener.listen(1024)
    return listener
