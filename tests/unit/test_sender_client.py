"""The controller's end of the sender: whatever the process does, there is an answer for every engine, and no hang."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import anyio
import psutil
import pytest

from hybridasync.errors import EngineError, NotSent, OutcomeUnknown, Rejected, RemoteProtocolError
from hybridasync.transport import sender
from hybridasync.transport.sender import Request, SenderProcess, decode_failure, encode_failure
from hybridasync.types import SendTarget, WeightSnapshot

TARGETS = (SendTarget("engine-0", "http://a", False), SendTarget("engine-1", "http://b", True))
SNAPSHOT = WeightSnapshot(3, "/snapshot", {"b": "2", "a": "1"}, 8, 0.0)
READY = 'import json, sys, time\nprint(json.dumps({"ready": True}), flush=True)\nline = sys.stdin.readline()\n'
GOOD = READY + 'for _ in range(3):\n    print(json.dumps({"beat": True}), flush=True)\n'


Children = Callable[[], list[psutil.Process]]


@pytest.fixture
def children() -> Children:
    """Processes started in this test: those of other tests' fixtures live beside it."""
    before = set(psutil.Process().children())
    return lambda: [child for child in psutil.Process().children() if child not in before]


def process(tmp_path: Path, program: str) -> SenderProcess:
    return SenderProcess([sys.executable, "-u", "-c", program], os.environ, tmp_path / "logs" / "sender.log")


async def test_a_transfer_is_a_line_there_and_a_line_back(tmp_path: Path) -> None:
    """It is asked with everything that it needs, and its signs of life are passed over."""
    answer = 'open(sys.argv[0] if 0 else "%s", "w").write(line)\nprint(json.dumps({"failures": []}), flush=True)\n'
    program = GOOD + answer % (tmp_path / "asked") + "sys.stdin.readline()"
    async with process(tmp_path, program) as running:
        assert await running.send(TARGETS, SNAPSHOT) == {}
    asked = Request.decode((tmp_path / "asked").read_text())
    assert asked == Request(TARGETS, "/snapshot", 3, ("a", "b"))


async def test_a_failure_ends_the_process_and_the_next_transfer_has_a_new_one(
    tmp_path: Path, children: Children
) -> None:
    """Its groups are gone with it; the failure names the engine, and whether it happened."""
    failure = encode_failure(Rejected("engine-1", "receive_weights", 400, detail="no"))
    program = GOOD + f'print(json.dumps({{"failures": [{failure!r}]}}), flush=True)\ntime.sleep(100)'
    async with process(tmp_path, program) as running:
        for _ in range(2):
            failures = await running.send(TARGETS, SNAPSHOT)
            assert list(failures) == ["engine-1"]
            assert str(failures["engine-1"]) == "engine-1: receive_weights: HTTP 400 no"
            assert not children()


@pytest.mark.parametrize(
    ("program", "kind", "words"),
    [
        ("import sys\nsys.exit('no torch here')", NotSent, "no torch here"),
        (READY + "sys.exit('out of memory')", OutcomeUnknown, "out of memory"),
        (READY + "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", OutcomeUnknown, "lost in the transfer"),
    ],
)
async def test_a_sender_that_dies_twice_has_failed_for_every_engine(
    tmp_path: Path, program: str, kind: type[EngineError], *, words: str
) -> None:
    """Before it was asked nothing can have happened, afterwards anything."""
    async with process(tmp_path, program) as running:
        failures = await running.send(TARGETS, SNAPSHOT)
    assert list(failures) == ["engine-0", "engine-1"]
    assert all(type(error) is kind and words in str(error) for error in failures.values())


async def test_a_sender_that_dies_once_is_replaced(tmp_path: Path) -> None:
    """The second one is asked the same, and its answer counts."""
    died = str(tmp_path / "died")
    once = f"import os\nif not os.path.exists({died!r}):\n    open({died!r}, 'w')\n    os._exit(1)\n"
    program = READY + once + 'print(json.dumps({"failures": []}), flush=True)\nsys.stdin.readline()'
    async with process(tmp_path, program) as running:
        assert await running.send(TARGETS, SNAPSHOT) == {}


async def test_a_silent_sender_is_taken_for_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, children: Children
) -> None:
    """Stopped, it is ended after a while, and with it whatever waits for it."""
    monkeypatch.setattr(sender, "SILENCE_S", 0.2)
    async with process(tmp_path, READY + "time.sleep(100)") as running:
        failures = await running.send(TARGETS, SNAPSHOT)
        assert not children()
    assert all(type(error) is OutcomeUnknown for error in failures.values())


async def test_a_cancelled_transfer_ends_the_sender(tmp_path: Path, children: Children) -> None:
    """Engines that wait in a broadcast are freed by its end."""
    async with process(tmp_path, READY + "time.sleep(100)") as running:
        with anyio.move_on_after(1.0) as scope:
            await running.send(TARGETS, SNAPSHOT)
        assert scope.cancelled_caught
        assert not children()


async def test_it_ends_with_its_block(tmp_path: Path, children: Children) -> None:
    """Also where it ignores signals."""
    program = f"import signal\nsignal.signal({int(signal.SIGTERM)}, signal.SIG_IGN)\n" + READY
    async with process(tmp_path, program):
        [child] = children()
    assert not child.is_running()


@pytest.mark.parametrize(
    "error",
    [
        NotSent("e", "send", "x"),
        OutcomeUnknown("e", "broadcast"),
        RemoteProtocolError("e", "layout", "HTTP"),
        Rejected("e", "join", 404, detail="HTTP 5"),
    ],
)
def test_errors_come_through(error: EngineError) -> None:
    """Kind, fields and message are those of the sender's side."""
    decoded = decode_failure(encode_failure(error))
    assert (type(decoded), str(decoded)) == (type(error), str(error))
    assert getattr(decoded, "status", None) == getattr(error, "status", None)
