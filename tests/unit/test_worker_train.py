"""Training steps of one real Megatron worker against the same mathematics in plain PyTorch and transformers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.worker_kit import save_model, tiny_config, tiny_hf

from hybridasync.config.models import Config
from hybridasync.errors import DataError, DivergedError, LocalProtocolError
from hybridasync.observability import names
from hybridasync.types import LossKind, TrainBatch, TrainSample
from hybridasync.worker import hf_mapping
from hybridasync.worker.optimizer import OptimizerSettings, learning_rate
from hybridasync.worker.service import Worker

TEMPERATURE = 0.8
OPTIMIZER = {"lr": 1e-2, "adam_eps": 1e-3, "clip_grad": 0.0, "weight_decay": 0.1}
Losses = Callable[[torch.Tensor, torch.Tensor, TrainSample, int], torch.Tensor]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A policy and a reference model of other weights."""
    root = tmp_path_factory.mktemp("models")
    return {
        name: save_model(tiny_hf("qwen3", tied=True, seed=seed, vocab_size=100), root / name)
        for seed, name in enumerate(("policy", "reference"))
    }


@contextmanager
def working(config: Config, *, phase: str = "rl", total_steps: int = 10) -> Iterator[Worker]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    worker = Worker(config)
    try:
        worker.setup()
        worker.start_phase(phase, total_steps)
        yield worker
    finally:
        worker.close()
        dist.destroy_process_group()


def make_config(models: dict[str, Path], **sections: Any) -> Config:
    base = {
        "rollout": {"temperature": TEMPERATURE},
        "parallel": {"max_tokens_per_micro_batch": 40},
        "optimizer": OPTIMIZER,
    }
    return tiny_config(models["policy"], **{**base, **sections})


def make_samples(count: int = 6, *, seed: int = 0) -> list[TrainSample]:
    """Ragged samples, some with one prompt; their rollout log-probs are plausible but not the policy's own.

    Token 0 is left out: for `transformers` it is padding, whose embedding gets no gradient.
    """
    rng = random.Random(seed)
    prompt: tuple[int, ...] = ()
    samples = []
    for index in range(count):
        if index % 3 != 1:
            prompt = tuple(rng.randrange(1, 100) for _ in range(rng.randint(1, 9)))
        response = rng.randint(1, 12)
        ids = prompt + tuple(rng.randrange(1, 100) for _ in range(response))
        rollout = tuple(rng.uniform(-6.0, -2.0) for _ in range(response))
        samples.append(TrainSample(index, ids, len(prompt), rollout, rng.gauss(0.0, 1.0)))
    return samples


