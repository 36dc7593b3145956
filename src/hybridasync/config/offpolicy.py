"""The off-policy guard (R24-R32): samples of older weights are trained on only with a correction.

With an interval above 1, or with engines that run ahead, the trainer's current log-probs aren't those of the policy
that sampled. Taken as old log-probs they make the importance ratio 1 where it isn't: the gradient is wrong and nothing
shows it.
"""

from __future__ import annotations

from collections.abc import Iterator

from hybridasync.config.findings import Finding, Refuse, Warn
from hybridasync.config.models import Config


def version_lag(config: Config) -> int:
    """The most weight versions between the weights that sampled and the step that trains: S + K - 1."""
    return config.rollout.max_staleness + config.publication.update_weights_interval - 1


def correction_needed(config: Config) -> Iterator[Finding]:
    """Stale samples need truncated importance sampling, or the engine's log-probs as old log-probs (R25, R26, R28)."""
    algorithm = config.algorithm
    if config.mode == "sync" or version_lag(config) == 0 or config.run.debug_train_only:
        return
    if algorithm.use_tis or algorithm.use_rollout_logprobs:
        return
    staleness, interval = config.rollout.max_staleness, config.publication.update_weights_interval
    yield Refuse(
        "algorithm.use_tis",
        f"old log-probs require correction: with max_staleness {staleness} and update_weights_interval {interval} "
        f"samples may be {version_lag(config)} weight versions old. Enable --use-tis or --use-rollout-logprobs "
        "(or run on-policy: --mode sync)",
    )


def one_correction(config: Config) -> Iterator[Finding]:
    """Both corrections together would correct twice (R29)."""
    if config.algorithm.use_tis and config.algorithm.use_rollout_logprobs:
        yield Refuse(
            "algorithm.use_rollout_logprobs",
            "use_tis and use_rollout_logprobs exclude each other (both correct the same gap): keep one",
        )


def tis_range(config: Config) -> Iterator[Finding]:
    """The importance weight has a lower and an upper bound, in that order."""
    low, high = config.algorithm.tis_clip_low, config.algorithm.tis_clip
    if low > high:
        yield Refuse("algorithm.tis_clip_low", f"{low:g} is above tis_clip ({high:g}): no importance weight would pass")


def unequal_precision(config: Config) -> Iterator[Finding]:
    """Engines in another precision than the trainer are off-policy too, by rounding."""
    engine, trainer = config.engine.dtype, config.model.dtype
    if engine not in (None, trainer) and not (config.algorithm.use_tis or config.algorithm.use_rollout_logprobs):
        yield Warn(
            "engine.dtype", f"{engine} in the engines and {trainer} in training differ in log-probs: add --use-tis"
        )


def in_flight_mode(config: Config) -> Iterator[Finding]:
    """Fully asynchronous generation has its effect only with a lead and without draining."""
    if config.mode != "fully_async" or config.run.debug_train_only:
        return
    if config.rollout.max_staleness == 0:
        yield Warn("rollout.max_staleness", "0 in mode fully_async: the engines can't run ahead; 1 or more overlaps")
    if config.publication.pause_mode == "drain":
        yield Warn(
            "publication.pause_mode", "drain in mode fully_async: requests in flight don't live through a publication"
        )
