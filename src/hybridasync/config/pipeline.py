"""The one ordered list of normalisations and checks, and what comes out: what runs, why, and within which bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hybridasync.config import checks, layout, normalise, offpolicy, publishing
from hybridasync.config.findings import Change, Refuse, Rule, Set, Warn, refuse
from hybridasync.config.models import Config
from hybridasync.config.names import is_written, value_of
from hybridasync.schedule import Schedule

# Order matters: what a rule sets is what the rules after it see.
RULES: tuple[Rule, ...] = (
    # The objective comes first: whether a reference model is needed is settled before anything asks for one (R19).
    normalise.zero_kl,
    normalise.unused_reference,
    checks.reference_given,
    checks.one_kl_term,
    normalise.bridge_without_load,
    normalise.first_weights,
    # The mode bounds how far engines run ahead, and with that what the off-policy guard has to judge.
    normalise.train_only,
    normalise.evaluating_engines,
    normalise.sync_is_on_policy,
    normalise.pause_mode_of_mode,
    publishing.interval_within_staleness,
    publishing.sent_in_full,
    publishing.staged_unless_blocking,
    offpolicy.own_old_policy,
    offpolicy.correction_needed,
    offpolicy.one_correction,
    offpolicy.unused_corrections,
    offpolicy.tis_range,
    offpolicy.in_flight_mode,
    # Layout and batch.
    normalise.attached_engines,
    checks.workers_fit_layout,
    normalise.one_update_per_step,
    checks.batch_divides,
    checks.batch_splits_over_replicas,
    # Data and sampling.
    checks.prompts_given,
    checks.function_instead_of_files,
    checks.weights_fit_files,
    checks.prepared_is_made,
    checks.prompt_template_has_prompt,
    checks.warm_start_has_data,
    checks.sampling_is_untruncated,
    checks.groups_have_a_baseline,
    checks.lengths_fit_context,
    checks.overlong_buffer_fits,
    # Loss, learning rate, evaluation.
    normalise.upper_clip,
    checks.learning_rate_range,
    checks.evaluation_is_configured,
    checks.evaluation_cancels_interval,
    # Engines, ports and nodes.
    normalise.engine_dtype,
    offpolicy.unequal_precision,
    layout.engine_urls,
    layout.engine_kind_needs,
    layout.enough_engines,
    layout.transport_reaches_engines,
    layout.engine_devices,
    layout.ports_are_apart,
    layout.several_nodes_meet,
)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Derived numbers. None where they depend on the size of the data set, which isn't known yet."""

    samples_per_step: int
    updates_per_step: int
    data_parallel_size: int
    slots: int  # groups admitted and not yet trained on: (max_staleness + 1) × rollout_batch_size
    max_partition_lag: int  # steps: max_staleness
    max_version_lag: int  # weight versions: max_staleness + update_weights_interval (auto: k_max) - 1
    steps: int | None
    publications: int | None  # the initial one included; None where the interval is chosen on the way
    evaluations: int | None  # the initial one included
    samples: int | None  # of the whole run


@dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration that has passed every check, and the way from what was written to what runs."""

    config: Config
    changes: tuple[Change, ...]
    warnings: tuple[str, ...]
    bounds: Bounds


def resolve(config: Config) -> Resolved:
    """Apply `RULES` in order. Resolving what it returned changes nothing more.

    Raises: ConfigError that names every setting refused.
    """
    written, refused = config, list[Refuse]()
    changes, warnings = list[Change](), list[str]()
    for rule in RULES:
        for finding in tuple(rule(config)):
            if isinstance(finding, Set):
                changes.append(_change(written, config, finding))
                config = replace(config, {finding.setting: finding.value})
            elif isinstance(finding, Warn):
                warnings.append(str(finding))
            else:
                refused.append(finding)
    refuse(refused, source="the configuration")
    return Resolved(config, tuple(changes), tuple(warnings), bounds(config))


def replace(config: Config, values: dict[str, Any]) -> Config:
    """A copy with other values at paths like `optimizer.lr`."""
    for setting, value in values.items():
        section, _, name = setting.rpartition(".")
        if section:
            part = getattr(config, section).model_copy(update={name: value})
            config = config.model_copy(update={section: part})
        else:
            config = config.model_copy(update={name: value})
    return config


def schedule_of(config: Config, *, num_rollout: int, steps_per_epoch: int | None) -> Schedule:
    """The schedule of a run. Evaluation counts only with an interval and prompts (R5)."""
    configured = config.eval.eval_interval is not None and config.eval.eval_prompt_data is not None
    return Schedule(
        num_rollout=num_rollout,
        update_weights_interval=config.publication.longest_interval,
        eval_interval=config.eval.eval_interval if configured else None,
        steps_per_epoch=steps_per_epoch,
        save_interval=config.checkpoint.save_interval,
        eval_at_end=config.eval.eval_at_end,
    )


def bounds(config: Config, *, steps_per_epoch: int | None = None) -> Bounds:
    """The numbers that follow from a configuration; with `steps_per_epoch` epoch ends count too."""
    samples = normalise.samples_per_step(config)
    steps = None if config.run.debug_train_only else config.rollout.num_rollout
    publications = evaluations = None
    if steps is not None:
        schedule = schedule_of(config, num_rollout=steps, steps_per_epoch=steps_per_epoch)
        initial = schedule.eval_interval is not None and not config.eval.skip_eval_before_train
        if config.publication.update_weights_interval != "auto":
            publications = 1 + sum(schedule.publish_due(step) for step in range(steps))
        evaluations = int(initial) + sum(schedule.eval_due(step) for step in range(steps))
    return Bounds(
        samples_per_step=samples,
        updates_per_step=samples // (config.optimizer.global_batch_size or samples),
        data_parallel_size=checks.data_parallel_size(config),
        slots=(config.rollout.max_staleness + 1) * config.rollout.rollout_batch_size,
        max_partition_lag=config.rollout.max_staleness,
        max_version_lag=offpolicy.version_lag(config),
        steps=steps,
        publications=publications,
        evaluations=evaluations,
        samples=None if steps is None else steps * samples,
    )


def _change(written: Config, config: Config, finding: Set) -> Change:
    wrote = value_of(written, finding.setting) if is_written(written, finding.setting) else None
    return Change(finding.setting, wrote, finding.value, finding.why, filled_in=finding.quiet)
