"""One group from the fleet: n samples of a prompt, continued where a publication or a death interrupted them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from uuid import uuid4

import anyio

from hybridasync.drivers.fleet import Fleet
from hybridasync.errors import EngineError, EngineLost, Rejected
from hybridasync.types import Completion, SamplingParams, VersionSpan


@dataclass(frozen=True, slots=True)
class Limits:
    """Token limits of a request. `context_length` covers prompt and completion together."""

    max_response_tokens: int
    context_length: int

    def budget(self, prompt_tokens: int) -> int:
        """Tokens that a completion of this prompt may have (C13, C54)."""
        return min(self.max_response_tokens, self.context_length - prompt_tokens)


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """`params.max_new_tokens` is the budget of the whole completion, however many requests it takes."""

    input_ids: tuple[int, ...]
    params: SamplingParams
    partial_rollout: bool  # False: an interrupted sample starts again from its prompt
    max_retries: int
    gated: bool = True


async def generate_group(fleet: Fleet, request: GroupRequest) -> tuple[Completion, ...]:
    """n finished completions. Raises the last EngineError once `max_retries` further attempts failed."""
    first = await _attempts(fleet, request, input_ids=request.input_ids, params=request.params)
    return tuple([await _finished(fleet, request, completion, index=index) for index, completion in enumerate(first)])


async def _finished(fleet: Fleet, request: GroupRequest, completion: Completion, *, index: int) -> Completion:
    while completion.finish_reason == "abort":
        kept = completion if request.partial_rollout else replace(completion, output_ids=(), logprobs=(), spans=())
        left = request.params.max_new_tokens - len(kept.output_ids)
        if left <= 0:
            return replace(kept, finish_reason="length")
        params = replace(request.params, n=1, max_new_tokens=left, seeds=request.params.seeds[index : index + 1])
        (more,) = await _attempts(fleet, request, input_ids=(*request.input_ids, *kept.output_ids), params=params)
        completion = _joined(kept, more)
    return completion


async def _attempts(
    fleet: Fleet, request: GroupRequest, *, input_ids: Sequence[int], params: SamplingParams
) -> tuple[Completion, ...]:
    left, losses = request.max_retries, 0
    while True:
        try:
            return await fleet.generate(uuid4().hex, input_ids, params, gated=request.gated)
        except EngineLost:
            losses += 1  # no fault of the request's, unless it always happens with this one
            if losses > MAX_LOSSES:
                raise
            continue
        except EngineError as error:
            wont_change = isinstance(error, Rejected) and 400 <= error.status < 500 and error.status != 429
            if wont_change or not left:
                raise
        left -= 1
        await anyio.sleep(RETRY_PAUSE_S)


MAX_LOSSES = 5
"""Engines that may be lost over one request before it is dropped: one prompt must not crash them all, for ever."""

RETRY_PAUSE_S = 0.5
"""Between two attempts: an engine that refuses at once must not be asked in a burst."""


def _joined(first: Completion, second: Completion) -> Completion:
    offset = len(first.output_ids)
    moved = tuple(VersionSpan(s.version, s.start + offset, s.end + offset) for s in second.spans)
    return Completion(
        output_ids=first.output_ids + second.output_ids,
        logprobs=first.logprobs + second.logprobs,
        spans=first.spans + moved,
        finish_reason=second.finish_reason,
        engine=second.engine,
    )
