"""Old log-probs and corrections in one real Megatron worker, against the same mathematics in plain PyTorch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.test_worker_train import (
    assert_same_gradients,
    hf_logprobs,
    hf_step,
    make_config,
    make_samples,
    policy_batch,
    surrogate,
    weights,
    working,
)
from tests.worker_kit import save_model, tiny_hf

from hybridasync.errors import DataError, LocalProtocolError
from hybridasync.worker.kept import KeptWeights


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A policy and a reference model of other weights."""
    root = tmp_path_factory.mktemp("models")
    return {
        name: save_model(tiny_hf("qwen3", tied=True, seed=seed, vocab_size=100), root / name)
        for seed, name in enumerate(("policy", "reference"))
    }


def policy() -> Any:
    return tiny_hf("qwen3", tied=True, vocab_size=100)


def test_r30_old_log_probs_are_those_of_the_weights_last_published(models: dict[str, Path]) -> None:
    """R30: interval 2: after an unpublished step the ratio is against the published weights, gradients included."""
    first, second, model = make_samples(), make_samples(seed=1), policy()
    with torch.no_grad():
        published = {sample.group: hf_logprobs(model, sample)[0] for sample in second}
    config = make_config(models, algorithm={"keep_old_actor": True}, publication={"update_weights_interval": 2})
    with working(config) as worker:
        worker.decide(0, 0, True)
        worker.train_step(policy_batch(first))
        trained = weights(worker)
        model.load_state_dict(trained, strict=False)
        loss = hf_step(model, second, lambda lp, _, s, __: surrogate(lp, published[s.group], s.advantage))
        result = worker.train_step(policy_batch(second, step=1))
        assert result.metrics["ratio_mean"] != 1.0
        assert result.metrics["loss"] == pytest.approx(loss, abs=1e-5)
        assert_same_gradients(worker, model)


def test_u7_a_sample_of_other_weights_is_an_error_before_anything_is_trained(models: dict[str, Path]) -> None:
    """U7: a sample of version 1, version 0 kept: an error that names both, and the weights stay; a commit publishes."""
    stale = [replace(sample, oldest_version=1) for sample in make_samples()]
    config = make_config(models, algorithm={"keep_old_actor": True}, publication={"update_weights_interval": 2})
    with working(config) as worker:
        with pytest.raises(DataError, match="made by weight version 1, and keep_old_actor holds none"):
            worker.train_step(policy_batch(stale))
        worker.decide(0, 0, True)
        worker.decide(1, 1, False)  # no engine took it: what it was sampled from is still version 0
        before = weights(worker)
        with pytest.raises(DataError, match=r"step 3: .* version 1, and keep_old_actor holds 0; use_tis"):
            worker.train_step(policy_batch(stale, step=3))
        torch.testing.assert_close(weights(worker), before, atol=0, rtol=0)
        worker.decide(2, 1, True)
        with pytest.raises(LocalProtocolError, match="epoch 1 came after that of epoch 2"):
            worker.decide(1, 0, True)
        assert worker.train_step(policy_batch(stale)).metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)


def test_with_importance_weights_the_snapshot_is_the_proximal_policy(models: dict[str, Path]) -> None:
    """keep_old_actor with use_tis: samples of any version, clip against the snapshot, weight snapshot over engine."""
    stale, model = [replace(sample, oldest_version=7) for sample in make_samples()], policy()
    algorithm = {"keep_old_actor": True, "use_tis": True, "tis_clip": 1.5}
    config = make_config(models, algorithm=algorithm, publication={"update_weights_interval": 2})

    def losses(logprobs: torch.Tensor, *rest: Any) -> torch.Tensor:
        old, rollout = logprobs.detach(), torch.tensor(rest[1].rollout_logprobs)
        return surrogate(logprobs, old, rest[1].advantage) * (old - rollout).exp().clamp(0.0, 1.5)

    loss = hf_step(model, stale, losses)
    with working(config) as worker:
        worker.decide(0, 8, True)
        assert worker.train_step(policy_batch(stale)).metrics["loss"] == pytest.approx(loss, abs=1e-5)
        assert_same_gradients(worker, model)


