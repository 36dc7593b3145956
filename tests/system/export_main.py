"""Run by test_sglang.py on two ranks: exports a model from a tensor-parallel and from a pipeline-parallel trainer.

export_main.py MODEL OUT      writes OUT/tp2, OUT/pp2 and OUT/tp2.json, OUT/pp2.json: the trainer's own checksums
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist
from tests.worker_kit import tiny_config

from hybridasync.weights.layout import EngineLayout
from hybridasync.worker import export, hf_mapping, model, parallel

ENGINES = EngineLayout(tensor_parallel_size=2, kv_heads=2)


def write(source: Path, out: Path, *, tp: int, pp: int) -> None:
    """One snapshot; all ranks of the default group take part."""
    parallel.init(tp, pp, 0)
    bundle = model.build(tiny_config(source), source)
    hf_mapping.load_hf(bundle.gpt, source)
    snapshot = export.export_snapshot(bundle.gpt, 1, out, engines=ENGINES)
    if dist.get_rank() == 0:
        out.with_suffix(".json").write_text(json.dumps(dict(snapshot.checksums)))
    parallel.close()


def main() -> None:
    source, out = map(Path, sys.argv[1:])
    dist.init_process_group("gloo")
    for name, tp, pp in (("tp2", 2, 1), ("pp2", 1, 2)):
        write(source, out / name, tp=tp, pp=pp)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
