"""What a benchmark is going to run: written before the first trial, and what `bench verify` recomputes from."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from hybridasync.bench.variants import VARIED, settings_of
from hybridasync.config.load import load
from hybridasync.config.models import Config
from hybridasync.config.pipeline import resolve
from hybridasync.errors import ConfigError

FILE_NAME = "plan.json"
FIRST_SEED = 20260802

# What would make steps unequal, or only cost time.
QUIET = (
    "eval.eval_interval=none",
    "eval.eval_at_end=false",
    "eval.skip_eval_before_train=true",
    "checkpoint.save_interval=none",
    "checkpoint.export_hf=false",
    "observability.progress=plain",
    "observability.tensorboard=false",
)

OWN = {"seed": "each trial has its own", "rollout.num_rollout": "--steps sets it"}
"""Beside what variants set: what a `--set` would have no effect on."""


@dataclass(frozen=True, slots=True)
class Job:
    """One trial of one variant. Trials of the same number are a pair: they have one seed."""

    trial: int
    variant: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.trial:02d}-{self.variant}"


@dataclass(frozen=True, slots=True)
class Plan:
    """`first` and `last` step of the window are compared, both included; steps before it warm up."""

    recipe: str
    overrides: tuple[str, ...]
    variants: tuple[str, ...]
    trials: int
    steps: int
    first: int
    last: int
    blocking: bool
    accept: tuple[str, ...]

    def jobs(self) -> tuple[Job, ...]:
        """Every trial has each variant once, in an order rotated by one from trial to trial (R123)."""
        found = []
        for trial in range(self.trials):
            shift = trial % len(self.variants)
            for variant in self.variants[shift:] + self.variants[:shift]:
                found.append(Job(trial, variant, FIRST_SEED + trial))
        return tuple(found)

    def settings(self, job: Job) -> list[str]:
        """The overrides of a trial, in the order in which they are applied."""
        own = [f"{setting}={value}" for setting, value in settings_of(job.variant, blocking=self.blocking).items()]
        return [*QUIET, *self.overrides, f"seed={job.seed}", f"rollout.num_rollout={self.steps}", *own]

    def config(self, job: Job) -> Config:
        """What would run. Raises ConfigError for a setting that the recipe or a variant has wrong."""
        return resolve(load(self.recipe, self.settings(job))).config

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Raises ValueError for what isn't a plan."""
        values: Any = json.loads(text)
        if not isinstance(values, dict) or values.keys() != {field.name for field in fields(cls)}:
            raise ValueError("not the plan of a benchmark")
        lists: dict[str, Any] = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return cls(**{**values, **lists})


def window(steps: int, given: str | None) -> tuple[int, int]:
    """First and last step that count: 5 to 15 of 20, the middle half of others.

    Raises ConfigError for a window that isn't FIRST:LAST within the run.
    """
    if given is None:
        return steps // 4, max(steps // 4, 3 * steps // 4)
    first, colon, last = given.partition(":")
    if not (colon and first.strip().isdecimal() and last.strip().isdecimal() and int(first) <= int(last) < steps):
        raise ConfigError(f"wants FIRST:LAST, steps from 0 to {steps - 1}, got {given!r}", setting="--window")
    return int(first), int(last)


def check(plan: Plan) -> None:
    """Resolve every variant before anything starts. Raises ConfigError, also for a setting that is the benchmark's."""
    for override in plan.overrides:
        setting = override.partition("=")[0].strip()
        own = {**dict.fromkeys(VARIED, "the variants set it, see --variants"), **OWN}
        if setting in own:
            raise ConfigError(f"can't be given with --set: {own[setting]}", setting=setting)
    for job in plan.jobs()[: len(plan.variants)]:
        if plan.config(job).network.nnodes > 1:
            raise ConfigError("a benchmark runs on one node", setting="network.nnodes")


def read_plan(folder: Path) -> Plan:
    """Raises OSError, or ValueError for what isn't a plan."""
    return Plan.from_json((folder / FILE_NAME).read_text(encoding="utf-8"))
