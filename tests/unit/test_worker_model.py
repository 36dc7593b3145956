"""The Megatron model computes what Hugging Face computes, and gives back the weights it was given."""

from __future__ import annotations

import errno
import json
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tests.worker_kit import KINDS, one_rank, save_model, tiny_config, tiny_hf

from hybridasync.data.model_dir import parameter_count, parameter_shapes
from hybridasync.errors import CheckpointError, ConfigError
from hybridasync.transport.checkpoints import CheckpointFolders
from hybridasync.weights.checksums import checksums
from hybridasync.worker import attention, checkpoints, export, hf_mapping, model

CPU = torch.device("cpu")
LENGTHS = (40, 3, 17, 64, 1)
VOCAB = 100  # padded to 128 in the trainer
ALL = [(kind, tied) for kind in KINDS for tied in (False, True)]


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with one_rank():
        yield


def loaded(path: Path, **sections: Any) -> model.ModelBundle:
    bundle = model.build(tiny_config(path, **sections), path)
    hf_mapping.load_hf(bundle.gpt, path)
    return bundle


def sequences(vocab: int = VOCAB) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, vocab, (length,), generator=generator) for length in LENGTHS]


def packed_logits(bundle: model.ModelBundle, parts: list[torch.Tensor]) -> torch.Tensor:
    """[tokens, padded vocabulary]"""
    ids = torch.cat(parts)[None]
    pack = attention.packed([len(part) for part in parts], CPU)
    logits: torch.Tensor = bundle.module(ids, torch.zeros_like(ids), None, packed_seq_params=pack)
    return logits[0]


@pytest.mark.parametrize(("kind", "tied"), ALL)
def test_equals_hugging_face(tmp_path: Path, kind: str, tied: bool) -> None:
    """Logits of a right-padded batch and of a pack equal transformers to 1e-4, and the export is bit-exact."""
    reference = tiny_hf(kind, tied=tied, vocab_size=VOCAB)
    bundle = loaded(save_model(reference, tmp_path))
    ids = torch.randint(3, VOCAB, (2, 40), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        batch = bundle.module(ids, torch.arange(40).expand(2, -1), None)
        assert (batch[..., :VOCAB] - reference(ids).logits).abs().max() <= 1e-4
        wanted = torch.cat([reference(part[None]).logits[0] for part in sequences()])
        assert (packed_logits(bundle, sequences())[:, :VOCAB] - wanted).abs().max() <= 1e-4
    found = dict(hf_mapping.iter_hf(bundle.gpt))
    assert [(name, tuple(tensor.shape)) for name, tensor in found.items()] == list(parameter_shapes(bundle.hf))
    state = reference.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in found.items())
    assert set(state) - set(found) == ({"lm_head.weight"} if tied else set())
    assert parameter_count(bundle.hf) == sum(parameter.numel() for parameter in reference.parameters())


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_of_a_pack_equal_hugging_face(tmp_path: Path, recompute: bool) -> None:
    """With and without recomputed activations, gradients through packing, RoPE and padding equal transformers."""
    reference = tiny_hf("qwen3", tied=True, vocab_size=VOCAB)
    bundle = loaded(save_model(reference, tmp_path), parallel={"recompute_activations": recompute})
    for part in sequences():
        F.cross_entropy(reference(part[None]).logits[0], part.roll(1), reduction="sum").backward()
    targets = torch.cat([part.roll(1) for part in sequences()])
    F.cross_entropy(packed_logits(bundle, sequences()), targets, reduction="sum").backward()
    wanted = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for name, gradient in hf_mapping.iter_hf(bundle.gpt, get=lambda parameter: parameter.grad):
        assert torch.allclose(gradient, wanted[name], atol=1e-4, rtol=1e-4), name
    padding = dict(bundle.gpt.named_parameters())["embedding.word_embeddings.weight"].grad[VOCAB:]
    assert not padding.any()


def test_c44_padding_has_no_probability(tmp_path: Path) -> None:
    """Case C44: with all logits equal each of the 10 real tokens has log-probability -ln 10, at any temperature."""
    tiny = {"vocab_size": 10, "hidden_size": 4, "num_attention_heads": 2, "head_dim": 2}
    reference = tiny_hf("llama", tied=True, **tiny)
    with torch.no_grad():
        reference.model.embed_tokens.weight.zero_()
    bundle = loaded(save_model(reference, tmp_path))
    with torch.no_grad():
        logits = packed_logits(bundle, [torch.arange(10)])
    for temperature in (0.1, 1.0, 2.0):
        logprob = (logits / temperature).log_softmax(-1)
        assert torch.allclose(logprob[:, :10], torch.tensor(-2.302585), atol=1e-6)
        assert logprob[:, 10:].exp().max() == 0
        assert torch.isfinite((logprob.exp() * logprob).sum())
    assert dict(hf_mapping.iter_hf(bundle.gpt))["model.embed_tokens.weight"].shape == (10, 4)


