"""The rollout loop: prompts → samples → rewards → groups, as far ahead of training as the ledger admits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import anyio

from hybridasync.algorithms.filters import has_signal
from hybridasync.algorithms.seeds import sample_seeds
from hybridasync.config.models import Config
from hybridasync.drivers.fleet import Fleet
from hybridasync.drivers.generation import GroupRequest, Limits, generate_group
from hybridasync.drivers.notify import Changed
from hybridasync.errors import DataError, EngineError, PromptsUsedUp, RewardError
from hybridasync.ports import MetricSink, PromptSource, RewardFn, Tokenizer
from hybridasync.protocol.failures import FailureBudget
from hybridasync.protocol.ledger import RolloutLedger, Starved
from hybridasync.types import CORRECT, Completion, Group, Prompt, Sample, SamplingParams


@dataclass(frozen=True, slots=True)
class RolloutParts:
    """What the loop works with; all of it is owned by `app.py`."""

    fleet: Fleet
    source: PromptSource
    reward: RewardFn
    tokenizer: Tokenizer
    sink: MetricSink
    limits: Limits


class Rollout:
    """Owner of the ledger. `run` is the loop; `take` hands a batch to training."""

    def __init__(self, config: Config, ledger: RolloutLedger, parts: RolloutParts) -> None:
        self._config = config
        self._ledger = ledger
        self._parts = parts
        self._changed = Changed()
        self._engine_failures = FailureBudget(window=max(4, config.rollout.rollout_batch_size), share=0.5)
        self._reward_failures = FailureBudget(window=REWARD_WINDOW, share=config.run.max_reward_error_fraction)
        self.counts: Counter[str] = Counter()

    async def run(self) -> None:
        """Admit prompts for ever; cancelled by the owner. Raises what makes going on pointless."""
        async with anyio.create_task_group() as groups:
            full_since, patience = anyio.current_time(), next_place_warning_s(0)
            while True:
                while self._ledger.may_admit() and not self._ledger.exhausted:
                    full_since, patience = anyio.current_time(), next_place_warning_s(0)
                    prompt = self._parts.source.draw()
                    if prompt is None:
                        self._ledger.exhausted = True
                        self._changed.notify()
                        break
                    partition = self._ledger.admit(prompt)
                    self._parts.sink.group(prompt.uid, "in_flight", partition=partition)
                    groups.start_soon(self._produce, prompt, partition)
                if not await self._changed_within(full_since + patience):
                    patience = next_place_warning_s(patience)
                    if self._ledger.wants_more:  # else all groups of the run are admitted
                        self._stalled("places_stalled", full_since)

    async def take(self, step: int) -> tuple[Group, ...]:
        """The batch of `step`. Raises DataError where it can't fill up, PromptsUsedUp where nothing is left for it."""
        started, patience = anyio.current_time(), BATCH_STALL_S
        while True:
            batch = self._ledger.take(step)
            if isinstance(batch, Starved):
                kind = PromptsUsedUp if batch.exhausted else DataError
                raise kind(_starved_text(batch, self._config))
            if batch is not None:
                for group in batch:
                    self._parts.sink.group(group.prompt.uid, "trained", step=step)
                return batch
            if not await self._changed_within(started + patience):
                self._stalled("batch_stalled", started, step=step)
                patience = math.inf

    def finish(self, step: int) -> None:
        """`step` is trained and published: its slots are free."""
        self._ledger.finish(step)
        self._changed.notify()

    def state(self) -> dict[str, Any]:
        """Position in the data; prompts that are admitted and not trained on will be drawn again."""
        return {"ledger": self._ledger.state(), "source": self._parts.source.state(self._ledger.pending())}

    def start_at(self, step: int) -> None:
        """Admit for `step` and what follows, from the first prompt on."""
        self._ledger.restore({"finished": step, "counts": {}})

    def restore(self, state: Mapping[str, Any]) -> None:
        self._parts.source.restore(state["source"])
        self._ledger.restore(state["ledger"])

    async def _changed_within(self, deadline: float) -> bool:
        """Look at the state again in either case: a change in the moment of the deadline is a deadline."""
        with anyio.CancelScope(deadline=deadline):
            await self._changed.wait()
            return True
        return False

    def _stalled(self, event: str, since: float, **fields: object) -> None:
        waited, ledger = round(anyio.current_time() - since), self._ledger
        counts = f"{ledger.in_flight} groups in flight, {ledger.complete} complete, {ledger.slots} places"
        self._parts.sink.event(event, level="warning", waited_s=waited, cause=counts, **fields)

    async def _produce(self, prompt: Prompt, partition: int) -> None:
        group = await self._group(prompt, partition)
        if group is None:
            self._ledger.dropped(prompt.uid)
        else:
            algorithm = self._config.algorithm
            wanted = has_signal(group, self._config) or not (algorithm.filter_zero_variance and algorithm.refill)
            self._ledger.completed(group, keep=wanted)
            self._parts.sink.group(prompt.uid, "complete" if wanted else "filtered")
            self.counts["groups_filtered"] += not wanted
        self._changed.notify()

    async def _group(self, prompt: Prompt, partition: int) -> Group | None:
        """None: the group is dropped, counted, and another takes its place."""
        try:
            completions = await generate_group(self._parts.fleet, self._request(prompt))
        except EngineError as error:
            self._dropped(prompt, error, self._engine_failures)
            return None
        self._engine_failures.record(failed=False)
        try:
            samples = await self._scored(prompt, completions)
        except RewardError as error:
            self._dropped(prompt, error, self._reward_failures, weight=len(completions))
            return None
        self._reward_failures.record(failed=False, times=len(completions))
        return Group(prompt, samples, partition)

    async def _scored(self, prompt: Prompt, completions: tuple[Completion, ...]) -> tuple[Sample, ...]:
        texts = [self._parts.tokenizer.decode(completion.output_ids) for completion in completions]
        rewards = await self._parts.reward(prompt, texts, completions)
        return tuple(
            Sample(completion, text, reward, reward >= CORRECT)
            for completion, text, reward in zip(completions, texts, rewards, strict=True)
        )

    def _request(self, prompt: Prompt) -> GroupRequest:
        rollout = self._config.rollout
        params = SamplingParams(
            max_new_tokens=self._parts.limits.budget(len(prompt.input_ids)),
            temperature=rollout.temperature,
            n=rollout.n_samples_per_prompt,
            seeds=self._seeds(prompt),
        )
        return GroupRequest(prompt.input_ids, params, rollout.partial_rollout, rollout.max_retries)

    def _seeds(self, prompt: Prompt) -> tuple[int, ...]:
        rollout = self._config.rollout
        if not rollout.deterministic:
            return ()
        return sample_seeds(self._config.seed, "rollout", prompt.uid, count=rollout.n_samples_per_prompt)

    def _dropped(
        self, prompt: Prompt, error: EngineError | RewardError, budget: FailureBudget, *, weight: int = 1
    ) -> None:
        self.counts["groups_dropped"] += 1
        fields = {"uid": prompt.uid, "cause": str(error), "kind": type(error).__name__}
        self._parts.sink.event("group_dropped", level="warning", **fields)
        self._parts.sink.group(prompt.uid, "dropped", reason=str(error))
        budget.record(failed=True, times=weight)
        if budget.spent:
            raise error


