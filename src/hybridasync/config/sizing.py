"""How many steps a run has, and how many make an epoch (R37-R47): the one place that computes it.

It runs once, when the data set's size is known and before anything that needs the numbers is made.
"""

from __future__ import annotations

from typing import NamedTuple

from hybridasync.config.checks import evaluation_cancels_interval
from hybridasync.config.models import Config
from hybridasync.config.pipeline import replace
from hybridasync.errors import ConfigError


class Sizing(NamedTuple):
    """Training steps; steps of an epoch, None where epochs don't end at a step (R43); and why."""

    num_rollout: int
    steps_per_epoch: int | None
    reason: str


def resolve_sizing(config: Config, dataset_size: int | None, *, loaded: int | None = None) -> Sizing:
    """Steps of the run, from the settings and the number of prompts. `loaded` counts those before filtering.

    The smaller one of num_rollout and num_epoch counts (R41). Idempotent: resolving `with_sizing` of the answer gives
    the same numbers (R45). With `debug_train_only` there are no RL steps, and the size isn't looked at (R38); nor is it
    without a global data set, where nobody knows it (R39).

    Raises: ConfigError: no prompts, fewer than a batch where epochs are to be counted, or no length at all.
    """
    rollout = config.rollout
    if config.run.debug_train_only:
        return Sizing(0, None, "debug_train_only: no RL steps")
    if not rollout.rollout_global_dataset:
        return _without_data_set(config)
    dataset_size = dataset_size or 0
    count = _counted(dataset_size, loaded)
    if dataset_size <= 0:
        raise ConfigError(f"{config.data.prompt_data} has no prompts to train on ({count})", setting="data.prompt_data")
    batch, wanted, epochs = rollout.rollout_batch_size, rollout.num_rollout, rollout.num_epoch
    if dataset_size < batch:
        return _smaller_than_a_batch(config, dataset_size, count)
    per_epoch, tail = divmod(dataset_size, batch)
    if wanted is None and epochs is None:
        raise ConfigError(
            f"the run has no length: {per_epoch} steps make an epoch; give num_rollout or num_epoch (it is {epochs})",
            setting="rollout.num_rollout",
        )
    if epochs is not None and tail and rollout.strict_epochs:
        raise ConfigError(
            f"strict_epochs: {batch} doesn't divide the {count}; {tail} would be left out of each epoch",
            setting="rollout.rollout_batch_size",
        )
    by_epochs = None if epochs is None else per_epoch * epochs
    steps = min(n for n in (wanted, by_epochs) if n is not None)
    parts = [f"num_rollout {wanted}"] * (wanted is not None)
    parts += [f"num_epoch {epochs} × {per_epoch} steps = {by_epochs}"] * (by_epochs is not None)
    reason = f"{parts[0]}" if len(parts) == 1 else f"the smaller of {' and '.join(parts)}"
    return Sizing(steps, per_epoch, reason)


def with_sizing(config: Config, sizing: Sizing) -> Config:
    """The configuration with the resolved number of steps."""
    return replace(config, {"rollout.num_rollout": sizing.num_rollout}) if sizing.num_rollout else config


def sizing_line(config: Config, sizing: Sizing, dataset_size: int) -> str:
    """The one line to log (R47)."""
    return (
        f"{dataset_size} prompts, {config.rollout.rollout_batch_size} a step: "
        f"{sizing.steps_per_epoch or 'no whole number of'} steps an epoch, {sizing.num_rollout} steps ({sizing.reason})"
    )


def sizing_warnings(config: Config, sizing: Sizing, dataset_size: int) -> tuple[str, ...]:
    """What the data set's size brings to light, once for a run: a dropped tail (U5), a cancelled interval (R14)."""
    found = []
    per_epoch, epochs = sizing.steps_per_epoch, config.rollout.num_epoch
    if per_epoch is not None and epochs is not None and (tail := dataset_size % config.rollout.rollout_batch_size):
        found.append(
            f"rollout.num_epoch: an epoch counts as {per_epoch} steps of {config.rollout.rollout_batch_size} prompts; "
            f"the last {tail} of {dataset_size} don't fill one (strict_epochs = true refuses that)"
        )
    publication = config.publication
    interval = publication.k_min if publication.update_weights_interval == "auto" else publication.longest_interval
    evaluated = config.eval.eval_interval is not None and config.eval.eval_prompt_data is not None
    said = any(True for _ in evaluation_cancels_interval(config))
    if evaluated and per_epoch is not None and per_epoch < interval and not said:
        found.append(
            f"publication.update_weights_interval: {interval} is above the {per_epoch} steps of an epoch: each epoch "
            "ends with an evaluation, which publishes first"
        )
    return tuple(found)


def _without_data_set(config: Config) -> Sizing:
    rollout = config.rollout
    if rollout.num_epoch is not None:
        raise ConfigError(
            f"num_epoch requires rollout_global_dataset; it is {rollout.num_epoch}", setting="rollout.num_epoch"
        )
    if rollout.num_rollout is None or rollout.num_rollout <= 0:
        raise ConfigError(
            f"num_rollout must be positive without rollout_global_dataset; it is {rollout.num_rollout}",
            setting="rollout.num_rollout",
        )
    return Sizing(rollout.num_rollout, None, f"num_rollout {rollout.num_rollout}; no global data set, no epochs")


def _smaller_than_a_batch(config: Config, dataset_size: int, count: str) -> Sizing:
    rollout = config.rollout
    if rollout.num_epoch is not None or rollout.num_rollout is None:
        given = f"num_epoch {rollout.num_epoch}" if rollout.num_epoch is not None else "no num_rollout"
        raise ConfigError(
            f"the data set is smaller than the batch, {dataset_size} < {rollout.rollout_batch_size} ({count}), so "
            f"epochs can't be counted in steps ({given}); give num_rollout alone, a smaller rollout_batch_size or more "
            "prompts",
            setting="rollout.rollout_batch_size",
        )
    reason = f"num_rollout {rollout.num_rollout}; {dataset_size} prompts wrap around within a step"
    return Sizing(rollout.num_rollout, None, reason)


def _counted(left: int, loaded: int | None) -> str:
    if loaded is None or loaded == left:
        return f"{left} prompts"
    return f"{loaded} prompts loaded, {loaded - left} filtered, {left} left"
