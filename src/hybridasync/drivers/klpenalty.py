"""The KL penalty of the reward: what the reference model thinks of each response, before advantages are computed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from hybridasync.algorithms.assembly import to_train_samples
from hybridasync.config.models import Config
from hybridasync.observability import names
from hybridasync.ports import Trainer
from hybridasync.types import Group


def kl_metrics(groups: Sequence[Group], coefficient: float) -> dict[str, float]:
    """What the step reports of the penalty."""
    values = [coefficient * sample.kl for group in groups for sample in group.samples]
    return {names.KL_PENALTY: math.fsum(values) / max(1, len(values)), names.HAS_REFERENCE_FORWARD: 1.0}


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
