"""A launched engine: ports that get taken, strangers that answer, and pauses that take effect too late."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

import anyio
import pytest
from tests.fake_engine import FakeEngine, serving
from tests.sidecar_kit import Rig, txn

from hybridasync.errors import ConfigError, OutcomeUnknown
from hybridasync.protocol.transactions import TransactionMachine
from hybridasync.sidecar import control as control_module
from hybridasync.sidecar import supervise
from hybridasync.sidecar.control import Control
from hybridasync.sidecar.supervise import LaunchedEngine, LaunchFile

COMMAND = (sys.executable, "-m", "tests.fake_engine", "--port", "{port}")


def launched(folder: Path, command: tuple[str, ...] = COMMAND) -> LaunchedEngine:
    launch = LaunchFile(kind="sglang", command=command, log=folder / "engine.log", init_timeout_s=60.0)
    return LaunchedEngine("engine-0", launch)


async def outcome(engine: LaunchedEngine) -> str:
    """Run the engine until it is ready (its URL) or given up (the reason), and stop it."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine.run, lambda: None)
        with anyio.fail_after(60):
            while engine.client is None and not engine.detail:  # noqa: ASYNC110 - no event: that is the interface
                await anyio.sleep(0.05)
        result = engine.detail or engine.url
        tasks.cancel_scope.cancel()
    await engine.stop()
    return result


async def test_c36_a_port_that_was_taken_meanwhile_is_exchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C36: the first port is stolen between choice and bind; the engine comes up on another one."""
    free = supervise._free_port
    with socket.create_server(("127.0.0.1", 0)) as thief:
        stolen = thief.getsockname()[1]
        ports = iter([stolen])
        monkeypatch.setattr(supervise, "_free_port", lambda host: next(ports, None) or free(host))
        url = await outcome(launched(tmp_path))
    assert url.startswith("http://127.0.0.1:") and url != f"http://127.0.0.1:{stolen}"
    assert "in use" in (tmp_path / "engine.log").read_text()


async def test_c36_a_stranger_that_answers_is_never_taken_for_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C36: our engine is still starting, and somebody else's answers on its port."""
    with serving(FakeEngine()) as url:
        monkeypatch.setattr(supervise, "_free_port", lambda _: int(url.rpartition(":")[2]))
        engine = launched(tmp_path, (sys.executable, "-c", "import time; time.sleep(60)", "{port}"))
        assert "another process answers" in await outcome(engine)
    assert engine.pid is None


async def test_a_killed_engine_is_reported_with_its_signal_even_before_its_end_was_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its port refuses a moment before its parent is told: the status names the signal, not the refused port."""
    monkeypatch.setattr(control_module, "OBITUARY_S", 60.0)  # the moment is long where the machine is busy
    engine = launched(tmp_path)
    control = Control(engine, TransactionMachine())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine.run, control.engine_lost)
        with anyio.fail_after(60):
            while engine.client is None:  # noqa: ASYNC110 - no event: that is the interface
                await anyio.sleep(0.05)
        assert engine.pid is not None
        port = int(engine.url.rpartition(":")[2])
        os.kill(engine.pid, signal.SIGKILL)
        while supervise._listening("127.0.0.1", port):  # without a turn of the event loop
            time.sleep(0.001)  # noqa: ASYNC251
        status = await control.status()
        tasks.cancel_scope.cancel()
    await engine.stop()
    assert status.state == "down" and "SIGKILL" in status.detail


async def test_a_command_that_does_not_exist_is_named(tmp_path: Path) -> None:
    """The log says which program was not found."""
    reason = await outcome(launched(tmp_path, ("/no/such/program", "{port}")))
    assert "exit code 127" in reason and "/no/such/program: No such file or directory" in reason


async def test_a_log_that_cannot_be_written_is_a_reason_not_a_crash(tmp_path: Path) -> None:
    """The sidecar lives on and says why there is no engine."""
    (tmp_path / "engine.log").mkdir()
    assert "can't be launched" in await outcome(launched(tmp_path))


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"kind": "vllm", "command": ["x"], "log": "x", "init_timeout_s": 1}']
)
def test_a_launch_file_that_says_nonsense_is_refused(tmp_path: Path, text: str) -> None:
    """A mistake of the caller's, with the path in the message."""
    path = tmp_path / "launch.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"launch\.json"):
        LaunchFile.load(path)


async def test_a_pause_that_takes_effect_after_its_own_resume_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """C01 between sidecar and engine: the pause timed out, was undone, and then happened after all."""
    monkeypatch.setattr(control_module, "STRAY_POLL_S", 0.02)
    rig = Rig()
    rig.engine.failures["pause"] = [OutcomeUnknown("e", "pause", "no complete answer")]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(rig.control.run)
        with pytest.raises(OutcomeUnknown):
            await rig.pause(txn(0))
        assert rig.engine.flags == [True, False]
        again = rig.engine.reached["resume"] = anyio.Event()
        rig.engine.paused = True
        with anyio.fail_after(10):
            await again.wait()
        await anyio.sleep(0.02)
        assert rig.engine.flags == [True, False, False]
        assert not rig.engine.paused and rig.machine.idle
        tasks.cancel_scope.cancel()
