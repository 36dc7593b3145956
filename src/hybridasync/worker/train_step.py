"""One training step: samples → optimizer updates → the numbers of the step.

Every rank holds the whole batch and packs its own part of it; per-token results are summed into one flat vector that
all ranks share, so that metrics are exact, computed once, and the same everywhere.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hybridasync.config.models import Config
from hybridasync.errors import DataError, DivergedError, LocalProtocolError
from hybridasync.types import StepResult, TrainBatch, TrainSample
from hybridasync.worker.kept import KeptWeights
from hybridasync.worker.losses import (
    LossSettings,
    PolicyTokens,
    policy_metrics,
    policy_token_losses,
    sft_token_losses,
    token_weights,
)
from hybridasync.worker.model import ModelBundle
from hybridasync.worker.optimizer import (
    OptimizerSettings,
    apply_update,
    clear_gradients,
    gradient_norm,
    learning_rate,
    set_hyperparameters,
)
from hybridasync.worker.packing import MicroBatch, SampleTable, pack
from hybridasync.worker.parallel import Layout
from hybridasync.worker.passes import Passes, Slots

SFT_TEMPERATURE = 1.0


@dataclass(frozen=True, slots=True)
class TrainingPhase:
    """The optimizer of the phase that the run is in."""

    optimizer: Any
    settings: OptimizerSettings


@dataclass(slots=True)
class Update:
    """The samples of one optimizer update that carry loss. Tensors are over their N response tokens, in order."""

    micro_batches: list[MicroBatch]  # of this data-parallel rank
    tokens: int
    weights: Tensor
    advantages: Tensor
    rollout: Tensor  # empty for supervised samples
    samples: Tensor  # which sample of the update each token belongs to
    versions: list[int]  # weight versions that sampled, one for each sample
    old: Tensor | None = None  # None: the policy itself, before this update
    reference: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one optimizer update did."""

    loss: float
    grad_norm: float
    policy: PolicyTokens | None


def carries_loss(sample: TrainSample) -> bool:
    """Masked samples and empty responses have no token in the loss, and none in its normaliser."""
    return not sample.masked and len(sample.input_ids) > sample.response_start


