"""The metric names, each with its unit and its meaning: the one list that workers, controller, sinks and report share.

A name never changes its cohort: each says whether it is over the samples that were trained on, or over all that the
step consumed, groups filtered for want of reward variance included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Group = Literal["learning", "policy", "rollout", "time", "publication", "staleness", "run", "system"]


@dataclass(frozen=True, slots=True)
class Metric:
    """`unit` is empty for ratios and plain numbers. `group` is the heading under which displays file it."""

    name: str
    group: Group
    unit: str
    meaning: str


_registry: dict[str, Metric] = {}


def _metric(name: str, group: Group, meaning: str, *, unit: str = "") -> str:
    _registry[name] = Metric(name, group, unit, meaning)
    return name


# Of the workers: global over all ranks and all optimizer updates of the step.
LOSS = _metric("loss", "learning", "objective that was minimised, normalised over the active tokens of the step")
GRAD_NORM = _metric("grad_norm", "learning", "global gradient norm before clipping, mean over the updates")
LR = _metric("lr", "learning", "learning rate of the last update")
ACTIVE_TOKENS = _metric("active_tokens", "learning", "response tokens that carried loss", unit="tokens")
OPTIMIZER_UPDATES = _metric("optimizer_updates", "learning", "optimizer updates of the step")
HAS_REFERENCE_FORWARD = _metric("has_reference_forward", "learning", "1 if a reference model was computed")
RATIO_MEAN = _metric("ratio_mean", "policy", "mean importance ratio, current policy to old policy")
RATIO_MAX = _metric("ratio_max", "policy", "largest importance ratio, current policy to old policy")
CLIP_FRACTION = _metric("clip_fraction", "policy", "share of active tokens whose ratio was clipped")
TIS_MEAN = _metric("tis_mean", "policy", "mean truncated importance weight, trainer to engine")
TIS_CLIP_FRACTION = _metric("tis_clip_fraction", "policy", "share of active tokens whose importance weight was cut")
LOGPROB_GAP_MEAN = _metric(
    "logprob_gap_mean", "policy", "mean |trainer - engine log-prob| of trained tokens", unit="nats"
)
LOGPROB_GAP_P99 = _metric("logprob_gap_p99", "policy", "99th percentile of |trainer - engine log-prob|", unit="nats")
LOGPROB_GAP_MAX = _metric(
    "logprob_gap_max", "policy", "largest |trainer - engine log-prob| of a trained token", unit="nats"
)
APPROX_KL = _metric("approx_kl", "policy", "mean KL estimate (k3) of the trainer against the engine", unit="nats")
ENTROPY = _metric("entropy", "policy", "mean entropy of the next-token distribution at active tokens", unit="nats")
KL = _metric("kl", "policy", "mean KL estimate (k3) of the policy against the reference model", unit="nats")
EFFECTIVE_SAMPLE_SIZE = _metric("effective_sample_size", "policy", "(sum w)^2 / (n sum w^2) of importance weights")

# Of the controller, over the samples of the step.
REWARD_MEAN = _metric("reward_mean", "learning", "mean reward over the trained samples")
REWARD_GROUP_MEAN = _metric("reward_group_mean", "learning", "mean over trained groups of the mean in the group")
REWARD_GENERATED_MEAN = _metric("reward_generated_mean", "learning", "mean reward over all consumed samples")
KL_PENALTY = _metric("kl_penalty", "learning", "mean KL penalty taken off the rewards (algorithm.kl_coef)")
ACCURACY = _metric("accuracy", "learning", "share of all consumed samples that were correct")
SAMPLES = _metric("samples", "rollout", "samples that the step consumed", unit="samples")
RESPONSE_TOKENS = _metric("response_tokens", "rollout", "mean response length, all consumed samples", unit="tokens")
RESPONSE_TOKENS_SUM = _metric("response_tokens_sum", "rollout", "response tokens, all consumed samples", unit="tokens")
TRUNCATED_FRACTION = _metric("truncated_fraction", "rollout", "share of all consumed samples cut by the response cap")
GROUPS_FILTERED = _metric("groups_filtered", "rollout", "groups dropped for want of reward variance", unit="groups")
GROUPS_DROPPED = _metric("groups_dropped", "rollout", "groups lost to failures, or too stale to use", unit="groups")
IN_FLIGHT = _metric("in_flight", "rollout", "requests being generated when the step ended", unit="requests")

# Rates and times of a step.
RESPONSE_TOK_S = _metric(
    "response_tok_s", "rollout", "consumed response tokens by end-to-end step time", unit="tokens/s"
)
SAMPLES_S = _metric("samples_s", "rollout", "consumed samples by end-to-end step time", unit="samples/s")
STEP_S = _metric("step_s", "time", "end-to-end step time, with waiting, publication and checkpoint_s", unit="s")
CHECKPOINT_S = _metric("checkpoint_s", "time", "of a step: the checkpoint after the step before it", unit="s")
FRAMEWORK_S = _metric("framework_s", "time", "step time without publication and evaluation", unit="s")
TRAIN_S = _metric("train_s", "time", "time of the training step on the workers", unit="s")
TRAIN_WAIT_S = _metric(
    "train_wait_s", "time", "time that the workers waited for samples: a complete batch, or engines to drain", unit="s"
)
ENGINE_IDLE_S = _metric(
    "engine_idle_s", "time", "time without a request at the engines, mean over the engines", unit="s"
)
PUBLISH_S = _metric(
    "publish_s",
    "time",
    "time that training was held up by the publication of this step's weights, without publish_drain_wait_s; its parts "
    "may take longer, beside the next step",
    unit="s",
)
PAUSE_MS = _metric(
    "pause_ms",
    "publication",
    "how long the slowest engine stood still for new weights after this step; 0 where none were due",
    unit="ms",
)
PUBLISH_EXPORT_S = _metric(
    "publish_export_s", "publication", "of a publication: the trainer wrote the weights, engines generated", unit="s"
)
PUBLISH_STAGE_S = _metric(
    "publish_stage_s", "publication", "of a publication: engines prepared the weights and generated", unit="s"
)
PUBLISH_DRAIN_S = _metric(
    "publish_drain_s", "publication", "requests in flight were let finish before the weights changed", unit="s"
)
PUBLISH_DRAIN_WAIT_S = _metric(
    "publish_drain_wait_s",
    "publication",
    "of train_wait_s: for requests in flight, before the weights changed",
    unit="s",
)
PUBLISH_WAIT_S = _metric(
    "publish_wait_s",
    "publication",
    "of a pause: from asking until all engines were paused; a switch has none",
    unit="s",
)
PUBLISH_TRANSFER_S = _metric(
    "publish_transfer_s",
    "publication",
    "the weights came into effect: loaded under a pause, or the request to switch while engines generate",
    unit="s",
)
PUBLISH_VERIFY_S = _metric("publish_verify_s", "publication", "of a pause: version and checksums read back", unit="s")
PUBLISH_RESUME_S = _metric("publish_resume_s", "publication", "of a pause: until all engines ran again", unit="s")
PUBLISH_BYTES = _metric("publish_bytes", "publication", "weights written for the engines", unit="bytes")
PUBLISH_FULL_BYTES = _metric("publish_full_bytes", "publication", "what a complete snapshot takes", unit="bytes")
PUBLISH_DELTA = _metric("publish_delta", "publication", "1 if only what changed was written")
PUBLISH_INTERVAL = _metric(
    "publish_interval", "publication", "steps between two publications (update_weights_interval)", unit="steps"
)
PUBLICATIONS = _metric("publications", "publication", "completed publications so far, the first one included")
WEIGHT_VERSION = _metric("weight_version", "publication", "weight version after the step: completed training steps")
PARTITION_LAG_MEAN = _metric("partition_lag_mean", "staleness", "step minus its groups' partition, mean", unit="steps")
PARTITION_LAG_MAX = _metric("partition_lag_max", "staleness", "step minus its groups' partition, largest", unit="steps")
VERSION_LAG_MEAN = _metric(
    "version_lag_mean", "staleness", "trained version minus a sample's oldest, mean", unit="versions"
)
VERSION_LAG_MAX = _metric(
    "version_lag_max", "staleness", "trained version minus a sample's oldest, max", unit="versions"
)

# Counters of the run and use of the machine.
SAMPLES_TRAINED = _metric("samples_trained", "run", "samples trained on so far", unit="samples")
ERRORS = _metric("errors", "run", "events of level warning or error so far")
NAN_INF = _metric("nan_inf", "run", "values of the run so far that were not finite")
CONTROLLER_RSS_MIB = _metric("controller_rss_mib", "system", "resident memory of the controller process", unit="MiB")
TRAINER_RSS_MIB = _metric(
    "trainer_rss_mib", "system", "resident memory of the worker processes on this node", unit="MiB"
)
ROLLOUT_RSS_MIB = _metric(
    "rollout_rss_mib", "system", "resident memory of the engine processes on this node", unit="MiB"
)
TRAINER_PUBLISHED_COPY_MIB = _metric(
    "trainer_published_copy_mib", "system", "copy of what was published last, where memory allows for one", unit="MiB"
)
TRAINER_ALLOCATED_MIB = _metric(
    "trainer_allocated_mib", "system", "CUDA memory in use after the training step, largest rank", unit="MiB"
)
TRAINER_ALLOCATED_PEAK_MIB = _metric(
    "trainer_allocated_peak_mib", "system", "CUDA memory in use, most of the run so far, largest rank", unit="MiB"
)
TRAINER_RESERVED_MIB = _metric(
    "trainer_reserved_mib", "system", "CUDA memory held by the allocator after the training step", unit="MiB"
)
TRAINER_RESERVED_PEAK_MIB = _metric(
    "trainer_reserved_peak_mib", "system", "CUDA memory held by the allocator, most of the run so far", unit="MiB"
)
CPU_PERCENT = _metric("cpu_percent", "system", "processor use of this node, over all its cores", unit="%")

METRICS: Mapping[str, Metric] = MappingProxyType(_registry)


def tag(name: str) -> str:
    """The name under its heading, as TensorBoard shows it: `learning/loss`. Unknown names are filed under `other`."""
    metric = METRICS.get(name)
    return f"{metric.group if metric else 'other'}/{name}"