def hf_logprobs(model: Any, sample: TrainSample, temperature: float = TEMPERATURE) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of the response tokens."""
    ids = torch.tensor(sample.input_ids)[None]
    logits = model(ids, use_cache=False).logits[0, sample.response_start - 1 : -1] / temperature
    full = logits.log_softmax(-1)
    targets = ids[0, sample.response_start :]
    return full.gather(1, targets[:, None])[:, 0], -(full.exp() * full).sum(-1)


def hf_step(model: Any, samples: Sequence[TrainSample], losses: Losses, temperature: float = TEMPERATURE) -> float:
    """Loss of a token mean written down plainly; leaves the gradients in the model."""
    model.zero_grad()
    parts = []
    for index, sample in enumerate(samples):
        logprobs, entropy = hf_logprobs(model, sample, temperature)
        parts.append(losses(logprobs, entropy, sample, index))
    loss = torch.cat(parts).mean()
    loss.backward()
    return float(loss.detach())


def surrogate(logprobs: torch.Tensor, old: torch.Tensor, advantage: float, high: float = 0.2) -> torch.Tensor:
    ratio = (logprobs - old).exp()
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1 + high))


def gradients(worker: Worker) -> dict[str, torch.Tensor]:
    gpt = worker._ready().bundle.gpt
    return {name: tensor.clone() for name, tensor in hf_mapping.iter_hf(gpt, lambda parameter: parameter.main_grad)}


def weights(worker: Worker) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in hf_mapping.iter_hf(worker._ready().bundle.gpt)}


def optimizer_state(worker: Worker) -> dict[Any, Any]:
    assert worker._phase is not None
    return {
        key: {name: value.clone() for name, value in state.items()}
        for key, state in worker._phase.optimizer.optimizer.state.items()
    }


def assert_same_gradients(worker: Worker, model: Any) -> None:
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, value in gradients(worker).items():
        torch.testing.assert_close(value, expected[name], atol=1e-5, rtol=0, msg=lambda text, n=name: f"{n}: {text}")


def policy_batch(samples: Sequence[TrainSample], step: int = 0, loss: LossKind = "policy") -> TrainBatch:
    return TrainBatch(step, loss, tuple(samples))


def test_a_grpo_step_equals_plain_pytorch(models: dict[str, Path]) -> None:
    """Loss, gradients, gradient norm and the updated weights (AdamW, norms without decay) of one on-policy step."""
    samples, model = make_samples(), tiny_hf("qwen3", tied=True, vocab_size=100)
    config = make_config(models, algorithm={"entropy_coef": 0.01})
    loss = hf_step(model, samples, lambda lp, ent, s, _: surrogate(lp, lp.detach(), s.advantage) - 0.01 * ent)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    spared = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": spared, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-3)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)
    with working(config) as worker:
        result = worker.train_step(policy_batch(samples))
        assert result.updated
        assert result.metrics["loss"] == pytest.approx(loss, abs=1e-5)
        assert result.metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        assert result.metrics["active_tokens"] == sum(len(s.rollout_logprobs) for s in samples)
        assert (result.metrics["ratio_mean"], result.metrics["optimizer_updates"]) == (1.0, 1.0)
        assert set(result.metrics) <= set(names.METRICS)
        assert_same_gradients(worker, model)
        adam.step()
        for name, value in weights(worker).items():
            torch.testing.assert_close(value, dict(model.named_parameters())[name].detach(), atol=1e-5, rtol=0)


def test_tis_and_kl_against_a_reference_equal_plain_pytorch(models: dict[str, Path]) -> None:
    """Truncated weights of policy over engine multiply the surrogate; k3 against another model is added."""
    samples, model, reference = make_samples(), *(tiny_hf("qwen3", tied=True, vocab_size=100, seed=s) for s in (0, 1))
    algorithm = {"use_tis": True, "tis_clip": 1.5, "tis_clip_low": 0.2, "use_kl_loss": True, "kl_loss_coef": 0.05}
    config = make_config(models, algorithm=algorithm, model={"ref_load": str(models["reference"])})

    def losses(logprobs: torch.Tensor, _: torch.Tensor, sample: TrainSample, __: int) -> torch.Tensor:
        old, rollout = logprobs.detach(), torch.tensor(sample.rollout_logprobs)
        log_ratio = hf_logprobs(reference, sample)[0].detach() - logprobs
        kl = log_ratio.exp() - log_ratio - 1
        return surrogate(logprobs, old, sample.advantage) * (old - rollout).exp().clamp(0.2, 1.5) + 0.05 * kl

    loss = hf_step(model, samples, losses)
    with working(config) as worker:
        result = worker.train_step(policy_batch(samples))
        assert result.metrics["loss"] == pytest.approx(loss, abs=1e-5)
        assert result.metrics["has_reference_forward"] == 1.0
        assert result.metrics["kl"] > 0
        assert 0.2 <= result.metrics["tis_mean"] <= 1.5
        assert_same_gradients(worker, model)


def test_the_clip_against_the_engines_log_probs_equals_plain_pytorch(models: dict[str, Path]) -> None:
    """With use_rollout_logprobs far-off tokens are clipped and have no gradient; clip-higher is asymmetric."""
    samples, model = make_samples(), tiny_hf("qwen3", tied=True, vocab_size=100)
    config = make_config(models, algorithm={"use_rollout_logprobs": True, "eps_clip_high": 0.28})
    loss = hf_step(
        model, samples, lambda lp, _, s, __: surrogate(lp, torch.tensor(s.rollout_logprobs), s.advantage, high=0.28)
    )
    with working(config) as worker:
        result = worker.train_step(policy_batch(samples))
        assert result.metrics["loss"] == pytest.approx(loss, abs=1e-4 * max(1.0, abs(loss)))
        assert result.metrics["clip_fraction"] > 0
        assert_same_gradients(worker, model)


def test_several_updates_in_a_step_share_the_old_policy(models: dict[str, Path]) -> None:
    """With global_batch_size 3 of 6 the second update's ratio is against the policy before the first one."""
    samples, model = make_samples(), tiny_hf("qwen3", tied=True, vocab_size=100)
    with torch.no_grad():
        old = {sample.group: hf_logprobs(model, sample)[0] for sample in samples}
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.0)
    for part in (samples[:3], samples[3:]):
        hf_step(model, part, lambda lp, _, s, __: surrogate(lp, old[s.group], s.advantage))
        adam.step()
    config = make_config(models, optimizer={**OPTIMIZER, "weight_decay": 0.0, "global_batch_size": 3})
    with working(config) as worker:
        result = worker.train_step(policy_batch(samples))
        assert result.metrics["optimizer_updates"] == 2.0
        assert result.metrics["ratio_mean"] != 1.0
        for name, value in weights(worker).items():
            torch.testing.assert_close(value, dict(model.named_parameters())[name].detach(), atol=1e-5, rtol=0)


