"""A rank of the tests' jobs: the product's entry point around a stub worker and a scripted controller.

What the controller does is the environment variable SCENARIO; what a worker does in `train_step` is its argument.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import anyio
import torch
import torch.distributed as dist

from hybridasync.config.models import Config
from hybridasync.errors import CheckpointError, ConfigError, DivergedError, TrainerError
from hybridasync.runtime.controller import connect
from hybridasync.runtime.outcome import Outcome
from hybridasync.runtime.rank import main
from hybridasync.transport.rpc import Patience

QUICK = Patience(call_s=20, ping_interval_s=0.3, ping_s=4, ping_misses=2, after_loss_s=1, after_error_s=1.5, close_s=3)
RESUME_S = 1.0


class TwoArguments(Exception):
    """torch can't carry this one: it isn't made of one string."""

    def __init__(self, one: str, two: int) -> None:
        super().__init__(one, two)


class StubWorker:
    """Operations that a test asks for by name."""

    def __init__(self, config: Config) -> None:
        self.rank = dist.get_rank() + 1
        self.order: list[int] = []
        self.steps = 0
        self.spans: list[tuple[str, float, float]] = []
        self.config = config

    def __getattr__(self, name: str) -> Any:
        return self.do_step  # every operation of the port is this one

    def do_step(self, what: str = "pid", *arguments: Any) -> object:
        return getattr(self, f"do_{what}")(*arguments)

    def do_pid(self) -> dict[int, int]:
        pids: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(pids, os.getpid())
        return {rank + 1: pid for rank, pid in enumerate(pids)}

    def do_sum(self, number: int) -> float:
        self.order.append(number)
        total = torch.tensor([float(number)])
        dist.all_reduce(total)
        return total.item()

    def do_order(self) -> list[int]:
        orders: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(orders, self.order)
        assert all(order == orders[0] for order in orders)
        return self.order

    def do_timed(self, name: str) -> None:
        """One rank takes three times as long as the other."""
        started = time.monotonic()
        time.sleep(0.03 if self.rank == 2 else 0.01)
        self.spans.append((name, started, time.monotonic()))

    def do_spans(self) -> list[list[tuple[str, float, float]]]:
        spans: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(spans, self.spans)
        return spans

    def do_count(self, seconds: float = 0) -> int:
        time.sleep(seconds)
        self.steps += 1
        return self.steps

    def do_later(self, seconds: float, what: str, *arguments: Any) -> object:
        time.sleep(seconds)
        return self.do_step(what, *arguments)

    def do_hang(self, rank: int) -> None:
        if rank == self.rank:
            time.sleep(300)

    def decide(self, epoch: int, version: int, commit: bool) -> tuple[int, int, bool]:
        return epoch, version, commit

    def do_nothing(self, *_: object) -> None: ...

    def do_thread(self) -> tuple[bool, str, str]:
        main_thread = threading.current_thread() is threading.main_thread()
        return main_thread, os.environ["RANK"], os.environ["WORLD_SIZE"]

    def do_local_ranks(self) -> list[str]:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, os.environ["LOCAL_RANK"])
        return found

    def do_config(self) -> Config:
        return self.config

    def do_mixed(self) -> None:
        if self.rank == 2:
            raise DivergedError("loss is nan")
        dist.barrier()

    def do_end(self, rank: int, code: int) -> None:
        if rank == self.rank:
            sys.stderr.write("last words of a worker\n")
            if code < 0:
                os.kill(os.getpid(), -code)
            os._exit(code)
        dist.barrier()

    def do_raise(self, kind: str, rank: int = 0) -> object:
        if rank not in (0, self.rank):
            return None
        if kind == "config":
            raise ConfigError("no such thing", setting="model.dtype")
        if kind == "diverged":
            raise DivergedError("loss is nan")
        if kind == "checkpoint":
            raise CheckpointError("disk full")
        if kind == "two":
            raise TwoArguments("ü", 2)
        if kind == "exit":
            raise SystemExit(3)
        return threading.Lock()  # can't be pickled

    def close(self) -> None:
        pass


def worker(config: Config) -> StubWorker:
    if os.environ.get("GRANDCHILD"):
        subprocess.Popen(["sleep", "300"])
    return StubWorker(config)


async def controller(config: Config, *, run_dir: Path, resume: bool) -> Outcome:
    (run_dir / "controller.pid").write_text(str(os.getpid()))
    interrupted: list[int] = []
    async with anyio.create_task_group() as outer:
        work = anyio.CancelScope()

        async def receive() -> None:
            with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                async for number in signals:
                    interrupted.append(number)
                    work.cancel()

        outer.start_soon(receive)
        try:
            with work:
                async with connect(config, run_dir, patience=QUICK) as trainer:
                    try:
                        await scenario(trainer, run_dir, resume)
                    finally:
                        with anyio.CancelScope(shield=True):
                            await anyio.sleep(RESUME_S)
                        (run_dir / "resumed").touch()
        finally:
            outer.cancel_scope.cancel()
    return Outcome(128 + interrupted[0] if interrupted else 0)


async def scenario(trainer: Any, run_dir: Path, resume: bool) -> None:
    name = os.environ.get("SCENARIO", "ordinary")
    pids = await trainer.call("train_step", "pid")
    (run_dir / "pids.part").write_text(" ".join(map(str, pids.values())))
    (run_dir / "pids.part").rename(run_dir / "pids")
    if name == "wait":
        await trainer.watch()
    elif name == "fail-once" and not resume:
        (run_dir / "checkpoints" / "step_000001").mkdir(parents=True)
        raise TrainerError("the first start fails")
    elif name == "local-ranks":
        (run_dir / "local_ranks").write_text(json.dumps(await trainer.call("train_step", "local_ranks")))
    elif name == "mistake":
        raise ConfigError("no such thing", setting="model.dtype")
    elif name == "bug":
        raise ZeroDivisionError("a bug")


if __name__ == "__main__":
    if os.environ.get("ABSENT") == os.environ["RANK"]:
        code = int(os.environ.get("ABSENT_CODE", "0"))
        sys.exit(code) if code >= 0 else os.kill(os.getpid(), -code)
    main(controller=controller, worker=worker)