BATCH_STALL_S = 60.0
"""R113: training has waited so long for its batch that somebody should know; said once for a batch."""


def next_place_warning_s(waited_s: float) -> float:
    """R113: after how long a wait for a place the rollout says so next: 600 s, then each 60, past 1200 each 30."""
    if waited_s < PLACE_STALL_S:
        return PLACE_STALL_S
    every = 60.0 if waited_s < 2 * PLACE_STALL_S else 30.0
    return (waited_s // every + 1) * every


PLACE_STALL_S = 600.0
"""A step may take minutes; engines that stand so long with every place taken wait for a trainer that may be stuck."""

REWARD_WINDOW = 64
"""Samples over which failing rewards are counted: one bad row must not stop a run, a dead judge must."""


def _starved_text(starved: Starved, config: Config) -> str:
    counts = (
        f"step {starved.step}: {starved.kept} of {starved.wanted} groups kept, {starved.filtered} filtered because "
        f"all their samples earned the same, {starved.dropped} dropped"
    )
    if starved.exhausted:
        return f"{counts}; the prompts are used up: raise rollout.num_epoch or give more data.prompt_data"
    return (
        f"{counts}; algorithm.max_gen_batches = {config.algorithm.max_gen_batches} is used up: raise it, take prompts "
        "of a difficulty nearer to the model's, or set algorithm.filter_zero_variance = false"
    )
