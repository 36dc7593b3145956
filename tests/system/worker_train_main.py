"""Run by test_worker_train_parallel.py on two ranks: training steps in every layout, in one launch.

Arguments: directory with `policy/`, `reference/` and `expected.pt`, the result of one process.
"""

from __future__ import annotations

import dataclasses
import math
import random
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.worker_kit import tiny_config

from hybridasync.config.models import Config
from hybridasync.errors import DivergedError
from hybridasync.types import StepResult, TrainBatch, TrainSample
from hybridasync.worker import hf_mapping
from hybridasync.worker.service import Worker

LAYOUTS: dict[str, dict[str, Any]] = {
    "TP=2": {"num_workers": 2, "tensor_model_parallel_size": 2},
    "DP=2": {"num_workers": 2},
    "DP=2 distributed optimizer": {"num_workers": 2, "use_distributed_optimizer": True},
    "PP=2": {"num_workers": 2, "pipeline_model_parallel_size": 2},
}


def make_config(root: Path, parallel: dict[str, Any]) -> Config:
    """All terms of the loss, two updates a step, several micro-batches; Adam's epsilon is large, so that rounding in
    gradients near zero isn't blown up to whole steps.
    """
    return tiny_config(
        root / "policy",
        model={"ref_load": str(root / "reference")},
        rollout={"temperature": 0.8},
        parallel={"max_tokens_per_micro_batch": 24, **parallel},
        algorithm={"use_tis": True, "entropy_coef": 0.01, "use_kl_loss": True, "kl_loss_coef": 0.05},
        optimizer={"lr": 1e-2, "adam_eps": 1e-3, "weight_decay": 0.1, "clip_grad": 0.5, "global_batch_size": 5},
    )


def make_batch(step: int) -> TrainBatch:
    """Nine ragged samples, some with one prompt, one masked: portions and ranks get unequal shares."""
    rng = random.Random(step)
    prompt: tuple[int, ...] = ()
    samples = []
    for index in range(9):
        if index % 3 != 1:
            prompt = tuple(rng.randrange(1, 100) for _ in range(rng.randint(1, 9)))
        response = rng.randint(1, 12)
        ids = prompt + tuple(rng.randrange(1, 100) for _ in range(response))
        rollout = tuple(rng.uniform(-6.0, -2.0) for _ in range(response))
        samples.append(TrainSample(index, ids, len(prompt), rollout, rng.gauss(0.0, 1.0), masked=index == 4))
    return TrainBatch(step, "policy", tuple(samples))


def two_steps(worker: Worker) -> dict[str, Any]:
    """Metrics and log-probs, and on the first rank the weights that came of it."""
    worker.start_phase("warm_start", 1)  # its optimizer must leave nothing behind in the gradient buffers
    worker.start_phase("rl", 2)
    results = [worker.train_step(make_batch(step)) for step in range(2)]
    values = worker.logprobs(make_batch(0).samples)
    tensors = hf_mapping.iter_hf(worker._ready().bundle.gpt) if worker._ready().runner._place.dp_rank == 0 else ()
    return {
        "metrics": [dict(result.metrics) for result in results],
        "logprobs": values,
        "weights": {name: tensor.clone() for name, tensor in tensors},
    }


def check_layout(root: Path, name: str, expected: dict[str, Any]) -> None:
    worker = Worker(make_config(root, LAYOUTS[name]))
    info = worker.setup()
    assert set(info.pids) == {1, 2}
    try:
        found = two_steps(worker)
        check_alike(found["metrics"])
        if dist.get_rank() == 0:
            check_equal(name, found, expected)
        check_odd_batches(worker)
        dist.barrier()
    finally:
        worker.close()


def check_alike(value: Any) -> None:
    """Every rank has the same answer, to the last bit."""
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, value)
    assert all(answer == answers[0] for answer in answers), answers


def check_equal(name: str, found: dict[str, Any], expected: dict[str, Any]) -> None:
    for step, (mine, theirs) in enumerate(zip(found["metrics"], expected["metrics"], strict=True)):
        assert set(mine) == set(theirs)
        for key in set(mine) - {"train_s"}:
            assert math.isclose(mine[key], theirs[key], rel_tol=1e-4, abs_tol=1e-4), (name, step, key, mine, theirs)
    for mine, theirs in zip(found["logprobs"], expected["logprobs"], strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), atol=1e-4, rtol=0)
    assert set(found["weights"]) == set(expected["weights"])
    largest = max(float((found["weights"][key] - value).abs().max()) for key, value in expected["weights"].items())
    print(f"{name}: weights differ by at most {largest:.1e}")
    assert largest < 1e-5, (name, largest)


def check_odd_batches(worker: Worker) -> None:
    """One sample for two ranks, none at all, and one that diverges: the same outcome on every rank."""
    batch = make_batch(7)
    alone = worker.train_step(dataclasses.replace(batch, samples=batch.samples[:1]))
    check_alike((alone.updated, dict(alone.metrics)))
    assert alone.updated
    masked = tuple(dataclasses.replace(sample, masked=True) for sample in batch.samples)
    skipped: StepResult = worker.train_step(dataclasses.replace(batch, samples=masked))
    assert not skipped.updated
    bad = (dataclasses.replace(batch.samples[0], advantage=math.nan), *batch.samples[1:4])
    try:
        worker.train_step(dataclasses.replace(batch, samples=bad))
    except DivergedError:
        outcome = "diverged"
    else:
        outcome = "went on"
    check_alike(outcome)
    assert outcome == "diverged"


def main(root: Path) -> None:
    dist.init_process_group("gloo")
    expected = torch.load(root / "expected.pt")
    for name in LAYOUTS:
        check_layout(root, name, expected)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
