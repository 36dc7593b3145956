"""The controller's connection to its workers, the same in a torchrun job and in a plain script."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from hybridasync.config.models import Config
from hybridasync.errors import ConfigError
from hybridasync.runtime import lock
from hybridasync.runtime.environment import Environment, is_torchrun
from hybridasync.runtime.interface import check_interface
from hybridasync.runtime.local import spawn_local_workers
from hybridasync.runtime.start import RANK_PROGRAM
from hybridasync.transport.rpc import Patience, RpcTrainer, join


@asynccontextmanager
async def connect(
    config: Config, run_dir: Path, *, patience: Patience | None = None, program: Sequence[str] = RANK_PROGRAM
) -> AsyncIterator[RpcTrainer]:
    """The workers, joined and configured; dismissed at the end of the block, also when it is cancelled.

    As rank 0 of a launched job the workers are its other ranks; otherwise parallel.num_workers processes are started
    here, as `python <program> <configuration>`. Raises ConfigError, WorkerLost naming a rank that doesn't start within
    network.start_timeout_s, or TrainerError.
    """
    async with AsyncExitStack() as stack:
        stack.enter_context(lock.hold(run_dir))
        check_interface(config.network)
        if is_torchrun():
            place = Environment.read()
            _check_size(config, place)
            member, check = place.membership(config.network), None
        else:
            job = await stack.enter_async_context(spawn_local_workers(config, run_dir, program=program))
            member, check = job.member, job.check
        await join(member, check=check)
        waits = patience or Patience(call_s=config.network.rpc_timeout_s)
        trainer = RpcTrainer(member.worker_ranks, patience=waits, logs=run_dir / "logs")
        stack.push_async_callback(trainer.close)
        # Its answers are the barrier: no collective is called before every rank has its process group.
        await trainer.call("configure", config, timeout_s=config.network.start_timeout_s)
        yield trainer


def _check_size(config: Config, place: Environment) -> None:
    if place.rank != 0:
        raise ConfigError(f"rank 0 is the controller; rank {place.rank} of the job has to call serve_worker")
    if place.world_size != config.parallel.num_workers + 1:
        raise ConfigError(
            f"is {config.parallel.num_workers}, but the job has {place.world_size} processes: it needs one for the "
            f"controller and one for each worker",
            setting="parallel.num_workers",
        )
