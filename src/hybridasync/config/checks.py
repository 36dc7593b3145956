"""Relations between settings of the training side: batch, data, loss, evaluation, learning rate.

Each check is a pure function of the configuration; its docstring is its reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from hybridasync.config.findings import Finding, Refuse, Warn
from hybridasync.config.models import Config
from hybridasync.config.normalise import needs_reference, samples_per_step


def reference_given(config: Config) -> Iterator[Finding]:
    """A KL term needs the model that it is measured against; which one is the user's choice (R19)."""
    if needs_reference(config) and config.model.ref_load is None:
        name = "kl_coef" if config.algorithm.kl_coef else "kl_loss_coef"
        term = "KL penalty of the reward" if config.algorithm.kl_coef else "KL loss"
        yield Refuse(
            "model.ref_load",
            f"the {term} ({name} {getattr(config.algorithm, name):g}) needs a reference model: give --ref-load "
            f"DIR (usually the initial policy, {config.model.hf_checkpoint}), or set {name} to 0",
        )


def one_kl_term(config: Config) -> Iterator[Finding]:
    """KL against the reference is a term of the loss or of the reward; in both it would count twice (R21)."""
    algorithm = config.algorithm
    if algorithm.kl_coef and algorithm.kl_loss_coef:
        yield Refuse(
            "algorithm.kl_coef",
            f"{algorithm.kl_coef:g} and kl_loss_coef {algorithm.kl_loss_coef:g} exclude each other: set one to 0",
        )


def workers_fit_layout(config: Config) -> Iterator[Finding]:
    """Every model replica takes TP × PP workers."""
    parallel = config.parallel
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    if parallel.num_workers % (tp * pp):
        yield Refuse(
            "parallel.num_workers",
            f"{parallel.num_workers} isn't divisible by tensor_model_parallel_size {tp} × "
            f"pipeline_model_parallel_size {pp} = {tp * pp}",
        )


