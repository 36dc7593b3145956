"""Training in parallel: tensor, data and pipeline parallel steps equal those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.system.worker_train_main import LAYOUTS, make_config, two_steps
from tests.worker_kit import save_model, tiny_hf, torchrun

from hybridasync.worker.service import Worker


@pytest.mark.slow
def test_every_layout_trains_as_one_process_does(tmp_path: Path) -> None:
    """TP=2, DP=2 with both optimizers and PP=2: metrics, log-probs and weights after two GRPO steps.

    The weights agree to 1e-5, every number of the steps to 1e-4, and both ranks answer the same.
    """
    for seed, name in enumerate(("policy", "reference")):
        save_model(tiny_hf("qwen3", tied=True, seed=seed, vocab_size=100), tmp_path / name)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    worker = Worker(make_config(tmp_path, {}))
    worker.setup()
    torch.save(two_steps(worker), tmp_path / "expected.pt")
    worker.close()
    dist.destroy_process_group()
    output = torchrun(Path(__file__).parent / "worker_train_main.py", 2, str(tmp_path))
    assert all(f"{name}: weights differ by at most" in output for name in LAYOUTS)
