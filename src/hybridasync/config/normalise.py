"""Rules that set a value: what the configuration implies, and defaults that depend on other settings.

Each is a pure function of the configuration that yields what is to run instead, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator

from hybridasync.config.findings import Finding, Set, Warn
from hybridasync.config.models import Config
from hybridasync.config.names import is_written


def zero_kl(config: Config) -> Iterator[Finding]:
    """A KL loss with coefficient 0 is no KL loss (R18, R19): settled before anything asks for a reference model."""
    algorithm = config.algorithm
    if algorithm.use_kl_loss and algorithm.kl_loss_coef == 0:
        yield Set(
            "algorithm.use_kl_loss", False, "kl_loss_coef is 0: the term is exactly zero, the objective is the same"
        )
    elif not algorithm.use_kl_loss and algorithm.kl_loss_coef != 0:
        yield Warn("algorithm.kl_loss_coef", f"{algorithm.kl_loss_coef:g} has no effect: use_kl_loss is false")


def unused_reference(config: Config) -> Iterator[Finding]:
    """Nothing loads or runs a reference model that no term needs (R20)."""
    if config.model.ref_load is not None and not needs_reference(config):
        yield Set("model.ref_load", None, "no term of loss or reward needs a reference model, so none is loaded")


def needs_reference(config: Config) -> bool:
    """Whether any consumer needs the reference model: the one place that decides (R21)."""
    algorithm = config.algorithm
    in_loss = algorithm.use_kl_loss and algorithm.kl_loss_coef != 0
    return (in_loss or algorithm.kl_coef != 0) and not config.run.debug_train_only


def bridge_without_load(config: Config) -> Iterator[Finding]:
    """Where neither a mode nor a checkpoint is named, training starts from Hugging Face weights."""
    model = config.model
    if (
        model.load is None
        and model.megatron_to_hf_mode == "raw"
        and not is_written(config, "model.megatron_to_hf_mode")
    ):
        why = "default: without model.load the first weights are Hugging Face ones"
        yield Set("model.megatron_to_hf_mode", "bridge", why, quiet=True)


def first_weights(config: Config) -> Iterator[Finding]:
    """Without model.load the policy starts as the reference model (R34): said where that isn't hf_checkpoint."""
    model = config.model
    if model.load is None and model.ref_load not in (None, model.hf_checkpoint):
        yield Warn(
            "model.ref_load",
            f"training starts from these weights, too, and not from hf_checkpoint; --load {model.hf_checkpoint} with "
            "--megatron-to-hf-mode bridge would start from those",
        )
    if model.ref_ckpt_step is not None and model.ref_load is None:
        yield Warn("model.ref_ckpt_step", "has no effect: ref_load isn't set")


def sync_is_on_policy(config: Config) -> Iterator[Finding]:
    """Mode sync generates, trains and publishes in turn: nothing runs ahead and no publication is skipped."""
    if config.mode != "sync":
        return
    if config.rollout.max_staleness:
        yield Set("rollout.max_staleness", 0, "in mode sync the engines wait for the training step")
    if config.publication.update_weights_interval != 1:
        why = "in mode sync each step trains on samples of the newest weights; use mode hybrid for an interval"
        yield Set("publication.update_weights_interval", 1, why)


def attached_engines(config: Config) -> Iterator[Finding]:
    """Engines or sidecars that run already are counted by their URLs."""
    engine = config.engine
    urls = engine.sidecar_url or (engine.url if engine.kind == "attach" else ())
    if urls and engine.num_engines != len(urls):
        yield Set("engine.num_engines", len(urls), "one engine for each URL")


def train_only(config: Config) -> Iterator[Finding]:
    """Without engines there is nothing to evaluate on (R15)."""
    if config.run.debug_train_only and config.eval.eval_interval is not None:
        yield Set("eval.eval_interval", None, "debug_train_only runs no engines, and evaluation needs them")


def evaluating_engines(config: Config) -> Iterator[Finding]:
    """Engines set apart for evaluation would idle where there is none (U9)."""
    if config.eval.eval_engines != "shared" and config.eval.eval_interval is None and not config.eval.eval_at_end:
        yield Set("eval.eval_engines", "shared", "eval_interval isn't set, so that nothing is evaluated")


def pause_mode_of_mode(config: Config) -> Iterator[Finding]:
    """What a pause does to requests in flight follows the mode."""
    if config.publication.pause_mode is None:
        if config.mode == "fully_async":
            value, why = "retract", "fully_async: requests in flight live through a publication"
        else:
            value, why = "drain", f"{config.mode}: a publication waits until the partition is completely produced"
        yield Set("publication.pause_mode", value, why, quiet=True)


def upper_clip(config: Config) -> Iterator[Finding]:
    """The clip range is symmetric unless its upper side is given."""
    if config.algorithm.eps_clip_high is None:
        yield Set("algorithm.eps_clip_high", config.algorithm.eps_clip, "default: eps_clip", quiet=True)


def one_update_per_step(config: Config) -> Iterator[Finding]:
    """Without a global batch size a step is one update, the strictest on-policy choice."""
    if config.optimizer.global_batch_size is None:
        why = "default: all samples of a step in one update"
        yield Set("optimizer.global_batch_size", samples_per_step(config), why, quiet=True)


def engine_dtype(config: Config) -> Iterator[Finding]:
    """Engines use the trainer's type, so that log-probs agree."""
    if config.engine.dtype is None:
        yield Set("engine.dtype", config.model.dtype, "default: model.dtype", quiet=True)


def samples_per_step(config: Config) -> int:
    """Prompts of a step times samples of a prompt."""
    return config.rollout.rollout_batch_size * config.rollout.n_samples_per_prompt
