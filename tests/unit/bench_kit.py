"""A finished benchmark without its runs: what trials leave on disk, written by hand."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hybridasync.bench.plan import FILE_NAME, Job, Plan
from hybridasync.bench.publication import WORK
from hybridasync.bench.readings import TRIALS
from hybridasync.bench.variants import settings_of

STEP_S = {"zero_kl": 1.25, "optimized": 1.0}
TOKENS, SAMPLES = 768.0, 32
START = 1_800_000_000.0


def plan(**changed: Any) -> Plan:
    values: dict[str, Any] = {
        "recipe": "bench-publication",
        "overrides": (),
        "variants": ("zero_kl", "optimized"),
        "trials": 2,
        "steps": 4,
        "first": 1,
        "last": 3,
        "blocking": False,
        "accept": ("optimized/zero_kl >= 1.05",),
    }
    return Plan(**(values | changed))


def manifest_of(job: Job) -> dict[str, Any]:
    return {
        "variant": job.variant,
        "trial": job.trial,
        "seed": job.seed,
        "declared": settings_of(job.variant, blocking=False),
        "config": {
            "seed": job.seed,
            "rollout.rollout_batch_size": 8,
            "rollout.n_samples_per_prompt": 4,
            "publication.update_weights_interval": 2 if job.variant == "optimized" else 1,
        },
        "data": {"prompts.jsonl": "0" * 64},
        "source": {"version": "0.1.0", "commit": "abc", "files": 1, "sha256": "1" * 64},
        "packages": {"torch": "2.13.0"},
        "machine": {
            "cpus": 2,
            "usable_cpus": 2,
            "processor": "a processor",
            "architecture": "x86_64",
            "memory_mib": 4096,
            "kernel": "6.1",
            "python": "3.11",
            "gpus": [],
        },
        "environment": {"OMP_NUM_THREADS": "1"},
    }


def write_trial(folder: Path, job: Job, steps: int) -> None:
    run = folder / "run"
    run.mkdir(parents=True)
    step_s, interval = STEP_S[job.variant], 2 if job.variant == "optimized" else 1
    rows, events, usage = [], [], []
    for step in range(steps):
        at = START + step_s * (step + 1)
        published = (step + 1) % interval == 0
        rows.append(
            {
                "step": step,
                "time": datetime.fromtimestamp(at, UTC).isoformat(),
                "step_s": step_s,
                "response_tokens_sum": TOKENS,
                "samples": float(SAMPLES),
                "publish_s": 0.25 if published else 0.0,
                "version_lag_mean": 2.0,
                "partition_lag_mean": 2.0,
            }
        )
        if published:
            event = {"event": "publication.completed", "step": step, "pause_s": 0.2, "prepare_s": 0.05, "bytes": 2**20}
            events.append(event)
        usage.append({"time": at - 0.1, "cpu_percent": 90.0, "engine_peak_mib": 300.0 + step, "trainer_peak_mib": 9.0})
    events.append({"event": "publication.completed", "step": None, "pause_s": 9.0})
    for name, content in (("run/metrics", rows), ("run/events", events), ("usage", usage)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    (folder / "manifest.json").write_text(json.dumps(manifest_of(job)))
    write_ended(folder, job, status="complete", steps=steps)


def write_ended(folder: Path, job: Job, *, status: str, steps: int) -> None:
    ended = {"variant": job.variant, "trial": job.trial, "seed": job.seed, "status": status, "steps": steps}
    rest = {"returncode": 0, "wall_s": 20.0, "start_s": 8.0, "attempts": 1, "reason": ""}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trial.json").write_text(json.dumps(ended | rest))


def write_runs(out: Path, made: Plan) -> Path:
    """All trials of the plan, complete, under `out`; answers the working folder."""
    work = out / WORK
    work.mkdir(parents=True)
    (work / FILE_NAME).write_text(made.to_json())
    for job in made.jobs():
        write_trial(work / TRIALS / job.name, job, made.steps)
    return work
