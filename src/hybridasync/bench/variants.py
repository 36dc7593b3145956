"""What the variants of the publication benchmark set. Everything else of their configurations must be equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybridasync.errors import ConfigError

Settings = Mapping[str, str]

INTERVAL = "publication.update_weights_interval"
STAGED = "publication.staged"
DELTA = "publication.delta"
BLOCKING = "publication.blocking"
K_MAX = "publication.k_max"


@dataclass(frozen=True, slots=True)
class Variant:
    """`settings` are overrides `section.key` → value; `reference` variants may publish the blocking way."""

    name: str
    meaning: str
    settings: Settings
    reference: bool = False


VARIANTS: Mapping[str, Variant] = {
    variant.name: variant
    for variant in (
        Variant(
            "baseline",
            "after every step; a KL loss of weight zero is asked for, which the configuration switches off",
            {"algorithm.use_kl_loss": "true", "algorithm.kl_loss_coef": "0.0", INTERVAL: "1", STAGED: "false"},
            reference=True,
        ),
        Variant(
            "zero_kl", "after every step; no KL loss is asked for", {INTERVAL: "1", STAGED: "false"}, reference=True
        ),
        Variant("optimized", "after every second step", {INTERVAL: "2", STAGED: "false"}, reference=True),
        Variant("staged", "after every step, staged while the engines generate", {INTERVAL: "1", STAGED: "true"}),
        Variant(
            "staged-delta",
            "after every step, staged, and only what changed",
            {INTERVAL: "1", STAGED: "true", DELTA: "true"},
        ),
        Variant(
            "adaptive",
            "after every step or every second, as publications are measured to cost; staged",
            {INTERVAL: '"auto"', K_MAX: "2", STAGED: "true"},
        ),
    )
}

REFERENCE_ORDER = ("zero_kl", "baseline", "optimized")
"""The first of these that takes part is what the others are compared with."""


def chosen(names: Sequence[str]) -> tuple[str, ...]:
    """The names in the order of `VARIANTS`; all where none is given. Raises ConfigError for an unknown name."""
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        raise ConfigError(f"unknown: {', '.join(unknown)}; there are {', '.join(VARIANTS)}", setting="--variants")
    return tuple(name for name in VARIANTS if name in names or not names)


def settings_of(name: str, *, blocking: bool) -> dict[str, str]:
    """The overrides of a variant. `blocking`: those of the reference publish its way."""
    variant = VARIANTS[name]
    extra = {BLOCKING: "true"} if blocking and variant.reference else {}
    return {**variant.settings, **extra}


def compared_with(names: Sequence[str]) -> str:
    """The variant that the others are compared with."""
    return next((name for name in REFERENCE_ORDER if name in names), names[0])


VARIED = frozenset({setting for variant in VARIANTS.values() for setting in variant.settings} | {BLOCKING})
"""Settings in which trials of different variants may differ."""
