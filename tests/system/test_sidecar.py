"""Real sidecar processes beside a scripted engine: case C01, leases, ownership of the engine, the HTTP API."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import httpx
import psutil
import pytest
from tests.fake_engine import FakeEngine, refusing, serving

from hybridasync.errors import EngineError, NotSent, OutcomeUnknown, Rejected
from hybridasync.observability.process import child_environment
from hybridasync.transport.sidecar import SidecarClient

pytestmark = pytest.mark.slow

TOKEN = "s3cret"
A = "a" * 32
ENGINE_PROGRAM = [sys.executable, "-m", "tests.fake_engine"]
ROOT = Path(__file__).resolve().parents[2]

DEADLINE_S = 30.0
"""For whatever has to happen; the machine may be busy."""


def txn(sequence: int) -> str:
    return f"ha1:{A}:{sequence}"


@dataclass
class Running:
    """A sidecar process."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def client(self, timeout_s: float = DEADLINE_S, token: str = TOKEN) -> SidecarClient:
        return SidecarClient("engine-0", self.url, token, timeout_s=timeout_s)

    def http(self, method: str, path: str, **options: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {TOKEN}"} | options.pop("headers", {})
        return httpx.request(method, self.url + path, headers=headers, timeout=DEADLINE_S, trust_env=False, **options)

    def status(self) -> dict[str, Any]:
        return dict(self.http("GET", "/v1/status").json())

    def until_buried(self) -> dict[str, Any]:
        """Its status once the engine has ended and how is known: a port refuses a moment before its process ends."""

        def buried(status: dict[str, Any]) -> bool:
            return (status["state"], status["engine_pid"]) == ("down", None) and "ended with" in status["detail"]

        return self.until(buried)

    def until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Ask for the status until it is as wanted."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition(status := self.status()):
            assert time.monotonic() < deadline, f"{status}\n{self.log.read_text()}"
            time.sleep(0.05)
        return status


@dataclass
class Sidecars:
    folder: Path
    started: list[Running] = field(default_factory=list)

    def start(self, *arguments: str, owned: bool = True) -> Running:
        number = len(self.started)
        announce = self.folder / f"sidecar-{number}.json"
        log = self.folder / f"sidecar-{number}.log"
        environment = (child_environment() if owned else dict(os.environ)) | {"HYBRIDASYNC_TOKEN": TOKEN}
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "hybridasync.sidecar", "--announce", str(announce), *arguments],
                stderr=output,
                env=environment,
                cwd=ROOT,
            )
        deadline = time.monotonic() + DEADLINE_S
        while not announce.exists():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        running = Running(process, json.loads(announce.read_text())["url"], log)
        self.started.append(running)
        return running

    def launch(self, *arguments: str, port: str = "{port}", announced: bool = False, init_s: float = 60.0) -> Running:
        """A sidecar that launches the scripted engine."""
        command = [*ENGINE_PROGRAM, "--port", port, *arguments]
        command += ["--announce", "{announce}"] if announced else []
        number = len(self.started)
        description = {
            "kind": "embedded",
            "command": command,
            "env": {},
            "log": str(self.folder / f"engine-{number}.log"),
            "init_timeout_s": init_s,
        }
        path = self.folder / f"launch-{number}.json"
        path.write_text(json.dumps(description))
        return self.start("--launch", str(path))


@pytest.fixture
def sidecars(tmp_path: Path) -> Iterator[Sidecars]:
    kit = Sidecars(tmp_path)
    yield kit
    for running in kit.started:
        if running.process.poll() is None:
            running.process.kill()
        running.process.wait()


@pytest.fixture
def fake() -> FakeEngine:
    return FakeEngine()


