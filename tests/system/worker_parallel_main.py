"""Run by test_worker_parallel.py on two ranks: every check of the model side that needs a second one, in one launch."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.worker_kit import KINDS, save_model, tiny_config, tiny_hf

from hybridasync.errors import CheckpointError
from hybridasync.types import WeightSnapshot
from hybridasync.weights.checksums import checksums
from hybridasync.worker import attention, checkpoints, export, hf_mapping, model, parallel
from hybridasync.worker.published import PublishedCopy

# isort: split
# Megatron comes after hybridasync.worker, which prepares it for the CPU.
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region, vocab_parallel_cross_entropy

LENGTHS = (40, 3, 17, 1)


@contextmanager
def groups(tp: int, pp: int) -> Iterator[parallel.Layout]:
    place = parallel.init(tp, pp, 0)
    try:
        yield place
    finally:
        parallel.close()


def run_packed(
    bundle: model.ModelBundle, ids: torch.Tensor, *, train: bool, wrapped: Any = None
) -> torch.Tensor | None:
    """Logits [tokens, padded vocabulary] of the pack on the last stage; with `train` gradients of the mean NLL too."""
    pack = attention.packed(LENGTHS, torch.device("cpu"))
    held: list[torch.Tensor] = []

    def forward_step(_: Any, module: Any) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
        logits = module(ids[None], torch.zeros_like(ids)[None], None, packed_seq_params=pack)

        def loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
            held.append(gather_from_tensor_model_parallel_region(output[0].detach()))
            targets = ids.roll(-1)[:, None]
            nll = vocab_parallel_cross_entropy(output.transpose(0, 1).float().clone(), targets)
            return nll.sum(), torch.tensor(ids.numel(), dtype=torch.int), {}

        return logits, loss

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter([None]),
        model=[wrapped or bundle.module],
        num_microbatches=1,
        seq_length=ids.numel(),
        micro_batch_size=1,
        forward_only=not train,
    )
    return held[0] if held else None


def check_layout(tp: int, pp: int, work: Path) -> None:
    """Logits equal transformers, export is bit-exact and has one process's checksums."""
    for kind in KINDS:
        for tied in (False, True):
            reference = tiny_hf(kind, tied=tied, vocab_size=100, num_hidden_layers=4)
            with groups(tp, pp) as place:
                bundle = model.build(tiny_config(work / f"{kind}-{tied}"), work / f"{kind}-{tied}")
                hf_mapping.load_hf(bundle.gpt, work / f"{kind}-{tied}")
                ids = torch.randint(3, 100, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
                logits = run_packed(bundle, ids, train=False)
                if place.last_stage:
                    with torch.no_grad():
                        wanted = torch.cat([reference(part[None]).logits[0] for part in ids.split(LENGTHS)])
                    worst = (logits[:, :100] - wanted).abs().max().item()
                    assert worst <= 1e-4, (kind, tied, worst)
                snapshot = export.export_snapshot(bundle.gpt, 1, work / f"out-{tp}-{pp}-{kind}-{tied}")
                found = dict(hf_mapping.iter_hf(bundle.gpt))
                if place.rank == 0:
                    state = reference.state_dict()
                    assert list(found) == [name for name in found if torch.equal(found[name], state[name])]
                    assert set(state) - set(found) == ({"lm_head.weight"} if tied else set())
                    same = (work / f"sums-{kind}-{tied}").read_text()
                    assert repr(sorted(snapshot.checksums.items())) == same
                else:
                    assert not found
                check_delta(bundle, snapshot, work / f"out-{tp}-{pp}-{kind}-{tied}")
    say(f"layout tp={tp} pp={pp}")


def taken_and_written(bundle: model.ModelBundle, version: int, path: Path, published: PublishedCopy) -> WeightSnapshot:
    """The first rank writes what it holds of all of them; told to every rank."""
    assert export.export_snapshot(bundle.gpt, version, path, published=published).pending
    written: list[Any] = [export.write_taken(published, version, path) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(written, src=0)
    snapshot: WeightSnapshot = written[0]
    return snapshot


def check_delta(bundle: model.ModelBundle, whole: WeightSnapshot, path: Path) -> None:
    """What changed is gathered from all ranks and adds up to what a whole export says, on every rank."""
    published = PublishedCopy(compared=True)
    first = taken_and_written(bundle, 1, path / "whole", published)
    assert first.checksums == whole.checksums and first.base_version is None
    published.decided(1, commit=True)
    same = taken_and_written(bundle, 2, path / "same", published)
    assert (same.base_version, same.bytes, same.checksums) == (1, 0, whole.checksums)
    assert export.export_published(bundle.gpt, published, 2, path=path / "again") == first.bytes


def write_models(work: Path) -> None:
    """Models on disk, and the checksums of what one process exports."""
    for kind in KINDS:
        for tied in (False, True):
            reference = tiny_hf(kind, tied=tied, vocab_size=100, num_hidden_layers=4)
            save_model(reference, work / f"{kind}-{tied}")
            sums = checksums(reference.state_dict().items(), tie_word_embeddings=tied)
            (work / f"sums-{kind}-{tied}").write_text(repr(sorted(sums.items())))


def check_c44(tp: int, pp: int, work: Path) -> None:
    """Case C44: vocabulary 10, padded in the trainer; uniform logits are -ln 10, and a changed row arrives."""
    tiny = {"vocab_size": 10, "hidden_size": 4, "num_key_value_heads": 2, "num_attention_heads": 2, "head_dim": 2}
    if dist.get_rank() == 0 and not (work / "c44").exists():
        reference = tiny_hf("llama", tied=True, **tiny)
        with torch.no_grad():
            reference.model.embed_tokens.weight.zero_()
        save_model(reference, work / "c44")
    dist.barrier()
    with groups(tp, pp) as place:
        bundle = model.build(tiny_config(work / "c44"), work / "c44")
        hf_mapping.load_hf(bundle.gpt, work / "c44")
        ids = torch.arange(sum(LENGTHS)) % 10
        logits = run_packed(bundle, ids, train=False)
        if place.last_stage:
            assert logits.shape[1] == 64
            logprob = logits.log_softmax(-1)
            assert torch.allclose(logprob[:, :10], torch.full((1,), -math.log(10)), atol=1e-6)
            assert int(logits.argmax(-1).max()) < 10 and float(logprob[:, 10:].max()) < -1e8
        for row in (None, 3):
            if row is not None:
                with torch.no_grad():
                    for name, weight in bundle.gpt.named_parameters():
                        if "word_embeddings" in name and place.tp_rank == 0:
                            weight[row] = 7.0
            found = dict(hf_mapping.iter_hf(bundle.gpt))
            if place.rank == 0:
                table = found["model.embed_tokens.weight"]
                assert table.shape == (10, 4) and "lm_head.weight" not in found
                wanted = torch.zeros(10, 4)
                if row is not None:
                    wanted[row] = 7.0
                assert torch.equal(table, wanted)
    say(f"c44 tp={tp} pp={pp}")


def trained(source: Path, *, distributed: bool, dtype: str = "fp32") -> tuple[model.ModelBundle, Any, Any]:
    """Model, DDP wrapper and optimizer, as the training code sets them up."""
    bundle = model.build(tiny_config(source, model={"dtype": dtype}), source)
    hf_mapping.load_hf(bundle.gpt, source)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=distributed, grad_reduce_in_fp32=True)
    wrapped = DistributedDataParallel(bundle.config, ddp, bundle.module)
    settings = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        weight_decay=0.01,
        adam_eps=1e-3,  # a larger one amplifies rounding less
        clip_grad=1.0,
        params_dtype=bundle.dtype,
        bf16=dtype == "bf16",
        use_distributed_optimizer=distributed,
    )
    optimizer = get_megatron_optimizer(settings, [wrapped])
    bundle.config.finalize_model_grads_func = finalize_model_grads
    return bundle, wrapped, optimizer


