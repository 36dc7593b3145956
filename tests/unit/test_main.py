"""The end of a run as seen by signals."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import anyio
import pytest

from hybridasync.main import supervised

NUMBERS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in NUMBERS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", NUMBERS)
def test_c33_a_signal_after_the_end_changes_nothing(number: signal.Signals) -> None:
    """torchrun sends one to every rank when a worker has died, just while the controller writes down why."""

    async def main() -> None:
        raise OSError("disk")

    outcome = anyio.run(supervised, main)
    os.kill(os.getpid(), number)
    assert outcome.code == 1 and "disk" in outcome.message


@pytest.mark.parametrize("number", NUMBERS)
def test_c33_a_second_signal_does_not_cut_the_compensation_short(number: signal.Signals) -> None:
    """Work is cancelled once; what it does in its shielded end is carried out whatever comes. The first one counts."""
    undone = []

    async def main() -> None:
        try:
            os.kill(os.getpid(), number)
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                for other in NUMBERS:
                    os.kill(os.getpid(), other)
                    await anyio.sleep(0.01)
                undone.append(True)

    outcome = anyio.run(supervised, main)
    assert undone and outcome.code == 128 + number