def test_a_supervised_step_equals_plain_pytorch(models: dict[str, Path]) -> None:
    """Mean negative log-likelihood of the response at temperature 1, with the warm start's learning rate."""
    samples, model = make_samples(), tiny_hf("qwen3", tied=True, vocab_size=100)
    supervised = [TrainSample(s.group, s.input_ids, s.response_start, (), 1.0) for s in samples]
    loss = hf_step(model, samples, lambda lp, *_: -lp, temperature=1.0)
    config = make_config(models, warm_start={"lr": 3e-3, "lr_warmup_steps": 3})
    with working(config, phase="warm_start") as worker:
        result = worker.train_step(policy_batch(supervised, loss="sft"))
        assert result.metrics["loss"] == pytest.approx(loss, abs=1e-5)
        assert result.metrics["lr"] == pytest.approx(1e-3)
        assert_same_gradients(worker, model)


def test_clipping_scales_the_gradient_to_the_norm(models: dict[str, Path]) -> None:
    """clip_grad bounds the norm that Adam sees, and the norm reported is the one before."""
    config = make_config(models, optimizer={**OPTIMIZER, "clip_grad": 0.01})
    with working(config) as worker:
        result = worker.train_step(policy_batch(make_samples()))
        parameters = worker._ready().bundle.gpt.parameters()
        norm = torch.stack([parameter.main_grad.norm() for parameter in parameters]).norm()
        assert result.metrics["grad_norm"] > 0.01
        assert float(norm) == pytest.approx(0.01, rel=1e-3)


def test_c42_masked_samples_change_nothing(models: dict[str, Path]) -> None:
    """With two masked samples and an empty response added, loss and gradients are those without them."""
    samples = make_samples()
    masked = [TrainSample(90 + i, (1, 2, 3, 4), 2, (-1.0, -1.0), 5.0, masked=True) for i in range(2)]
    empty = TrainSample(99, (1, 2, 3), 3, (), 5.0)
    for aggregation in ("token_mean", "sequence_mean", "constant"):
        config = make_config(models, algorithm={"loss_aggregation": aggregation})
        with working(config) as worker:
            expected = worker.train_step(policy_batch(samples)).metrics, gradients(worker)
        with working(config) as worker:
            found = worker.train_step(policy_batch([masked[0], *samples, empty, masked[1]])).metrics, gradients(worker)
        assert found[0]["loss"] == pytest.approx(expected[0]["loss"], abs=1e-6)
        assert found[0]["active_tokens"] == expected[0]["active_tokens"]
        for name, value in expected[1].items():
            torch.testing.assert_close(found[1][name], value, atol=1e-6, rtol=0)


