"""The pipeline says what runs and why, or refuses with every reason at once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridasync.config.load import apply_override, validate
from hybridasync.config.models import Config
from hybridasync.config.normalise import needs_reference
from hybridasync.config.pipeline import Resolved, resolve
from hybridasync.errors import ConfigError


def config(*overrides: str) -> Config:
    """The smallest configuration that resolves, with overrides."""
    values: dict[str, Any] = {
        "model": {"hf_checkpoint": "model"},
        "data": {"prompt_data": "train.jsonl"},
        "rollout": {
            "num_rollout": 4,
            "rollout_batch_size": 8,
            "n_samples_per_prompt": 8,
            "max_response_tokens": 16,
        },
    }
    for override in overrides:
        apply_override(values, override)
    return validate(values, source="test")


def run(*overrides: str) -> Resolved:
    return resolve(config(*overrides))


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        run(*overrides)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


def written(resolved: Resolved) -> dict[str, tuple[Any, Any]]:
    """Changes of what was asked for, defaults that were only filled in left out."""
    return {one.setting: (one.wrote, one.runs) for one in resolved.changes if not one.filled_in}


EVAL = ("eval.eval_interval=2", "eval.eval_prompt_data=eval.jsonl")


def test_defaults_that_depend_on_others_are_filled_in_with_a_reason() -> None:
    """What runs is complete: pause mode, batch, clip range and engine type have values and reasons."""
    resolved = run()
    assert resolved.config.publication.pause_mode == "drain"
    assert resolved.config.optimizer.global_batch_size == 64
    assert resolved.config.algorithm.eps_clip_high == 0.2
    assert resolved.config.engine.dtype == "fp32"
    assert written(resolved) == {} and all(one.why for one in resolved.changes)
    assert resolved.warnings == ()


@pytest.mark.parametrize(("mode", "pause"), [("sync", "drain"), ("hybrid", "drain"), ("fully_async", "retract")])
def test_the_pause_mode_follows_the_mode(mode: str, pause: str) -> None:
    """Unless it is written, what a pause does to requests in flight is the mode's."""
    settings_ = (f"mode={mode}", "rollout.max_staleness=1", "algorithm.use_tis=true")
    assert run(*settings_).config.publication.pause_mode == pause
    assert run(*settings_, "publication.pause_mode=abort").config.publication.pause_mode == "abort"


def test_sync_waits_and_publishes_every_step() -> None:
    """Mode sync runs nothing ahead and skips no publication, and says so."""
    resolved = run("mode=sync", "rollout.max_staleness=2", "publication.update_weights_interval=3")
    assert written(resolved) == {
        "rollout.max_staleness": (2, 0),
        "publication.update_weights_interval": (3, 1),
    }
    assert (resolved.bounds.max_version_lag, resolved.bounds.slots) == (0, 8)


def test_c38_zero_kl_is_no_kl() -> None:
    """C38, R18-R20, R23: with coefficient 0, number or text, no reference is asked for, named or loaded."""
    for coefficient in ("0", "0.0", '"0.0"'):
        resolved = run("algorithm.use_kl_loss=true", f"algorithm.kl_loss_coef={coefficient}", "model.ref_load=missing")
        assert written(resolved) == {
            "algorithm.use_kl_loss": (True, False),
            "model.ref_load": ("missing", None),
        }
        assert not needs_reference(resolved.config)
        assert resolved.config.model.hf_checkpoint == "model"
    without_path = run("algorithm.use_kl_loss=true")
    assert without_path.config == run("model.ref_load=x").config == run().config


def test_c38_a_kl_loss_needs_its_reference() -> None:
    """C38, R19: any coefficient above 0 needs a reference model, however small it is."""
    for coefficient in ("0.1", "1e-12"):
        asked = ("algorithm.use_kl_loss=true", f"algorithm.kl_loss_coef={coefficient}")
        assert refusal(*asked).startswith("model.ref_load: the KL loss (kl_loss_coef")
        kept = run(*asked, "model.ref_load=ref")
        assert kept.config.algorithm.use_kl_loss and kept.config.model.ref_load == "ref"
    assert written(run("algorithm.kl_loss_coef=0.01")) == {}
    assert "no effect" in run("algorithm.kl_loss_coef=0.01").warnings[0]


TIS, ROLLOUT, KEPT, OWN = (
    f"algorithm.{name}=true" for name in ("use_tis", "use_rollout_logprobs", "keep_old_actor", "true_on_policy_mode")
)
TWO, STALE, SYNC, ASYNC = (
    "publication.update_weights_interval=2",
    "rollout.max_staleness=1",
    "mode=sync",
    "mode=fully_async",
)
ANY_WAY_OUT = "Enable --use-tis or --use-rollout-logprobs"


