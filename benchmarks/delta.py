"""Delta against full publications: bytes, times, and whether the engine's weights are the trainer's to the last bit.

A real trainer (Megatron, Adam in fp32 over bf16 weights, policy-gradient steps on random groups) and a real engine
process. After each step the weights are published as a delta; every `--full-every` steps complete weights are exported
and staged as well, for comparison, without being switched to. The checksums that the engine reads back are compared
with the trainer's after every switch, and at the end with those of complete weights.

Without `--model` the model is SmolLM2-135M out of the package that the recipe smollm2-arithmetic names.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch, and for the engine's process

import anyio
import torch
import torch.distributed as dist
from plain import print_table
from transformers import LlamaConfig, LlamaForCausalLM

from hybridasync.bench.measure import Foreign, Spread, write_results
from hybridasync.config.models import Config
from hybridasync.config.pipeline import resolve
from hybridasync.data.smollm2 import prepare
from hybridasync.transport.sglang import SglangServer
from hybridasync.types import TrainBatch, TrainSample, WeightSnapshot
from hybridasync.weights.checksums import checksums
from hybridasync.weights.snapshot import read_tensors, write_snapshot
from hybridasync.worker import export
from hybridasync.worker.model import DTYPES
from hybridasync.worker.service import Worker

START_TIMEOUT_S = 120.0
TINY = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="Hugging Face directory; default: SmolLM2-135M")
    parser.add_argument("--layers", type=int, help="keep only the first so many layers")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--publications", type=int, default=50)
    parser.add_argument("--full-every", type=int, default=10, help="compare with complete weights every so many steps")
    parser.add_argument("--groups", type=int, default=2, help="groups of 4 samples of 64 tokens in a step")
    parser.add_argument("--out", type=Path, help="file for the results, JSON")
    parser.add_argument("--quick", action="store_true", help="a tiny random model: shows that it works")
    return parser.parse_args()


def model_of(options: argparse.Namespace, folder: Path) -> Path:
    if options.quick:
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
        torch.manual_seed(0)
        config = LlamaConfig(**TINY, **heads, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=0)
        LlamaForCausalLM(config).save_pretrained(folder / "tiny")
        return folder / "tiny"
    source = options.model
    if source is None:
        prepare(folder / "smollm2", seed=0)
        source = folder / "smollm2" / "model"
    return _shortened(source, options.layers, folder / "model") if options.layers else source


def _shortened(source: Path, layers: int, target: Path) -> Path:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
    kept = [
        (name, tensor)
        for name, tensor in read_tensors(source)
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < layers
    ]
    write_snapshot(target, kept, json.loads((target / "config.json").read_text()), files_from=source)
    return target


def recipe(model: Path, options: argparse.Namespace) -> Config:
    config = Config.model_validate(
        {
            "mode": "sync",
            "model": {"hf_checkpoint": str(model), "dtype": options.dtype},
            "data": {"prompt_data": "none.jsonl"},
            "rollout": {
                "num_rollout": options.publications,
                "rollout_batch_size": options.groups,
                "n_samples_per_prompt": 4,
                "max_response_tokens": 64,
            },
            "optimizer": {"lr": options.lr},
            "publication": {"delta": True},
        }
    )
    return resolve(config).config


def batch_of(step: int, *, groups: int, vocabulary: int) -> TrainBatch:
    """Random tokens, half of each group rewarded: real gradients of the policy loss."""
    rng = random.Random(step)
    samples = [
        TrainSample(
            group=group,
            input_ids=tuple(rng.randrange(3, vocabulary) for _ in range(96)),
            response_start=32,
            rollout_logprobs=(-1.0,) * 64,
            advantage=1.0 if member % 2 else -1.0,
            oldest_version=step,
        )
        for group in range(groups)
        for member in range(4)
    ]
    return TrainBatch(step, "policy", tuple(samples))


@contextmanager
def trainer(config: Config) -> Iterator[Worker]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    worker = Worker(config)
    try:
        worker.setup()
        worker.start_phase("rl", config.rollout.num_rollout or 1)
        yield worker
    finally:
        worker.close()
        dist.destroy_process_group()


@contextmanager
def engine(model: Path, dtype: str, folder: Path) -> Iterator[str]:
    announce = folder / "engine.json"
    command = [sys.executable, "-m", "hybridasync.engine", "--model-path", str(model), "--dtype", dtype, "--port", "0"]
    with (folder / "engine.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--announce", str(announce), "--max-total-tokens", "4096"], stdout=log, stderr=log
        )
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not announce.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((folder / "engine.log").read_text()[-2000:])
            time.sleep(0.1)
        yield str(json.loads(announce.read_text())["url"])
    finally:
        process.terminate()
        process.wait(20)


class Comparison:
    """Publications of one trainer to one engine, timed."""

    def __init__(self, worker: Worker, server: SglangServer, folder: Path, *, dtype: str) -> None:
        self._worker = worker
        self._server = server
        self._folder = folder
        self._dtype = DTYPES[dtype]
        self.delta: list[dict[str, float]] = []
        self.full: list[dict[str, float]] = []
        self.unequal: list[int] = []

    async def publish(self, version: int, *, compare: bool) -> None:
        if compare:
            gpt = self._worker._ready().bundle.gpt
            path = self._folder / "full"
            snapshot = export.export_snapshot(gpt, version, path, dtype=self._dtype)
            self.full.append(await self._stage(snapshot))
            shutil.rmtree(path)
        path = self._folder / f"v{version}"
        taken = self._worker.export_weights(version, str(path))
        snapshot = self._worker.write_weights(version, str(path))
        row = await self._stage(snapshot)
        row["export_s"] += taken.prepare_s
        started = time.perf_counter()
        await self._server.switch(snapshot, "retract")
        row["switch_s"] = time.perf_counter() - started
        if await self._server.checksums() != snapshot.checksums:
            self.unequal.append(version)
        self._worker.decide(version, version=version, commit=True)
        if snapshot.base_version is not None:
            self.delta.append(row)
        shutil.rmtree(path)

    async def check_complete(self, version: int) -> None:
        """What the engine serves against complete weights, written from the trainer once more."""
        path = self._folder / "last"
        snapshot = export.export_snapshot(self._worker._ready().bundle.gpt, version, path, dtype=self._dtype)
        written = checksums(read_tensors(path), tie_word_embeddings="lm_head.weight" not in dict(read_tensors(path)))
        if not await self._server.checksums() == written == snapshot.checksums:
            self.unequal.append(-1)

    async def _stage(self, snapshot: WeightSnapshot) -> dict[str, float]:
        started = time.perf_counter()
        if not await self._server.stage(snapshot):
            raise RuntimeError("the engine can't stage")
        staged_s = time.perf_counter() - started
        return {"bytes": snapshot.bytes, "export_s": snapshot.prepare_s, "stage_s": staged_s}


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    model = model_of(options, folder)
    config = recipe(model, options)
    with ExitStack() as stack:
        worker = stack.enter_context(trainer(config))
        url = stack.enter_context(engine(model, options.dtype, folder))
        async with SglangServer("engine", url, control_timeout_s=600, request_timeout_s=600) as server:
            comparison = Comparison(worker, server, folder, dtype=options.dtype)
            foreign = Foreign()
            await comparison.publish(0, compare=True)
            vocabulary = worker._ready().bundle.hf.vocab_size
            for step in range(options.publications):
                worker.train_step(batch_of(step, groups=options.groups, vocabulary=vocabulary))
                await comparison.publish(step + 1, compare=(step + 1) % options.full_every == 0)
            await comparison.check_complete(options.publications)
            others = foreign.share()
        copy_mib = worker.memory()["published_copy_mib"]
    full_bytes = comparison.full[0]["bytes"]
    return {
        "shape": "quick" if options.quick else (options.model or Path("SmolLM2-135M")).name,
        "layers": options.layers,
        "dtype": options.dtype,
        "lr": options.lr,
        "publications": options.publications,
        "deltas": len(comparison.delta),
        "unequal": comparison.unequal,
        "full_bytes": full_bytes,
        "bytes_share": Spread.of(row["bytes"] / full_bytes for row in comparison.delta) if comparison.delta else None,
        "delta": _spreads(comparison.delta),
        "full": _spreads(comparison.full),
        "published_copy_mib": copy_mib,
        "foreign_cpu_share": others,
    }


def _spreads(rows: list[dict[str, float]]) -> dict[str, Spread]:
    return {name: Spread.of(row[name] for row in rows) for name in rows[0]} if rows else {}


def main() -> None:
    options = options_of()
    if options.quick:
        options.publications, options.full_every, options.lr = min(options.publications, 5), 2, 1e-5
    with tempfile.TemporaryDirectory(dir=_memory()) as folder:
        result = anyio.run(measure, options, Path(folder))
    print(f"{result['publications']} publications, {result['dtype']}, learning rate {result['lr']:g}\n")
    delta, full = result["delta"], result["full"]
    rows = [
        ["MB written", *(_scaled(way.get("bytes"), 1e-6) for way in (delta, full))],
        ["export, s", *(way.get("export_s", "–") for way in (delta, full))],
        ["stage, s", *(way.get("stage_s", "–") for way in (delta, full))],
        ["switch, ms", _scaled(delta.get("switch_s"), 1e3), "–"],
    ]
    print_table(("", "delta", "full"), rows)
    share = _scaled(result["bytes_share"], 100.0)
    print(f"\ndelta / full: {share} % of the bytes; {result['deltas']} of {result['publications']} were deltas")
    print(f"the trainer's copy: {result['published_copy_mib']:.0f} MiB")
    print(f"engine's weights not the trainer's after publications: {result['unequal'] or 'none'}")
    if options.out is not None:
        write_results(options.out, "delta", [result])
    if result["unequal"]:
        raise SystemExit(1)


def _memory() -> Path | None:
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else None


def _scaled(spread: Spread | None, factor: float) -> str:
    return str(Spread(*(factor * value for value in (spread.median, spread.low, spread.high)))) if spread else "–"


if __name__ == "__main__":
    main()
