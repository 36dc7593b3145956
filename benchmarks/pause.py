"""How long an engine stands still for a publication, by the size of the model, and where that time goes.

Real engine and sidecar processes and the real publication saga, while the engine generates; in place of the trainer two
complete snapshots of a random model, published in turn. Staged, the engine switches between two tokens: `pause` is what
it says that this took, `transfer` the whole request, which waits for the token that is being made. `drained` is the
same with pause_mode drain: nothing is in flight, and the pause is the whole request. `load` is a publication where
nothing is staged (publication.staged = false), which is under a pause from `wait` to `resume`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch, and for the engine's process

import anyio
import torch
from plain import print_table
from transformers import LlamaConfig, LlamaForCausalLM

from hybridasync.bench.measure import Foreign, Spread, write_results
from hybridasync.config.models import Config
from hybridasync.config.pipeline import replace, resolve
from hybridasync.drivers.fleet import Engine, Fleet
from hybridasync.drivers.publish import Publisher, PublishParts
from hybridasync.drivers.staged import transfer_by_disk
from hybridasync.protocol.debts import Debts
from hybridasync.runtime.engines import running_engines
from hybridasync.transport.journal import JournalFile
from hybridasync.types import PauseMode, PublicationResult, SamplingParams, WeightSnapshot
from hybridasync.weights.checksums import checksums
from hybridasync.weights.snapshot import read_tensors

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SHAPES: Mapping[str, tuple[str, dict[str, int]]] = {
    "quick": ("fp32", {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}),
    "10M": ("fp32", {"vocab_size": 4096, "hidden_size": 320, "intermediate_size": 896, "num_hidden_layers": 7}),
    "135M": ("bf16", {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}),
}
IN_FLIGHT = 2
PARTS = ("stage_s", "wait_s", "transfer_s", "verify_s", "resume_s", "pause_s")


class Snapshots:
    """Stands in for the trainer: version v is snapshot v modulo 2."""

    def __init__(self, folders: list[Path]) -> None:
        tensors = [dict(read_tensors(folder)) for folder in folders]
        self._sums = [checksums(named.items(), tie_word_embeddings=True) for named in tensors]
        self._bytes = sum(tensor.nbytes for tensor in tensors[0].values())
        self._folders = folders

    async def export_weights(self, version: int, path: str) -> WeightSnapshot:
        which = version % 2
        return WeightSnapshot(version, str(self._folders[which]), self._sums[which], self._bytes, 0.0)

    async def decide(self, epoch: int, *, version: int, commit: bool) -> None:
        return None


class Sink:
    def publication(self, result: PublicationResult) -> None:
        return None

    def event(self, name: str, /, **fields: object) -> None:
        if fields.get("level") in ("warning", "error"):
            raise RuntimeError(f"{name}: {fields}")


def write_models(folder: Path, dtype: str, shape: Mapping[str, int]) -> list[Path]:
    heads = max(1, shape["hidden_size"] // 64)
    settings = {**shape, "num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": 64}
    for index in range(2):
        torch.manual_seed(index)
        config = LlamaConfig(**settings, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=0)
        LlamaForCausalLM(config).to(DTYPES[dtype]).save_pretrained(folder / str(index))
    return [folder / "0", folder / "1"]


def recipe(model: Path, dtype: str, run_dir: Path) -> Config:
    config = Config.model_validate(
        {
            "model": {"hf_checkpoint": str(model)},
            "run": {"dir": str(run_dir)},
            "data": {"prompt_data": "none.jsonl"},
            "rollout": {
                "num_rollout": 1,
                "rollout_batch_size": 1,
                "n_samples_per_prompt": 2,
                "max_response_tokens": 8,
            },
            "engine": {"dtype": dtype, "device": "cpu", "max_running_requests": 8},
        }
    )
    return resolve(config).config


async def publications(
    config: Config, engines: list[Engine], folders: list[Path], *, count: int, mode: PauseMode = "retract"
) -> list[Any]:
    trainer: Any = Snapshots(folders)
    sink: Any = Sink()
    run_dir = Path(config.run.dir or ".")
    parts = PublishParts(
        Fleet(engines),
        trainer,
        transfer_by_disk(config.publication, trainer, sink),
        journal=JournalFile(run_dir / "journal.jsonl"),
        debts=Debts(),
        sink=sink,
    )
    publisher = Publisher(config.publication, parts, session=uuid4().hex, mode=mode)
    async with anyio.create_task_group() as tasks:
        for number in range(0 if mode == "drain" else IN_FLIGHT):
            tasks.start_soon(generate, engines[0], number)
        results = [await publisher.publish(version, "unused", step=None) for version in range(count + 2)]
        tasks.cancel_scope.cancel()
    return results[2:]  # the first ones open files and import modules


async def generate(engine: Engine, number: int) -> None:
    """One request after the other."""
    params = SamplingParams(max_new_tokens=64, temperature=1.0, n=1)
    for again in itertools.count():
        await engine.server.generate(f"busy-{number}-{again}", [3, 4, 5], params)


async def measure(name: str, count: int) -> dict[str, Any]:
    dtype, shape = SHAPES[name]
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        (run_dir / "logs").mkdir(parents=True)
        folders = write_models(Path(folder), dtype, shape)
        size = sum(tensor.numel() for _, tensor in read_tensors(folders[0]))
        config = recipe(folders[0], dtype, run_dir)
        async with running_engines(config, run_dir) as engines:
            foreign = Foreign()
            staged = await publications(config, engines, folders, count=count)
            drained = await publications(config, engines, folders, count=count, mode="drain")
            loading = replace(config, {"publication.staged": False})
            loaded = await publications(loading, engines, folders, count=max(1, count // 4))
            others = foreign.share()
    return {
        "shape": name,
        "dtype": dtype,
        "parameters": size,
        "bytes": staged[0].bytes,
        "staged": {part: Spread.of(getattr(result, part) for result in staged) for part in PARTS},
        "drained": {part: Spread.of(getattr(result, part) for result in drained) for part in PARTS},
        "loaded": {part: Spread.of(getattr(result, part) for result in loaded) for part in PARTS},
        "foreign_cpu_share": others,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes = [name for name in SHAPES if name != "quick"]
    parser.add_argument("--shapes", nargs="+", choices=shapes, default=shapes, help="default: all")
    parser.add_argument("--rounds", type=int, default=20, help="publications of each shape (default 20)")
    parser.add_argument("--out", type=Path, help="file for the results, JSON")
    parser.add_argument("--quick", action="store_true", help="a tiny model: shows that it works")
    options = parser.parse_args()
    results = []
    for name in ["quick"] if options.quick else options.shapes:
        result = anyio.run(measure, name, 3 if options.quick else options.rounds)
        results.append(result)
        print(f"\n{name}: {result['parameters'] / 1e6:.1f} M parameters, {result['dtype']}; milliseconds\n")
        rows = [
            [part.removesuffix("_s"), *(_milliseconds(result[way][part]) for way in ("staged", "drained", "loaded"))]
            for part in PARTS
        ]
        print_table(("", "staged", "drained", "load"), rows)
    if options.out is not None:
        write_results(options.out, "pause", results)
    for way in ("staged", "drained"):
        pauses = [f"{1000 * result[way]['pause_s'].median:.2f} ms ({result['shape']})" for result in results]
        print(f"standstill, {way}: {', '.join(pauses)}")


def _milliseconds(spread: Spread) -> str:
    return str(Spread(*(1000 * value for value in (spread.median, spread.low, spread.high))))


if __name__ == "__main__":
    main()