@pytest.mark.parametrize(
    ("overrides", "refused_with"),
    [
        # R24: no lag, no correction.
        ((), None),
        ((SYNC, TWO), None),
        # R25, R26.
        ((TWO,), ANY_WAY_OUT),
        ((TWO,), "--keep-old-actor would do"),
        ((STALE,), ANY_WAY_OUT),
        ((ASYNC, STALE), ANY_WAY_OUT),
        ((TWO, TIS), None),
        ((TWO, ROLLOUT), None),
        ((TWO, KEPT), None),
        ((TWO, KEPT, TIS), None),
        # R27: the policy as its own old policy leaves importance weights as the only correction.
        ((TWO, OWN), "Enable --use-tis"),
        ((TWO, OWN, KEPT), "Enable --use-tis"),
        ((TWO, OWN, ROLLOUT), "Enable --use-tis"),
        ((TWO, OWN, TIS), None),
        # R28: one snapshot can't stand for several behaviour policies.
        ((TWO, STALE, KEPT), ANY_WAY_OUT),
        ((STALE, KEPT), "a single snapshot can't represent several behaviour policies"),
        ((TWO, STALE, KEPT, TIS), None),
        ((STALE, TIS), None),
        ((STALE, ROLLOUT), None),
        ((ASYNC, STALE, ROLLOUT), None),
    ],
)
def test_r24_r28_the_off_policy_guard(overrides: tuple[str, ...], refused_with: str | None) -> None:
    """R24-R28, C37: samples of older weights are trained on only with a correction, and the message has the fix."""
    if refused_with is None:
        run(*overrides)
    else:
        message = refusal(*overrides)
        assert "old log-probs require correction" in message
        assert refused_with in message


def test_r31_the_policy_is_its_own_old_policy_by_itself_only_in_fully_async() -> None:
    """R31: on where a step is one update and nothing else is asked for; hybrid and several updates never turn it on."""
    assert run(ASYNC, STALE, TIS).config.algorithm.true_on_policy_mode is True
    assert run(STALE, TIS).config.algorithm.true_on_policy_mode is False
    assert run(ASYNC, STALE, TIS, "optimizer.global_batch_size=64").config.algorithm.true_on_policy_mode is True
    assert run(ASYNC, STALE, TIS, "optimizer.global_batch_size=32").config.algorithm.true_on_policy_mode is False
    assert run(ASYNC, STALE, ROLLOUT).config.algorithm.true_on_policy_mode is False
    assert run(ASYNC, STALE, TIS, "algorithm.true_on_policy_mode=false").config.algorithm.true_on_policy_mode is False


def test_r16_r17_the_interval_is_one_setting_and_costs_one_update_of_age() -> None:
    """R16, R17: K is 1 unless set, going back is that one setting, and K = 2 makes samples one update older at most."""
    assert run().config.publication.update_weights_interval == 1
    assert run(TWO, TIS, "publication.update_weights_interval=1").config == run(TIS).config
    assert [run(TIS, *more).bounds.max_version_lag for more in ((), (TWO,), (TWO, STALE))] == [0, 1, 2]


def test_old_log_probs_have_one_source() -> None:
    """Two sources of old log-probs are refused; one that true_on_policy_mode overrides is warned of."""
    assert "exclude each other" in refusal(KEPT, ROLLOUT)
    assert "algorithm.keep_old_actor: has no effect: true_on_policy_mode is on" in run(OWN, KEPT).warnings
    for setting in ("tis_level=sequence", "tis_mode=mask"):
        assert "has no effect: use_tis is false" in run(f"algorithm.{setting}").warnings[0]
        assert run(f"algorithm.{setting}", TIS).warnings == ()


def test_r21_kl_is_a_term_of_the_loss_or_of_the_reward() -> None:
    """R21, C38: not both; a KL penalty in the reward keeps the reference even if the loss coefficient is 0."""
    both = ("algorithm.kl_coef=0.1", "algorithm.kl_loss_coef=0.1", "model.ref_load=r")
    assert "exclude each other" in refusal(*both)
    reward_only = ("algorithm.use_kl_loss=true", "algorithm.kl_loss_coef=0", "algorithm.kl_coef=0.01")
    kept = run(*reward_only, "model.ref_load=r").config
    assert needs_reference(kept) and kept.model.ref_load == "r" and not kept.algorithm.use_kl_loss
    assert "KL penalty of the reward (kl_coef 0.01) needs a reference model" in refusal(*reward_only)
    assert not needs_reference(run("algorithm.kl_coef=0.0", "model.ref_load=r").config)


