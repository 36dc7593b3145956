"""What the control plane costs by itself: start, idle use, calls, fan-out, open requests, memory over many steps."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import anyio
import anyio.lowlevel
import psutil

from hybridasync.bench.control_program import PROGRAM, WORKERS, configuration
from hybridasync.bench.fakes import (
    Counter,
    FreeServer,
    FreeSidecar,
    FreeTrainer,
    FreeTransfer,
    NoJournal,
    NoStore,
    Parity,
)
from hybridasync.config.models import Config
from hybridasync.drivers.checkpointing import Checkpointing
from hybridasync.drivers.fleet import Engine, Fleet
from hybridasync.drivers.generation import Limits
from hybridasync.drivers.publish import Publisher, PublishParts
from hybridasync.drivers.rollout import Rollout, RolloutParts
from hybridasync.drivers.training import LoopParts, TrainingLoop
from hybridasync.errors import OperatingError
from hybridasync.http import Endpoint
from hybridasync.observability.process import descendants, terminate_tree, wait_ended
from hybridasync.observability.sinks import RunSinks
from hybridasync.protocol.debts import Debts
from hybridasync.protocol.ledger import RolloutLedger
from hybridasync.schedule import Schedule
from hybridasync.transport.sidecar import SidecarClient

Numbers = dict[str, Any]

Driver = Callable[[], AbstractContextManager[tuple[subprocess.Popen[str], float]]]

OURS = (sys.executable, *PROGRAM)
STUB = (*OURS, "stub")

START_LIMIT_S = 120.0
ORPHANS_AFTER_S = 20.0
SPARE_DESCRIPTORS = 200
AT_ONCE = 64
"""Requests that are opened in one moment: a connection has to be made within http.CONNECT_TIMEOUT_S."""


def control_plane(idle_s: float) -> Numbers:
    """A controller with two workers and a sidecar. Raises OperatingError."""
    return {"workers": WORKERS, "sidecars": 1} | measured(_driver, idle_s)


def measured(driver_of: Driver, idle_s: float) -> Numbers:
    """Start, idle use, calls, end and sudden death of a driver that speaks as control_program.py does.

    Raises OperatingError for one that ends before it is ready.
    """
    with driver_of() as (driver, start_s):
        found: Numbers = {"start_s": start_s}
        found |= idle_use(driver.pid, idle_s)
        found |= _calls(_ask(driver, "calls"))
        stopped = time.perf_counter()
        _ask(driver, "", answer=False)
        driver.wait(START_LIMIT_S)
        found["stop_s"] = time.perf_counter() - stopped
    with driver_of() as (driver, _):
        found |= _after_kill(driver)
    return found


@contextmanager
def _driver() -> Iterator[tuple[subprocess.Popen[str], float]]:
    with (
        running(STUB) as (_, stub),
        tempfile.TemporaryDirectory(prefix="hybridasync-bench-") as folder,
        started([*OURS, "driver", folder, stub["url"]]) as driver,
    ):
        yield driver


@contextmanager
def started(command: Sequence[str]) -> Iterator[tuple[subprocess.Popen[str], float]]:
    """A driver that has answers of what it controls, and the seconds from its start until then."""
    at = time.perf_counter()
    with running(command) as (driver, _):
        yield driver, time.perf_counter() - at


def _after_kill(driver: subprocess.Popen[str]) -> Numbers:
    members = descendants(driver.pid)
    driver.send_signal(signal.SIGKILL)
    killed = time.perf_counter()
    left = wait_ended(members, ORPHANS_AFTER_S)
    gone_s = time.perf_counter() - killed
    for one in left:
        terminate_tree(one.pid, grace_s=1)
    return {"orphans": len(left), "gone_s": gone_s}


@contextmanager
def running(command: Sequence[str]) -> Iterator[tuple[subprocess.Popen[str], Numbers]]:
    """A process, and the first line of JSON that it says. Ended with the block, and all below it."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process, _read(process)
    finally:
        terminate_tree(process.pid, grace_s=5)
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def _ask(process: subprocess.Popen[str], line: str, *, answer: bool = True) -> Numbers:
    if process.stdin is not None:
        process.stdin.write(line + "\n")
        process.stdin.flush()
    return _read(process) if answer else {}