@contextmanager
def attached(sidecars: Sidecars, fake: FakeEngine) -> Iterator[Running]:
    with serving(fake) as url:
        yield sidecars.start("--engine-url", url)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_gone(pid: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not gone(pid):
        assert time.monotonic() < deadline, f"process {pid} lives"
        time.sleep(0.02)


async def test_c01_a_a_pause_that_timed_out_is_undone_by_its_own_end(sidecars: Sidecars, fake: FakeEngine) -> None:
    """C01-A: the engine is slow to pause, the client gives up and ends at once; the engine ends up running."""
    fake.faults["/pause_generation"] = [4.0]
    with attached(sidecars, fake) as running:
        async with running.client(timeout_s=1.5) as hasty, running.client() as patient:
            with pytest.raises(OutcomeUnknown):
                await hasty.pause(txn(0), "retract", 60.0)
            await patient.end(txn(0))
            assert not fake.paused
            assert [p for p in fake.done if "generation" in p] == ["/pause_generation", "/continue_generation"]
            assert (await patient.status()).state == "running"
            assert not await patient.pause(txn(0), "retract", 60.0)


async def test_c01_b_a_dead_engine_owes_nothing(sidecars: Sidecars) -> None:
    """C01-B: the engine's port is closed: refused at once, with no call to resume, and the end is harmless."""
    with refusing() as url:
        running = sidecars.start("--engine-url", url)
        async with running.client() as client:
            with pytest.raises(Rejected) as refused:
                await client.pause(txn(0), "drain", 60.0)
            assert refused.value.status == 424
            assert (await client.status()).state == "down"
            await client.end(txn(0))
            with pytest.raises(Rejected) as refused:
                await client.fence()
            assert refused.value.status == 409


async def test_c01_c_a_resume_that_the_engine_refuses_is_reported_each_time(
    sidecars: Sidecars, fake: FakeEngine
) -> None:
    """C01-C: each end is an error until the engine resumes; meanwhile the status says what is wrong."""
    fake.faults["/continue_generation"] = [500, 500, 500]
    with attached(sidecars, fake) as running:
        async with running.client() as client:
            assert await client.pause(txn(0), "retract", 60.0)
            for _ in range(3):
                with pytest.raises(OutcomeUnknown, match="502"):
                    await client.end(txn(0))
            status = await client.status()
            assert (status.state, status.txn) == ("recovery_required", txn(0))
            await client.end(txn(0))
            assert not fake.paused and (await client.status()).state == "running"


async def test_c01_d_a_late_end_leaves_the_newer_pause_alone(sidecars: Sidecars, fake: FakeEngine) -> None:
    """C01-D: transaction 2 holds the engine; the late end of transaction 1 resumes nothing."""
    with attached(sidecars, fake) as running:
        async with running.client() as client:
            assert await client.pause(txn(1), "retract", 60.0)
            await client.end(txn(1))
            assert await client.pause(txn(2), "retract", 60.0)
            await client.end(txn(1))
            assert fake.paused and (await client.status()).txn == txn(2)
            await client.end(txn(2))
            assert not fake.paused
    assert fake.control_calls() == ["/pause_generation", "/continue_generation"] * 2


async def test_a_drain_waits_until_nothing_runs_and_never_aborts(sidecars: Sidecars, fake: FakeEngine) -> None:
    """Mode drain answers not ready while requests run or wait, and then pauses with retract."""
    with attached(sidecars, fake) as running:
        async with running.client() as client:
            for fake.running, fake.waiting in ((1, 0), (0, 1)):
                assert not await client.pause(txn(0), "drain", 60.0)
            assert not fake.paused
            fake.running = fake.waiting = 0
            assert await client.pause(txn(0), "drain", 60.0)
            await client.end(txn(0))
            assert await client.pause(txn(1), "abort", 60.0)
            assert await client.pause(txn(1), "abort", 60.0)
    bodies = [body for path, body in fake.calls if path == "/pause_generation"]
    assert bodies == [{"mode": "retract"}, {"mode": "abort"}]


async def test_a_client_that_hangs_up_has_its_pause_undone(sidecars: Sidecars, fake: FakeEngine) -> None:
    """R88 over HTTP: the pause is carried out, undone, and forgotten; nobody sent an end."""
    fake.faults["/pause_generation"] = [2.5]
    with attached(sidecars, fake) as running:
        async with running.client() as client:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(client.pause, txn(0), "retract", 60.0)
                while not fake.calls:  # noqa: ASYNC110 - the engine is in another thread
                    await anyio.sleep(0.02)
                tasks.cancel_scope.cancel()
            running.until(lambda status: "/continue_generation" in fake.done and status["state"] == "running")
            assert not fake.paused
            assert (await client.status()).txn is None


async def test_a_lease_that_is_not_renewed_ends_the_pause(sidecars: Sidecars, fake: FakeEngine) -> None:
    """The controller died: the sidecar resumes by itself, and says that the weights can't be trusted."""
    with attached(sidecars, fake) as running:
        async with running.client() as client:
            assert await client.pause(txn(0), "retract", 60.0)
            await client.renew(txn(0), 600.0)
            assert (await client.status()).lease_left_s > 60.0 and fake.paused
            await client.renew(txn(0), 1.0)
            status = running.until(lambda status: status["state"] == "running")
            assert status["torn"] and not fake.paused
            with pytest.raises(Rejected) as refused:
                await client.renew(txn(0), 60.0)
            assert refused.value.status == 409
            await client.end(txn(0))
            assert running.status()["torn"]
            assert await client.pause(txn(1), "retract", 60.0)
            await client.end(txn(1))
            assert not running.status()["torn"]
    assert fake.control_calls() == ["/pause_generation", "/continue_generation"] * 2


async def test_a_sidecar_that_finds_a_paused_engine_says_so_and_an_end_resumes_it(
    sidecars: Sidecars, fake: FakeEngine
) -> None:
    """The sidecar was killed while its engine was paused; the end that the journal owes goes to the new one."""
    with attached(sidecars, fake) as running:
        async with running.client() as client:
            assert await client.pause(txn(0), "retract", 60.0)
        running.process.kill()
        running.process.wait()
        again = sidecars.start(*running.process.args[-2:])  # type: ignore[misc, index]
        assert again.status()["state"] == "paused" and again.status()["txn"] is None
        async with again.client() as client:
            await client.end(txn(0))
        assert not fake.paused and again.status()["state"] == "running"


def test_a_sidecar_that_is_stopped_resumes_an_attached_engine(sidecars: Sidecars, fake: FakeEngine) -> None:
    """SIGTERM: exit code 0, and an engine that lives on isn't left paused."""
    with attached(sidecars, fake) as running:
        assert running.http("POST", "/v1/pause", json={"txn": txn(0)}).json()["paused"]
        running.process.terminate()
        assert running.process.wait(DEADLINE_S) == 0
        assert not fake.paused


async def test_a_sidecar_that_is_stopped_in_the_middle_of_a_pause_undoes_it(
    sidecars: Sidecars, fake: FakeEngine
) -> None:
    """R88, server shutdown: the pause is on its way to the engine when SIGTERM comes; afterwards the engine runs."""
    fake.faults["/pause_generation"] = [2.5]
    with attached(sidecars, fake) as running:

        async def pause() -> None:
            async with running.client() as client:
                with suppress(EngineError):
                    await client.pause(txn(0), "retract", 60.0)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pause)
            while not fake.calls:  # noqa: ASYNC110 - the engine is in another thread
                await anyio.sleep(0.02)
            for _ in range(3):  # an impatient user
                running.process.terminate()
                await anyio.sleep(0.1)
            assert await anyio.to_thread.run_sync(running.process.wait, DEADLINE_S) == 0
        assert not fake.paused
    assert fake.done.count("/continue_generation") == 1


