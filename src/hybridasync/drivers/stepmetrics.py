"""Numbers of one step's batch. Every mean says of which samples it is: those that were trained on (C53)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import anyio

from hybridasync.types import Group, PublicationResult

_NONE = PublicationResult(0, None, (), *(0.0,) * 7, bytes=0)


def batch_metrics(step: int, groups: Sequence[Group], trained: Sequence[Group]) -> dict[str, float]:
    """`groups` are all that the step consumed, `trained` those not filtered; lags are in steps and versions."""
    samples = [sample for group in groups for sample in group.samples]
    used = [sample for group in trained for sample in group.samples]
    lengths = [len(sample.completion.output_ids) for sample in samples]
    partition_lags = [step - group.partition for group in groups]
    version_lags = [step - version for group in groups if (version := group.oldest_version) is not None]
    group_means = [_mean([sample.reward for sample in group.samples]) for group in trained]
    return {
        "reward_mean": _mean([sample.reward for sample in used]),
        "reward_group_mean": _mean(group_means),
        "reward_generated_mean": _mean([sample.reward for sample in samples]),
        "accuracy": _mean([float(sample.correct) for sample in samples]),
        "samples": float(len(samples)),
        "response_tokens": _mean([float(length) for length in lengths]),
        "response_tokens_sum": float(sum(lengths)),
        "truncated_fraction": _mean([float(sample.truncated) for sample in samples]),
        "partition_lag_mean": _mean([float(lag) for lag in partition_lags]),
        "partition_lag_max": float(max(partition_lags, default=0)),
        "version_lag_mean": _mean([float(lag) for lag in version_lags]),
        "version_lag_max": float(max(version_lags, default=0)),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


class Stopwatch:
    """Seconds that it ran for, over any number of starts and stops. Asked while it runs, those up to now count."""

    def __init__(self, seconds: float = 0.0, *, running: bool = False) -> None:
        self._seconds = seconds
        self._since = anyio.current_time() if running else None

    @property
    def seconds(self) -> float:
        return self._seconds + (0.0 if self._since is None else anyio.current_time() - self._since)

    def start(self) -> None:
        if self._since is None:
            self._since = anyio.current_time()

    def stop(self) -> None:
        self._seconds, self._since = self.seconds, None


class StepRow:
    """The row of a step in the making. Time is booked to the step that caused it, so that rows add up (R122).

    `time` runs while training is about this step, `held` while its publication holds training up. With a publication
    beside the next step both stop in between, and run again where training has to wait for its end.
    """

    def __init__(self, step: int, *, saving_s: float) -> None:
        self.step = step
        self.saving_s = saving_s  # the checkpoint after the step before
        self.metrics: dict[str, float] = {"checkpoint_s": saving_s}
        self.time = Stopwatch(saving_s, running=True)
        self.held = Stopwatch()
        self.completed = anyio.Event()  # nothing more is booked to it
        self.over = anyio.Event()  # beside training: the workers know the outcome of the publication
        self._held_since: float | None = None  # beside training: since when that waits for the publication's end
        self._served_at: float | None = None

    def let_go(self) -> None:
        """Training goes on while the publication does. What isn't known of it yet is NaN in the row."""
        self.time.stop()
        self.held.stop()
        self.metrics |= {"publish_s": self.held.seconds, "publish_drain_wait_s": math.nan}
        self.metrics |= dict.fromkeys(publication_metrics(None), math.nan)
        self._add_rates()

    def hold_up(self) -> None:
        """Training waits for the publication."""
        self._held_since = anyio.current_time()
        self.time.start()
        self.held.start()

    def served(self) -> None:
        """Beside training: engines have just begun to serve the new weights."""
        self._served_at = anyio.current_time()

    def complete(self, publication: PublicationResult | None) -> None:
        """Nothing more is booked to this step. Waiting for requests in flight is waiting for samples."""
        self.time.stop()
        self.held.stop()
        drain_s = self._waited_for_drain_s(publication) if publication else 0.0
        self.metrics["train_wait_s"] += drain_s
        self.metrics |= {"publish_s": max(0.0, self.held.seconds - drain_s), "publish_drain_wait_s": drain_s}
        self.metrics |= publication_metrics(publication)
        self._add_rates()
        self.completed.set()

    def _waited_for_drain_s(self, publication: PublicationResult) -> float:
        """How much of the draining training waited for: all, or beside training what was left of it by then."""
        if self._served_at is None:
            return publication.drain_s
        if self._held_since is None:
            return 0.0
        drained_at = self._served_at - publication.swap_s
        return min(publication.drain_s, max(0.0, drained_at - self._held_since))

    def _add_rates(self) -> None:
        self.metrics["step_s"] = seconds = self.time.seconds
        self.metrics["response_tok_s"] = self.metrics["response_tokens_sum"] / seconds
        self.metrics["samples_s"] = self.metrics["samples"] / seconds


def publication_metrics(publication: PublicationResult | None) -> dict[str, float]:
    """The parts of a publication, in the row of the step that caused it; zeros where there was none."""
    publication = publication or _NONE
    return {
        "pause_ms": 1000 * publication.pause_s,
        "publish_export_s": publication.export_s,
        "publish_stage_s": publication.stage_s,
        "publish_drain_s": publication.drain_s,
        "publish_wait_s": publication.wait_s,
        "publish_transfer_s": publication.transfer_s,
        "publish_verify_s": publication.verify_s,
        "publish_resume_s": publication.resume_s,
        "publish_bytes": float(publication.bytes),
        "publish_full_bytes": float(publication.full_bytes),
        "publish_delta": float(publication.kind == "delta"),
    }