def test_r32_a_negative_staleness_is_refused() -> None:
    """R32: max_staleness is 0 unless set, and never negative."""
    assert run().config.rollout.max_staleness == 0
    with pytest.raises(ConfigError, match="max_staleness"):
        config("rollout.max_staleness=-1")


def test_corrections_exclude_each_other_and_have_ordered_bounds() -> None:
    """R29: one correction at a time; importance weights lie between 0 and 2 unless told otherwise."""
    assert "exclude each other" in refusal("algorithm.use_tis=true", "algorithm.use_rollout_logprobs=true")
    assert (run().config.algorithm.tis_clip_low, run().config.algorithm.tis_clip) == (0.0, 2.0)
    assert refusal("algorithm.tis_clip_low=3").startswith("algorithm.tis_clip_low: 3 is above tis_clip (2)")


def test_c37_a_batch_larger_than_the_run_shows_its_factors() -> None:
    """C37: 2 × 8 × 8 = 128 samples of the whole run are fewer than one update of 256 takes."""
    message = refusal("rollout.num_rollout=2", "optimizer.global_batch_size=256")
    assert "num_rollout 2 × rollout_batch_size 8 × n_samples_per_prompt 8 = 128 < global_batch_size 256" in message


def test_c37_the_batch_divides_the_step_and_the_replicas() -> None:
    """C37: a batch that doesn't divide the step, or by the data parallel size, is refused with the factors."""
    assert "doesn't divide the samples of a step: rollout_batch_size 8 × n_samples_per_prompt 8 = 64" in refusal(
        "optimizer.global_batch_size=48"
    )
    message = refusal("rollout.rollout_batch_size=3", "optimizer.global_batch_size=12", "parallel.num_workers=8")
    assert message.startswith("optimizer.global_batch_size: 12 isn't divisible by the data parallel size 8")
    assert "num_workers 8 / (tensor_model_parallel_size 1 × pipeline_model_parallel_size 1)" in message
    assert run("optimizer.global_batch_size=16", "parallel.num_workers=8").bounds.updates_per_step == 4


