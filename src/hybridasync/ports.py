"""What the drivers need of the outside world. Adapters in `transport/`, tests and the simulation implement it.

Every method that waits has a deadline of its own in the adapter; all of them may be cancelled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from hybridasync.errors import EngineError
from hybridasync.types import (
    Completion,
    EvalResult,
    Group,
    GroupState,
    PauseMode,
    Prompt,
    PublicationResult,
    SamplingParams,
    SendTarget,
    ServedWeights,
    SidecarStatus,
    StepResult,
    TrainBatch,
    TrainerInfo,
    TrainSample,
    WeightSnapshot,
)


class InferenceServer(Protocol):
    """One engine's data plane and weight calls. Errors: NotSent, Rejected, OutcomeUnknown, RemoteProtocolError."""

    name: str
    base_url: str

    async def generate(self, rid: str, input_ids: Sequence[int], params: SamplingParams) -> tuple[Completion, ...]:
        """n completions of one prompt (one request). A finish reason `abort` means interrupted, with what was made."""
        ...

    async def abort(self, rid: str) -> None: ...

    async def stage(self, snapshot: WeightSnapshot) -> bool:
        """Prepare the snapshot beside the live weights while the engine generates. False: this engine can't.

        Rejected for a snapshot that it can't use: a delta to a version that it doesn't hold, say.
        """
        ...

    async def switch(self, snapshot: WeightSnapshot, mode: PauseMode) -> ServedWeights:
        """Change to the staged snapshot between two tokens; `mode` is what becomes of requests in flight.

        There is no pause that anybody could owe an end. Rejected: nothing has changed. Whenever a switch that was given
        up arrives, it has no effect but this one: the engine knows the snapshot by its version and checksums.
        """
        ...

    async def update_weights(self, snapshot: WeightSnapshot) -> None:
        """Load the snapshot. The engine must be paused."""
        ...

    async def weight_version(self) -> str:
        """The version that the engine says it serves; "default" before the first publication."""
        ...

    async def checksums(self) -> Mapping[str, str]:
        """Checksum of each parameter as the engine holds it."""
        ...

    async def read_back(self) -> ServedWeights:
        """Both, in as few calls as the engine allows: engines are paused while they are asked."""
        ...

    async def in_flight(self) -> int: ...

    async def healthy(self) -> bool: ...

    async def moved(self, base_url: str) -> None:
        """The engine was started anew, perhaps at another address."""
        ...


class WeightSender(Protocol):
    """Sends a snapshot to paused engines without a folder that they could read."""

    async def send(self, targets: Sequence[SendTarget], snapshot: WeightSnapshot) -> Mapping[str, EngineError]:
        """The failures by engine, one not holding up another. Cancelled, it leaves engines half-updated."""
        ...


class Sidecar(Protocol):
    """The control plane of one engine (DESIGN section 6). `txn` is `ha1:<32 hex>:<n>`."""

    name: str

    async def status(self) -> SidecarStatus: ...

    async def pause(self, txn: str, mode: PauseMode, lease_s: float) -> bool:
        """True: paused. False: not ready, not paused; ask again with the same `txn`."""
        ...

    async def renew(self, txn: str, lease_s: float) -> None: ...

    async def end(self, txn: str | None) -> None:
        """Resume. Idempotent. None ends the pause of a client without transactions, or one that nobody holds."""
        ...

    async def recover(self, timeout_s: float) -> None: ...

    async def fence(self, txns: Sequence[str] = ()) -> None:
        """Kill the engine and start it anew, and refuse the pauses of `txns` should they still be under way."""
        ...


