"""Continuous batching: who decodes, who waits, and what pausing and new weights do to them.

Everything here runs on the decoder's thread, between two tokens. The rules are SGLang 0.5.23's:

* paused: requests that arrive are held until `resume`; `retract` moves what runs back to the waiting queue (it prefills
  prompt and output again), `abort` ends everything with what was made, `in_place` freezes the batch with its cache;
* new weights while paused are installed at once; otherwise when nothing is in flight, and new requests wait for that;
* keys and values are shared by the samples of one prompt in one prefill and never reused after that, so none
  outlives the weights that made it (save in `in_place`, where that is what was asked for).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from hybridasync.engine.model import Decoder
from hybridasync.engine.requests import GeneratedSequence, Group, RequestError, abort_reason
from hybridasync.engine.rows import Leaving, Rows
from hybridasync.engine.sampling import sample
from hybridasync.engine.weights import Weights

PauseMode = Literal["abort", "retract", "in_place"]
NOT_FLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running or queued. "
    "Retract or finish them, then call /flush_cache."
)
_BROKEN = "the model's output isn't finite: its weights are broken"


SEEDED_ROWS = 4
SEEDED_WIDTH = 16
"""What a sample with a seed is computed in, whoever shares its batch: at least so many rows, and a prompt padded to a
multiple of this. Kernels for fewer rows (MKL) and for ragged ends (torch's attention) round otherwise, by 1e-7, which
now and then decides between two tokens."""


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_total_tokens` bounds rows × positions of the cache, `max_prefill_tokens` one prefill pass, padded."""

    max_running_requests: int
    max_total_tokens: int
    max_prefill_tokens: int = 8192


@dataclass(frozen=True, slots=True)
class Loads:
    running: int
    waiting: int
    used_tokens: int


class Scheduler:
    def __init__(
        self,
        decoder: Decoder,
        weights: Weights,
        rows: Rows,
        *,
        limits: Limits,
        generator: torch.Generator,
        version: str,
    ) -> None:
        self.decoder = decoder
        self.weights = weights
        self.rows = rows
        self.limits = limits
        self.generator = generator
        self.version = version
        self.paused: PauseMode | None = None
        self.waiting: deque[GeneratedSequence] = deque()
        self._held: list[Group] = []
        self._groups: dict[str, Group] = {}
        self._exclusive: deque[Callable[[], None]] = deque()

    # --- requests

    def submit(self, groups: list[Group]) -> None:
        """All of them or none. Raises RequestError for an id that is in use."""
        for group in groups:
            if group.rid in self._groups:
                raise RequestError(f"Duplicate request ID detected: {group.rid}")
        self._groups.update((group.rid, group) for group in groups)
        if self.paused or self._exclusive:
            self._held.extend(groups)
        else:
            self._queue(groups)

    def abort(self, rid: str) -> None:
        """End a request with what it made; unknown ids and held requests are left alone."""
        group = self._groups.get(rid)
        if group is not None and group not in self._held:
            self._abort(lambda sequence: sequence.group is group)

    def abort_all(self) -> None:
        self._abort(lambda sequence: True)

    def drop(self, rids: Iterable[str]) -> None:
        """Nobody waits for these any more: free what they hold, in any state."""
        dropped = {id(group) for rid in rids if (group := self._groups.pop(rid, None))}
        self._held = [group for group in self._held if id(group) not in dropped]
        self.waiting = deque(sequence for sequence in self.waiting if id(sequence.group) not in dropped)
        if leaving := [row for row, sequence in self.rows.living() if id(sequence.group) in dropped]:
            self.rows.release(leaving)

    def loads(self) -> Loads:
        held = sum(len(group.sequences) for group in self._held)
        return Loads(self.rows.alive, len(self.waiting) + held, self.rows.cached_tokens())

    # --- pausing and weights

    def pause(self, mode: PauseMode) -> None:
        self.paused = mode
        if mode == "abort":
            self._abort(lambda sequence: True, frozen=False)
        elif mode == "retract":
            self._retract()

    def resume(self) -> None:
        self.paused = None
        self._abort(lambda sequence: sequence.abort_requested)
        if not self._exclusive:
            self._release_held()

    def when_exclusive(self, action: Callable[[], None]) -> None:
        """Run `action` while nothing is in flight, or at once when paused; requests that arrive meanwhile are held."""
        self._exclusive.append(action)

    def install(self, weights: Weights | None, *, version: str | None, flush: bool) -> tuple[bool, str]:
        """Switch to other weights (None keeps them) and version (None keeps it); answers success and a message."""
        if weights is not None:
            self.weights = weights
        if version is not None:
            self._set_version(version)
        if flush and not self.flush():
            return False, NOT_FLUSHED
        return True, "Succeeded to update model weights."

    def switch(self, weights: Weights, *, version: str, mode: PauseMode) -> float | None:
        """Pause, install and resume between two tokens; answers the seconds. None: it is paused by somebody else."""
        if self.paused is not None:
            return None
        begun = time.perf_counter()
        try:
            self.pause(mode)
            self.install(weights, version=version, flush=False)
        finally:
            self.resume()
        return time.perf_counter() - begun

    def flush(self) -> bool:
        """False if requests run, or wait without a pause. There is no cache of prefixes to empty."""
        return self.rows.alive == 0 and (not self.waiting or self.paused is not None)

    # --- the loop

    def has_work(self) -> bool:
        if self._exclusive and (self.paused or self._idle()):
            return True
        return not self.paused and not self._idle()

    def step(self) -> None:
        """Admit who fits, then one token for each row."""
        while self._exclusive and (self.paused or self._idle()):
            self._exclusive.popleft()()
            if not self._exclusive and not self.paused:
                self._release_held()
        if self.paused:
            return
        self._admit()
        if self.rows.alive:
            self._decode()

    def fail_all(self, message: str) -> None:
        """After an error in a step: end what was in flight, so that nobody waits for ever, and start afresh.

        Tensors aren't read, they may be what failed: the tokens of the present stay are lost.
        """
        sequences = [*(sequence for _, sequence in self.rows.living()), *self.waiting]
        self.waiting.clear()
        self.rows.cache.clear()
        self.rows = Rows(self.rows.cache, device=self.rows.device, max_total_tokens=self.limits.max_total_tokens)
        for sequence in sequences:
            self._finish(sequence, {**abort_reason(message), "status_code": 500})

    def _idle(self) -> bool:
        return self.rows.alive == 0 and not self.waiting

    def _queue(self, groups: Iterable[Group]) -> None:
        for group in groups:
            self.waiting.extend(group.sequences)

    def _release_held(self) -> None:
        held, self._held = self._held, []
        self._queue(held)

    def _admit(self) -> None:
        while chosen := self._choose():
            for prompts, sequences, sources in self._passes(chosen):
                self._prefill(prompts, sequences, sources)

    def _choose(self) -> list[GeneratedSequence]:
        """The longest prefix of the waiting queue that fits beside what runs."""
        chosen: list[GeneratedSequence] = []
        if not self.waiting:
            return chosen
        needed = max((sequence.tokens_needed for _, sequence in self.rows.living()), default=0)
        while self.waiting and self.rows.alive + len(chosen) < self.limits.max_running_requests:
            needed = max(needed, self.waiting[0].tokens_needed)
            rows = self.rows.alive + len(chosen) + 1
            if rows > 1 and rows * needed > self.limits.max_total_tokens:
                break
            chosen.append(self.waiting.popleft())
        return chosen

    def _passes(
        self, chosen: list[GeneratedSequence]
    ) -> Iterable[tuple[list[list[int]], list[GeneratedSequence], list[int]]]:
        """Batches of distinct contexts of similar length, the sequences that start from them, and which from which."""
        by_context: dict[tuple[int, ...], list[GeneratedSequence]] = {}
        for sequence in chosen:
            alone = (-1, id(sequence)) if sequence.output_ids else ()
            by_context.setdefault((*sequence.group.input_ids, *alone), []).append(sequence)
        members = sorted(
            by_context.values(), key=lambda sharing: len(sharing[0].group.input_ids) + len(sharing[0].output_ids)
        )
        seeded = any(sequence.group.sampling.seeded for sequence in chosen)
        prompts: list[list[int]] = []
        sequences: list[GeneratedSequence] = []
        sources: list[int] = []
        for sharing in members:
            context = sharing[0].context
            full = (len(prompts) + 1) * len(context) > self.limits.max_prefill_tokens
            if prompts and (full or (seeded and _width(context) != _width(prompts[-1]))):
                yield prompts, sequences, sources
                prompts, sequences, sources = [], [], []
            sources += [len(prompts)] * len(sharing)
            prompts.append(context)
            sequences += sharing
        yield prompts, sequences, sources

    def _prefill(self, prompts: list[list[int]], sequences: list[GeneratedSequence], sources: list[int]) -> None:
        lengths = [len(prompt) for prompt in prompts]
        rows = self.rows.place(sequences, [lengths[source] for source in sources])
        src = torch.tensor(sources, device=rows.device)
        multiple = SEEDED_WIDTH if self.rows.any_seeded else 1
        hidden = self.decoder.prefill(
            self.weights, prompts, self.rows.cache, rows=rows, src=src, width_multiple=multiple
        )
        last = torch.tensor(lengths, device=rows.device) - 1
        # repeated up to the fewest rows of a seeded batch; `src` picks none of the repetitions
        prompt = torch.arange(max(len(prompts), self._fewest_rows), device=rows.device) % len(prompts)
        logits = self.decoder.logits(self.weights, hidden[prompt, last[prompt]])
        for index, source in enumerate(sources):
            group = sequences[index].group
            if group.logprob_start >= 0 and group.input_logprobs is None:
                group.input_logprobs = self._input_logprobs(hidden[source], group)
        tokens, logprobs = sample(logits[src], self.rows.sampling(rows), self.generator)
        self._after_sampling(rows, tokens, logprobs)

    def _input_logprobs(self, hidden: torch.Tensor, group: Group) -> list[float | None]:
        """From position `logprob_start` on, at temperature 1; the first has none, as SGLang answers."""
        ids, start = group.input_ids, group.logprob_start
        if start >= len(ids):
            return []
        targets = torch.tensor(ids[start + 1 :], dtype=torch.int64, device=hidden.device)
        logits = self.decoder.logits(self.weights, hidden[start : len(ids) - 1])
        picked: list[float] = torch.log_softmax(logits, -1).gather(-1, targets[:, None])[:, 0].tolist()
        return [None, *(value if math.isfinite(value) else None for value in picked)]

    def _decode(self) -> None:
        rows, state = self.rows, self.rows.state
        positions, batch = rows.make_step_room(), slice(0, max(rows.used, self._fewest_rows))
        logits = self.decoder.step(
            self.weights, state.last[batch], state.length[batch], cache=rows.cache, positions=positions
        )
        rows.advance()
        tokens, logprobs = sample(logits, rows.sampling(batch), self.generator)
        self._after_sampling(batch, tokens, logprobs)

    @property
    def _fewest_rows(self) -> int:
        return SEEDED_ROWS if self.rows.any_seeded else 1

    def _after_sampling(self, rows: torch.Tensor | slice, tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
        leaving = self.rows.record(rows, tokens, logprobs)
        if self.rows.any_streaming:
            self._stream(rows, tokens, logprobs, ending=set(leaving.rows) if leaving else set())
        if leaving is not None:
            self._finish_leaving(leaving)

    def _stream(
        self, rows: torch.Tensor | slice, tokens: torch.Tensor, logprobs: torch.Tensor, *, ending: set[int]
    ) -> None:
        numbers = range(len(self.rows.sequences)) if isinstance(rows, slice) else rows.tolist()
        for place, row in enumerate(numbers):
            sequence = self.rows.sequences[row]
            if sequence is not None and sequence.group.stream and row not in ending:
                sequence.group.stream.token(sequence, int(tokens[place]), float(logprobs[place]), version=self.version)

    # --- ends

    def _finish_leaving(self, leaving: Leaving) -> None:
        if any(leaving.broken):
            self.rows.wipe([row for row, broken in zip(leaving.rows, leaving.broken, strict=True) if broken])
        self.rows.release(leaving.rows)
        for sequence, stopped, broken in zip(leaving.sequences, leaving.stopped, leaving.broken, strict=True):
            limit = sequence.group.sampling.max_new_tokens
            if broken:
                sequence.output_ids.pop()
                sequence.output_logprobs.pop()
                self._finish(sequence, abort_reason(_BROKEN))
            elif limit == 0:
                sequence.output_ids.clear()
                sequence.output_logprobs.clear()
                self._finish(sequence, {"type": "length", "length": 0})
            elif stopped:
                self._finish(sequence, {"type": "stop", "matched": sequence.output_ids[-1]})
            else:
                self._finish(sequence, {"type": "length", "length": limit})

    def _finish(self, sequence: GeneratedSequence, reason: dict[str, Any]) -> None:
        sequence.finish = reason
        sequence.final_version = self.version
        group = sequence.group
        if group.stream:
            group.stream.end(sequence)
        group.unfinished -= 1
        if group.unfinished == 0:
            self._groups.pop(group.rid, None)
            group.finished = time.perf_counter()
            group.on_finish(group)

    def _abort(self, matches: Callable[[GeneratedSequence], bool], *, frozen: bool | None = None) -> None:
        """End matching sequences. A batch that is frozen in place only notes it, as in SGLang, until it resumes."""
        if frozen is None:
            frozen = self.paused == "in_place"
        targets = [(row, sequence) for row, sequence in self.rows.living() if matches(sequence)]
        if frozen:
            for _, sequence in targets:
                sequence.abort_requested = True
        elif targets:
            self.rows.release([row for row, _ in targets])
            for _, sequence in targets:
                self._finish(sequence, abort_reason("Aborted"))
        waiting = [sequence for sequence in self.waiting if matches(sequence)]
        if waiting:
            self.waiting = deque(sequence for sequence in self.waiting if not matches(sequence))
            for sequence in waiting:
                self._finish(sequence, abort_reason("Abort in waiting queue"))

    def _retract(self) -> None:
        living = self.rows.living()
        if not living:
            return
        self.rows.release([row for row, _ in living])
        for _, sequence in living:
            sequence.retractions += 1
        self.waiting.extendleft(sequence for _, sequence in reversed(living))
        self._abort(lambda sequence: sequence.abort_requested)

    def _set_version(self, version: str) -> None:
        made = [(sequence, len(sequence.output_ids)) for sequence in self.waiting]
        counts = self.rows.counts()
        made += [(sequence, len(sequence.output_ids) + counts[row]) for row, sequence in self.rows.living()]
        for sequence, tokens in made:
            if tokens:
                sequence.version_changes.append((self.version, tokens))
        self.version = version


def _width(context: list[int]) -> int:
    return -(-len(context) // SEEDED_WIDTH)
