"""Forward and backward passes over packed micro-batches through Megatron's schedules, pipelined or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from hybridasync.worker.attention import SDPACoreAttention, SharedTokens, share
from hybridasync.worker.logprobs import token_logprobs
from hybridasync.worker.model import ModelBundle
from hybridasync.worker.packing import MicroBatch
from hybridasync.worker.parallel import Layout

Slots = Tensor | slice
"""Which response tokens of the update: [R] places, or a slice of them."""

TokenLoss = Callable[[Tensor, Tensor, Slots], Tensor]
"""(log-probs [R], entropies [R], their slots) of one micro-batch → its part of the loss, a scalar."""


class Passes:
    """Runs one model. What comes out is the same on every rank of the default group, all of which take part."""

    def __init__(self, bundle: ModelBundle, place: Layout) -> None:
        self._device = bundle.device
        self._writes = place.last_stage and place.tp_rank == 0
        self._group = parallel_state.get_tensor_model_parallel_group() if place.tp > 1 else None
        # Float16Module would copy the logits of every position to fp32; only those of response tokens are needed.
        self._options: dict[str, Any] = {} if bundle.module is bundle.gpt else {"fp32_output": False}
        self._schedule = get_forward_backward_func()
        self.shares_prompts = any(isinstance(part, SDPACoreAttention) for part in bundle.gpt.modules())

    @torch.no_grad()
    def forward(
        self, module: torch.nn.Module, micro_batches: Sequence[MicroBatch], *, tokens: int, temperature: float
    ) -> Tensor:
        """Log-prob and entropy of `tokens` response tokens, [2, tokens] in the order of their slots."""
        return self._run(module, micro_batches, tokens=tokens, temperature=temperature, loss=None)

    def forward_backward(
        self,
        module: torch.nn.Module,
        micro_batches: Sequence[MicroBatch],
        *,
        tokens: int,
        temperature: float,
        loss: TokenLoss,
    ) -> Tensor:
        """As `forward`, and the gradients of the sum of `loss` over all ranks are in the buffers of `module`."""
        return self._run(module, micro_batches, tokens=tokens, temperature=temperature, loss=loss)

    def _run(
        self,
        module: torch.nn.Module,
        micro_batches: Sequence[MicroBatch],
        *,
        tokens: int,
        temperature: float,
        loss: TokenLoss | None,
    ) -> Tensor:
        found = torch.zeros(2, tokens, device=self._device)
        self._schedule(
            forward_step_func=partial(self._step, found=found, temperature=temperature, loss=loss),
            data_iterator=iter(micro_batches),
            model=[module],
            num_microbatches=len(micro_batches),
            seq_length=max(batch.input_ids.numel() for batch in micro_batches),
            micro_batch_size=1,
            forward_only=loss is None,
        )
        dist.all_reduce(found)
        return found

    def _step(
        self,
        batches: Iterator[MicroBatch],
        model: torch.nn.Module,
        *,
        found: Tensor,
        temperature: float,
        **options: Any,
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]]:
        batch = next(batches)
        if (sequences := batch.sequences) is not None:
            lengths = sequences.lengths.tolist()
            share(batch.cu_seqlens, SharedTokens(lengths, sequences.tokens, sequences.owned))
        pack = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=batch.cu_seqlens,
            cu_seqlens_kv=batch.cu_seqlens,
            max_seqlen_q=batch.max_seqlen,
            max_seqlen_kv=batch.max_seqlen,
        )
        output = model(batch.input_ids, batch.position_ids, None, packed_seq_params=pack, **self._options)
        return output, partial(self._finish, batch, found=found, temperature=temperature, loss=options["loss"])

    def _finish(
        self, batch: MicroBatch, output: Tensor, *, found: Tensor, temperature: float, loss: TokenLoss | None
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """What Megatron asks for on the last stage: (loss, a token count that isn't used, data that isn't used)."""
        logits = output[0].index_select(0, batch.predictors)
        logprobs, entropy = token_logprobs(logits, batch.targets, temperature=temperature, group=self._group)
        if self._writes:
            found[:, batch.slots] = torch.stack([logprobs.detach(), entropy.detach()])
        value = logprobs.sum() if loss is None else loss(logprobs, entropy, batch.slots)
        return value, torch.zeros((), dtype=torch.int, device=self._device), {}
