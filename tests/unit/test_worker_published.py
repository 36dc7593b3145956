"""Exports of what changed: from the trainer's weights to the engine's, to the last bit, or everything instead."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.worker_kit import one_rank, save_model, tiny_config, tiny_hf

from hybridasync.engine.model_config import ModelConfig
from hybridasync.engine.weights import Weights, WeightStore
from hybridasync.errors import CheckpointError
from hybridasync.observability import names, resources
from hybridasync.types import WeightSnapshot
from hybridasync.weights.delta import DELTA_FILE, change_of
from hybridasync.weights.snapshot import read_tensors
from hybridasync.worker import export, hf_mapping, model, parallel
from hybridasync.worker.published import PublishedCopy
from hybridasync.worker.service import Worker


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with one_rank():
        yield


class Trainer:
    """A bf16 export of an fp32 model, and an engine that holds what was exported."""

    def __init__(self, folder: Path, *, tied: bool = True) -> None:
        path = save_model(tiny_hf("qwen3", tied=tied, vocab_size=100), folder / "source")
        bundle = model.build(tiny_config(path), path)
        hf_mapping.load_hf(bundle.gpt, path)
        self.gpt = bundle.gpt
        self.folder = folder
        self.published = PublishedCopy(compared=True)
        self.store = WeightStore(ModelConfig.from_directory(path), device=torch.device("cpu"), dtype=torch.bfloat16)
        self.engine: Weights | None = None

    def export(self, version: int, *, commit: bool | None = True) -> WeightSnapshot:
        path = self.folder / f"v{version}"
        taken = export.export_snapshot(self.gpt, version, path, dtype=torch.bfloat16, published=self.published)
        assert taken.pending and not path.exists()
        snapshot = export.write_taken(self.published, version, path)
        if commit is not None:
            self.published.decided(version, commit=commit)
        return snapshot

    def take(self, snapshot: WeightSnapshot) -> None:
        """As an engine does, and as the saga verifies it."""
        base = snapshot.base_version
        if base is None:
            self.engine = self.store.load(read_tensors(snapshot.path))
        else:
            assert self.engine is not None
            names = {"version": str(snapshot.version), "base_version": str(base)}
            self.engine = self.store.patched(self.engine, snapshot.path, **names)
        assert self.engine.checksums() == snapshot.checksums

    @torch.no_grad()
    def change(self, scale: float) -> None:
        """An update of every weight, relative to its size, of which bf16 shows a part."""
        for parameter in self.gpt.parameters():
            parameter.mul_(1 + scale * torch.randn_like(parameter))


@pytest.mark.parametrize("tied", [True, False])
def test_many_small_updates_arrive_to_the_last_bit(tmp_path: Path, tied: bool) -> None:
    """Twenty versions, each as a delta of a fraction of the size, verified by the checksums of the whole."""
    trainer = Trainer(tmp_path, tied=tied)
    first = trainer.export(0)
    trainer.take(first)
    assert (first.base_version, first.bytes, first.full_bytes) == (None, first.full_bytes, trainer.published.nbytes)
    for version in range(1, 21):
        trainer.change(1e-4)
        snapshot = trainer.export(version)
        assert snapshot.base_version == version - 1 and 0 < snapshot.bytes < 0.2 * snapshot.full_bytes
        assert [path.name for path in Path(snapshot.path).iterdir()] == [DELTA_FILE]
        trainer.take(snapshot)


def test_weights_that_did_not_change_are_an_empty_delta(tmp_path: Path) -> None:
    """The same weights under the next version: nothing to write, and the checksums stay."""
    trainer = Trainer(tmp_path)
    trainer.take(trainer.export(0))
    snapshot = trainer.export(1)
    assert (snapshot.base_version, snapshot.bytes) == (0, 0)
    trainer.take(snapshot)


def test_large_updates_are_written_whole(tmp_path: Path) -> None:
    """Where a delta wouldn't be smaller there is none, and the next one has its base all the same."""
    trainer = Trainer(tmp_path)
    trainer.take(trainer.export(0))
    trainer.change(0.5)
    whole = trainer.export(1)
    assert whole.base_version is None and whole.bytes == whole.full_bytes
    trainer.take(whole)
    trainer.change(1e-4)
    snapshot = trainer.export(2)
    assert snapshot.base_version == 1
    trainer.take(snapshot)


def test_comparing_stops_where_nearly_everything_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32 every weight changes at each update: after a tenth of them the rest isn't compared."""
    trainer = Trainer(tmp_path)
    trainer.export(0)
    trainer.change(0.5)
    compared: list[str] = []
    monkeypatch.setattr(
        "hybridasync.worker.published.change_of", lambda old, new: compared.append("x") or change_of(old, new)
    )
    assert trainer.export(1).base_version is None
    assert 0 < len(compared) < len(dict(trainer.published.tensors())) / 2