def test_c42_a_step_with_nothing_to_learn_from_is_skipped(models: dict[str, Path]) -> None:
    """All samples masked: loss 0, not updated, and weights and optimizer state are bit for bit what they were."""
    samples = make_samples()
    masked = [
        TrainSample(s.group, s.input_ids, s.response_start, s.rollout_logprobs, 1.0, masked=True) for s in samples
    ]
    with working(make_config(models)) as worker:
        worker.train_step(policy_batch(samples))
        before = weights(worker), optimizer_state(worker)
        for batch in (masked, []):
            result = worker.train_step(policy_batch(batch, step=1))
            assert not result.updated
            assert (result.metrics["loss"], result.metrics["grad_norm"]) == (0.0, 0.0)
            assert (result.metrics["active_tokens"], result.metrics["optimizer_updates"]) == (0.0, 0.0)
        torch.testing.assert_close((weights(worker), optimizer_state(worker)), before, atol=0, rtol=0)


def test_r22_kl_off_and_coefficient_zero_are_the_same_step(models: dict[str, Path]) -> None:
    """Same loss and gradients, no reference model loaded (its path doesn't even exist) and none run."""
    found = []
    for algorithm in ({"use_kl_loss": False}, {"use_kl_loss": True, "kl_loss_coef": 0.0}):
        config = make_config(models, algorithm=algorithm, model={"ref_load": "/nowhere"})
        with working(config) as worker:
            found.append((worker.train_step(policy_batch(make_samples())).metrics, gradients(worker)))
    (off, off_gradients), (zero, zero_gradients) = found
    assert off["loss"] == zero["loss"]
    assert off["has_reference_forward"] == zero["has_reference_forward"] == 0.0
    torch.testing.assert_close(off_gradients, zero_gradients, atol=0, rtol=0)


def test_a_step_that_diverges_raises_and_leaves_the_weights(models: dict[str, Path]) -> None:
    """A NaN advantage ends in DivergedError with the step's number; the next good step works."""
    bad = [TrainSample(0, (1, 2, 3), 1, (-1.0, -1.0), math.nan)]
    with working(make_config(models)) as worker:
        before = weights(worker)
        with pytest.raises(DivergedError, match="step 4") as caught:
            worker.train_step(policy_batch(bad, step=4))
        assert caught.value.step == 4
        torch.testing.assert_close(weights(worker), before, atol=0, rtol=0)
        assert math.isfinite(worker.train_step(policy_batch(make_samples())).metrics["loss"])


def test_log_probs_equal_transformers(models: dict[str, Path]) -> None:
    """In the order of the samples, at the sampling temperature; masked ones too, an empty response as an empty list."""
    model = tiny_hf("qwen3", tied=True, vocab_size=100)
    samples = make_samples()
    samples[2] = TrainSample(2, (5, 6), 2, (), 0.0)
    samples[3] = TrainSample(3, (5, 6, 7), 1, (0.0, 0.0), 0.0, masked=True)
    with working(make_config(models)) as worker:
        found = worker.logprobs(samples)
        assert worker.logprobs([]) == []
    assert found[2] == []
    for sample, values in zip(samples, found, strict=True):
        if values:
            torch.testing.assert_close(torch.tensor(values), hf_logprobs(model, sample)[0], atol=1e-5, rtol=0)


def test_log_probs_that_dont_match_the_tokens_are_refused(models: dict[str, Path]) -> None:
    """A missing log-prob is an error that names the counts; nothing is cut to fit."""
    with working(make_config(models)) as worker, pytest.raises(DataError, match="1 log-probs for 2 response tokens"):
        worker.train_step(policy_batch([TrainSample(0, (1, 2, 3), 1, (-1.0,), 1.0)]))