def _read(process: subprocess.Popen[str]) -> Numbers:
    """The next line that is JSON; libraries write to the same stream. Raises OperatingError at the end of it."""
    while line := process.stdout.readline() if process.stdout else "":
        if line.startswith("{"):
            found: Numbers = json.loads(line)
            return found
    raise OperatingError("a process of the benchmark ended before it was ready")


def idle_use(pid: int, seconds: float) -> Numbers:
    """Processes, threads, MiB and percent of one core of a process and all below it, while nothing is asked of it."""
    time.sleep(1.0)  # let the start's last work end
    members = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]

    def spent() -> float:
        times = [member.cpu_times() for member in members]
        return sum(one.user + one.system for one in times)

    before = spent()
    time.sleep(seconds)
    cpu = 100 * (spent() - before) / seconds
    memory = [member.memory_full_info() for member in members]
    return {
        "processes": len(members),
        "threads": sum(member.num_threads() for member in members),
        "rss_mib": sum(one.rss for one in memory) / 2**20,
        "pss_mib": sum(one.pss for one in memory) / 2**20,
        "pss_without_controller_mib": sum(one.pss for one in memory[1:]) / 2**20,
        "idle_cpu_percent": cpu,
    }


def _calls(answer: Numbers) -> Numbers:
    return {
        "rpc_p50_ms": 1000 * median(answer["rpc"]),
        "rpc_p99_ms": 1000 * percentile(answer["rpc"], 99),
        "http_p50_ms": 1000 * median(answer["http"] or [0.0]),
        "http_p99_ms": 1000 * percentile(answer["http"] or [0.0, 0.0], 99),
        "rpc_calls_per_s": answer["calls_per_s"],
        "bulk_there_and_back_ms": 1000 * median(answer["bulk"]),
    }


def percentile(values: Sequence[float], percent: int) -> float:
    """0 of no values: a few requests are opened before a timer is due."""
    return quantiles(values, n=100, method="inclusive")[percent - 1] if len(values) > 1 else max(values, default=0.0)


async def fan_out(counts: Sequence[int], repeats: int) -> list[Numbers]:
    """Whole publications to so many engines: the real saga and HTTP clients, one stub process that answers for all."""
    found = []
    with running(STUB) as (_, stub):
        for count in counts:
            sidecars = [SidecarClient(f"engine-{n}", f"{stub['url']}/{n}", "token", timeout_s=60) for n in range(count)]
            fleet = Fleet([Engine(FreeServer(one.name), one) for one in sidecars])
            publisher = _publisher(configuration(), fleet, RunNothing())
            for version in range(2):
                await publisher.publish(version, "", step=None)
            pauses, lags = [], list[float]()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(loop_lag, lags)
                for version in range(2, 2 + repeats):
                    pauses.append((await publisher.publish(version, "", step=version)).pause_s)
                tasks.cancel_scope.cancel()
            row = {"engines": count, "pause_ms": 1000 * median(pauses), "lag_max_ms": 1000 * max(lags, default=0.0)}
            found.append(row | {"engine_us": 1e6 * median(pauses) / count})
            for one in sidecars:
                await one.__aexit__(None, None, None)
    return found