def step(bundle: model.ModelBundle, wrapped: Any, optimizer: Any, seed: int) -> float | None:
    """One update on the same pack on every data parallel rank; answers its loss on the last stage."""
    ids = torch.randint(3, 100, (sum(LENGTHS),), generator=torch.Generator().manual_seed(seed))
    wrapped.zero_grad_buffer()
    optimizer.zero_grad()
    logits = run_packed(bundle, ids, train=True, wrapped=wrapped)
    assert optimizer.step()[0]
    if logits is None:
        return None
    return F.cross_entropy(logits[:, : bundle.hf.vocab_size].float(), ids.roll(-1)).item()


def weights(bundle: model.ModelBundle) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in hf_mapping.iter_hf(bundle.gpt)}


def check_checkpoint(work: Path, *, distributed: bool, dtype: str, saved_at: tuple[int, int] = (1, 1)) -> None:
    """Save after two of four steps; resuming is bit-exact in the same layout and equal in every other."""
    source, folder = work / "qwen3-True", work / f"checkpoint-{distributed}-{dtype}-{saved_at[0]}{saved_at[1]}"
    with groups(*saved_at):
        bundle, wrapped, optimizer = trained(source, distributed=distributed, dtype=dtype)
        for seed in (1, 2):
            step(bundle, wrapped, optimizer, seed)
        saved = weights(bundle)
        checkpoints.save(folder, bundle.gpt, optimizer, extra={"steps": 2, "phase": "rl"})
        losses = [step(bundle, wrapped, optimizer, seed) for seed in (3, 4)]
        wanted = weights(bundle)
    tolerance = 1e-5 if dtype == "fp32" else 0.02
    for tp, pp in ((1, 1), (2, 1), (1, 2)):
        with groups(tp, pp) as place:
            bundle, wrapped, optimizer = trained(source, distributed=distributed, dtype=dtype)
            assert checkpoints.load(folder, bundle.gpt, optimizer) == {"steps": 2, "phase": "rl"}
            compare(place, saved, weights(bundle), 0)
            found = [step(bundle, wrapped, optimizer, seed) for seed in (3, 4)]
            pairs = [(a, b) for a, b in zip(losses, found, strict=True) if a is not None and b is not None]
            assert dtype == "bf16" or all(abs(a - b) <= tolerance for a, b in pairs), pairs
            compare(place, wanted, weights(bundle), 0 if (tp, pp) == saved_at else tolerance)
        say(f"checkpoint {dtype} distributed={distributed} tp={tp} pp={pp} saved at {saved_at}")


