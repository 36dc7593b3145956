"""Megatron's gradient buffers and Adam, the learning-rate schedule, and the policy for numbers that aren't finite."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from hybridasync.config.models import Config
from hybridasync.worker.model import ModelBundle

Schedule = Literal["constant", "linear", "cosine"]
Phase = Literal["warm_start", "rl"]


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """Adam and its schedule in one phase of a run. Steps are training steps, not optimizer updates."""

    lr: float
    min_lr: float
    schedule: Schedule
    warmup_steps: int
    total_steps: int
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    clip_grad: float

    @classmethod
    def of_phase(cls, config: Config, phase: Phase, total_steps: int) -> OptimizerSettings:
        """The warm start has its own rate, warm-up and weight decay and no decay of the rate; the rest is shared."""
        optimizer, warm_start = config.optimizer, config.warm_start
        supervised = phase == "warm_start"
        return cls(
            lr=warm_start.lr if supervised else optimizer.lr,
            min_lr=0.0 if supervised else optimizer.min_lr,
            schedule="constant" if supervised else optimizer.lr_schedule,
            warmup_steps=warm_start.lr_warmup_steps if supervised else optimizer.lr_warmup_steps,
            total_steps=total_steps,
            weight_decay=warm_start.weight_decay if supervised else optimizer.weight_decay,
            betas=(optimizer.adam_beta1, optimizer.adam_beta2),
            eps=optimizer.adam_eps,
            clip_grad=optimizer.clip_grad,
        )


def learning_rate(step: int, settings: OptimizerSettings) -> float:
    """Rate of the 0-based `step`: linear up to `lr` in `warmup_steps`, then constant, or down towards `min_lr`.

    The first step after the warm-up has exactly `lr`; `min_lr` would be reached right after the last step, so that no
    step is spent at a rate of zero. Cosine: Loshchilov and Hutter 2017, SGDR, https://arxiv.org/abs/1608.03983.
    """
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.lr
    decay_steps = max(1, settings.total_steps - settings.warmup_steps)
    progress = min(1.0, (step - settings.warmup_steps) / decay_steps)
    left = 1.0 - progress if settings.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return settings.min_lr + (settings.lr - settings.min_lr) * left


def wrap_for_training(bundle: ModelBundle, *, distributed_optimizer: bool) -> DistributedDataParallel:
    """The module with Megatron's gradient buffers. Gradients are *summed* over data-parallel ranks and micro-batches.

    The loss carries its normaliser in the weights of its tokens, so nothing may be divided by counts afterwards.
    """
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=distributed_optimizer, grad_reduce_in_fp32=True, overlap_grad_reduce=False
    )
    model = DistributedDataParallel(bundle.config, settings, bundle.module)
    bundle.config.no_sync_func = model.no_sync
    bundle.config.finalize_model_grads_func = _sum_gradients
    return model


def _sum_gradients(model: list[torch.nn.Module], _num_tokens: torch.Tensor | None = None, **groups: Any) -> None:
    finalize_model_grads(model, None, **groups)


def make_optimizer(
    model: DistributedDataParallel, settings: OptimizerSettings, *, dtype: torch.dtype, distributed: bool
) -> Any:
    """A fresh Megatron Adam with decoupled weight decay that spares norms and biases."""
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            min_lr=settings.min_lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.betas[0],
            adam_beta2=settings.betas[1],
            adam_eps=settings.eps,
            clip_grad=settings.clip_grad,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=distributed,
        ),
        [model],
    )
    set_hyperparameters(optimizer, settings, lr=settings.lr)
    return optimizer


def set_hyperparameters(optimizer: Any, settings: OptimizerSettings, *, lr: float) -> None:
    """Rate and weight decay of each parameter group.

    Megatron marks norms and biases with `wd_mult` 0 but leaves it to its own scheduler to apply that; without this
    they would decay too.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_mult", 1.0)
        group["weight_decay"] = settings.weight_decay * group.get("wd_mult", 1.0)


def clear_gradients(model: DistributedDataParallel, optimizer: Any) -> None:
    model.zero_grad_buffer()
    optimizer.zero_grad()


def gradient_norm(optimizer: Any) -> float:
    """L2 norm of the summed gradients of the whole model, before clipping. The same on all ranks; collective."""
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm())


def apply_update(optimizer: Any, norm: float, *, clip_grad: float) -> None:
    """Clip by the global norm (0 = off) and step. `gradient_norm` came before and gave `norm`."""
    if clip_grad > 0:
        for part in optimizer.chained_optimizers:
            if parameters := part.get_parameters():
                clip_grad_by_total_norm_fp32(parameters, max_norm=clip_grad, total_norm=norm)
    optimizer.step_with_ready_grads()