def test_r30_an_interval_of_one_keeps_two_published_versions() -> None:
    """R30: depth 2 holds this publication and the one before, depth 1 the last; loading one leaves the module alone."""
    module = torch.nn.Linear(2, 2)
    for depth, held in ((1, [3]), (2, [2, 3])):
        kept = KeptWeights(module, depth=depth)
        for version in range(4):
            with torch.no_grad():
                module.weight.fill_(version)
            kept.keep(version)
        with torch.no_grad():
            module.weight.fill_(99)
        assert [kept.version_for(version, step=0, exact=True) for version in held] == held
        with pytest.raises(DataError):
            kept.version_for(held[0] - 1, step=0, exact=True)
        assert kept.version_for(0, step=0, exact=False) == held[0]
        for version in held:
            with kept.loaded(version):
                assert module.weight.unique().tolist() == [version]
        assert module.weight.unique().tolist() == [99]


def test_true_on_policy_mode_takes_each_updates_own_policy(models: dict[str, Path]) -> None:
    """Two updates in a step: the ratio is 1 in both, where otherwise the second is against the policy before it."""
    optimizer = {"lr": 1e-2, "global_batch_size": 3}
    for own, same in ((True, True), (False, False)):
        config = make_config(models, algorithm={"true_on_policy_mode": own}, optimizer=optimizer)
        with working(config) as worker:
            result = worker.train_step(policy_batch(make_samples()))
            assert result.metrics["optimizer_updates"] == 2.0
            assert (result.metrics["ratio_max"] == 1.0) is same


def test_gspo_and_masked_importance_weights_equal_plain_pytorch(models: dict[str, Path]) -> None:
    """One ratio for a response against the engine's log-probs; sequence-level weights that mask whole responses."""
    samples, model = make_samples(), policy()
    gspo = {
        "importance_sampling_level": "sequence",
        "use_rollout_logprobs": True,
        "loss_aggregation": "sequence_mean",
        "eps_clip": 0.9,
    }
    with working(make_config(models, algorithm=gspo)) as worker:
        result = worker.train_step(policy_batch(samples))
        expected = []
        for sample in samples:
            log_ratio = hf_logprobs(model, sample)[0] - torch.tensor(sample.rollout_logprobs)
            ratio, advantage = log_ratio.mean().exp(), sample.advantage
            expected.append(-torch.min(ratio * advantage, ratio.clamp(0.1, 1.9) * advantage))
        loss = torch.stack(expected).mean()
        model.zero_grad()
        loss.backward()
        assert result.metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
        assert_same_gradients(worker, model)


@pytest.mark.parametrize("level", ["sequence", "geometric"])
def test_responses_outside_of_the_range_are_masked(models: dict[str, Path], level: str) -> None:
    """tis_mode mask at response level: what lies outside has no loss, the rest its weight; the normaliser is all."""
    samples, model = make_samples(), policy()
    kept: list[bool] = []

    def losses(logprobs: torch.Tensor, *rest: Any) -> torch.Tensor:
        log_ratio = logprobs.detach() - torch.tensor(rest[1].rollout_logprobs)
        weight = (log_ratio.sum() if level == "sequence" else log_ratio.mean()).exp()
        kept.append(bool(0.3 <= weight <= 3.0))
        return surrogate(logprobs, logprobs.detach(), rest[1].advantage) * weight * kept[-1]

    loss = hf_step(model, samples, losses)
    algorithm = {"use_tis": True, "tis_mode": "mask", "tis_level": level, "tis_clip": 3.0, "tis_clip_low": 0.3}
    with working(make_config(models, algorithm=algorithm)) as worker:
        result = worker.train_step(policy_batch(samples))
        assert result.metrics["loss"] == pytest.approx(loss, abs=1e-5)
        assert 0 < result.metrics["tis_clip_fraction"] <= 1
        assert not all(kept)
        assert_same_gradients(worker, model)


def test_r20_reference_log_probs_need_a_reference_model(models: dict[str, Path]) -> None:
    """R20: kl_coef loads the reference, whose log-probs equal transformers'; the loss makes no reference forward."""
    reference, samples = tiny_hf("qwen3", tied=True, vocab_size=100, seed=1), make_samples()
    config = make_config(models, algorithm={"kl_coef": 0.1}, model={"ref_load": str(models["reference"])})
    with working(config) as worker:
        for sample, values in zip(samples, worker.reference_logprobs(samples), strict=True):
            torch.testing.assert_close(torch.tensor(values), hf_logprobs(reference, sample)[0], atol=1e-5, rtol=0)
        assert worker.train_step(policy_batch(samples)).metrics["has_reference_forward"] == 0.0
    with working(make_config(models)) as worker, pytest.raises(LocalProtocolError, match="no reference model"):
        worker.reference_logprobs(samples)
