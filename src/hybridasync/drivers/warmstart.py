"""The supervised phase before RL, on the same workers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import anyio

from hybridasync.ports import MetricSink, Trainer
from hybridasync.types import TrainBatch


class Display(Protocol):
    """The part of the progress display that a phase needs."""

    def phase(self, name: str, total: int | None = None, *, completed: int = 0) -> None: ...

    def advance(self, metrics: dict[str, float]) -> None: ...


async def warm_start(
    trainer: Trainer,
    batches: Iterable[TrainBatch],
    steps: int,
    *,
    display: Display,
    sink: MetricSink,
    rows: bool = False,
) -> None:
    """Train on `batches` with the supervised loss; nothing to do without steps.

    `rows`: these are the steps of the run, with a row of metrics each (`run.debug_train_only`, R15).
    """
    if not steps:
        return
    display.phase("warm start", steps)
    await trainer.start_phase("warm_start", steps)
    started = anyio.current_time()
    loss = 0.0
    for batch in batches:
        result = await trainer.train_step(batch)
        loss = result.metrics["loss"]
        display.advance(dict(result.metrics))
        if rows:
            sink.step(batch.step, result.metrics)
    sink.event("warm_start_done", steps=steps, loss=loss, wall_s=anyio.current_time() - started)