class StepRunner:
    """Training steps and log-probs of one model on this rank. All ranks make the same calls."""

    def __init__(
        self,
        config: Config,
        bundle: ModelBundle,
        place: Layout,
        *,
        model: Any,
        reference: ModelBundle | None,
    ) -> None:
        """`model` is the module in Megatron's gradient buffers; `reference` the frozen model of the KL loss."""
        self._config = config
        self._bundle = bundle
        self._place = place
        self._model = model
        self._reference = reference
        self._loss = LossSettings.from_config(config.algorithm)
        self._passes = Passes(bundle, place)
        # R30: with an interval of 1 the weights before the last published ones are kept, too.
        depth = 2 if config.publication.longest_interval == 1 else 1
        self.kept = KeptWeights(bundle.gpt, depth=depth)

    def train_step(self, batch: TrainBatch, phase: TrainingPhase) -> StepResult:
        """One step. Raises DataError for samples that don't fit together.

        Raises DivergedError, on every rank, before an update whose loss or gradient norm isn't finite; the weights are
        then those of before that update.
        """
        started = time.perf_counter()
        lr = learning_rate(batch.step, phase.settings)
        updates = self._updates(batch)
        metrics = {"lr": lr, "optimizer_updates": float(len(updates)), "loss": 0.0, "grad_norm": 0.0}
        metrics["active_tokens"] = float(sum(update.tokens for update in updates))
        if batch.loss == "policy":
            self._add_old_logprobs(batch.step, updates)
            metrics["has_reference_forward"] = float(self._add_reference(updates))
        outcomes = []
        for update in updates:
            set_hyperparameters(phase.optimizer, phase.settings, lr=lr)
            outcomes.append(self._update(batch, update, phase))
        if outcomes:
            metrics["loss"] = sum(outcome.loss for outcome in outcomes) / len(outcomes)
            metrics["grad_norm"] = sum(outcome.grad_norm for outcome in outcomes) / len(outcomes)
        if policies := [outcome.policy for outcome in outcomes if outcome.policy is not None]:
            metrics |= policy_metrics(_concatenate(policies), self._loss)
        metrics["train_s"] = self._slowest(time.perf_counter() - started)
        return StepResult(batch.step, updated=bool(updates), metrics=metrics)

    def logprobs(self, samples: Sequence[TrainSample], *, reference: bool = False) -> list[list[float]]:
        """For each sample the log-probs of its response tokens, at the sampling temperature; masked samples too.

        Under the policy, or with `reference` under the reference model.
        """
        bundle = self._reference if reference else self._bundle
        if bundle is None:
            raise LocalProtocolError("no reference model is loaded: no coefficient needs one")
        lengths = [len(sample.input_ids) - sample.response_start for sample in samples]
        table = SampleTable.of([sample for sample, length in zip(samples, lengths, strict=True) if length > 0])
        total = sum(lengths)
        values: list[float] = []
        if total:
            found = self._passes.forward(
                bundle.module, self._pack(table), tokens=total, temperature=self._config.rollout.temperature
            )
            values = found[0].tolist()
        ends = np.cumsum(lengths).tolist()
        return [values[end - length : end] for end, length in zip(ends, lengths, strict=True)]

    def _slowest(self, seconds: float) -> float:
        value = torch.tensor(seconds, dtype=torch.float64, device=self._bundle.device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return float(value)

    def _updates(self, batch: TrainBatch) -> list[Update]:
        """The batch in portions of global_batch_size samples; portions in which nothing carries loss are left out."""
        samples = batch.samples
        size = self._config.optimizer.global_batch_size if batch.loss == "policy" else None
        size = size or max(1, len(samples))
        portions = [
            [sample for sample in samples[start : start + size] if carries_loss(sample)]
            for start in range(0, len(samples), size)
        ]
        return [self._prepare(batch, portion) for portion in portions if portion]

    def _prepare(self, batch: TrainBatch, samples: list[TrainSample]) -> Update:
        table = SampleTable.of(samples)
        supervised = batch.loss == "sft"
        lengths = torch.from_numpy(table.response_lengths)
        weights = token_weights(
            lengths,
            "token_mean" if supervised else self._config.algorithm.loss_aggregation,
            max_response_tokens=self._config.rollout.max_response_tokens,
        )
        advantages = np.fromiter((sample.advantage for sample in samples), np.float32, len(samples))
        return Update(
            micro_batches=self._pack(table),
            tokens=weights.numel(),
            weights=weights.to(self._bundle.device),
            advantages=torch.from_numpy(np.repeat(advantages, table.response_lengths)).to(self._bundle.device),
            rollout=torch.empty(0) if supervised else _rollout_logprobs(table, samples).to(self._bundle.device),
            samples=torch.arange(len(samples)).repeat_interleave(lengths).to(self._bundle.device),
            versions=[sample.oldest_version for sample in samples],
        )

    def _pack(self, table: SampleTable) -> list[MicroBatch]:
        return pack(
            table,
            rank=self._place.dp_rank,
            ranks=self._place.dp,
            capacity=self._config.parallel.max_tokens_per_micro_batch,
            device=self._bundle.device,
            share_prompts=self._passes.shares_prompts,
        )

    def _add_old_logprobs(self, step: int, updates: list[Update]) -> None:
        """Old log-probs where they aren't the policy's own in the very update: the engine's, or of a forward pass."""
        algorithm = self._config.algorithm
        if algorithm.true_on_policy_mode:
            return
        for update in updates:
            if algorithm.use_rollout_logprobs:
                update.old = update.rollout
            elif algorithm.keep_old_actor:
                update.old = self._kept_logprobs(step, update)
            elif len(updates) > 1:
                update.old = self._forward(self._bundle, update)

    def _kept_logprobs(self, step: int, update: Update) -> Tensor:
        """Log-probs under the published weights that sampled (R30); a sample of other weights is an error (U7).

        With importance weights the snapshot is the proximal policy alone, and may be another than the one that sampled.
        """
        versions = torch.tensor(update.versions, device=update.samples.device)[update.samples]
        corrected = self._config.algorithm.use_tis
        chosen = {
            version: self.kept.version_for(version, step=step, exact=not corrected) for version in update.versions
        }
        old = torch.zeros_like(update.rollout)
        for kept in sorted(set(chosen.values())):
            with self.kept.loaded(kept):
                found = self._forward(self._bundle, update)
            of_these = torch.isin(versions, torch.tensor([v for v, k in chosen.items() if k == kept]).to(versions))
            old = torch.where(of_these, found, old)
        return old

    def _add_reference(self, updates: list[Update]) -> bool:
        """Whether a reference forward pass was made: only where the KL coefficient isn't zero (R20)."""
        if self._reference is None or not updates or not self._loss.kl_coef:
            return False
        for update in updates:
            update.reference = self._forward(self._reference, update)
        return True

    def _forward(self, bundle: ModelBundle, update: Update) -> Tensor:
        temperature = self._config.rollout.temperature
        found = self._passes.forward(bundle.module, update.micro_batches, tokens=update.tokens, temperature=temperature)
        return found[0]

    def _update(self, batch: TrainBatch, update: Update, phase: TrainingPhase) -> Outcome:
        supervised = batch.loss == "sft"

        def loss(logprobs: Tensor, entropy: Tensor, slots: Slots) -> Tensor:
            if supervised:
                losses = sft_token_losses(logprobs)
            else:
                losses = policy_token_losses(_policy_tokens(update, logprobs, entropy, slots=slots), self._loss)
            return (update.weights[slots] * losses).sum()

        clear_gradients(self._model, phase.optimizer)
        logprobs, entropy = self._passes.forward_backward(
            self._model,
            update.micro_batches,
            tokens=update.tokens,
            temperature=SFT_TEMPERATURE if supervised else self._config.rollout.temperature,
            loss=loss,
        )
        everything = slice(None)
        with torch.no_grad():
            value = float(loss(logprobs, entropy, everything))
        norm = gradient_norm(phase.optimizer)
        if not (math.isfinite(value) and math.isfinite(norm)):
            raise DivergedError(f"step {batch.step}: loss {value}, gradient norm {norm}", step=batch.step)
        apply_update(phase.optimizer, norm, clip_grad=phase.settings.clip_grad)
        return Outcome(value, norm, None if supervised else _policy_tokens(update, logprobs, entropy, slots=everything))


def _policy_tokens(update: Update, logprobs: Tensor, entropy: Tensor, *, slots: Slots) -> PolicyTokens:
    return PolicyTokens(
        logprobs=logprobs,
        entropy=entropy,
        old=logprobs.detach() if update.old is None else update.old[slots],
        rollout=update.rollout[slots],
        advantages=update.advantages[slots],
        samples=update.samples[slots],
        reference=None if update.reference is None else update.reference[slots],
    )


def _concatenate(parts: list[PolicyTokens]) -> PolicyTokens:
    if len(parts) == 1:
        return parts[0]
    references = [part.reference for part in parts if part.reference is not None]
    first = 0
    samples = []
    for part in parts:
        samples.append(part.samples + first)
        first = int(samples[-1].max()) + 1
    return PolicyTokens(
        logprobs=torch.cat([part.logprobs for part in parts]),
        entropy=torch.cat([part.entropy for part in parts]),
        old=torch.cat([part.old for part in parts]),
        rollout=torch.cat([part.rollout for part in parts]),
        advantages=torch.cat([part.advantages for part in parts]),
        samples=torch.cat(samples),
        reference=torch.cat(references) if references else None,
    )


def _rollout_logprobs(table: SampleTable, samples: Sequence[TrainSample]) -> Tensor:
    counts = np.fromiter((len(sample.rollout_logprobs) for sample in samples), np.int64, len(samples))
    if np.any(counts != table.response_lengths):
        index = int(np.argmax(counts != table.response_lengths))
        raise DataError(
            f"sample of prompt {samples[index].group} has {counts[index]} log-probs "
            f"for {table.response_lengths[index]} response tokens"
        )
    values = chain.from_iterable(sample.rollout_logprobs for sample in samples)
    return torch.from_numpy(np.fromiter(values, np.float32, int(counts.sum())))
