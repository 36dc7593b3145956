"""Resident memory of trainer and engine over many training steps: the slope that is left once everything is warm.

A run of the quick-start task with a tiny model, as `hybridasync train` does it. The slope is that of a straight line
through the second half of the steps (least squares); the first half fills caches and pools.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes of the run

import numpy as np
from plain import print_table

from hybridasync.bench.measure import write_results

ROLES = ("trainer_rss_mib", "rollout_rss_mib", "controller_rss_mib")
SHOWN = ("first", "half", "last", "slope_mib_per_1000_steps")
SERIES = 50  # values of each in the results
TIMEOUT_S = 7200


def slope(values: Sequence[float]) -> float:
    """MiB in 1,000 steps, of the second half."""
    half = values[len(values) // 2 :]
    return float(1000 * np.polyfit(np.arange(len(half)), half, 1)[0])


def run(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    settings = {
        "run.dir": folder / "run",
        "rollout.num_rollout": options.steps,
        "rollout.rollout_batch_size": 8,
        "rollout.n_samples_per_prompt": 4,
        "rollout.max_response_tokens": 8,
        "warm_start.steps": 0,
        "warm_start.data": "none",
        "algorithm.filter_zero_variance": "false",
        "eval.eval_interval": "none",
        "eval.eval_prompt_data": "none",
        "eval.eval_at_end": "false",
        "checkpoint.export_hf": "false",
        "observability.progress": "off",
        "observability.tensorboard": "false",
        **dict(setting.split("=", 1) for setting in options.set),
    }
    command = [sys.executable, "-m", "hybridasync_cli", "train", "quickstart"]
    for name, value in settings.items():
        command += ["--set", f"{name}={value}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="further settings")
    parser.add_argument("--out", type=Path, help="file for the results, JSON")
    parser.add_argument("--quick", action="store_true", help="few steps: shows that it works")
    options = parser.parse_args()
    if options.quick:
        options.steps = 8
    with tempfile.TemporaryDirectory() as folder:
        rows = run(Path(folder), options)
    result: dict[str, Any] = {"shape": "quick" if options.quick else "tiny", "steps": len(rows), "roles": {}}
    for role in ROLES:
        values = [float(row[role]) for row in rows]
        result["roles"][role] = {
            "first": values[0],
            "half": values[len(values) // 2],
            "last": values[-1],
            "slope_mib_per_1000_steps": slope(values),
            "series": values[:: max(1, len(values) // SERIES)],
        }
    print(f"{len(rows)} steps; MiB\n")
    header = ("", "first step", "half-way", "last step", "slope / 1,000 steps")
    print_table(
        header,
        [
            [role.removesuffix("_rss_mib"), *(f"{of[name]:.1f}" for name in SHOWN)]
            for role, of in result["roles"].items()
        ],
    )
    if options.out is not None:
        write_results(options.out, "memory", [result])


if __name__ == "__main__":
    main()