def test_bf16_and_recomputed_activations_train(models: dict[str, Path]) -> None:
    """Recomputation gives the very same step in fp32; bf16 stays near it."""
    losses = {}
    for dtype, recompute in (("fp32", False), ("fp32", True), ("bf16", True)):
        config = make_config(models, model={"dtype": dtype}, parallel={"recompute_activations": recompute})
        with working(config) as worker:
            steps = [worker.train_step(policy_batch(make_samples(), step=step)).metrics["loss"] for step in range(2)]
            losses[dtype, recompute] = steps
            assert next(worker._ready().bundle.gpt.parameters()).dtype == getattr(
                torch, {"fp32": "float32", "bf16": "bfloat16"}[dtype]
            )
    assert losses["fp32", False] == pytest.approx(losses["fp32", True], abs=1e-6)
    assert losses["fp32", False] == pytest.approx(losses["bf16", True], abs=0.15)


def test_a_new_phase_starts_with_a_fresh_optimizer(models: dict[str, Path]) -> None:
    """Weights go on where the warm start left them; moments and schedule begin anew."""
    supervised = [TrainSample(s.group, s.input_ids, s.response_start, (), 1.0) for s in make_samples()]
    with working(make_config(models), phase="warm_start") as worker:
        worker.train_step(policy_batch(supervised, loss="sft"))
        before = weights(worker)
        worker.start_phase("rl", 10)
        assert not optimizer_state(worker)
        torch.testing.assert_close(weights(worker), before, atol=0, rtol=0)
        assert worker.train_step(policy_batch(make_samples())).metrics["lr"] == 1e-2


def test_a_checkpoint_resumes_exactly(models: dict[str, Path], tmp_path: Path) -> None:
    """Two more steps after loading equal two more steps without the interruption."""
    batches = [policy_batch(make_samples(seed=step), step=step) for step in range(3)]
    config = make_config(models, optimizer={"lr": 1e-2})
    with working(config) as worker:
        worker.train_step(batches[0])
        worker.save_checkpoint(str(tmp_path / "model"))
        expected = [worker.train_step(batch).metrics["loss"] for batch in batches[1:]]
    with working(config) as worker:
        worker.load_checkpoint(str(tmp_path / "model"))
        assert [worker.train_step(batch).metrics["loss"] for batch in batches[1:]] == expected


def test_the_worker_describes_itself_and_exports(models: dict[str, Path], tmp_path: Path) -> None:
    """TrainerInfo, memory in MiB, a snapshot with checksums; operations before their time are our own bug."""
    config = make_config(models, rollout={"temperature": TEMPERATURE, "max_staleness": 1})
    with pytest.raises(LocalProtocolError):
        Worker(config).train_step(policy_batch([]))
    with working(config) as worker:
        assert worker.export_weights(3, str(tmp_path / "v3")).pending
        snapshot = worker.write_weights(3, str(tmp_path / "v3"))
        assert (snapshot.version, len(snapshot.checksums) > 0) == (3, True)
        assert worker.memory()["rss_peak_mib"] >= 1
        with pytest.raises(LocalProtocolError, match="no phase 'pre'"):
            worker.start_phase("pre", 1)


def test_the_learning_rate_warms_up_and_decays() -> None:
    """Linear warm-up over 2 steps to the peak, then constant, or down to min_lr as after the last of 10 steps."""

    def rates(schedule: Any, steps: Sequence[int]) -> list[float]:
        settings = OptimizerSettings(1.0, 0.2, schedule, 2, 10, 0.0, (0.9, 0.95), 1e-8, 1.0)
        return [learning_rate(step, settings) for step in steps]

    assert rates("constant", [0, 1, 2, 9]) == [0.5, 1.0, 1.0, 1.0]
    assert rates("linear", [0, 1, 2, 6, 10, 99]) == pytest.approx([0.5, 1.0, 1.0, 0.6, 0.2, 0.2])
    assert rates("cosine", [1, 2, 6, 10]) == pytest.approx([1.0, 1.0, 0.6, 0.2])
