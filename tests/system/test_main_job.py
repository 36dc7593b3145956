"""`hybridasync train`, whole: the main job to its floor, and short runs of the other modes, layouts and objectives.

Real processes throughout: the command, torchrun, Megatron workers, sidecars and engines.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer
from whole_run import SHORT, Run, train

from hybridasync.data.jsonl import read_rows
from hybridasync.transport.weights import SnapshotFolder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

REWARDS = '''
"""Scores that tell any two answers apart, so that a policy without training has something to learn from."""


def score(response, label):
    return sum(map(ord, response)) % 7 / 6


async def score_group(responses, labels, prompts):
    assert len(responses) == len(labels) == len(prompts)
    return [score(response, label) for response, label in zip(responses, labels)]
'''

EVERY_SAMPLE = {"observability.samples_per_step": 16, "algorithm.filter_zero_variance": False}


@pytest.fixture(scope="module")
def main_job(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = train(tmp_path_factory.mktemp("main"), {})
    assert run.returncode == 0, run.explain()
    return run


def short(directory: Path, settings: Mapping[str, object], *options: str) -> Run:
    """A run of a few steps that has to end well, with nothing left of it and nothing of it open to the network."""
    (directory / "rewards.py").write_text(REWARDS)
    run = train(directory, {"reward.function": "rewards:score"} | SHORT | EVERY_SAMPLE | settings, *options)
    assert run.returncode == 0, run.explain()
    check_clean(run)
    check_bounds(run)
    return run


def check_clean(run: Run) -> None:
    assert run.left == frozenset()
    assert run.listening <= {"127.0.0.1"}, run.listening
    assert run.summary["status"] == "completed"
    assert (run.summary["errors"], run.summary["nan_inf"]) == (0, 0), [
        row for row in run.rows("events") if row["level"] != "info"
    ]
    snapshots = SnapshotFolder(run.directory, None, local=True, model_bytes=0)
    assert not Path(snapshots.path(0)).parent.exists()


def check_bounds(run: Run) -> None:
    """Steps in order; no sample from the future, none older than the bounds admit."""
    resolved = tomllib.loads((run.directory / "config.resolved.toml").read_text())
    staleness, interval = resolved["rollout"]["max_staleness"], resolved["publication"]["update_weights_interval"]
    steps = run.column("step")
    assert steps == list(range(run.summary["steps"]))
    assert run.column("weight_version") == [step + 1 for step in steps]
    assert max(run.column("partition_lag_max")) <= staleness
    assert max(run.column("version_lag_max")) <= staleness + interval - 1
    for sample in run.rows("samples"):
        oldest, newest = sample["versions"]
        assert 0 <= oldest <= newest <= sample["step"]
        assert 0 <= sample["step"] - sample["partition"] <= staleness


def test_main_job_learns_to_sort(main_job: Run) -> None:
    """Held-out accuracy, sampled, rises by 0.3 and to 0.5 at least, with equal log-probs on both sides."""
    initial, final = main_job.summary["eval"]["initial"], main_job.summary["eval"]["final"]
    assert initial["accuracy"] <= 0.35
    assert final["sampled_accuracy"] >= max(0.5, initial["sampled_accuracy"] + 0.3)
    assert final["accuracy"] >= 0.7
    assert (initial["step"], initial["version"], final["step"], final["version"]) == (0, 0, 60, 60)
    assert main_job.summary["logprob_gap_max"] <= 1e-4
    assert main_job.column("logprob_gap_max")[0] <= 1e-4  # these samples are of the weights that train on them
    assert min(main_job.column("effective_sample_size")) > 0.3  # later ones are of weights one step older


def test_main_job_keeps_its_books(main_job: Run) -> None:
    """Publications, samples and steps add up, ages stay within the bounds, and all processes and folders are gone."""
    check_clean(main_job)
    check_bounds(main_job)
    summary = main_job.summary
    assert (summary["steps"], summary["weight_version"], summary["publications"]) == (60, 60, 61)
    published = main_job.events("publication.completed")
    assert [row["version"] for row in published] == list(range(61))
    trained = main_job.column("samples_trained")
    assert trained == sorted(trained) and summary["samples_trained"] == trained[-1]
    kept = [16 * (16 - filtered) for filtered in main_job.column("groups_filtered")]
    assert trained[-1] == sum(kept)
    assert {"error", "wall_s"} & summary.keys() == {"wall_s"}


def test_main_job_leaves_a_complete_run_directory(main_job: Run) -> None:
    """Every file that the documents name is there and readable; the report needs nothing from elsewhere.

    There is no journal: its engines switch, so that nothing was ever owed.
    """
    names = {path.name for path in main_job.directory.iterdir()}
    assert names >= {
        *("config.resolved.toml", "events.jsonl", "metrics.jsonl", "samples.jsonl", "evaluations.jsonl"),
        *("summary.json", "report.html", "tensorboard", "checkpoints", "hf", "prepared", "logs"),
    }
    assert "journal.jsonl" not in names
    assert [path.name for path in (main_job.directory / "checkpoints").glob("step_*")] == ["step_000060"]
    report = (main_job.directory / "report.html").read_text()
    assert "<svg" in report and not re.search(r"https?://(?!www\.w3\.org/)", report)
    board = EventAccumulator(str(main_job.directory / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("learning/reward_mean")] == list(range(60))
    assert [event.step for event in board.Scalars("eval/accuracy")] == [0, 30, 60]


def test_main_job_exports_a_policy_for_transformers(main_job: Run) -> None:
    """hf/ loads in transformers, and its greedy answers are as accurate as the engine's."""
    tokenizer = AutoTokenizer.from_pretrained(main_job.directory / "hf")
    model = AutoModelForCausalLM.from_pretrained(main_job.directory / "hf", dtype=torch.float32)
    rows = read_rows(main_job.directory / "prepared" / "eval.jsonl", setting="eval.eval_prompt_data")
    given = tokenizer([row.fields["prompt"] for row in rows], return_tensors="pt")  # all of one length
    made = model.generate(**given, max_new_tokens=8, do_sample=False)[:, given.input_ids.shape[1] :]
    answers = tokenizer.batch_decode(made, skip_special_tokens=True)
    right = sum(answer == row.fields["label"] for answer, row in zip(answers, rows, strict=True))
    assert right / len(rows) == pytest.approx(main_job.summary["eval"]["final"]["accuracy"], abs=1 / 256 + 1e-9)


