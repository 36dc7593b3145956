"""The reference model: there where something needs it, once, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tests.unit.test_worker_train import make_config, make_samples, policy_batch
from tests.worker_kit import save_model, tiny_hf

from hybridasync.worker import service
from hybridasync.worker.model import ModelBundle
from hybridasync.worker.service import Worker


class Census:
    """Models that a worker builds, their parameters, and forward passes of those beyond the policy."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bundles: list[ModelBundle] = []
        self.forwards = 0
        build = service.build

        def counted(*args: Any, **arguments: Any) -> ModelBundle:
            bundle = build(*args, **arguments)
            if self.bundles:
                bundle.gpt.register_forward_hook(self._forward)
            self.bundles.append(bundle)
            return bundle

        monkeypatch.setattr(service, "build", counted)

    def _forward(self, *_: object) -> None:
        self.forwards += 1

    @property
    def parameter_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for bundle in self.bundles for p in bundle.gpt.parameters())


@contextmanager
def worker(root: Path, algorithm: dict[str, Any], ref_load: str | None) -> Iterator[Worker]:
    models = {name: root / name for name in ("policy", "reference")}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    made = Worker(make_config(models, algorithm=algorithm, model={"ref_load": ref_load}))
    try:
        made.setup()
        made.start_phase("rl", 10)
        yield made
    finally:
        made.close()
        dist.destroy_process_group()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for seed, name in enumerate(("policy", "reference")):
        save_model(tiny_hf("qwen3", tied=True, seed=seed, vocab_size=100), tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("ref_load", [None, "/nowhere"])
def test_r20_r22_nothing_is_loaded_or_computed_for_a_coefficient_of_zero(
    root: Path, monkeypatch: pytest.MonkeyPatch, ref_load: str | None
) -> None:
    """R20, R22, C38: with coefficient 0 two steps build one model and make no forward pass of another."""
    census = Census(monkeypatch)
    with worker(root, {"use_kl_loss": True, "kl_loss_coef": 0.0}, ref_load) as made:
        for step in range(2):
            assert made.train_step(policy_batch(make_samples(), step=step)).metrics["has_reference_forward"] == 0.0
    assert (len(census.bundles), census.forwards) == (1, 0)


def test_r20_a_reference_is_loaded_once_and_doubles_the_parameters(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R20: a coefficient above 0 loads one reference for the whole run, computed in each step, without gradients."""
    census = Census(monkeypatch)
    passes = []
    with worker(root, {"use_kl_loss": True, "kl_loss_coef": 0.01}, str(root / "reference")) as made:
        for step in range(2):
            made.train_step(policy_batch(make_samples(), step=step))
            passes.append(census.forwards)
    policy, reference = census.bundles
    alone = sum(p.numel() * p.element_size() for p in policy.gpt.parameters())
    assert census.parameter_bytes == 2 * alone
    assert passes[0] > 0 and passes[1] == 2 * passes[0]
    assert all(p.grad is None and not p.requires_grad for p in reference.gpt.parameters())
