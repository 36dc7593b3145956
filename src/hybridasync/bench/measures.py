"""What the publication benchmark reports: the columns of a step, and the measures of a trial made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybridasync.bench.stats import Arm

Step = Mapping[str, float]
"""One step of one trial: the columns below."""

COLUMNS: Mapping[str, str] = {
    "step": "number of the step, from 0",
    "in_window": "1: in the window that is compared",
    "response_tok_s": "response tokens by end-to-end step time",
    "samples_s": "samples by end-to-end step time",
    "step_s": "end-to-end step time",
    "framework_s": "step time without publication and waiting",
    "train_s": "training step on the workers",
    "train_wait_s": "the trainer waited for data",
    "engine_idle_s": "the engines had no request",
    "publish_s": "the training loop was held up by the publication of this step's weights, draining included",
    "published": "publications of this step's weights",
    "prepare_s": "publication: export and staging, while engines generate",
    "export_s": "publication: the trainer wrote the weights",
    "stage_s": "publication: engines prepared them while they generated",
    "drain_s": "publication: requests in flight were let finish",
    "wait_s": "publication: from asking for the pause until all engines were paused",
    "transfer_s": "publication: weights brought into effect",
    "verify_s": "publication: version and checksums read back",
    "resume_s": "publication: engines resumed",
    "pause_ms": "publication: standstill of the slowest engine",
    "published_mib": "publication: bytes that were written",
    "cpu_percent": "processor use of the machine, all its cores, idle times included",
    "others_percent": "share of the machine's processor time that other programs took",
    "trainer_cpu_percent": "processor use of the trainer, of one core",
    "engine_cpu_percent": "processor use of the engines, of one core",
    "controller_cpu_percent": "processor use of controller and sidecars, of one core",
    "gpu_percent": "use of all GPUs, idle times included; 0 without a GPU",
    "trainer_rss_mib": "resident memory of the trainer",
    "rollout_rss_mib": "resident memory of the engines",
    "trainer_peak_mib": "largest resident memory of the trainer so far",
    "rollout_peak_mib": "largest resident memory of the engines so far",
    "trainer_allocated_mib": "allocated on the trainer's devices; 0 on a CPU",
    "trainer_reserved_mib": "reserved by the trainer's allocator; 0 on a CPU",
    "gpu_used_mib": "memory in use on the fullest GPU; 0 without a GPU",
    "ratio_mean": "mean importance ratio",
    "clip_fraction": "share of tokens whose ratio was clipped",
    "tis_mean": "mean truncated importance weight",
    "tis_clip_fraction": "share of tokens whose importance weight was cut",
    "version_lag_mean": "weight age of the samples, in versions, mean",
    "version_lag_max": "weight age of the samples, in versions, largest",
    "publication_lag": "weight age beyond what running ahead causes: what skipped publications add, in versions",
    "partition_lag_mean": "steps that generation was ahead, mean",
    "reward_mean": "mean reward",
    "loss": "objective",
    "response_tokens_sum": "response tokens of the step",
    "samples": "samples of the step",
    "errors": "warnings and errors of the run so far",
    "nan_inf": "values of the run so far that weren't finite",
    "has_reference_forward": "1: a reference model was computed",
}


@dataclass(frozen=True, slots=True)
class Measure:
    """sum(numerator) / sum(denominator) over the steps of a window; without a denominator the mean over the steps.

    `largest`: the largest numerator instead, which has no interval.
    """

    name: str
    meaning: str
    unit: str
    numerator: str
    denominator: str = ""
    largest: bool = False

    def arm(self, steps: Sequence[Step]) -> Arm:
        above = [step[self.numerator] for step in steps]
        return Arm(above, [step[self.denominator] for step in steps] if self.denominator else [1.0] * len(steps))

    def value(self, steps: Sequence[Step]) -> float:
        if self.largest:
            return max((step[self.numerator] for step in steps), default=0.0)
        return self.arm(steps).value


def _mean(name: str, unit: str, *, of_publications: bool = False) -> Measure:
    meaning = COLUMNS[name].removeprefix("publication: ")
    if of_publications:
        return Measure(name, f"{meaning}, mean of the publications", unit, name, "published")
    return Measure(name, f"{meaning}, mean of the steps", unit, name)


MEASURES: Mapping[str, Measure] = {
    measure.name: measure
    for measure in (
        Measure("response_tok_s", "response throughput", "tokens/s", "response_tokens_sum", "step_s"),
        Measure("samples_s", "sample throughput", "samples/s", "samples", "step_s"),
        _mean("step_s", "s"),
        _mean("framework_s", "s"),
        _mean("train_s", "s"),
        _mean("train_wait_s", "s"),
        _mean("engine_idle_s", "s"),
        Measure("publish_share", "publication's share of the step time", "", "publish_s", "step_s"),
        _mean("publish_s", "s"),
        Measure("publications", "publications a step", "", "published"),
        _mean("prepare_s", "s", of_publications=True),
        _mean("export_s", "s", of_publications=True),
        _mean("stage_s", "s", of_publications=True),
        _mean("drain_s", "s", of_publications=True),
        _mean("wait_s", "s", of_publications=True),
        _mean("transfer_s", "s", of_publications=True),
        _mean("verify_s", "s", of_publications=True),
        _mean("resume_s", "s", of_publications=True),
        _mean("pause_ms", "ms", of_publications=True),
        Measure("pause_ms_max", "longest pause of an engine", "ms", "pause_ms", largest=True),
        _mean("published_mib", "MiB", of_publications=True),
        _mean("cpu_percent", "%"),
        _mean("others_percent", "%"),
        _mean("trainer_cpu_percent", "%"),
        _mean("engine_cpu_percent", "%"),
        _mean("controller_cpu_percent", "%"),
        _mean("gpu_percent", "%"),
        Measure("trainer_peak_mib", "largest resident memory of the trainer", "MiB", "trainer_peak_mib", largest=True),
        Measure("rollout_peak_mib", "largest resident memory of engines", "MiB", "rollout_peak_mib", largest=True),
        Measure("trainer_reserved_mib", "reserved on the device", "MiB", "trainer_reserved_mib", largest=True),
        Measure("gpu_used_mib", "used on the fullest GPU", "MiB", "gpu_used_mib", largest=True),
        _mean("ratio_mean", ""),
        _mean("clip_fraction", ""),
        _mean("tis_mean", ""),
        _mean("tis_clip_fraction", ""),
        _mean("version_lag_mean", "versions"),
        _mean("publication_lag", "versions"),
        _mean("reward_mean", ""),
    )
}
