"""From rewarded groups to what the workers train on."""

from __future__ import annotations

from collections.abc import Sequence

from hybridasync.algorithms.advantages import ScoredMember, compute_advantages
from hybridasync.algorithms.shaping import shaped_reward
from hybridasync.config.models import Config
from hybridasync.errors import DataError
from hybridasync.types import Group, Prompt, Sample, TrainSample


def carries_loss(sample: Sample, config: Config) -> bool:
    """Whether the sample counts in its group's baseline: neither masked nor, where asked for, cut by the cap."""
    return not (sample.masked or (config.reward.mask_truncated and sample.truncated))


def advantages_of(groups: Sequence[Group], config: Config) -> list[tuple[float, ...]]:
    """For each group the advantages of its samples, in their order. Members that carry no loss have 0.0.

    Groups are told apart by the uid of their prompt; two prompts of the same text are two groups.
    """
    members = [
        ScoredMember(group.prompt.uid, shaped_reward(sample, config), carries_loss(sample, config))
        for group in groups
        for sample in group.samples
    ]
    values = iter(compute_advantages(members, config.algorithm.advantage))
    return [tuple(next(values) for _ in group.samples) for group in groups]


def to_train_samples(groups: Sequence[Group], config: Config) -> tuple[TrainSample, ...]:
    """The samples of one step, in the order of the groups.

    A response without tokens counts in the baseline with its reward, but there is nothing of it to learn from: it is
    passed on as masked. Raises DataError where log-probs and tokens don't line up.
    """
    return tuple(
        _train_sample(group.prompt, sample, advantage=advantage, masked=not carries_loss(sample, config))
        for group, advantages in zip(groups, advantages_of(groups, config), strict=True)
        for sample, advantage in zip(group.samples, advantages, strict=True)
    )


def _train_sample(prompt: Prompt, sample: Sample, *, advantage: float, masked: bool) -> TrainSample:
    completion = sample.completion
    if len(completion.logprobs) != len(completion.output_ids):
        raise DataError(
            f"prompt {prompt.uid}: {completion.engine} sent {len(completion.output_ids)} tokens "
            f"with {len(completion.logprobs)} log-probs"
        )
    return TrainSample(
        group=prompt.uid,
        input_ids=prompt.input_ids + completion.output_ids,
        response_start=len(prompt.input_ids),
        rollout_logprobs=completion.logprobs,
        advantage=advantage,
        masked=masked or not completion.output_ids,
        oldest_version=completion.oldest_version or 0,
    )
