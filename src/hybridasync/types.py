"""What flows through the pipeline: one frozen dataclass for each thing, in the order in which it is made.

prompt → sample → group → train sample → batch → step result → weight snapshot → publication.
Versions are weight versions: the number of training steps whose update the weights contain (0 = initial weights).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Mode = Literal["sync", "hybrid", "fully_async"]
FinishReason = Literal["stop", "length", "abort"]
PauseMode = Literal["retract", "abort", "in_place", "drain"]
PublicationKind = Literal["full", "delta"]
GroupState = Literal["in_flight", "complete", "filtered", "dropped", "trained"]
SidecarState = Literal["running", "pausing", "paused", "ending", "recovery_required", "down"]


CORRECT = 0.5
"""A reward from here up counts as correct in accuracies; rewards of verifiers are 0 or 1."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question. From here on the prompt *is* its token ids; `text` is for people and rewards."""

    uid: int  # unique and increasing in the order drawn, across epochs (R119)
    row: int  # row in its data set, before shuffling
    epoch: int  # 0-based pass over the data
    source: str  # name of the data set
    input_ids: tuple[int, ...]
    text: str
    label: str  # the gold answer, as the reward function wants it
    extra: Mapping[str, object] = field(default_factory=dict)  # the remaining fields of the row


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Output tokens `start` (inclusive) to `end` (exclusive) were sampled from weights of this version."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How completions are drawn. `temperature` 0 is greedy."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    n: int = 1
    stop_token_ids: tuple[int, ...] = ()
    seeds: tuple[int, ...] = ()  # [n] one for each sample; empty: the engine draws as it likes


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer of an engine. `logprobs` are of the distribution sampled from: at the sampling temperature."""

    output_ids: tuple[int, ...]  # [T], the stop token included
    logprobs: tuple[float, ...]  # [T], natural log
    spans: tuple[VersionSpan, ...]  # cover 0..T without gaps; empty only if T == 0
    finish_reason: FinishReason
    engine: str

    @property
    def oldest_version(self) -> int | None:
        return min((span.version for span in self.spans), default=None)


@dataclass(frozen=True, slots=True)
class Sample:
    """A completion of a prompt, with its reward. `masked` samples carry no loss and never enter a normaliser."""

    completion: Completion
    text: str  # decoded without special tokens; for rewards and people, never encoded again
    reward: float  # before shaping
    correct: bool
    masked: bool = False
    kl: float = 0.0  # sum of engine minus reference log-probs of its tokens; 0 unless algorithm.kl_coef asks for it

    @property
    def truncated(self) -> bool:
        return self.completion.finish_reason == "length"


@dataclass(frozen=True, slots=True)
class Group:
    """The n samples of one prompt."""

    prompt: Prompt
    samples: tuple[Sample, ...]
    partition: int  # steps finished when it was admitted; step - partition is its partition lag (R113)

    @property
    def oldest_version(self) -> int | None:
        versions = [v for s in self.samples if (v := s.completion.oldest_version) is not None]
        return min(versions, default=None)


@dataclass(frozen=True, slots=True)
class TrainSample:
    """What a worker needs of one sample. Loss positions are the response tokens, input_ids[response_start:]."""

    group: int  # uid of the prompt
    input_ids: tuple[int, ...]  # [L] prompt and response
    response_start: int  # number of prompt tokens
    rollout_logprobs: tuple[float, ...]  # [L - response_start]; empty for supervised samples
    advantage: float  # the same for each token of the response; 1.0 for supervised samples
    masked: bool = False
    oldest_version: int = 0


LossKind = Literal["policy", "sft"]


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """The samples of one step, of all data-parallel ranks; workers split it themselves."""

    step: int
    loss: LossKind
    samples: tuple[TrainSample, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one training step did. `metrics` are global (all ranks), named as in observability/names.py."""

    step: int
    updated: bool  # False: nothing to learn from (all samples masked) or a skipped update; weights are unchanged
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class TrainerInfo:
    """What the workers say of themselves once the model is built."""

    parameters: int  # of the whole model
    vocab_size: int
    context_length: int
    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int
    device: str
    pids: Mapping[int, int]  # rank → process id


@dataclass(frozen=True, slots=True)
class WeightSnapshot:
    """A set of weights at `path`: complete in Hugging Face layout (config.json + *.safetensors), or what changed."""

    version: int
    path: str
    checksums: Mapping[str, str]  # parameter name → checksum (protocol of transport/weights.py), of the complete set
    bytes: int  # of the files at `path`
    prepare_s: float
    full_bytes: int = 0  # what a complete set takes; 0: as `bytes`
    base_version: int | None = None  # the files hold only what differs from this version; None: they are complete
    pending: bool = False  # taken from the trainer; what else is known of it, files included, `write_weights` makes


@dataclass(frozen=True, slots=True)
class SendTarget:
    """An engine that weights are sent to. `fresh`: it may have started anew since the last time."""

    name: str
    url: str
    fresh: bool


@dataclass(frozen=True, slots=True)
class SidecarStatus:
    """Answer of GET /v1/status: who paused the engine, since when, and for how much longer (R70)."""

    engine_url: str
    engine_kind: str
    state: SidecarState
    weight_version: str | None
    txn: str | None
    holder: str | None
    since: float | None  # seconds since the epoch
    lease_left_s: float | None
    torn: bool
    healthy: bool
    engine_pid: int | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """What an engine says of the weights that it serves: its name for their version, checksum of each parameter."""

    version: str
    checksums: Mapping[str, str]
    paused_s: float = 0.0  # after a switch: how long generation stood still for it


@dataclass(frozen=True, slots=True)
class PublicationResult:
    """One publication. Times are seconds, the longest over the engines.

    `pause_s` is how long engines stood still. Where they are paused, that is from asking them until all run again;
    where they switch between two tokens, what each says that this took, or the whole request where they are drained.
    What was retracted is computed again after that.
    """

    version: int
    step: int | None  # the step that caused it; None for the initial one
    engines: tuple[str, ...]  # verified at `version`
    prepare_s: float
    drain_s: float  # requests in flight were let finish first
    wait_s: float  # from asking for the pause until all were paused
    transfer_s: float  # new weights came into effect; for a switch the whole request
    verify_s: float
    resume_s: float
    pause_s: float
    bytes: int
    degraded: bool = False
    export_s: float = 0.0  # the trainer wrote the weights; in prepare_s, or with publication.blocking in transfer_s
    stage_s: float = 0.0  # engines prepared them while they generated; in prepare_s
    full_bytes: int = 0  # what a complete snapshot takes
    kind: PublicationKind = "full"

    @property
    def swap_s(self) -> float:
        """Everything after draining."""
        return self.wait_s + self.transfer_s + self.verify_s + self.resume_s


@dataclass(frozen=True, slots=True)
class EvalResult:
    """One evaluation, filed under the weight version that really served it (R55)."""

    version: int
    step: int | None  # completed steps when it ran; 0 = before training
    accuracy: float  # greedy
    sampled_accuracy: float | None  # at the sampling temperature
    prompts: int
    mean_response_tokens: float
    truncated_fraction: float
    logprob_gap_max: float | None  # max |trainer - engine| log-prob of the same weights, None if not checked
    wall_s: float
