"""The transfer of a recipe: how its weights get to its engines, and the process that takes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from hybridasync.config.models import Config
from hybridasync.drivers.staged import transfer_by_disk
from hybridasync.drivers.transfer import SentTransfer, Transfer
from hybridasync.observability.process import child_environment
from hybridasync.ports import MetricSink, Trainer
from hybridasync.runtime.engines import device_of, group_environment
from hybridasync.runtime.environment import without_torchrun
from hybridasync.runtime.interface import address_of
from hybridasync.transport.sender import SenderProcess

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class SenderSettings:
    """`address`: where engines reach this process; `timeout_s`: deadline of one request, and of one broadcast."""

    transport: str
    bucket_bytes: int
    backend: str
    address: str
    timeout_s: float


@asynccontextmanager
async def transfer_to_engines(
    config: Config, run_dir: Path, trainer: Trainer, *, sink: MetricSink
) -> AsyncIterator[Transfer]:
    """The sender, where the recipe needs one, ends with the block."""
    if config.publication.transport == "disk" or config.run.debug_train_only:
        yield transfer_by_disk(config.publication, trainer, sink)
        return
    async with sender_of(config, run_dir) as sender:
        yield SentTransfer(trainer, sender)


def sender_of(config: Config, run_dir: Path) -> SenderProcess:
    """Not started yet."""
    publication = config.publication
    nccl = device_of(config) == "cuda" and Path("/dev/nvidia0").exists()
    settings = SenderSettings(
        transport=publication.transport,
        bucket_bytes=max(1, int(publication.bucket_mib * MIB)),
        backend="nccl" if nccl else "gloo",
        address=address_of(config.network),
        timeout_s=publication.rollout_http_timeout,
    )
    environment = child_environment(without_torchrun(os.environ)) | group_environment(config)
    if nccl:  # it shares the GPU of worker rank 1
        environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    command = [sys.executable, "-m", "hybridasync.runtime.sender", json.dumps(asdict(settings))]
    return SenderProcess(command, environment, run_dir / "logs" / "sender.log")
