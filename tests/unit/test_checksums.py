"""Checksums are SGLang's, snapshots are complete or absent."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hybridasync.config.models import EngineSection
from hybridasync.weights import gpu_hash, snapshot
from hybridasync.weights.checksums import checksums, overall
from hybridasync.weights.layout import EngineLayout, engine_layout, fused_name


def sha64(*tensors: torch.Tensor, padding: int = 0) -> str:
    data = b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in tensors) + bytes(padding)
    return f"{int.from_bytes(hashlib.sha256(data).digest()[:8], 'big'):016x}"


def tiny(dtype: torch.dtype = torch.float32, vocab: int = 70) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {
        "model.embed_tokens.weight": (vocab, 8),
        "model.layers.0.self_attn.q_proj.weight": (8, 8),
        "model.layers.0.self_attn.k_proj.weight": (4, 8),
        "model.layers.0.self_attn.v_proj.weight": (4, 8),
        "model.layers.0.self_attn.q_norm.weight": (4,),
        "model.layers.0.mlp.gate_proj.weight": (16, 8),
        "model.layers.0.mlp.up_proj.weight": (16, 8),
        "model.layers.0.mlp.down_proj.weight": (8, 16),
        "model.norm.weight": (8,),
        "lm_head.weight": (vocab, 8),
    }
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_names_are_fused_and_bytes_are_hashed_as_sglang_does(dtype: torch.dtype) -> None:
    """q, k, v and gate, up are one parameter each; vocabulary is padded to 64 rows, gate and up to 32 each."""
    t = tiny(dtype)
    layer = "model.layers.0."
    q, k, v = (t[f"{layer}self_attn.{x}_proj.weight"] for x in "qkv")
    gate, up = (t[f"{layer}mlp.{x}_proj.weight"] for x in ("gate", "up"))
    empty = torch.zeros(16, 8, dtype=dtype)
    row_bytes = 8 * dtype.itemsize
    expected = {
        "model.embed_tokens.weight": sha64(t["model.embed_tokens.weight"], padding=58 * row_bytes),
        f"{layer}self_attn.qkv_proj.weight": sha64(q, k, v),
        f"{layer}self_attn.q_norm.weight": sha64(t[f"{layer}self_attn.q_norm.weight"]),
        f"{layer}mlp.gate_up_proj.weight": sha64(gate, empty, up, empty),
        f"{layer}mlp.down_proj.weight": sha64(torch.cat([t[f"{layer}mlp.down_proj.weight"], empty.T], 1)),
        "model.norm.weight": sha64(t["model.norm.weight"]),
        "lm_head.weight": sha64(t["lm_head.weight"], padding=58 * row_bytes),
    }
    assert checksums(t.items(), tie_word_embeddings=False) == expected
    assert checksums(reversed(t.items()), tie_word_embeddings=False) == expected
    del expected["lm_head.weight"]
    assert checksums(t.items(), tie_word_embeddings=True) == expected


def test_one_changed_bit_changes_the_overall_checksum() -> None:
    """Overall depends on every byte and not on the order."""
    t = tiny()
    before = overall(checksums(t.items(), tie_word_embeddings=False))
    assert before == overall(checksums(reversed(t.items()), tie_word_embeddings=False))
    t["model.norm.weight"].view(torch.int32)[3] ^= 1
    assert before != overall(checksums(t.items(), tie_word_embeddings=False))


def test_conversion_to_the_engines_type() -> None:
    """A snapshot in fp32 that an engine holds in bf16 has the checksums of the bf16 tensors."""
    t = tiny()
    halved = {name: tensor.to(torch.bfloat16) for name, tensor in t.items()}
    wanted = checksums(halved.items(), tie_word_embeddings=False)
    assert checksums(t.items(), tie_word_embeddings=False, dtype=torch.bfloat16) == wanted


def test_missing_and_double_parts_are_refused() -> None:
    """Half a fused parameter never gets a checksum."""
    t = tiny()
    double = [*t.items(), ("model.norm.weight", t["model.norm.weight"])]
    with pytest.raises(ValueError, match="twice"):
        checksums(double, tie_word_embeddings=False)
    del t["model.layers.0.self_attn.k_proj.weight"]
    with pytest.raises(ValueError, match="qkv_proj"):
        checksums(t.items(), tie_word_embeddings=False)


def test_each_rank_of_an_engine_holds_its_part() -> None:
    """Two ranks: rows of q, k, v, gate, up and vocabulary, columns of down; with one kv head for both, both hold it."""
    t = tiny()
    layer = "model.layers.0."
    q, k, v = (t[f"{layer}self_attn.{x}_proj.weight"] for x in "qkv")
    sums = checksums(t.items(), tie_word_embeddings=False, layout=EngineLayout(2, kv_heads=2, cuda=False))
    for rank in (0, 1):
        half = slice(4 * rank, 4 * rank + 4), slice(2 * rank, 2 * rank + 2)
        assert sums[f"rank{rank}/{layer}self_attn.qkv_proj.weight"] == sha64(q[half[0]], k[half[1]], v[half[1]])
        assert sums[f"rank{rank}/model.norm.weight"] == sha64(t["model.norm.weight"])
        padded = torch.cat([t[f"{layer}mlp.down_proj.weight"], torch.zeros(8, 48)], 1)
        assert sums[f"rank{rank}/{layer}mlp.down_proj.weight"] == sha64(padded[:, 32 * rank : 32 * rank + 32])
    assert sums["rank1/lm_head.weight"] == sha64(t["lm_head.weight"][64:], padding=58 * 8 * 4)
    one = checksums(t.items(), tie_word_embeddings=False, layout=EngineLayout(2, kv_heads=1))
    assert one[f"rank1/{layer}self_attn.qkv_proj.weight"] == sha64(q[4:], k, v)
    with pytest.raises(ValueError, match="qkv_proj"):
        checksums(t.items(), tie_word_embeddings=False, layout=EngineLayout(3, kv_heads=2))


def test_the_hash_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal to what SGLang's own kernel answers (run under Triton's interpreter), however it is divided into chunks."""
    known = {
        "0eb9bb37557ba18e": torch.arange(40000, dtype=torch.float32),
        "aef4f752b4654d1d": torch.arange(-3, 4).to(torch.bfloat16),
        "d72b1c7df59e6b6b": torch.arange(8193 * 2).to(torch.bfloat16),
    }
    assert [gpu_hash.gpu_hash(tensor) for tensor in known.values()] == list(known)
    monkeypatch.setattr(gpu_hash, "_CHUNK_TILES", 1)
    assert [gpu_hash.gpu_hash(tensor) for tensor in known.values()] == list(known)
    assert gpu_hash.gpu_hash(torch.zeros(0)) == "0" * 16
    t = tiny()
    sums = checksums(t.items(), tie_word_embeddings=False, layout=EngineLayout(cuda=True))
    gate_up = torch.cat([t[f"model.layers.0.mlp.{x}_proj.weight"] for x in ("gate", "up")])
    assert sums["model.layers.0.mlp.gate_up_proj.weight"] == gpu_hash.gpu_hash(gate_up)