class Trainer(Protocol):
    """The training workers as one. Collective calls run one at a time, in the order in which they were made.

    Errors: TrainerError and its kinds, ConfigError for a model that can't be used, CheckpointError.
    """

    async def setup(self) -> TrainerInfo:
        """Build the model and load the initial weights."""
        ...

    async def start_phase(self, phase: str, total_steps: int) -> None:
        """Make the optimizer and schedule of the phase: "warm_start" or "rl"."""
        ...

    async def train_step(self, batch: TrainBatch) -> StepResult: ...

    async def logprobs(self, samples: Sequence[TrainSample]) -> list[list[float]]:
        """Log-probs of the response tokens under the current weights, at the sampling temperature."""
        ...

    async def export_weights(self, version: int, path: str) -> WeightSnapshot:
        """Take the weights, to be written as a Hugging Face directory at `path`, complete or not at all.

        The snapshot may still be `pending`: then `write_weights` writes it, and training may go on meanwhile. With
        `publication.delta` only what changed since the last version that engines took, where that is smaller.
        """
        ...

    async def write_weights(self, version: int, path: str) -> WeightSnapshot:
        """Write what was taken last. Beside other calls, which it neither waits for nor holds up. CheckpointError."""
        ...

    async def export_published(self, version: int, path: str) -> int:
        """With `publication.delta`: write the version exported last in full; answers its bytes. CheckpointError."""
        ...

    async def decide(self, epoch: int, *, version: int, commit: bool) -> None:
        """Tell every worker what became of the publication of `version`: engines serve it, or it never happened.

        `epoch` grows with each decision; an older one is refused. A worker that doesn't answer in time is taken for
        lost, and its process ended, so that no other one waits for it. Bounded without a deadline of the caller's.
        """
        ...

    async def reference_logprobs(self, samples: Sequence[TrainSample]) -> list[list[float]]:
        """As `logprobs`, under the reference model."""
        ...

    async def save_checkpoint(self, path: str) -> None:
        """Write model and optimizer to the empty folder `path`."""
        ...

    async def load_checkpoint(self, path: str) -> None: ...

    async def export_hf(self, path: str) -> None:
        """Write a directory that `transformers` loads, tokenizer included."""
        ...

    async def clear_cache(self) -> None:
        """Give cached device memory back (`publication.clear_cache_on_skipped_steps`)."""
        ...

    async def memory(self) -> Mapping[str, float]:
        """Memory of the workers in MiB: peak and current, allocated and reserved."""
        ...

    async def close(self) -> None: ...


class RewardFn(Protocol):
    """Scores the completions of one group. One value per text, in order. Raises RewardError."""

    async def __call__(
        self, prompt: Prompt, texts: Sequence[str], completions: Sequence[Completion]
    ) -> list[float]: ...


class PromptSource(Protocol):
    """Endless (or `num_epoch` long) stream of prompts with an exact position."""

    def draw(self) -> Prompt | None:
        """The next prompt; None once the data is used up."""
        ...

    def state(self, unused: Iterable[int] = ()) -> dict[str, Any]:
        """The position. `unused` are uids drawn but not trained on: a restored source draws them first."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class Tokenizer(Protocol):
    def decode(self, ids: Sequence[int]) -> str: ...


class CheckpointStore(Protocol):
    """Checkpoint folders of a run. Errors: CheckpointError, which names the path."""

    def begin(self, step: int) -> Path:
        """An empty folder that doesn't count yet."""
        ...

    def commit(self, step: int, state: Mapping[str, Any]) -> Path:
        """Write the state, make the folder count, point `latest` at it, drop the oldest beyond the limit."""
        ...

    def verified_state(self, path: Path) -> dict[str, Any]:
        """The state of a complete checkpoint whose files are as they were written."""
        ...

    def latest(self) -> Path | None: ...


class SnapshotFolder(Protocol):
    """Where weight snapshots lie on their way to the engines."""

    def path(self, version: int) -> str: ...

    def drop_all_but(self, newest: int) -> None:
        """Remove all but so many of the newest snapshots."""
        ...


class Journal(Protocol):
    """Append-only record of debts. `append` returns only when the record is on disk."""

    def append(self, record: Mapping[str, Any]) -> None: ...

    def replay(self) -> list[dict[str, Any]]: ...


class MetricSink(Protocol):
    """Where numbers and events go. Never raises: a full disk must not stop a run in the middle of a publication."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def publication(self, result: PublicationResult) -> None: ...

    def evaluation(self, result: EvalResult) -> None: ...

    def samples(self, step: int, groups: Sequence[Group], advantages: Mapping[int, Sequence[float]]) -> None: ...

    def group(self, uid: int, state: GroupState, **fields: object) -> None:
        """A group of the rollout has come to `state`."""
        ...

    def event(self, name: str, /, **fields: object) -> None: ...

    def sync(self) -> None:
        """What was given so far is on disk, if it can be."""
        ...