def data_parallel_size(config: Config) -> int:
    """Model replicas: workers / (TP × PP)."""
    parallel = config.parallel
    replica = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    return max(1, parallel.num_workers // replica)


def batch_divides(config: Config) -> Iterator[Finding]:
    """A step is a whole number of optimizer updates: a remainder would never be trained on."""
    rollout, batch, samples = config.rollout, config.optimizer.global_batch_size, samples_per_step(config)
    if batch is None or config.run.debug_train_only:
        return
    factors = f"rollout_batch_size {rollout.rollout_batch_size} × n_samples_per_prompt {rollout.n_samples_per_prompt}"
    total = samples * (rollout.num_rollout or 0)
    if rollout.num_rollout is not None and total < batch:
        yield Refuse(
            "optimizer.global_batch_size",
            f"the whole run makes fewer samples than one update takes: num_rollout {rollout.num_rollout} × {factors} "
            f"= {total} < global_batch_size {batch}; a divisor of {samples} (the samples of a step) would do",
        )
    elif samples % batch:
        yield Refuse(
            "optimizer.global_batch_size",
            f"{batch} doesn't divide the samples of a step: {factors} = {samples}; a divisor of {samples} would do",
        )


def batch_splits_over_replicas(config: Config) -> Iterator[Finding]:
    """Every replica takes the same share of an update; an uneven split would hang a collective."""
    size, batch = data_parallel_size(config), config.optimizer.global_batch_size
    layout = (
        f"data parallel size {size} (num_workers {config.parallel.num_workers} / (tensor_model_parallel_size "
        f"{config.parallel.tensor_model_parallel_size} × pipeline_model_parallel_size "
        f"{config.parallel.pipeline_model_parallel_size}))"
    )
    if batch is not None and batch % size and not config.run.debug_train_only:
        yield Refuse("optimizer.global_batch_size", f"{batch} isn't divisible by the {layout}")
    if config.warm_start.steps and config.warm_start.batch_size % size:
        yield Refuse("warm_start.batch_size", f"{config.warm_start.batch_size} isn't divisible by the {layout}")


def prompts_given(config: Config) -> Iterator[Finding]:
    """RL needs prompts and a length; both are known before anything starts."""
    if config.run.debug_train_only or not config.rollout.rollout_global_dataset:
        return
    if not config.data.prompt_data:
        yield Refuse("data.prompt_data", "no prompts to train on: give a JSONL file (--prompt-data FILE)")
    if config.rollout.num_rollout is None and config.rollout.num_epoch is None:
        yield Refuse(
            "rollout.num_rollout",
            "the run has no length: give num_rollout (training steps) or num_epoch (passes over the data); with both "
            "the smaller one counts",
        )


def function_instead_of_files(config: Config) -> Iterator[Finding]:
    """Without a global data set a function makes the prompts, and there are no epochs to count (R39)."""
    data, rollout = config.data, config.rollout
    if config.run.debug_train_only:
        return
    if rollout.rollout_global_dataset:
        if data.prompt_function is not None:
            yield Warn("data.prompt_function", "has no effect: rollout_global_dataset is true")
        return
    if data.prompt_function is None:
        yield Refuse("data.prompt_function", "rollout_global_dataset is false, so a function has to make the prompts")
    if rollout.num_epoch is not None:
        yield Refuse("rollout.num_epoch", "num_epoch requires rollout_global_dataset: a function has no epochs")
    if rollout.num_rollout is None:
        yield Refuse("rollout.num_rollout", "num_rollout must be positive where rollout_global_dataset is false")
    for name in ("prompt_data", "extra_prompt_data", "weights"):
        if getattr(data, name):
            yield Warn(f"data.{name}", "has no effect: rollout_global_dataset is false")


def weights_fit_files(config: Config) -> Iterator[Finding]:
    """Every file has a weight, or none has."""
    weights, files = config.data.weights, 1 + len(config.data.extra_prompt_data)
    if weights and len(weights) != files:
        yield Refuse("data.weights", f"has {len(weights)} weights for {files} files, prompt_data included")
    elif any(weight <= 0 for weight in weights):
        yield Refuse("data.weights", f"wants weights above 0, got {list(weights)}; leave a file out instead")
    elif not math.isfinite(sum(weights)):
        yield Refuse("data.weights", f"have a sum beyond all numbers: {list(weights)}; shares like 0.7 and 0.3 will do")


def prompt_template_has_prompt(config: Config) -> Iterator[Finding]:
    """A template without a place for the prompt would make every prompt the same."""
    template = config.data.prompt_template
    if template is not None and "{prompt}" not in template:
        yield Refuse("data.prompt_template", f"has no {{prompt}} in it: {template!r}")


def warm_start_has_data(config: Config) -> Iterator[Finding]:
    """The supervised phase needs examples, and is all there is without engines."""
    warm = config.warm_start
    if warm.steps and not warm.data:
        yield Refuse("warm_start.data", f"warm_start.steps is {warm.steps}, but there is no data: give a JSONL file")
    if config.run.debug_train_only and not warm.steps:
        yield Refuse("run.debug_train_only", "leaves nothing to do: set warm_start.steps and warm_start.data")
    if warm.data and not warm.steps:
        yield Warn("warm_start.data", "has no effect: warm_start.steps is 0")


def sampling_is_untruncated(config: Config) -> Iterator[Finding]:
    """Log-probs on both sides are those of the whole distribution at the sampling temperature."""
    if config.rollout.top_p != 1:
        yield Refuse(
            "rollout.top_p",
            f"must be 1, got {config.rollout.top_p:g}: a truncated distribution has other log-probs than the trainer's",
        )


def groups_have_a_baseline(config: Config) -> Iterator[Finding]:
    """The advantage is relative to the group: a group of one has none."""
    if config.rollout.n_samples_per_prompt < 2 and not config.run.debug_train_only:
        yield Refuse(
            "rollout.n_samples_per_prompt",
            "1 sample has no group to be compared with (its advantage is always 0): use 2 or more",
        )


def lengths_fit_context(config: Config) -> Iterator[Finding]:
    """Prompt and completion share the context."""
    context, cap = config.engine.context_length, config.rollout.max_response_tokens
    prompt = config.data.max_prompt_tokens
    if context is not None and cap >= context:
        yield Refuse(
            "rollout.max_response_tokens", f"{cap} leaves no room for a prompt in engine.context_length {context}"
        )
    elif context is not None and prompt is not None and prompt >= context:
        yield Refuse(
            "data.max_prompt_tokens", f"{prompt} leaves no room for an answer in engine.context_length {context}"
        )
    elif context is not None and prompt is not None and prompt + cap > context:
        yield Warn(
            "rollout.max_response_tokens",
            f"max_prompt_tokens {prompt} + {cap} > engine.context_length {context}: long prompts get shorter answers",
        )


def overlong_buffer_fits(config: Config) -> Iterator[Finding]:
    """The soft overlong penalty begins inside the cap."""
    buffer, cap = config.reward.overlong_buffer_tokens, config.rollout.max_response_tokens
    if buffer > cap:
        yield Refuse("reward.overlong_buffer_tokens", f"{buffer} is more than max_response_tokens ({cap})")


def learning_rate_range(config: Config) -> Iterator[Finding]:
    """The decay goes down, and begins within the run."""
    optimizer, steps = config.optimizer, config.rollout.num_rollout
    if optimizer.min_lr > optimizer.lr:
        yield Refuse("optimizer.min_lr", f"{optimizer.min_lr:g} is above lr ({optimizer.lr:g})")
    if steps is not None and optimizer.lr_warmup_steps >= steps and not config.run.debug_train_only:
        yield Warn(
            "optimizer.lr_warmup_steps",
            f"{optimizer.lr_warmup_steps} isn't less than num_rollout ({steps}): the peak learning rate isn't reached",
        )


def evaluation_is_configured(config: Config) -> Iterator[Finding]:
    """Evaluation takes an interval and held-out prompts; one alone does nothing (R5)."""
    evaluation = config.eval
    if config.run.debug_train_only:
        return
    if evaluation.eval_interval is not None and not evaluation.eval_prompt_data:
        yield Refuse(
            "eval.eval_prompt_data",
            f"eval_interval is {evaluation.eval_interval}, but there are no held-out prompts: give --eval-prompt-data "
            "FILE, or leave eval_interval out",
        )
    if evaluation.eval_interval is None and evaluation.eval_at_end:
        yield Refuse("eval.eval_interval", "eval_at_end needs it: evaluation is configured by interval and prompts")
    elif evaluation.eval_interval is None and evaluation.eval_prompt_data:
        yield Warn("eval.eval_prompt_data", "has no effect: eval_interval isn't set, so nothing is evaluated")


def evaluation_cancels_interval(config: Config) -> Iterator[Finding]:
    """Each evaluation publishes first, so frequent evaluations take the interval's benefit away (R14)."""
    every, publication = config.eval.eval_interval, config.publication
    adaptive = publication.update_weights_interval == "auto"
    interval = publication.k_min if adaptive else publication.longest_interval
    if every is not None and interval > 1 and every < interval:
        yield Warn(
            "eval.eval_interval",
            f"{every} is below update_weights_interval ({interval}): each evaluation publishes first, so weights are "
            f"published every {every} steps and not every {interval}",
        )
    elif every is not None and interval > 1 and every % interval and not adaptive:
        yield Warn(
            "eval.eval_interval",
            f"{every} isn't a multiple of update_weights_interval ({interval}): evaluations publish out of turn, which "
            "takes a part of the interval's benefit away",
        )


def prepared_is_made(config: Config) -> Iterator[Finding]:
    """A path in the prepared folder needs the function that fills it."""
    if config.prepare.function is None:
        for setting, value in (
            ("model.hf_checkpoint", config.model.hf_checkpoint),
            ("model.load", config.model.load),
            ("model.ref_load", config.model.ref_load),
            ("data.prompt_data", config.data.prompt_data),
            ("warm_start.data", config.warm_start.data),
            ("eval.eval_prompt_data", config.eval.eval_prompt_data),
        ):
            if value is not None and "{prepared}" in value:
                yield Refuse(setting, f"{value!r} lies in the prepared folder, but prepare.function isn't set")