def test_a_version_that_no_engine_took_is_no_base(tmp_path: Path) -> None:
    """After an abort, and before a decision, everything is written; after the next commit differences again."""
    trainer = Trainer(tmp_path)
    trainer.export(0)
    assert trainer.export(1, commit=False).base_version == 0
    assert trainer.export(2, commit=None).base_version is None
    assert trainer.export(3).base_version is None
    assert trainer.export(4).base_version == 3


def test_the_version_exported_last_can_be_had_whole(tmp_path: Path) -> None:
    """For an engine that can't apply the delta, from the copy: training may have gone on meanwhile."""
    trainer = Trainer(tmp_path)
    trainer.export(0)
    trainer.change(1e-4)
    snapshot = trainer.export(1)
    trainer.change(0.5)
    written = export.export_published(trainer.gpt, trainer.published, 1, path=snapshot.path)
    assert written == snapshot.full_bytes
    loaded = trainer.store.load(read_tensors(snapshot.path))
    assert loaded.checksums() == snapshot.checksums
    with pytest.raises(CheckpointError, match="version 1 is held"):
        export.export_published(trainer.gpt, trainer.published, 2, path=snapshot.path)


def test_an_export_that_fails_leaves_no_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No space for the delta: an error with the path, nothing half-written; the next export is whole."""
    trainer = Trainer(tmp_path)
    trainer.export(0)
    trainer.change(1e-4)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("hybridasync.weights.delta.save_file", full)
        with pytest.raises(CheckpointError, match=r"version 1 .*No space left"):
            trainer.export(1, commit=None)
    assert list((tmp_path / "v1").iterdir()) == []
    with pytest.raises(CheckpointError, match="version None is held"):
        export.export_published(trainer.gpt, trainer.published, 1, path=tmp_path / "v1")
    snapshot = trainer.export(2)
    assert snapshot.base_version is None
    trainer.take(snapshot)


def test_known_checksums_are_those_of_what_is_held(tmp_path: Path) -> None:
    """Checksums are computed once for a set, shared with the next where tensors are, and again after a write."""
    trainer = Trainer(tmp_path)
    trainer.take(trainer.export(0))
    first = trainer.engine
    assert first is not None
    with torch.no_grad():
        next(iter(trainer.gpt.parameters())).view(-1)[0] += 1
    trainer.take(trainer.export(1))
    second = trainer.engine
    assert second is not None and second is not first
    shared = [name for name in first.named if second.named[name] is first.named[name]]
    assert len(shared) == len(first.named) - 1
    before = second.checksums()
    second.named["model.norm.weight"].add_(1)
    different = [name for name, value in second.checksums().items() if value != before[name]]
    assert different == ["model.norm.weight"]


def test_r120_allocated_and_reserved_memory_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R120: on CUDA both now and at most, in MiB, and the copy for deltas; clearing the cache asks torch for it."""
    worker = Worker(tiny_config(tmp_path, publication={"delta": True}))
    assert not any("reserved" in name for name in worker.memory())
    calls = []
    for name, value in {
        "is_available": lambda: True,
        "memory_allocated": lambda: 3 << 20,
        "max_memory_allocated": lambda: 4 << 20,
        "memory_reserved": lambda: 5 << 20,
        "max_memory_reserved": lambda: 6 << 20,
        "empty_cache": lambda: calls.append("cleared"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(parallel, "device", lambda: torch.device("cpu"))
    memory = {name: value for name, value in worker.memory().items() if not name.startswith("rss")}
    assert memory == {
        "published_copy_mib": 0,
        "allocated_mib": 3,
        "allocated_peak_mib": 4,
        "reserved_mib": 5,
        "reserved_peak_mib": 6,
    }
    assert {f"trainer_{name}" for name in memory} <= set(names.METRICS)
    worker.clear_cache()
    assert calls == ["cleared"]


def test_a_copy_is_made_where_publications_go_on_beside_training_and_memory_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at staleness 0, nor with keep_old_actor, nor where a container's limit leaves no room; for deltas always."""

    def pending(version: int, **sections: dict[str, Any]) -> bool:
        worker = Worker(tiny_config(path, **sections))
        monkeypatch.setattr(worker, "_ready", lambda: SimpleNamespace(bundle=bundle))
        return worker.export_weights(version, str(tmp_path / f"v{version}")).pending

    path = save_model(tiny_hf("qwen3", tied=True, vocab_size=100), tmp_path / "source")
    bundle = model.build(tiny_config(path), path)
    hf_mapping.load_hf(bundle.gpt, path)
    ahead: dict[str, dict[str, Any]] = {"rollout": {"max_staleness": 1}}
    assert pending(0, **ahead)
    assert not pending(1, rollout={"max_staleness": 0})
    assert not pending(2, **ahead, algorithm={"use_tis": True, "keep_old_actor": True})
    monkeypatch.setattr(resources, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("999999\n")
    assert resources.free_memory() == 1
    assert not pending(3, **ahead)
    assert pending(4, publication={"delta": True})
