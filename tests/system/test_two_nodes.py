"""A job of several nodes: one torchrun on each, static rendezvous, the whole product on top.

Each node is a network namespace with an interface and a shared memory of its own, where this machine lets us make
them (root, iproute2); else both are this machine's loopback, and a warning says why.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from job import wait_for
from tests.system.gate import free_port
from whole_run import ENVIRONMENT, SHORT, Census, Run, overrides

from hybridasync.observability.process import ProcessId, terminate, wait_ended

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

INTERFACE = "ha-test"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PRIVATE_MEMORY = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'


@dataclass(frozen=True)
class Network:
    """`prefixes`: what makes a command run on the first and on the second node."""

    interface: str
    addresses: tuple[str, str]
    prefixes: tuple[list[str], list[str]]


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    spaces = [f"hybridasync-test-{node}" for node in (0, 1)]
    try:
        if shutil.which("ip") is None:
            raise OSError("there is no `ip`: install iproute2")
        try:
            yield make_spaces(spaces)
        finally:
            for space in spaces:
                subprocess.run(["ip", "netns", "del", space], stderr=subprocess.DEVNULL, check=False)
    except OSError as error:
        warnings.warn(f"both nodes are on loopback, because {error}", stacklevel=1)
        yield Network("lo", ("127.0.0.1", "127.0.0.1"), ([], []))


def make_spaces(spaces: list[str]) -> Network:
    for space in spaces:
        ip("netns", "add", space)
    ip("link", "add", INTERFACE, "netns", spaces[0], "type", "veth", "peer", "name", INTERFACE, "netns", spaces[1])
    for space, address in zip(spaces, ADDRESSES, strict=True):
        ip("-n", space, "addr", "add", f"{address}/24", "dev", INTERFACE)
        ip("-n", space, "link", "set", INTERFACE, "up")
        ip("-n", space, "link", "set", "lo", "up")
    prefixes = [["ip", "netns", "exec", space, "sh", "-c", PRIVATE_MEMORY, "sh"] for space in spaces]
    for prefix in prefixes:
        done = subprocess.run([*prefix, "true"], capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"a node can't have a shared memory of its own: {done.stderr.strip()}")
    return Network(INTERFACE, ADDRESSES, (prefixes[0], prefixes[1]))


class Job:
    """Two torchruns with `ranks` processes, started as docs/multi-node.md says."""

    def __init__(
        self, network: Network, directory: Path, *, ranks: tuple[int, int], settings: Mapping[str, object]
    ) -> None:
        self.run_dir = directory / "run"
        self.census = (Census(), Census())
        self.agents: list[subprocess.Popen[bytes]] = []
        self._directory = directory
        self._started = time.monotonic()
        self._threads = []
        port = free_port()
        written = overrides({"network.interface": network.interface, "network.start_timeout_s": 120} | settings)
        for node in (0, 1):
            place = ["--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", str(ranks[node])]
            meeting = ["--master-addr", network.addresses[0], "--master-port", str(port)]
            rank = ["-m", "hybridasync.runtime.rank", "quickstart-fast", "--run-dir", str(self.run_dir), *written]
            command = [*network.prefixes[node], sys.executable, "-m", "torch.distributed.run", *place, *meeting, *rank]
            with (directory / f"node-{node}.log").open("w") as log:
                agent = subprocess.Popen(command, cwd=directory, env=ENVIRONMENT, stdout=log, stderr=log)
            self.agents.append(agent)
            self._threads.append(self.census[node].watch(agent.pid))

    def wait_until_published(self) -> None:
        """Everything is up once the engines have the first weights."""
        events = self.run_dir / "events.jsonl"
        up = "publication.completed"
        wait_for(lambda: self.agents[0].poll() is not None or (events.exists() and up in events.read_text()), 300)

    def finish(self, limit_s: float = 500) -> Run:
        """As the controller's node left it; its code is the first agent's. Nothing of the job lives afterwards."""
        try:
            codes = [agent.wait(max(1.0, self._started + limit_s - time.monotonic())) for agent in self.agents]
        finally:
            left = self.end()
        output = "".join((self._directory / f"node-{node}.log").read_text() for node in (0, 1))
        return Run(self.run_dir, codes[0], output, time.monotonic() - self._started, frozenset(), frozenset(left))

    def end(self) -> set[ProcessId]:
        """End what lives; answers what had not ended by itself within some seconds."""
        for census, thread in zip(self.census, self._threads, strict=True):
            census.stop(thread)
        left = wait_ended(self.census[0].members | self.census[1].members, 10)
        terminate(left, grace_s=5)
        for agent in self.agents:
            agent.kill()
            agent.wait()
        return left


@pytest.fixture
def start(network: Network, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs = []

    def start_one(*ranks: int, **settings: object) -> Job:
        named = {name.replace("__", "."): value for name, value in settings.items()}
        jobs.append(Job(network, tmp_path, ranks=(ranks[0], ranks[1]), settings=SHORT | named))
        return jobs[-1]

    yield start_one
    for job in jobs:
        job.end()


def listeners(prefix: list[str]) -> set[str]:
    """The addresses on which anything on this node listens."""
    found = subprocess.run([*prefix, "ss", "-Hltn"], capture_output=True, text=True, check=True).stdout
    return {line.split()[3].rpartition(":")[0] for line in found.splitlines()}


def test_two_nodes_train_to_the_end(network: Network, start: Callable[..., Job]) -> None:
    """Controller, engine and one worker on the first node, another worker on the second: data parallel to the end.

    Only the named interface is used between nodes, and only loopback for engines and sidecars.
    """
    job = start(2, 1, parallel__num_workers=2, checkpoint__save_interval=2)
    job.wait_until_published()
    listening = [listeners(prefix) for prefix in network.prefixes if prefix]
    run = job.finish()
    assert [agent.returncode for agent in job.agents] == [0, 0], run.explain()
    assert run.left == frozenset()
    assert (run.summary["status"], run.summary["steps"], run.summary["publications"]) == ("completed", 4, 5)
    assert run.summary["logprob_gap_max"] <= 1e-4
    assert (run.directory / "hf" / "model.safetensors").is_file()
    saved = sorted(path.name for path in (run.directory / "checkpoints").glob("step_*"))
    assert saved == ["step_000002", "step_000004"]
    store = {"*", "0.0.0.0", "[::]"}  # torchrun's own, on the first node
    assert [addresses - store for addresses in listening] in ([], [{"127.0.0.1", ADDRESSES[0]}, {ADDRESSES[1]}])


def test_first_worker_on_another_node_than_the_engine(start: Callable[..., Job]) -> None:
    """With the controller alone on its node the snapshots go through the run directory, not through shared memory."""
    job = start(1, 1, rollout__num_rollout=2, checkpoint__export_hf=False)
    run = job.finish()
    assert [agent.returncode for agent in job.agents] == [0, 0], run.explain()
    assert (run.summary["status"], run.summary["publications"]) == ("completed", 3)
    assert not (run.directory / "weights").exists()  # removed at the end


def test_c34_node_that_dies_ends_the_job(start: Callable[..., Job]) -> None:
    """SIGKILL of one node's torchrun in the middle of training: the other node names the rank, and nothing is left."""
    job = start(2, 1, parallel__num_workers=2, rollout__num_rollout=1000, warm_start__steps=0)
    job.wait_until_published()
    job.agents[1].kill()
    run = job.finish()
    assert run.returncode == 1, run.explain()
    assert run.summary["status"] == "failed"
    assert "worker rank 2 is lost" in run.summary["error"]
    assert run.left == frozenset()