def test_llama3_rope_scaling(tmp_path: Path) -> None:
    """The frequency scaling of Llama 3.1 equals transformers."""
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 8192
    reference = tiny_hf("llama", tied=False, rope_parameters=rope, head_dim=64, max_position_embeddings=16384)
    bundle = loaded(save_model(reference, tmp_path))
    with torch.no_grad():
        wanted = torch.cat([reference(part[None]).logits[0] for part in sequences()])
        assert (packed_logits(bundle, sequences()) - wanted).abs().max() <= 1e-4


def test_bf16(tmp_path: Path) -> None:
    """In bf16 the parameters are bf16, logits come as fp32, and differ from fp32 by rounding only."""
    reference = tiny_hf("qwen3", tied=False)
    bundle = loaded(save_model(reference, tmp_path), model={"dtype": "bf16"})
    assert {parameter.dtype for parameter in bundle.gpt.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        logits = packed_logits(bundle, sequences())
        wanted = torch.cat([reference(part[None]).logits[0] for part in sequences()])
    assert logits.dtype == torch.float32
    assert (logits - wanted).abs().mean() <= 0.05 * wanted.abs().mean()


def test_weights_in_several_files(tmp_path: Path) -> None:
    """A model directory with an index and several weight files loads like one with a single file."""
    reference = tiny_hf("llama", tied=False)
    reference.save_pretrained(tmp_path, max_shard_size="60KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    state = reference.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in hf_mapping.iter_hf(loaded(tmp_path).gpt))


def test_other_shapes_are_refused(tmp_path: Path) -> None:
    """Weights of a model of another size name both directories instead of loading."""
    small = save_model(tiny_hf("llama", tied=False), tmp_path / "small")
    large = save_model(tiny_hf("llama", tied=False, num_hidden_layers=3), tmp_path / "large")
    bundle = model.build(tiny_config(small), small)
    with pytest.raises(ConfigError, match=r"model.ref_load: .*large isn't of the same shapes as .*small"):
        hf_mapping.load_hf(bundle.gpt, large, setting="model.ref_load")


@pytest.mark.parametrize("tied", [False, True])
def test_exported_policy_loads_in_transformers(tmp_path: Path, tied: bool) -> None:
    """The exported directory loads with AutoModel and AutoTokenizer, bit-exact, its dtype as stored."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    reference = tiny_hf("qwen3", tied=tied, vocab_size=VOCAB)
    source = save_model(reference, tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    export.export_hf(loaded(source).gpt, tmp_path / "out")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in reference.state_dict().items())
    assert AutoTokenizer.from_pretrained(tmp_path / "out").decode([5, 6]) == "t5 t6"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_snapshot(tmp_path: Path, dtype: torch.dtype) -> None:
    """A snapshot holds the weights in the engines' type and checksums of these bytes, and replaces an older one."""
    reference = tiny_hf("qwen3", tied=True, vocab_size=VOCAB)
    bundle = loaded(save_model(reference, tmp_path / "source"))
    target = tmp_path / "weights" / "v3"
    export.export_snapshot(bundle.gpt, 2, target)
    snapshot = export.export_snapshot(bundle.gpt, 3, target, dtype=dtype)
    state = {name: tensor.to(dtype) for name, tensor in reference.state_dict().items()}
    written = load_file(target / "model.safetensors")
    assert all(torch.equal(written[name], state[name]) for name in written)
    assert snapshot.checksums == checksums(state.items(), tie_word_embeddings=True)
    assert (snapshot.version, snapshot.path) == (3, str(target)) and snapshot.prepare_s > 0
    assert snapshot.bytes == sum(tensor.nbytes for tensor in written.values())
    assert json.loads((target / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    assert [entry.name for entry in target.parent.iterdir()] == ["v3"]


def test_snapshot_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No space left is a CheckpointError that names the path, and leaves neither a part nor a changed older one."""
    bundle = loaded(save_model(tiny_hf("llama", tied=False), tmp_path / "source"))
    target = tmp_path / "weights" / "v1"
    export.export_snapshot(bundle.gpt, 1, target)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("hybridasync.weights.snapshot.save_file", full)
    with pytest.raises(CheckpointError, match=r"version 2 .*weights/v2: .*No space left"):
        export.export_snapshot(bundle.gpt, 2, target.with_name("v2"))
    assert [entry.name for entry in target.parent.iterdir()] == ["v1"]
    assert (target / "model.safetensors").exists()


def test_c32_checkpoint_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case C32: too little space, found before or while writing, is a CheckpointError with the path and the cause."""
    bundle = loaded(save_model(tiny_hf("llama", tied=False), tmp_path / "source"))

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("megatron.core.dist_checkpointing.strategies.filesystem_async._write_item", full)
        with pytest.raises(CheckpointError, match=r"step_1 can't be written: .*No space left"):
            checkpoints.save(tmp_path / "step_1", bundle.gpt, None, extra={})
    assert not (tmp_path / "step_1" / "metadata.json").exists()
    with pytest.raises(CheckpointError, match="isn't empty"):
        checkpoints.save(tmp_path / "step_1", bundle.gpt, None, extra={})
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with pytest.raises(CheckpointError, match=r"step_2 can't be written: it needs about \d+ MiB, and 0 MiB are free"):
        checkpoints.save(tmp_path / "step_2", bundle.gpt, None, extra={})


def test_c32_a_save_that_the_system_cuts_short_leaves_the_last_one(tmp_path: Path) -> None:
    """C32: the kernel refuses to let a file grow (RLIMIT_FSIZE): step 2 stays the latest, and saving works again."""
    bundle = loaded(save_model(tiny_hf("llama", tied=False), tmp_path / "source"))
    root = tmp_path / "checkpoints"
    root.mkdir()
    store = CheckpointFolders(root, keep=2)

    def save(step: int) -> None:
        folder = store.begin(step)
        (folder / "model").rmdir()
        checkpoints.save(folder / "model", bundle.gpt, None, extra={"steps": step})
        store.commit(step, {"step": step})

    save(2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    largest = max(path.stat().st_size for path in (root / "step_000002").rglob("*"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest // 2, hard))
    try:
        with pytest.raises(CheckpointError, match=r"step_000004\.partial/model can't be written: .*File too large"):
            save(4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    latest = store.latest()
    assert latest == root / "step_000002" and store.verified_state(latest) == {"step": 2}
    save(6)
    assert store.latest() == root / "step_000006"
    assert not list(root.glob("*.partial"))


def test_damaged_checkpoints(tmp_path: Path) -> None:
    """A checkpoint without its marker, with a truncated file or of another model is a CheckpointError that names it."""
    bundle = loaded(save_model(tiny_hf("llama", tied=False), tmp_path / "source"))
    folder = tmp_path / "step_2"
    checkpoints.save(folder, bundle.gpt, None, extra={"steps": 2})
    assert checkpoints.load(folder, bundle.gpt, None) == {"steps": 2}
    other = save_model(tiny_hf("llama", tied=False, num_hidden_layers=3), tmp_path / "other")
    with pytest.raises(CheckpointError, match="step_2 can't be loaded"):
        checkpoints.load(folder, model.build(tiny_config(other), other).gpt, None)
    (shard,) = folder.glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    with pytest.raises(CheckpointError, match="step_2 can't be loaded"):
        checkpoints.load(folder, bundle.gpt, None)
    (folder / "metadata.json").unlink()
    with pytest.raises(CheckpointError, match="step_2 is not a complete checkpoint"):
        checkpoints.load(folder, bundle.gpt, None)


@pytest.mark.parametrize("lengths", [[1], [5, 5, 5], [64, 33, 32, 31, 1], [1000, 1, 500, 501, 30, 250, 100]])
def test_plan_of_a_pack(lengths: list[int]) -> None:
    """Each token is in one bucket once, long sequences are padded less than twofold, positions start anew at 0."""
    plan = attention.make_plan(lengths, CPU)
    assert plan.positions.tolist() == [position for length in lengths for position in range(length)]
    tokens = torch.cat([bucket.tokens[bucket.kept] for bucket in plan.buckets])
    assert torch.equal(tokens[plan.unpack], torch.arange(sum(lengths)))
    for bucket in plan.buckets:
        assert bucket.tokens.numel() == bucket.sequences * bucket.length
        assert bucket.length <= attention.SHORT_SEQUENCE or bucket.tokens.numel() < 2 * bucket.kept.numel()


def test_plan_is_made_once_for_a_pack() -> None:
    """All layers share one plan, and it goes with the pack."""
    pack = attention.packed([3, 4], CPU)
    assert attention.plan_of(pack.cu_seqlens_q) is attention.plan_of(pack.cu_seqlens_kv)
    before = len(attention._plans)
    del pack
    assert len(attention._plans) == before - 1