@pytest.mark.parametrize(
    ("settings", "gpu_here", "cuda"),
    [
        ({"kind": "embedded", "device": "cuda"}, True, False),
        ({"kind": "sglang", "device": "cpu"}, True, False),
        ({"kind": "sglang", "device": "auto"}, True, True),
        ({"kind": "attach", "device": "auto", "tensor_parallel_size": 2}, False, False),
        ({"kind": "attach", "device": "cuda"}, False, True),
    ],
)
def test_layout_of_a_recipes_engines(settings: dict[str, object], gpu_here: bool, cuda: bool) -> None:
    """A real SGLang hashes on its device; the embedded engine the same everywhere."""
    section = EngineSection.model_validate(settings)
    layout = engine_layout(section, kv_heads=2, gpu_here=gpu_here)
    assert (layout.cuda, layout.tensor_parallel_size) == (cuda, section.tensor_parallel_size)


def test_fused_names() -> None:
    """Biases are fused like weights; other names stay."""
    assert fused_name("model.layers.3.self_attn.v_proj.bias") == ("model.layers.3.self_attn.qkv_proj.bias", "v_proj")
    assert fused_name("model.layers.3.self_attn.o_proj.weight") == ("model.layers.3.self_attn.o_proj.weight", None)


@pytest.mark.parametrize("shard_bytes", [1 << 30, 700])
def test_snapshot_round_trip(tmp_path: Path, shard_bytes: int) -> None:
    """What is written is read back bit for bit, in one file or in shards, and again after a replacement."""
    path = tmp_path / "deep" / "v1"
    for dtype in (torch.float32, torch.bfloat16):
        t = tiny(dtype)
        size = snapshot.write_snapshot(path, t.items(), {"model_type": "llama"}, shard_bytes=shard_bytes)
        assert size == sum(tensor.nbytes for tensor in t.values())
        back = dict(snapshot.read_tensors(path))
        assert back.keys() == t.keys()
        assert all(torch.equal(back[name], tensor) for name, tensor in t.items())
    assert snapshot.read_config(path) == {"model_type": "llama"}
    assert [p.name for p in path.parent.iterdir()] == ["v1"]
    assert (path / snapshot.INDEX_FILE).exists() == (shard_bytes < 1000)


