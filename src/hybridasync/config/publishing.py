"""Relations between the settings of publications: the adaptive interval, and what is done while engines generate."""

from __future__ import annotations

from collections.abc import Iterator

from hybridasync.config.findings import Finding, Refuse, Set, Warn
from hybridasync.config.models import Config
from hybridasync.config.names import is_written


def goes_on_beside_training(config: Config) -> bool:
    """Whether a publication may go on beside the next training step.

    At staleness 0 the next batch waits for it anyway. With keep_old_actor the next step's old log-probs are those of
    the weights whose publication is to be decided.
    """
    ahead = config.rollout.max_staleness > 0 and not config.publication.blocking
    return ahead and not config.algorithm.keep_old_actor


def interval_within_staleness(config: Config) -> Iterator[Finding]:
    """Skipped publications may age weights no more than running ahead does: K is at most max_staleness + 1."""
    publication, most = config.publication, config.rollout.max_staleness + 1
    if publication.update_weights_interval != "auto":
        for name in ("k_min", "k_max"):
            if is_written(config, f"publication.{name}") and config.mode != "sync":
                yield Warn(f"publication.{name}", "has no effect: update_weights_interval isn't auto")
        return
    if publication.k_min > min(publication.k_max, most):
        yield Refuse(
            "publication.k_min",
            f"{publication.k_min} is above k_max ({publication.k_max}) or above max_staleness + 1 ({most}): K lies "
            "between k_min and both of them",
        )
    elif publication.k_max > most:
        why = f"max_staleness {most - 1}: skipped publications may add as many versions of age as running ahead does"
        yield Set("publication.k_max", most, why, quiet=not is_written(config, "publication.k_max"))


def sent_in_full(config: Config) -> Iterator[Finding]:
    """What is sent goes into effect as it arrives, so it is sent under the pause, and as a whole."""
    publication = config.publication
    if publication.transport == "disk":
        return
    if publication.delta:
        yield Refuse("publication.delta", f"true needs publication.transport disk; it is {publication.transport}")
    elif publication.staged:
        why = f"transport {publication.transport}: weights are sent under the pause"
        yield Set("publication.staged", False, why, quiet=not is_written(config, "publication.staged"))


def staged_unless_blocking(config: Config) -> Iterator[Finding]:
    """A blocking publication does everything under the pause; a delta is applied to a staged copy of the weights."""
    publication = config.publication
    if publication.blocking and publication.delta:
        yield Refuse("publication.delta", "true and publication.blocking exclude each other: keep one")
    elif publication.blocking and publication.staged:
        why = "blocking: nothing is prepared before the pause"
        yield Set("publication.staged", False, why, quiet=not is_written(config, "publication.staged"))
    elif publication.delta and not publication.staged:
        yield Refuse("publication.delta", "true needs publication.staged: a delta is applied beside the live weights")
    elif publication.delta and config.engine.kind == "sglang":
        yield Warn("publication.delta", "has no effect: SGLang has no route for it, and gets complete weights")
