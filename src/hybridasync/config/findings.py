"""What the rules of the pipeline say: set this, refuse that, warn of this."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from hybridasync.config.models import Config
from hybridasync.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Set:
    """Run with another value than the configuration has. `quiet` marks a default that is only filled in."""

    setting: str
    value: Any
    why: str
    quiet: bool = False


@dataclass(frozen=True, slots=True)
class Refuse:
    """The user's mistake: what was given and what would do."""

    setting: str
    message: str


@dataclass(frozen=True, slots=True)
class Warn:
    """Legal, but probably not what was meant. Said once for a run."""

    setting: str
    message: str

    def __str__(self) -> str:
        return f"{self.setting}: {self.message}"


Finding = Set | Refuse | Warn
Rule = Callable[[Config], Iterable[Finding]]


@dataclass(frozen=True, slots=True)
class Change:
    """One line of `--explain`. `wrote` is None where the user wrote nothing."""

    setting: str
    wrote: Any
    runs: Any
    why: str
    filled_in: bool = False


def say_changes(changes: Iterable[Change], event: Callable[..., None]) -> None:
    """An event for each setting that runs otherwise than it was written (R18); filled-in defaults are none."""
    for change in changes:
        if not change.filled_in:
            event("setting_changed", setting=change.setting, wrote=change.wrote, runs=change.runs, why=change.why)


def refuse(refusals: Iterable[Refuse], *, source: str) -> None:
    """Raise one ConfigError that carries every refusal, if there is any.

    Raises: ConfigError.
    """
    found = tuple(refusals)
    if not found:
        return
    if len(found) == 1:
        raise ConfigError(found[0].message, setting=found[0].setting)
    lines = "\n".join(f"  {one.setting}: {one.message}" for one in found)
    raise ConfigError(f"{source} has {len(found)} errors:\n{lines}")