async def open_requests(wanted: int) -> Numbers:
    """How late the loop's timers are with so many requests open on the data plane, and while they are opened."""
    count = max(1, min(wanted, raise_descriptor_limit() - SPARE_DESCRIPTORS))
    opening, held = list[float](), list[float]()
    with running(STUB) as (_, stub):
        async with (
            Endpoint("stub", stub["url"], timeout_s=600, keep_alive=True) as data,
            Endpoint("stub", stub["url"], timeout_s=60) as control,
            anyio.create_task_group() as requests,
        ):

            async def hold() -> None:
                await data.call("hold", "POST", "/hold", json={"input_ids": [1, 2, 3]})

            started = time.perf_counter()
            async with anyio.create_task_group() as watch:
                watch.start_soon(loop_lag, opening)
                for number in range(1, count + 1):
                    requests.start_soon(hold)
                    if number % AT_ONCE == 0 or number == count:
                        await control.call("open", "GET", f"/open/{number}", timeout_s=600)
                watch.cancel_scope.cancel()
            opened_s = time.perf_counter() - started
            with anyio.move_on_after(5.0):
                await loop_lag(held)
            await control.call("release", "POST", "/release", json={})
    return {
        "wanted": wanted,
        "requests": count,
        "open_s": opened_s,
        "opening_lag_p99_ms": 1000 * percentile(opening, 99),
        "opening_lag_max_ms": 1000 * max(opening, default=0.0),
        "held_lag_p50_ms": 1000 * median(held),
        "held_lag_p99_ms": 1000 * percentile(held, 99),
        "held_lag_max_ms": 1000 * max(held),
    }


async def loop_lag(found: list[float], every_s: float = 0.01) -> None:
    """Append how much later than asked for the loop wakes a timer, for ever."""
    while True:
        due = time.perf_counter() + every_s
        await anyio.sleep(every_s)
        found.append(max(0.0, time.perf_counter() - due))


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open files to the hard one; answers it. Children inherit it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


async def many_steps(steps: int, samples: int = 10) -> Numbers:
    """Resident memory of a controller over so many steps: real loops and sinks, engines and trainer that cost nothing.

    `samples` readings after equal parts of the run; the first tenth fills caches and doesn't count for the growth.
    """
    readings: list[tuple[int, float]] = []
    process = psutil.Process()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="hybridasync-bench-") as folder:
        config = configuration(rollout={"num_rollout": steps, "max_staleness": 1}, algorithm={"use_tis": True})
        sink = RunSinks(Path(folder), config, echo=lambda _: None)
        async with anyio.create_task_group() as work:
            loop = _loop(config, sink, work)
            await loop.begin()
            while await loop.one_step() is not None:
                if loop.step % max(1, steps // samples) == 0:
                    readings.append((loop.step, process.memory_info().rss / 2**20))
            work.cancel_scope.cancel()
        sink.close()
    counted = readings[max(1, len(readings) // 10) :] or readings
    return {
        "steps": steps,
        "seconds": time.perf_counter() - started,
        "rss_mib": [round(rss, 1) for _, rss in readings],
        "growth_mib": counted[-1][1] - counted[0][1],
    }


def _loop(config: Config, sink: RunSinks, work: anyio.abc.TaskGroup) -> TrainingLoop:
    fleet = Fleet([Engine(FreeServer("engine-0"), FreeSidecar("engine-0"))])
    trainer, store, parity = FreeTrainer(), NoStore(), Parity()
    steps = config.rollout.num_rollout or 1
    ledger = RolloutLedger(config.rollout.rollout_batch_size, config.rollout.max_staleness, steps)
    rollout = Rollout(config, ledger, RolloutParts(fleet, Counter(), parity, parity, sink, Limits(8, 64)))
    parts = LoopParts(
        rollout,
        fleet,
        trainer,
        _publisher(config, fleet, sink),
        None,
        Checkpointing(store, trainer),
        sink,
        store,
        resources=dict,
    )
    schedule = Schedule(
        num_rollout=steps, update_weights_interval=1, save_interval=None, eval_interval=None, steps_per_epoch=None
    )
    return TrainingLoop(config, schedule, parts, background=work)


def _publisher(config: Config, fleet: Fleet, sink: Any) -> Publisher:
    parts = PublishParts(fleet, FreeTrainer(), FreeTransfer(), journal=NoJournal(), debts=Debts(), sink=sink)
    return Publisher(config.publication, parts, session="0" * 32, mode="retract")


class RunNothing:
    """A sink that keeps nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _nothing


def _nothing(*_: object, **__: object) -> None: ...
