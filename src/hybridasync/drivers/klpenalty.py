"""The KL penalty of the reward: what the reference model thinks of each response, before advantages are computed."""

from __future__ import annotations

import math
from dataclasses import replace

from hybridasync.algorithms.assembly import to_train_samples
from hybridasync.config.models import Config
from hybridasync.ports import Trainer
from hybridasync.types import Group


async def with_kl(groups: tuple[Group, ...], trainer: Trainer, config: Config) -> tuple[Group, ...]:
    """The groups, each sample with the log-prob of its response at the engine minus that under the reference model."""
    logprobs = iter(await trainer.reference_logprobs(to_train_samples(groups, config)))
    return tuple(
        replace(
            group,
            samples=tuple(
                replace(sample, kl=math.fsum(sample.completion.logprobs) - math.fsum(next(logprobs)))
                for sample in group.samples
            ),
        )
        for group in groups
    )