def test_a_killed_engine_is_down_at_once(sidecars: Sidecars) -> None:
    """kill -9: the status says so, with how it ended and the end of its log; a pause is refused, an end is harmless."""
    running = sidecars.launch(announced=True, port="0")
    pid = running.until(lambda status: status["healthy"])["engine_pid"]
    assert running.http("POST", "/v1/pause", json={"txn": txn(0)}).json()["paused"]
    os.kill(pid, signal.SIGKILL)
    status = running.until_buried()
    assert not status["healthy"]
    assert "SIGKILL" in status["detail"] and f"fake engine {pid} starts" in status["detail"]
    assert running.http("POST", "/v1/end", json={"txn": txn(0)}).status_code == 200
    assert running.http("POST", "/v1/pause", json={"txn": txn(1)}).status_code == 424
    assert running.http("POST", "/v1/recover", json={"timeout_s": 60}).status_code == 200
    status = running.until(lambda status: status["healthy"])
    assert status["state"] == "running" and status["engine_pid"] not in (None, pid)
    assert running.http("POST", "/v1/pause", json={"txn": txn(1)}).json()["paused"]


def test_a_fence_kills_a_stubborn_engine_and_starts_a_new_one(sidecars: Sidecars) -> None:
    """An engine that ignores SIGTERM and is paused: a fence replaces it, and the new one runs."""
    running = sidecars.launch("--ignore-term")
    pid = running.until(lambda status: status["healthy"])["engine_pid"]
    assert running.http("POST", "/v1/pause", json={"txn": txn(0)}).json()["paused"]
    assert running.http("POST", "/v1/fence").status_code == 200
    assert gone(pid)
    status = running.until(lambda status: status["healthy"])
    assert (status["state"], status["txn"]) == ("running", None) and status["engine_pid"] != pid
    assert running.http("POST", "/v1/end", json={"txn": txn(0)}).status_code == 200


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_no_engine_outlives_its_sidecar(sidecars: Sidecars, how: signal.Signals) -> None:
    """kill -9 and SIGTERM of the sidecar: its engine ends too."""
    running = sidecars.launch()
    pid = running.until(lambda status: status["healthy"])["engine_pid"]
    running.process.send_signal(how)
    assert running.process.wait(DEADLINE_S) == (-signal.SIGKILL if how == signal.SIGKILL else 0)
    wait_gone(pid)


PARENT = """
import subprocess, sys, os
from hybridasync.observability.process import child_environment
subprocess.Popen(sys.argv[1:], env=child_environment())
sys.stdin.read()
"""