def test_views_and_shared_tensors_are_written(tmp_path: Path) -> None:
    """Rows of one buffer and one tensor under two names come back as they are."""
    buffer = torch.arange(12.0).view(4, 3)
    snapshot.write_snapshot(tmp_path / "v", [("a", buffer[:2]), ("b", buffer[2:]), ("c", buffer), ("d", buffer)], {})
    back = dict(snapshot.read_tensors(tmp_path / "v"))
    assert torch.equal(torch.cat([back["a"], back["b"]]), buffer)
    assert torch.equal(back["c"], back["d"])


def test_config_source_copies_all_but_weights(tmp_path: Path) -> None:
    """Tokenizer and configuration come along, old weights don't."""
    source = tmp_path / "source"
    snapshot.write_snapshot(source, tiny().items(), {"a": 1}, durable=False)
    (source / "tokenizer.json").write_text("{}")
    (source / "old.bin").write_text("x")
    snapshot.write_snapshot(tmp_path / "new", [("x", torch.zeros(2))], source)
    names = {file.name for file in (tmp_path / "new").iterdir()}
    assert names == {"config.json", "tokenizer.json", "model.safetensors"}
    assert dict(snapshot.read_tensors(tmp_path / "new")).keys() == {"x"}


def test_a_failure_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    """The old snapshot stays whole and no partial folder remains when the source of tensors fails."""
    path = tmp_path / "v1"
    snapshot.write_snapshot(path, tiny().items(), {"a": 1})

    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield "x", torch.zeros(2)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        snapshot.write_snapshot(path, failing(), {"a": 2})
    assert [p.name for p in tmp_path.iterdir()] == ["v1"]
    assert snapshot.read_config(path) == {"a": 1}


def test_unreadable_directories_say_what_is_wrong(tmp_path: Path) -> None:
    """Missing, truncated and malicious directories raise SnapshotError with the file's name."""
    with pytest.raises(snapshot.SnapshotError, match=r"no model\.safetensors"):
        snapshot.weight_files(tmp_path)
    with pytest.raises(snapshot.SnapshotError, match=r"config\.json"):
        snapshot.read_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(snapshot.SnapshotError, match="not a JSON object"):
        snapshot.read_config(tmp_path)
    (tmp_path / snapshot.SINGLE_FILE).write_bytes(b"\x10\x00\x00")
    with pytest.raises(snapshot.SnapshotError, match=r"model\.safetensors"):
        list(snapshot.read_tensors(tmp_path))
    for index in ({"weight_map": {"x": "../other.safetensors"}}, {"weight_map": 3}, {}):
        (tmp_path / snapshot.INDEX_FILE).write_text(json.dumps(index))
        with pytest.raises(snapshot.SnapshotError, match="index"):
            snapshot.weight_files(tmp_path)
