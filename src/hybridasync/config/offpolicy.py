"""The off-policy guard (R24-R32): samples of older weights are trained on only with a correction.

With an interval above 1, or with engines that run ahead, the trainer's current log-probs aren't those of the policy
that sampled. Taken as old log-probs they make the importance ratio 1 where it isn't: the gradient is wrong and nothing
shows it.
"""

from __future__ import annotations

from collections.abc import Iterator

from hybridasync.config.findings import Finding, Refuse, Set, Warn
from hybridasync.config.models import Config
from hybridasync.config.normalise import samples_per_step


def version_lag(config: Config) -> int:
    """The most weight versions between the weights that sampled and the step that trains: S + K - 1."""
    return config.rollout.max_staleness + config.publication.longest_interval - 1


def own_old_policy(config: Config) -> Iterator[Finding]:
    """Whether the policy in training is its own old policy, settled before the guard asks (R31).

    In mode fully_async that is so without being asked for where a step is one update; in hybrid it never is.
    """
    algorithm = config.algorithm
    if algorithm.true_on_policy_mode is None:
        one_update = config.optimizer.global_batch_size in (None, samples_per_step(config))
        other = algorithm.use_rollout_logprobs or algorithm.keep_old_actor
        # Where nothing corrects at all, the guard should name every way out.
        corrected = algorithm.use_tis or version_lag(config) == 0
        on = config.mode == "fully_async" and one_update and corrected and not other
        why = "default: on in mode fully_async with one update a step and no other old log-probs"
        yield Set("algorithm.true_on_policy_mode", on, why, quiet=True)


def correction_needed(config: Config) -> Iterator[Finding]:
    """Stale samples need importance weights, or old log-probs that are those of the policy that sampled (R25-R28)."""
    algorithm = config.algorithm
    if config.mode == "sync" or version_lag(config) == 0 or config.run.debug_train_only or algorithm.use_tis:
        return
    staleness, publication = config.rollout.max_staleness, config.publication
    auto = " (up to k_max steps)" if publication.update_weights_interval == "auto" else ""
    interval = f"{publication.longest_interval}{auto}"
    problem = (
        f"old log-probs require correction: with max_staleness {staleness} and update_weights_interval {interval} "
        f"samples may be {version_lag(config)} weight versions old"
    )
    if algorithm.true_on_policy_mode:
        yield Refuse(
            "algorithm.true_on_policy_mode",
            f"{problem}, and true_on_policy_mode takes the policy's own log-probs as old. Enable --use-tis",
        )
    elif algorithm.keep_old_actor and staleness and not algorithm.use_rollout_logprobs:
        yield Refuse(
            "algorithm.keep_old_actor",
            f"{problem}, and a single snapshot can't represent several behaviour policies. "
            "Enable --use-tis or --use-rollout-logprobs (or run with --max-staleness 0)",
        )
    elif not algorithm.use_rollout_logprobs and not algorithm.keep_old_actor:
        snapshot = "" if staleness else "; at max_staleness 0 --keep-old-actor would do, too"
        yield Refuse(
            "algorithm.use_tis",
            f"{problem}. Enable --use-tis or --use-rollout-logprobs (or run on-policy: --mode sync){snapshot}",
        )


def one_correction(config: Config) -> Iterator[Finding]:
    """Both corrections together would correct twice (R29), and old log-probs have one source."""
    algorithm = config.algorithm
    if algorithm.use_tis and algorithm.use_rollout_logprobs:
        yield Refuse(
            "algorithm.use_rollout_logprobs",
            "use_tis and use_rollout_logprobs exclude each other (both correct the same gap): keep one",
        )
    if algorithm.keep_old_actor and algorithm.use_rollout_logprobs:
        yield Refuse(
            "algorithm.keep_old_actor",
            "use_rollout_logprobs and keep_old_actor exclude each other (both name the old log-probs): keep one",
        )
    if algorithm.true_on_policy_mode:
        for name in ("keep_old_actor", "use_rollout_logprobs"):
            if getattr(algorithm, name):
                yield Warn(f"algorithm.{name}", "has no effect: true_on_policy_mode is on")


def unused_corrections(config: Config) -> Iterator[Finding]:
    """Settings of importance weights do nothing without them."""
    algorithm = config.algorithm
    if not algorithm.use_tis:
        for name, default in (("tis_level", "token"), ("tis_mode", "truncate")):
            if getattr(algorithm, name) != default:
                yield Warn(f"algorithm.{name}", f"{getattr(algorithm, name)} has no effect: use_tis is false")


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
