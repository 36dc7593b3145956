"""Log-probs and entropies of chosen tokens from logits whose vocabulary is split over tensor-parallel ranks.

"Log-prob" means the same here as in the engine: of the distribution softmax(logits / temperature). The model has
given padded columns of the vocabulary a logit so low that their probability is 0.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ROW_BLOCK_ELEMENTS = 1 << 24
# 64 MiB of fp32 at a time: the pass that needs a temporary doesn't double the memory of the logits.


class _TokenLogProbs(torch.autograd.Function):
    """Overwrites `logits`, which has to be a tensor that nobody else reads."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
        width = logits.size(-1)
        local = targets - (0 if group is None else group.rank() * width)
        owned = (local >= 0) & (local < width)
        local_targets = local.clamp(0, width - 1)
        maximum = logits.amax(dim=-1)
        if group is not None:
            dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
        logits.sub_(maximum[:, None])
        chosen = logits.gather(1, local_targets[:, None])[:, 0] * owned
        sums = torch.empty(2, logits.size(0), dtype=logits.dtype, device=logits.device)
        rows = max(1, ROW_BLOCK_ELEMENTS // max(1, logits.size(1)))
        for start in range(0, logits.size(0), rows):
            block = logits[start : start + rows]
            exponentials = block.exp()
            torch.sum(exponentials, -1, out=sums[0, start : start + rows])
            torch.sum(block.mul_(exponentials), -1, out=sums[1, start : start + rows])
            block.copy_(exponentials)
        stats = torch.cat([chosen[None], sums])
        if group is not None:
            dist.all_reduce(stats, group=group)
        chosen, partition, energy = stats.unbind()
        log_partition = partition.log()
        entropy = log_partition - energy / partition
        probabilities = logits.div_(partition[:, None])
        ctx.save_for_backward(probabilities, local_targets, owned, entropy)
        ctx.set_materialize_grads(False)
        return chosen - log_partition, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None]:
        probabilities, local_targets, owned, entropy = ctx.saved_tensors
        grad_logprobs, grad_entropy = grads
        result = torch.zeros_like(probabilities)
        if grad_entropy is not None:
            # d entropy / d logit_k = -p_k (log p_k + entropy)
            slope = torch.xlogy(probabilities, probabilities).addcmul_(probabilities, entropy[:, None])
            result.addcmul_(slope, grad_entropy[:, None], value=-1.0)
        if grad_logprobs is not None:
            result.addcmul_(probabilities, grad_logprobs[:, None], value=-1.0)
            result.scatter_add_(1, local_targets[:, None], (grad_logprobs * owned)[:, None])
        return result, None, None


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of its distribution, both [R] fp32 and differentiable.

    `logits` [R, V / tp] of this rank, any float type, left as they are; `targets` [R] ids of the whole vocabulary.
    `group` is the tensor-parallel group, None when the vocabulary isn't split. Collective over `group`.
    """
    scaled = logits.float() / temperature  # a copy in any case
    logprobs, entropy = _TokenLogProbs.apply(scaled, targets, group)  # type: ignore[no-untyped-call]
    return logprobs, entropy
