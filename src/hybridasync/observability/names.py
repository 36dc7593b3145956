"""The metric names, each with its unit and its meaning: the one list that workers, controller, sinks and report share.

A name never changes its cohort: `*_mean` of rewards and lengths is over the samples that were trained on in that step,
and what counts another set says so in its meaning.
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


def _metric(name: str, group: Group, unit: str, meaning: str) -> str:
    _registry[name] = Metric(name, group, unit, meaning)
    return name


# Of the workers: global over all ranks and all optimizer updates of the step.
LOSS = _metric("loss", "learning", "", "objective that was minimised, normalised over the active tokens of the step")
GRAD_NORM = _metric("grad_norm", "learning", "", "global gradient norm before clipping, mean over the updates")
LR = _metric("lr", "learning", "", "learning rate of the last update")
ACTIVE_TOKENS = _metric("active_tokens", "learning", "tokens", "response tokens that carried loss")
OPTIMIZER_UPDATES = _metric("optimizer_updates", "learning", "", "optimizer updates of the step")
RATIO_MEAN = _metric("ratio_mean", "policy", "", "mean importance ratio, current policy to old policy")
CLIP_FRACTION = _metric("clip_fraction", "policy", "", "share of active tokens whose ratio was clipped")
TIS_MEAN = _metric("tis_mean", "policy", "", "mean truncated importance weight, trainer to engine")
TIS_CLIP_FRACTION = _metric("tis_clip_fraction", "policy", "", "share of active tokens whose importance weight was cut")
LOGPROB_GAP_MEAN = _metric("logprob_gap_mean", "policy", "nats", "mean |trainer - engine log-prob| of trained tokens")
LOGPROB_GAP_P99 = _metric("logprob_gap_p99", "policy", "nats", "99th percentile of |trainer - engine log-prob|")
LOGPROB_GAP_MAX = _metric("logprob_gap_max", "policy", "nats", "largest |trainer - engine log-prob| of a trained token")
ENTROPY = _metric("entropy", "policy", "nats", "mean entropy of the next-token distribution at active tokens")
KL = _metric("kl", "policy", "nats", "mean KL estimate (k3) of the policy against the reference model")
EFFECTIVE_SAMPLE_SIZE = _metric("effective_sample_size", "policy", "", "(sum w)^2 / (n sum w^2) of importance weights")

# Of the controller, over the samples that were trained on in the step.
REWARD_MEAN = _metric("reward_mean", "learning", "", "mean reward over the trained samples")
REWARD_GROUP_MEAN = _metric("reward_group_mean", "learning", "", "mean over trained groups of the mean in the group")
ACCURACY = _metric("accuracy", "learning", "", "share of trained samples that were correct")
RESPONSE_TOKENS = _metric("response_tokens", "rollout", "tokens", "mean response length of the trained samples")
TRUNCATED_FRACTION = _metric("truncated_fraction", "rollout", "", "share of trained samples cut by the response cap")
GROUPS_FILTERED = _metric("groups_filtered", "rollout", "groups", "groups dropped for want of reward variance")
GROUPS_DROPPED = _metric("groups_dropped", "rollout", "groups", "groups lost to failures, or too stale to use")
IN_FLIGHT = _metric("in_flight", "rollout", "groups", "groups being generated when the step ended")

# Rates and times of a step.
RESPONSE_TOK_S = _metric("response_tok_s", "rollout", "tokens/s", "trained response tokens by end-to-end step time")
SAMPLES_S = _metric("samples_s", "rollout", "samples/s", "trained samples by end-to-end step time")
STEP_S = _metric("step_s", "time", "s", "end-to-end step time, from the end of the previous step, publication included")
FRAMEWORK_S = _metric("framework_s", "time", "s", "step time without publication and evaluation")
TRAIN_S = _metric("train_s", "time", "s", "time of the training step on the workers")
TRAIN_WAIT_S = _metric("train_wait_s", "time", "s", "time that the workers waited for a complete batch")
ENGINE_IDLE_S = _metric("engine_idle_s", "time", "s", "time without a request at the engines, mean over the engines")
PUBLISH_S = _metric("publish_s", "time", "s", "time of the publication that followed this step; 0 where none was due")
PAUSE_MS = _metric("pause_ms", "publication", "ms", "pause of the slowest engine in the last publication")
PUBLICATIONS = _metric("publications", "publication", "", "completed publications so far, the first one included")
WEIGHT_VERSION = _metric("weight_version", "publication", "", "weight version after the step: completed training steps")
PARTITION_LAG_MEAN = _metric("partition_lag_mean", "staleness", "steps", "step minus its groups' partition, mean")
PARTITION_LAG_MAX = _metric("partition_lag_max", "staleness", "steps", "step minus its groups' partition, largest")
VERSION_LAG_MEAN = _metric("version_lag_mean", "staleness", "versions", "trained version minus a sample's oldest, mean")
VERSION_LAG_MAX = _metric("version_lag_max", "staleness", "versions", "trained version minus a sample's oldest, max")

# Counters of the run and use of the machine.
SAMPLES_TRAINED = _metric("samples_trained", "run", "samples", "samples trained on so far")
ERRORS = _metric("errors", "run", "", "errors handled so far: requests, rewards, publications, engines")
NAN_INF = _metric("nan_inf", "run", "", "values of the run so far that were not finite")
CONTROLLER_RSS_MIB = _metric("controller_rss_mib", "system", "MiB", "resident memory of the controller process")
TRAINER_RSS_MIB = _metric("trainer_rss_mib", "system", "MiB", "resident memory of the worker processes on this node")
ROLLOUT_RSS_MIB = _metric("rollout_rss_mib", "system", "MiB", "resident memory of the engine processes on this node")
CPU_PERCENT = _metric("cpu_percent", "system", "%", "processor use of this node, over all its cores")

METRICS: Mapping[str, Metric] = MappingProxyType(_registry)


def tag(name: str) -> str:
    """The name under its heading, as TensorBoard shows it: `learning/loss`. Unknown names are filed under `other`."""
    metric = METRICS.get(name)
    return f"{metric.group if metric else 'other'}/{name}"
