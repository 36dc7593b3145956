"""Every setting by its path, the options that people of Megatron/SGLang stacks know, and the nearest name to a typo."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hybridasync.config.models import Config

# Dashed option without its dashes → setting. The command line is generated from it, and a recipe that uses one of these
# names in the wrong place is told the right one.
STACK_NAMES: Mapping[str, str] = {
    "mode": "mode",
    "seed": "seed",
    "debug-train-only": "run.debug_train_only",
    "hf-checkpoint": "model.hf_checkpoint",
    "load": "model.load",
    "ref-load": "model.ref_load",
    "ref-ckpt-step": "model.ref_ckpt_step",
    "megatron-to-hf-mode": "model.megatron_to_hf_mode",
    "num-workers": "parallel.num_workers",
    "tensor-model-parallel-size": "parallel.tensor_model_parallel_size",
    "pipeline-model-parallel-size": "parallel.pipeline_model_parallel_size",
    "use-distributed-optimizer": "parallel.use_distributed_optimizer",
    "max-tokens-per-gpu": "parallel.max_tokens_per_micro_batch",
    "prompt-data": "data.prompt_data",
    "input-key": "data.prompt_key",
    "label-key": "data.label_key",
    "apply-chat-template": "data.apply_chat_template",
    "rollout-max-prompt-len": "data.max_prompt_tokens",
    "num-rollout": "rollout.num_rollout",
    "num-epoch": "rollout.num_epoch",
    "start-rollout-id": "rollout.start_rollout_id",
    "rollout-global-dataset": "rollout.rollout_global_dataset",
    "rollout-batch-size": "rollout.rollout_batch_size",
    "n-samples-per-prompt": "rollout.n_samples_per_prompt",
    "rollout-max-response-len": "rollout.max_response_tokens",
    "rollout-temperature": "rollout.temperature",
    "max-staleness": "rollout.max_staleness",
    "partial-rollout": "rollout.partial_rollout",
    "reward-function": "reward.function",
    "eps-clip": "algorithm.eps_clip",
    "eps-clip-high": "algorithm.eps_clip_high",
    "eps-clip-c": "algorithm.eps_clip_c",
    "importance-sampling-level": "algorithm.importance_sampling_level",
    "entropy-coef": "algorithm.entropy_coef",
    "use-kl-loss": "algorithm.use_kl_loss",
    "kl-loss-coef": "algorithm.kl_loss_coef",
    "kl-coef": "algorithm.kl_coef",
    "use-tis": "algorithm.use_tis",
    "tis-clip": "algorithm.tis_clip",
    "tis-clip-low": "algorithm.tis_clip_low",
    "tis-level": "algorithm.tis_level",
    "tis-mode": "algorithm.tis_mode",
    "use-rollout-logprobs": "algorithm.use_rollout_logprobs",
    "keep-old-actor": "algorithm.keep_old_actor",
    "true-on-policy-mode": "algorithm.true_on_policy_mode",
    "lr": "optimizer.lr",
    "min-lr": "optimizer.min_lr",
    "lr-decay-style": "optimizer.lr_schedule",
    "lr-warmup-iters": "optimizer.lr_warmup_steps",
    "weight-decay": "optimizer.weight_decay",
    "adam-beta1": "optimizer.adam_beta1",
    "adam-beta2": "optimizer.adam_beta2",
    "clip-grad": "optimizer.clip_grad",
    "global-batch-size": "optimizer.global_batch_size",
    "update-weights-interval": "publication.update_weights_interval",
    "pause-mode": "publication.pause_mode",
    "on-ambiguous-pause": "publication.on_ambiguous_pause",
    "rollout-http-timeout": "publication.rollout_http_timeout",
    "eval-interval": "eval.eval_interval",
    "eval-prompt-data": "eval.eval_prompt_data",
    "skip-eval-before-train": "eval.skip_eval_before_train",
    "eval-at-end": "eval.eval_at_end",
    "engine-kind": "engine.kind",
    "num-engines": "engine.num_engines",
    "use-fault-tolerance": "engine.use_fault_tolerance",
    "rollout-engine-init-timeout": "engine.rollout_engine_init_timeout",
    "save-interval": "checkpoint.save_interval",
    "nnodes": "network.nnodes",
    "master-addr": "network.master_addr",
    "master-port": "network.master_port",
    "progress": "observability.progress",
}

# Words of other stacks that are no option here but have an equivalent.
OTHER_WORDS: Mapping[str, str] = {
    "micro_batch_size": "parallel.max_tokens_per_micro_batch",
    "batch_size": "rollout.rollout_batch_size",
    "learning_rate": "optimizer.lr",
    "max_tokens": "rollout.max_response_tokens",
    "model_path": "model.hf_checkpoint",
    "tp": "parallel.tensor_model_parallel_size",
    "pp": "parallel.pipeline_model_parallel_size",
}


def section_models() -> Iterator[tuple[str, type[BaseModel]]]:
    """Name and model of each section, in the order of the recipe."""
    for name, field in Config.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield name, field.annotation


@cache
def settings() -> Mapping[str, FieldInfo]:
    """Every setting by its path, sections excluded: `seed`, `optimizer.lr`."""
    sections = dict(section_models())
    top = {name: field for name, field in Config.model_fields.items() if name not in sections}
    nested = {f"{s}.{name}": field for s, model in sections.items() for name, field in model.model_fields.items()}
    return {**top, **nested}


def value_of(config: Config, setting: str) -> Any:
    """The value at a path like `optimizer.lr`."""
    value: Any = config
    for part in setting.split("."):
        value = getattr(value, part)
    return value


def is_written(config: Config, setting: str) -> bool:
    """Whether the setting was given explicitly, as opposed to left at its default."""
    model: BaseModel = config
    for part in setting.split("."):
        if part not in model.model_fields_set:
            return False
        model = getattr(model, part)
    return True


def nearest(path: str) -> str | None:
    """The setting (or section) that a misspelt path most probably means."""
    leaf = path.rpartition(".")[2].replace("-", "_")
    known = {**{name.replace("-", "_"): setting for name, setting in STACK_NAMES.items()}, **OTHER_WORDS}
    if leaf in known:
        return known[leaf]
    by_leaf: dict[str, str] = {}
    for setting in settings():
        by_leaf.setdefault(setting.rpartition(".")[2], setting)
    section = path.rpartition(".")[0]
    siblings = [setting for setting in settings() if setting.rpartition(".")[0] == section]
    candidates: list[tuple[list[str], Mapping[str, str]]] = [
        ([s.rpartition(".")[2] for s in siblings], {s.rpartition(".")[2]: s for s in siblings}),
        (list(by_leaf), by_leaf),
        (list(known), known),
    ]
    if not section:
        sections = {name: f"[{name}]" for name, _ in section_models()}
        candidates.insert(1, (list(sections), sections))
    for words, target in candidates:
        if match := difflib.get_close_matches(leaf, words, n=1, cutoff=0.7):
            return target[match[0]]
    return None
