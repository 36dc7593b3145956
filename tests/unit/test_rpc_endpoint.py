"""The worker's end without a network: transport/rpc_endpoint.py."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from hybridasync.errors import CheckpointError, ConfigError
from hybridasync.transport.rpc_endpoint import SHUTDOWN, Endpoint, failure, to_error


def test_calls_run_in_the_order_of_their_numbers() -> None:
    """Calls that arrive in another order wait for those before them; SHUTDOWN ends the service."""
    endpoint, ran = Endpoint(1), list[int]()
    numbers = [3, 1, 4, 0, 2]
    answers = {
        n: endpoint.submit(n, "note" if n < 4 else SHUTDOWN, pickle.dumps((n,) if n < 4 else ())) for n in numbers
    }
    endpoint.serve({"note": ran.append, SHUTDOWN: lambda: None})
    assert ran == [0, 1, 2, 3]
    assert all(answer.value()["ok"] for answer in answers.values())


def test_number_used_twice_never_runs() -> None:
    """A repeated number is refused at once, whether the first call waits, is due or has run."""
    endpoint, ran = Endpoint(1), list[int]()
    first = [endpoint.submit(n, "note", pickle.dumps((n,))) for n in (0, 2)]
    for number in (0, 2):
        refused = endpoint.submit(number, "note", pickle.dumps((9,))).value()
        assert (refused["ok"], refused["type"]) == (False, "LocalProtocolError")
    endpoint.submit(1, SHUTDOWN, pickle.dumps(()))
    endpoint.serve({"note": ran.append, SHUTDOWN: lambda: None})
    assert ran == [0] and first[0].done() and not first[1].done()


def test_error_keeps_its_setting_and_text() -> None:
    """A ConfigError comes back as it was; a subclass counts as the nearest kind that both sides know."""

    class DiskFull(CheckpointError):
        pass

    there = ConfigError("what", setting="model.dtype")
    back = to_error(failure(there, rank=2))
    assert isinstance(back, ConfigError) and (str(back), back.setting) == (str(there), "model.dtype")
    envelope = failure(DiskFull("full"), rank=2)
    assert (envelope["type"], envelope["retryable"]) == ("CheckpointError", True)
    assert type(to_error(envelope)) is CheckpointError
    assert failure(OSError(28, "No space"), rank=1)["retryable"] is False


def test_silent_controller_ends_the_worker() -> None:
    """Without another ping in time the process ends itself, whatever it does, with its stacks on stderr."""
    code = (
        "import time; from hybridasync.transport import rpc_endpoint as r\n"
        "r.install(r.Endpoint(1)); print(r.ping(30)['operation']); r.ping(0.5); time.sleep(60)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 1 and "Timeout (0:00:00.500000)!" in done.stderr


@pytest.mark.parametrize("value", ["text", {"a": 1.0}, None])
def test_value_travels_as_it_is(value: object) -> None:
    """What an operation answers is what the controller unpickles."""
    endpoint = Endpoint(1)
    answer = endpoint.submit(0, "same", pickle.dumps((value,)))
    endpoint.submit(1, SHUTDOWN, pickle.dumps(()))
    endpoint.serve({"same": lambda given: given, SHUTDOWN: lambda: None})
    assert pickle.loads(answer.value()["value"]) == value