def compare(
    place: parallel.Layout, wanted: dict[str, torch.Tensor], found: dict[str, torch.Tensor], atol: float
) -> None:
    if place.rank == 0:
        assert list(wanted) == list(found)
        worst = max((wanted[name] - found[name]).abs().max().item() for name in wanted)
        assert worst <= atol, worst


def check_before_first_step(work: Path) -> None:
    """A checkpoint from before the first step resumes like a fresh start."""
    source, folder = work / "qwen3-True", work / "checkpoint-fresh"
    with groups(1, 1) as place:
        bundle, wrapped, optimizer = trained(source, distributed=True)
        checkpoints.save(folder, bundle.gpt, optimizer, extra={})
        step(bundle, wrapped, optimizer, 1)
        wanted = weights(bundle)
        bundle, wrapped, optimizer = trained(source, distributed=True)
        checkpoints.load(folder, bundle.gpt, optimizer)
        step(bundle, wrapped, optimizer, 1)
        compare(place, wanted, weights(bundle), 0)
    say("before the first step")


def check_errors_reach_every_rank(work: Path) -> None:
    """What fails on the first rank alone raises the same error on both, and nobody waits for ever."""
    (work / "file").touch()
    with groups(1, 2):
        bundle = model.build(tiny_config(work / "llama-False"), work / "llama-False")
        hf_mapping.load_hf(bundle.gpt, work / "llama-False")
        for attempt in (
            lambda: export.export_snapshot(bundle.gpt, 1, work / "file" / "snapshot"),
            lambda: checkpoints.save(work / "file" / "checkpoint", bundle.gpt, None, extra={}),
            lambda: checkpoints.load(work / "llama-False", bundle.gpt, None),
        ):
            try:
                attempt()
            except CheckpointError as error:
                assert str(work) in str(error)
            else:
                raise AssertionError("no error")
    say("errors")


def say(what: str) -> None:
    if dist.get_rank() == 0:
        print("ok", what, f"{time.monotonic() - START:.1f} s", flush=True)


def main() -> None:
    dist.init_process_group("gloo")
    shared: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared, src=0)
    work = Path(shared[0])
    if dist.get_rank() == 0:
        write_models(work)
    dist.barrier()
    for tp, pp in ((2, 1), (1, 2)):
        check_layout(tp, pp, work)
        check_c44(tp, pp, work)
    for dtype in ("fp32", "bf16"):
        for distributed in (True, False):
            check_checkpoint(work, distributed=distributed, dtype=dtype)
    check_checkpoint(work, distributed=False, dtype="fp32", saved_at=(2, 1))
    check_before_first_step(work)
    check_errors_reach_every_rank(work)
    assert parallel_state.model_parallel_is_initialized() is False
    dist.barrier()
    dist.destroy_process_group()


START = time.monotonic()

if __name__ == "__main__":
    main()
