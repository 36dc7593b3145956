"""What flows through the scheduler: a group (one prompt, n samples), its sequences, and how they ended.

All of it belongs to the decoder's thread from submission to the finishing callback; afterwards to the callback.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hybridasync.engine.sampling import TOP_K_ALL


class RequestError(ValueError):
    """A request that can't be served as it is; answered with status 400."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a group is sampled; `max_new_tokens` is resolved, `stop_token_ids` include the model's unless ignored."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = TOP_K_ALL
    min_p: float = 0.0
    n: int = 1
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None  # None: from the engine's own generator

    @property
    def seeded(self) -> bool:
        """Whether its draws follow from the seed alone; greedy ones follow from the weights."""
        return self.seed is not None and self.temperature > 0


class StreamSink(Protocol):
    """Hears of each token. Called on the decoder's thread; must not block."""

    def token(self, sequence: GeneratedSequence, token: int, logprob: float, *, version: str) -> None:
        """Not called for the last token of a sequence."""
        ...

    def end(self, sequence: GeneratedSequence) -> None:
        """The sequence is complete; its fields hold everything."""
        ...


@dataclass(eq=False, slots=True)
class GeneratedSequence:
    """One sample. `output_ids` and `output_logprobs` hold what was made before its present stay in a row."""

    group: Group
    index: int
    output_ids: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    version_changes: list[tuple[str, int]] = field(default_factory=list)  # (version until here, tokens then made)
    retractions: int = 0
    abort_requested: bool = False
    finish: dict[str, Any] | None = None
    final_version: str = ""

    @property
    def context(self) -> list[int]:
        return [*self.group.input_ids, *self.output_ids]

    @property
    def tokens_needed(self) -> int:
        return len(self.group.input_ids) + self.group.sampling.max_new_tokens

    def spans(self, version: str, tokens: int) -> list[dict[str, Any]]:
        """Which version made which of the first `tokens` output tokens, as SGLang's `weight_versions`."""
        result: list[dict[str, Any]] = []
        for name, end in [*self.version_changes, (version, tokens)]:
            end = min(end, tokens)
            if result and end <= result[-1]["end"]:
                continue
            if result and result[-1]["version"] == name:
                result[-1]["end"] = end
            else:
                result.append({"version": name, "start": result[-1]["end"] if result else 0, "end": end})
        return result


@dataclass(eq=False, slots=True)
class Group:
    """One prompt and its samples. `on_finish` runs on the decoder's thread and must not block."""

    rid: str
    input_ids: Sequence[int]
    sampling: Sampling
    on_finish: Callable[[Group], None]
    stream: StreamSink | None = None
    logprob_start: int = -1  # first prompt position whose log-prob is wanted; -1 for none
    created: float = field(default_factory=time.perf_counter)
    finished: float = 0.0
    input_logprobs: list[float | None] | None = None
    sequences: list[GeneratedSequence] = field(default_factory=list)
    unfinished: int = 0

    def __post_init__(self) -> None:
        self.sequences = [GeneratedSequence(self, index) for index in range(self.sampling.n)]
        self.unfinished = len(self.sequences)


def abort_reason(message: str) -> dict[str, Any]:
    return {"type": "abort", "message": message, "status_code": None, "err_type": None}
