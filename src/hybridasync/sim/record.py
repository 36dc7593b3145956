"""What is observed in the virtual world, and its checks: of what happened, never of what was believed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hybridasync.sim.engine import FRESH, TORN, token_of
from hybridasync.types import Completion, EvalResult, Group, GroupState, PublicationResult, TrainBatch

COMES_AFTER: Mapping[GroupState, tuple[GroupState | None, ...]] = {
    "in_flight": (None,),
    "complete": ("in_flight",),
    "filtered": ("in_flight",),
    "dropped": ("in_flight", "complete"),
    "trained": ("complete",),
}


@dataclass(slots=True)
class Bounds:
    """What the configuration promises."""

    batch_size: int
    samples_per_group: int
    max_staleness: int
    longest_pause_s: float
    resume_budget_s: float


@dataclass(slots=True)
class Record:
    """Observations over all starts of a run. `violations` is empty in a world that keeps its promises."""

    bounds: Bounds
    violations: list[str] = field(default_factory=list)
    trained: dict[int, tuple[int, ...]] = field(default_factory=dict)  # step → uids; a resumed run does steps again
    events: Counter[str] = field(default_factory=Counter)
    trace: list[str] = field(default_factory=list)
    groups: dict[int, GroupState] = field(default_factory=dict)  # of one controller: those that hold a slot

    def violated(self, what: str) -> None:
        self.violations.append(what)
        self.note(f"VIOLATION {what}")

    def note(self, line: str) -> None:
        self.trace.append(line)

    # The port MetricSink

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.note(f"step {step} version {metrics['weight_version']:.0f}")

    def publication(self, result: PublicationResult) -> None:
        self.note(f"published {result.version} to {','.join(result.engines) or 'nobody'}")
        if result.resume_s > self.bounds.resume_budget_s + 0.01:
            self.violated(f"the resumes of {result.version} took {result.resume_s:.1f} s")

    def evaluation(self, result: EvalResult) -> None:
        self.note(f"evaluated {result.version}")

    def samples(self, step: int, groups: Sequence[Group], advantages: Mapping[int, Sequence[float]]) -> None:
        """The groups of a step, after it was trained."""
        self.trained[step] = tuple(group.prompt.uid for group in groups)
        for group in groups:
            if step - group.partition > self.bounds.max_staleness:
                self.violated(f"step {step} trained on partition {group.partition}")
            if len(group.samples) != self.bounds.samples_per_group:
                self.violated(f"group {group.prompt.uid} has {len(group.samples)} samples")

    def group(self, uid: int, state: GroupState, **fields: object) -> None:
        """Admitted = trained + dropped + filtered + in flight + waiting, and never more than there are slots."""
        before = self.groups.get(uid)
        if before not in COMES_AFTER[state]:
            self.violated(f"group {uid} is {state} after it was {before or 'nothing'}")
        if state in ("in_flight", "complete"):
            self.groups[uid] = state
        else:
            self.groups.pop(uid, None)
        slots = (self.bounds.max_staleness + 1) * self.bounds.batch_size
        if len(self.groups) > slots:
            self.violated(f"{len(self.groups)} groups in {slots} slots")

    def event(self, name: str, /, **fields: object) -> None:
        self.events[name] += 1
        self.note(f"{name} {fields.get('engine', '')} {fields.get('cause', '')}".rstrip())

    def sync(self) -> None:
        return None

    # Checks

    def check_batch(self, batch: TrainBatch) -> None:
        """Every token was made by complete weights that were published to the engine, and says so truly."""
        for sample in batch.samples:
            tokens = sample.input_ids[sample.response_start :]
            if TORN in tokens:
                self.violated(f"step {batch.step} trained on tokens of torn weights")
            elif FRESH in tokens:
                self.violated(f"step {batch.step} trained on tokens of weights that were never published")
            elif tokens and token_of(sample.oldest_version) != min(tokens):
                self.violated(
                    f"step {batch.step}: a sample claims version {sample.oldest_version}, made by {min(tokens)}"
                )

    def check_answer(self, completion: Completion) -> None:
        """An answer that an evaluation counts was made by complete weights of the version that it is filed under."""
        tokens, version = completion.output_ids, completion.oldest_version
        if tokens and (version is None or min(tokens) != token_of(version)):
            self.violated(f"an evaluation counts an answer for version {version}, and it was made by {min(tokens)}")

    def check_end(self, steps: int) -> None:
        """After the last step: each step once, each prompt in one step only."""
        if sorted(self.trained) != list(range(steps)):
            self.violated(f"trained steps {sorted(self.trained)} of {steps}")
        uids = Counter(uid for step in self.trained.values() for uid in step)
        if twice := [uid for uid, times in uids.items() if times > 1]:
            self.violated(f"prompts {twice} were trained on twice")
        short = [step for step, groups in self.trained.items() if len(groups) != self.bounds.batch_size]
        if short:
            self.violated(f"batches of steps {short} aren't full")