def test_resolved_configuration_runs_again(main_job: Run, tmp_path: Path) -> None:
    """config.resolved.toml is a recipe by itself: a dry run of it resolves to the same settings."""
    written = main_job.directory / "config.resolved.toml"
    again = train(tmp_path, {}, "--dry-run", recipe=str(written))
    assert again.returncode == 0, again.output
    settings = [line for line in written.read_text().splitlines() if re.match(r"\w+ = ", line)]
    assert [line for line in settings if line not in again.output] == []


def test_sync_mode_is_on_policy(tmp_path: Path) -> None:
    """Mode sync, two data-parallel workers, mean of means, KL loss and entropy: no sample is ever stale."""
    run = short(
        tmp_path,
        {
            "parallel.num_workers": 2,
            "parallel.use_distributed_optimizer": True,
            "algorithm.loss_aggregation": "sequence_mean",
            "algorithm.use_kl_loss": True,
            "algorithm.kl_loss_coef": 0.05,
            "algorithm.entropy_coef": 0.01,
            "model.ref_load": "{prepared}/model",
        },
        *("--mode", "sync"),
    )
    assert run.column("partition_lag_max") == run.column("version_lag_max") == [0, 0, 0, 0]
    assert all(sample["versions"] == [sample["step"], sample["step"]] for sample in run.rows("samples"))
    assert max(run.column("logprob_gap_max")) <= 1e-4  # the samples trained on are those of the same weights
    assert run.column("has_reference_forward") == [1, 1, 1, 1]
    assert min(run.column("kl")) > 0 and min(run.column("entropy")) > 0
    assert run.column("samples_trained") == [16, 32, 48, 64]


