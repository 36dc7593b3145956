"""What one real Megatron worker loads at its start."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.unit.test_worker_train import make_config, make_samples, policy_batch, weights, working
from tests.worker_kit import save_model, tiny_hf

from hybridasync.errors import ConfigError


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A policy and another model of its shapes."""
    root = tmp_path_factory.mktemp("models")
    return {
        name: save_model(tiny_hf("qwen3", tied=True, seed=seed, vocab_size=100), root / name)
        for seed, name in enumerate(("policy", "other"))
    }


def test_r35_weights_of_a_megatron_checkpoint_are_loaded_alone(models: dict[str, Path], tmp_path: Path) -> None:
    """R35: the policy begins with the checkpoint's weights, and a reference model can be the same checkpoint."""
    saved = str(tmp_path / "model")
    with working(make_config(models)) as worker:
        worker.train_step(policy_batch(make_samples()))
        worker.save_checkpoint(saved)
        trained = weights(worker)
    algorithm = {"use_kl_loss": True, "kl_loss_coef": 0.1}
    config = make_config(models, model={"load": saved, "ref_load": saved}, algorithm=algorithm)
    with working(config) as worker:
        torch.testing.assert_close(weights(worker), trained, atol=0, rtol=0)
        result = worker.train_step(policy_batch(make_samples()))
        assert result.metrics["kl"] == pytest.approx(0.0, abs=1e-9)
        assert result.metrics["has_reference_forward"] == 1.0


def test_r34_another_hugging_face_directory_can_be_the_start(models: dict[str, Path], tmp_path: Path) -> None:
    """R34: `load` overrides the weights of hf_checkpoint; one of other shapes is refused and named."""
    with working(make_config(models, model={"load": str(models["other"])})) as worker:
        name, value = next(iter(weights(worker).items()))
        expected = dict(tiny_hf("qwen3", tied=True, seed=1, vocab_size=100).named_parameters())[name]
        torch.testing.assert_close(value, expected.detach(), atol=0, rtol=0)
    odd = save_model(tiny_hf("qwen3", tied=True, vocab_size=104), tmp_path / "odd")
    with (
        pytest.raises(ConfigError, match=r"model\.load: .*shapes"),
        working(make_config(models, model={"load": str(odd)})),
    ):
        pass