def test_workers_fill_whole_replicas() -> None:
    """Workers divide by TP × PP."""
    assert "3 isn't divisible by tensor_model_parallel_size 2 × pipeline_model_parallel_size 1 = 2" in refusal(
        "parallel.num_workers=3", "parallel.tensor_model_parallel_size=2"
    )
    sizes = (
        "parallel.num_workers=8",
        "parallel.tensor_model_parallel_size=2",
        "parallel.pipeline_model_parallel_size=2",
    )
    assert run(*sizes).bounds.data_parallel_size == 2


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("rollout.num_rollout=none",), "rollout.num_rollout: the run has no length"),
        (("data.prompt_data=none",), "data.prompt_data: no prompts to train on"),
        (("data.prompt_template=solve it",), "data.prompt_template: has no {prompt} in it"),
        (("rollout.top_p=0.9",), "rollout.top_p: must be 1, got 0.9"),
        (("rollout.n_samples_per_prompt=1",), "rollout.n_samples_per_prompt: 1 sample has no group"),
        (("warm_start.steps=5",), "warm_start.data"),
        (
            ("warm_start.steps=5", "warm_start.data=w", "warm_start.batch_size=3", "parallel.num_workers=2"),
            "warm_start.ba",
        ),
        (("eval.eval_interval=2",), "eval.eval_prompt_data: eval_interval is 2, but"),
        (("eval.eval_at_end=true",), "eval.eval_interval: eval_at_end needs it"),
        (("run.debug_train_only=true",), "run.debug_train_only: leaves nothing to do"),
        (("engine.kind=attach",), "engine.url: kind attach needs the addresses of the servers: url is empty"),
        (("engine.kind=attach", 'engine.url=["http://a:1", "http://a:1/"]'), "more than once"),
        (("engine.kind=attach", "engine.url=localhost:3000"), "isn't an http address"),
        (("engine.kind=attach", "engine.url=http://a"), "has no port"),
        (("engine.kind=attach", "engine.url=http://a:x"), "isn't an address"),
        (("engine.url=http://a:1",), "engine.url: is for kind attach; kind is embedded"),
        (("engine.kind=sglang",), "engine.python: kind sglang needs the Python interpreter"),
        (("engine.tensor_parallel_size=2",), "an embedded engine runs on one device"),
        (("engine.min_healthy_engines=2",), "2 is more than there are (1)"),
        ((*EVAL, "engine.num_engines=2", "eval.eval_engines=2"), "2 of 2 would leave none for the rollout"),
        (
            ("engine.kind=attach", 'engine.url=["http://10.0.0.2:1"]', "publication.transport=collective"),
            "network.interface: lo, but publication.transport is collective and http://10.0.0.2:1 is on another",
        ),
        (
            ("engine.kind=sglang", "engine.python=p", 'engine.args=["--dp-size=2"]', "publication.transport=tensor"),
            "publication.transport: tensor reaches the tensor-parallel ranks of one replica",
        ),
        (
            ("publication.delta=true", "publication.transport=collective"),
            "publication.delta: true needs publication.transport disk; it is collective",
        ),
        (("engine.gpu_ids=[0, 1]",), "lists 2 devices; num_engines 1 × tensor_parallel_size 1 = 1"),
        (("engine.num_engines=2", "engine.gpu_ids=[1, 1]"), "wants distinct device numbers"),
        (("engine.num_engines=4", "engine.port=30000", "engine.sidecar_port=30003"), "overlap"),
        (("engine.port=65535", "engine.num_engines=2"), "beyond the last port"),
        (("network.nnodes=2", "parallel.num_workers=2"), "network.master_port: 2 nodes need a fixed port"),
        (("network.nnodes=3", "network.master_port=29500"), "network.nnodes: 3 nodes, but only 1 workers"),
        (("optimizer.min_lr=1",), "optimizer.min_lr: 1 is above lr"),
        (("reward.overlong_buffer_tokens=17",), "17 is more than max_response_tokens (16)"),
        (("engine.context_length=16",), "rollout.max_response_tokens: 16 leaves no room"),
        (("engine.context_length=32", "data.max_prompt_tokens=32"), "data.max_prompt_tokens: 32 leaves no room"),
        (
            ("engine.kind=sglang", "engine.python=p", "engine.device=cpu", "rollout.deterministic=true"),
            "rollout.deterministic: SGLang has no deterministic inference on a CPU",
        ),
        (("model.hf_checkpoint={prepared}/model",), "prepare.function isn't set"),
    ],
)
def test_c37_relations_that_cannot_work_are_refused(overrides: tuple[str, ...], expected: str) -> None:
    """C37: relations between settings are checked before anything starts; a refusal names its setting and the fix."""
    assert expected in refusal(*overrides)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((*EVAL, "publication.update_weights_interval=3", "algorithm.use_tis=true"), "eval.eval_interval: 2 is below"),
        (
            ("eval.eval_interval=5", EVAL[1], "publication.update_weights_interval=2", "algorithm.use_tis=true"),
            "eval.eval_interval: 5 isn't a multiple of update_weights_interval (2)",
        ),
        (("eval.eval_prompt_data=eval.jsonl",), "eval.eval_prompt_data: has no effect"),
        (("warm_start.data=w.jsonl",), "warm_start.data: has no effect"),
        (("engine.python=/usr/bin/python",), "engine.python: has no effect"),
        (("engine.gpu_ids=[1]", "engine.device=cpu"), "engine.gpu_ids: has no effect"),
        (("publication.bucket_mib=64",), "publication.bucket_mib: has no effect"),
        (("engine.dtype=bf16",), "engine.dtype: bf16 in the engines and fp32 in training"),
        (("mode=fully_async",), "rollout.max_staleness: 0 in mode fully_async"),
        (
            ("mode=fully_async", "rollout.max_staleness=1", "algorithm.use_tis=true", "publication.pause_mode=drain"),
            "drain",
        ),
        (("optimizer.lr_warmup_steps=4",), "optimizer.lr_warmup_steps: 4 isn't less than num_rollout (4)"),
        (("engine.context_length=32", "data.max_prompt_tokens=20"), "long prompts get shorter answers"),
        (
            ("network.nnodes=2", "network.master_port=29500", "parallel.num_workers=2"),
            "network.interface: lo with 2 nodes",
        ),
    ],
)
def test_what_is_probably_not_meant_is_warned_of_once(overrides: tuple[str, ...], expected: str) -> None:
    """R14 and its kind: legal settings that cancel each other give one warning."""
    warnings = run(*overrides).warnings
    assert len(warnings) == 1 and expected in warnings[0]


GENERATED = ("rollout.rollout_global_dataset=false", "data.prompt_data=none", "data.prompt_function=m:f")


def test_r39_a_function_stands_in_for_files() -> None:
    """R39: without a global data set a function and a number of steps are needed, and epochs are refused."""
    assert run(*GENERATED).warnings == ()
    assert "a function has to make the prompts" in refusal(GENERATED[0], GENERATED[1])
    assert "num_epoch requires rollout_global_dataset" in refusal(*GENERATED, "rollout.num_epoch=1")
    assert "num_rollout must be positive" in refusal(*GENERATED, "rollout.num_rollout=none")
    assert "has no effect" in run(GENERATED[2]).warnings[0]
    assert "has no effect" in run(GENERATED[0], GENERATED[2]).warnings[0]