def test_fully_async_mode_keeps_requests_through_publications(tmp_path: Path) -> None:
    """Samples begin under one weight version and go on under the next, over two engines, within the bounds."""
    run = short(
        tmp_path,
        {
            "reward.function": "rewards:score_group",
            "reward.batched": True,
            "rollout.num_rollout": 6,
            "rollout.max_response_tokens": 100,
            "engine.num_engines": 2,
            "warm_start.steps": 0,
        },
        *("--mode", "fully_async"),
    )
    samples = run.rows("samples")
    assert any(oldest < newest for oldest, newest in (sample["versions"] for sample in samples))
    assert {sample["engine"] for sample in samples} == {"engine-0", "engine-1"}
    assert all(sorted(row["engines"]) == ["engine-0", "engine-1"] for row in run.events("publication.completed"))
    assert run.summary["publications"] == 7


def test_publication_interval_over_pipeline_stages(tmp_path: Path) -> None:
    """Every second step publishes, and the last one; the others don't touch the engines. Dr.GRPO on two stages."""
    run = short(
        tmp_path,
        {
            "rollout.num_rollout": 5,
            "parallel.num_workers": 2,
            "parallel.pipeline_model_parallel_size": 2,
            "parallel.recompute_activations": True,
            "algorithm.advantage": "dr_grpo",
            "algorithm.loss_aggregation": "constant",
            "publication.clear_cache_on_skipped_steps": True,
        },
        *("--update-weights-interval", "2"),
    )
    published = [(row["step"], row["version"]) for row in run.events("publication.completed")]
    assert published == [(None, 0), (1, 2), (3, 4), (4, 5)]
    assert run.column("publications") == [1, 2, 2, 3, 4]
    assert [pause == 0 for pause in run.column("pause_ms")] == [True, False, True, False, False]
    versions = {version for sample in run.rows("samples") for version in sample["versions"]}
    assert versions <= {0, 2, 4}


def test_bf16_over_tensor_parallel_workers(tmp_path: Path) -> None:
    """Two updates a step in bf16, the engine's log-probs as the old ones, on a model split over two workers.

    At a small learning rate what changed is published, gathered from both, and each time verified by its checksums.
    """
    run = short(
        tmp_path,
        {
            "model.dtype": "bf16",
            "parallel.num_workers": 2,
            "parallel.tensor_model_parallel_size": 2,
            "optimizer.global_batch_size": 8,
            "optimizer.lr": 1e-6,
            "optimizer.min_lr": 0.0,
            "publication.delta": True,
            "algorithm.use_tis": False,
            "algorithm.use_rollout_logprobs": True,
        },
    )
    assert run.column("optimizer_updates") == [2, 2, 2, 2]
    publications = run.events("publication.completed")
    assert [row["kind"] for row in publications] == ["full", "delta", "delta", "delta", "delta"]
    assert all(0 < row["bytes"] < row["full_bytes"] for row in publications[1:])
    assert run.column("publish_delta") == [1, 1, 1, 1] and min(run.column("trainer_published_copy_mib")) > 0
    assert run.summary["logprob_gap_max"] <= 0.2  # bf16 rounds to 8 bits on each side


def test_refill_with_math_verify(tmp_path: Path) -> None:
    """Groups without variance are replaced until a batch is full, with rewards by math-verify: each step is whole."""
    run = short(
        tmp_path,
        {
            "reward.function": "math_verify",
            "algorithm.filter_zero_variance": True,
            "algorithm.refill": True,
            "algorithm.max_gen_batches": 50,
            "warm_start.steps": 80,
            "prepare.args.digits": 2,
        },
    )
    assert run.column("samples_trained") == [16, 32, 48, 64]
    assert sum(run.column("groups_filtered")) > 0
    assert all(0 < reward < 1 for reward in run.column("reward_group_mean"))