def test_no_sidecar_outlives_the_controller_that_started_it(sidecars: Sidecars, fake: FakeEngine) -> None:
    """kill -9 of the parent: the sidecar ends, and resumes the engine that it was attached to first."""
    announce = sidecars.folder / "owned.json"
    with serving(fake) as url:
        command = [sys.executable, "-m", "hybridasync.sidecar", "--engine-url", url, "--announce", str(announce)]
        parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, *command],
            stdin=subprocess.PIPE,
            env=os.environ | {"HYBRIDASYNC_TOKEN": TOKEN},
        )
        with parent:
            deadline = time.monotonic() + DEADLINE_S
            while not announce.exists():
                assert time.monotonic() < deadline
                time.sleep(0.02)
            told = json.loads(announce.read_text())
            headers = {"Authorization": f"Bearer {TOKEN}"}
            pause = {"json": {"txn": txn(0)}, "headers": headers, "timeout": DEADLINE_S, "trust_env": False}
            answer = httpx.post(told["url"] + "/v1/pause", **pause)
            assert answer.json()["paused"] and fake.paused
            parent.kill()
            wait_gone(told["pid"])
        assert not fake.paused


def test_an_engine_that_does_not_come_up_is_reported_with_its_log(sidecars: Sidecars) -> None:
    """It ended before it was ready: exit code and last lines; `recover` says the same."""
    running = sidecars.launch("--die-after", "0", "--no-such-option")
    status = running.until(lambda status: bool(status["detail"]))
    assert status["state"] == "down" and "exit code 2" in status["detail"]
    assert "unrecognized arguments" in status["detail"]
    answer = running.http("POST", "/v1/recover", json={"timeout_s": 30})
    assert answer.status_code == 502 and "exit code 2" in answer.json()["error"]


def test_an_engine_that_never_gets_ready_is_given_up(sidecars: Sidecars) -> None:
    """After init_timeout_s it is killed, and the status says how long it had."""
    path = sidecars.folder / "launch.json"
    log = sidecars.folder / "engine.log"
    command = [sys.executable, "-c", "import time; time.sleep(600)", "{port}"]
    path.write_text(
        json.dumps({"kind": "sglang", "command": command, "env": {}, "log": str(log), "init_timeout_s": 0.5})
    )
    running = sidecars.start("--launch", str(path))
    status = running.until(lambda status: bool(status["detail"]))
    assert "wasn't ready within 0.5 s" in status["detail"]
    assert psutil.Process(running.process.pid).children() == []


def test_a_fixed_port_that_is_taken_is_named(sidecars: Sidecars) -> None:
    """C36: never talk to somebody else's server."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        running = sidecars.launch(port=str(port))
        status = running.until(lambda status: bool(status["detail"]))
    assert f"port {port} of engine-0 is taken" in status["detail"]


@pytest.mark.parametrize(
    ("arguments", "token", "message"),
    [
        (["--engine-url", "127.0.0.1:30000"], TOKEN, "must start with http"),
        (["--engine-url", "http://127.0.0.1:99999"], TOKEN, "Port out of range"),
        (["--launch", "/nowhere.json"], TOKEN, "/nowhere.json: No such file"),
        (["--engine-url", "http://127.0.0.1:9"], "", "HYBRIDASYNC_TOKEN: set it"),
        (["--engine-url", "http://127.0.0.1:9", "--port", "{taken}"], TOKEN, "can't listen on 127.0.0.1"),
        ([], TOKEN, "one of the arguments --engine-url --launch is required"),
    ],
)
def test_mistakes_of_the_user_are_exit_code_2_and_one_message(arguments: list[str], token: str, message: str) -> None:
    """No traceback, and the message is the last line."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = str(server.getsockname()[1])
        command = [sys.executable, "-m", "hybridasync.sidecar", *(a.replace("{taken}", taken) for a in arguments)]
        done = subprocess.run(
            command, env=os.environ | {"HYBRIDASYNC_TOKEN": token}, capture_output=True, text=True, timeout=DEADLINE_S
        )
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr


def test_a_sidecar_is_light() -> None:
    """It imports no torch, numpy or transformers: it starts in a fraction of a second and costs little memory."""
    program = "import sys, hybridasync.sidecar.__main__; print({'torch', 'numpy', 'transformers'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"


async def test_a_dead_sidecar_is_not_sent(sidecars: Sidecars, fake: FakeEngine) -> None:
    """The controller learns at once that a request to it can't have happened."""
    with attached(sidecars, fake) as running:
        running.process.kill()
        running.process.wait()
        async with running.client() as client:
            with pytest.raises(NotSent):
                await client.pause(txn(0), "retract", 60.0)