def test_every_file_of_a_mixture_has_a_weight_above_zero() -> None:
    """Weights are as many as files, prompt_data included, and positive."""
    extra = 'data.extra_prompt_data=["b.jsonl"]'
    assert run(extra, "data.weights=[1, 3.0]").config.data.weights == (1.0, 3.0)
    assert run(extra).warnings == ()
    assert "has 1 weights for 2 files" in refusal(extra, "data.weights=[1.0]")
    assert "wants weights above 0" in refusal(extra, "data.weights=[1.0, 0.0]")
    assert "a sum beyond all numbers" in refusal(extra, "data.weights=[1e308, 1e308]")


def test_all_refusals_are_reported_at_once() -> None:
    """One start shows everything that is in the way."""
    message = refusal("rollout.top_p=0.5", "engine.kind=sglang", "rollout.max_staleness=1", "parallel.num_workers=5")
    assert "has 4 errors" in message
    for setting in ("rollout.top_p", "engine.python", "algorithm.use_tis", "optimizer.global_batch_size"):
        assert f"  {setting}: " in message


def test_training_alone_needs_no_engine_and_no_prompts() -> None:
    """R15: with debug_train_only nothing of the rollout side is asked for."""
    resolved = run(
        "run.debug_train_only=true",
        "warm_start.steps=3",
        "warm_start.data=w.jsonl",
        "data.prompt_data=none",
        "rollout.num_rollout=none",
        "rollout.max_staleness=1",
        "engine.kind=sglang",
        *EVAL,
    )
    assert written(resolved)["eval.eval_interval"] == (2, None)
    assert resolved.bounds.publications is None


def test_engines_are_counted_by_their_addresses() -> None:
    """Servers that run already are as many as their URLs."""
    resolved = run("engine.kind=attach", 'engine.url=["http://a:1", "http://b:1"]')
    assert resolved.config.engine.num_engines == 2


def test_the_bounds_follow_from_the_settings() -> None:
    """Samples, slots, both lags, and what is published and evaluated are known before the start."""
    resolved = run(
        "rollout.num_rollout=20",
        "rollout.max_staleness=2",
        "publication.update_weights_interval=2",
        "algorithm.use_tis=true",
        "optimizer.global_batch_size=32",
        "eval.eval_interval=10",
        "eval.eval_prompt_data=e.jsonl",
    )
    bounds = resolved.bounds
    assert (bounds.samples_per_step, bounds.updates_per_step, bounds.samples) == (64, 2, 1280)
    assert (bounds.slots, bounds.max_partition_lag, bounds.max_version_lag) == (24, 2, 3)
    assert (bounds.publications, bounds.evaluations) == (11, 3)
    assert run("rollout.num_rollout=20").bounds.publications == 21
    assert run("rollout.num_rollout=none", "rollout.num_epoch=1").bounds.publications is None


@settings(max_examples=60, deadline=None)
@given(
    mode=st.sampled_from(["sync", "hybrid", "fully_async"]),
    staleness=st.integers(0, 3),
    interval=st.integers(1, 4),
    kl=st.sampled_from(["0", "0.0"]),
    use_kl=st.booleans(),
    batch=st.sampled_from(["none", "8", "32", "64"]),
    evaluation=st.booleans(),
)
def test_resolving_twice_changes_nothing(**drawn: Any) -> None:
    """The pipeline is idempotent: what it returned passes through unchanged, without further changes."""
    first = run(
        f"mode={drawn['mode']}",
        f"rollout.max_staleness={drawn['staleness']}",
        f"publication.update_weights_interval={drawn['interval']}",
        f"algorithm.kl_loss_coef={drawn['kl']}",
        f"algorithm.use_kl_loss={str(drawn['use_kl']).lower()}",
        "algorithm.use_tis=true",
        f"optimizer.global_batch_size={drawn['batch']}",
        *(EVAL if drawn["evaluation"] else ()),
    )
    second = resolve(first.config)
    assert second.config == first.config
    assert second.changes == ()
    assert (second.warnings, second.bounds) == (first.warnings, first.bounds)


def test_the_written_configuration_is_left_alone() -> None:
    """Resolving copies: the configuration that came in still says what the user wrote."""
    before = config("mode=sync", "rollout.max_staleness=1")
    resolve(before)
    assert before.rollout.max_staleness == 1
