"""The files of a run directory, as written by RunSinks."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hybridasync.drivers.stepmetrics import batch_metrics, publication_metrics
from hybridasync.observability import names
from hybridasync.observability.clock import Stopwatch
from hybridasync.observability.resources import ResourceGauge
from hybridasync.observability.sinks import RunSinks, prometheus_text
from hybridasync.observability.summary import write_summary
from hybridasync.ports import MetricSink
from hybridasync.types import Completion, EvalResult, Group, Prompt, PublicationResult, Sample, VersionSpan


@dataclass(frozen=True)
class Settings:
    tensorboard: bool = False
    log_level: str = "info"
    samples_per_step: int = 3


@dataclass(frozen=True)
class Recipe:
    observability: Settings = Settings()


def make_sinks(run_dir: Path, settings: Settings | None = None) -> RunSinks:
    return RunSinks(run_dir, Recipe(settings or Settings()), echo=lambda _: None)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def evaluation(step: int, accuracy: float = 0.5) -> EvalResult:
    return EvalResult(
        version=step, step=step, accuracy=accuracy, sampled_accuracy=None, prompts=8, mean_response_tokens=5.0,
        truncated_fraction=0.0, logprob_gap_max=1e-6, wall_s=0.5,
    )  # fmt: skip


def group(uid: int, rewards: tuple[float, ...], version: int = 0) -> Group:
    prompt = Prompt(uid=uid, row=uid, epoch=0, source="sort", input_ids=(1,), text=f"q{uid}", label="1")
    samples = tuple(
        Sample(
            Completion(
                (7, 8), (-0.1, -0.2), (VersionSpan(version, 0, 1), VersionSpan(version + 1, 1, 2)), "stop", "e0"
            ),
            text=f"a{uid}.{index}",
            reward=reward,
            correct=reward > 0.5,
        )
        for index, reward in enumerate(rewards)
    )
    return Group(prompt, samples, partition=uid)


def test_run_sinks_are_a_metric_sink(tmp_path: Path) -> None:
    """RunSinks fits the port that the drivers speak to, the display's echo included."""
    sink: MetricSink = make_sinks(tmp_path)
    sink.event("run.started", name="fields may be called name")
    assert rows(tmp_path / "events.jsonl")[0]["name"] == "fields may be called name"


def test_the_record_of_groups_is_never_rewritten(tmp_path: Path) -> None:
    """groups.jsonl is appended to over starts: what a start makes again stands after its own row."""
    with_step = {"loss": 1.0}
    first = make_sinks(tmp_path)
    first.begin_at(0)
    first.group(0, "in_flight", partition=0)
    first.group(0, "trained", step=0)
    first.step(0, with_step)
    first.group(1, "in_flight", partition=1)
    first.sync()
    first.close()
    second = make_sinks(tmp_path)
    second.begin_at(0)
    second.group(0, "in_flight", partition=0)
    second.close()
    assert rows(tmp_path / "groups.jsonl") == [
        {"completed": 0},
        {"uid": 0, "state": "in_flight", "partition": 0},
        {"uid": 0, "state": "trained", "step": 0},
        {"uid": 1, "state": "in_flight", "partition": 1},
        {"completed": 0},
        {"uid": 0, "state": "in_flight", "partition": 0},
    ]
    assert rows(tmp_path / "metrics.jsonl") == []


def test_c53_the_step_column_strictly_increases_over_a_resume(tmp_path: Path) -> None:
    """A run that got to step 7 and resumes at step 5 leaves one row for each step, that of the resumed run."""
    first = make_sinks(tmp_path)
    for step in range(8):
        first.step(step, {"loss": 1.0})
        first.samples(step, [group(step, (1.0,))], {})
    first.evaluation(evaluation(5, accuracy=0.1))
    first.evaluation(evaluation(6, accuracy=0.2))
    first.close()
    resumed = make_sinks(tmp_path)
    resumed.rewind(5)
    for step in range(5, 10):
        resumed.step(step, {"loss": 2.0})
    resumed.close()
    metrics = rows(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(10))
    assert [row["loss"] for row in metrics] == [1.0] * 5 + [2.0] * 5
    assert [row["step"] for row in rows(tmp_path / "evaluations.jsonl")] == [5]
    assert [row["step"] for row in rows(tmp_path / "samples.jsonl")] == list(range(5))


def test_c53_samples_of_a_step_that_was_cut_off_are_dropped_on_a_resume(tmp_path: Path) -> None:
    """Killed between the samples of step 1 and its row: the resumed run's samples of step 1 stand alone."""
    first = make_sinks(tmp_path)
    first.step(0, {"loss": 1.0})
    first.samples(1, [group(7, (1.0,))], {})
    first.close()
    resumed = make_sinks(tmp_path)
    resumed.rewind(1)
    resumed.samples(1, [group(8, (1.0,))], {})
    resumed.close()
    assert [row["uid"] for row in rows(tmp_path / "samples.jsonl")] == [8]


def test_c53_a_step_reported_twice_is_one_row(tmp_path: Path) -> None:
    """Without an announced resume, too, a step that comes again replaces what the file had from there on."""
    sinks = make_sinks(tmp_path)
    for step in (0, 1, 2, 1):
        sinks.step(step, {"loss": float(step)})
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [0, 1]


def test_an_evaluation_that_comes_before_its_step_is_kept(tmp_path: Path) -> None:
    """The evaluation after step 0 may be filed before the metrics of step 0: neither drops the other."""
    sinks = make_sinks(tmp_path)
    sinks.evaluation(evaluation(0))
    sinks.evaluation(evaluation(1))
    sinks.step(0, {"loss": 1.0})
    assert [row["step"] for row in rows(tmp_path / "evaluations.jsonl")] == [0, 1]
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [0]


def test_values_that_are_not_finite_are_null_named_and_counted(tmp_path: Path) -> None:
    """NaN and infinities never make the file unreadable, and are not silently dropped."""
    sinks = make_sinks(tmp_path)
    sinks.step(0, {"loss": math.nan, "grad_norm": math.inf, "lr": 0.1, "weight_version": 3})
    (row,) = rows(tmp_path / "metrics.jsonl")
    assert (row["loss"], row["grad_norm"], row["lr"], row["weight_version"]) == (None, None, 0.1, 3)
    assert row["non_finite"] == ["grad_norm", "loss"]
    assert (row["nan_inf"], row["errors"]) == (2, 0)
    assert rows(tmp_path / "events.jsonl")[0]["event"] == "metrics.non_finite"


def test_errors_are_counted_over_a_resume(tmp_path: Path) -> None:
    """Each row says how many warnings and errors there were so far; a resume goes on counting; so says the summary."""
    for step in range(2):
        sinks = make_sinks(tmp_path)
        sinks.event("engine.lost", level="warning")
        sinks.event("engine.back")
        sinks.step(step, {"loss": 1.0})
        sinks.event("late", level="error")
        sinks.close()
    assert [row["errors"] for row in rows(tmp_path / "metrics.jsonl")] == [1, 3]
    assert write_summary(tmp_path, status="completed", wall_s=1.0)["errors"] == 4


def test_samples_are_spread_over_groups(tmp_path: Path) -> None:
    """Of each step as many samples as the recipe says, the first of each group first, with advantage and versions."""
    sinks = make_sinks(tmp_path)
    sinks.samples(4, [group(1, (1.0, 0.0)), group(2, (0.0, 1.0))], {1: [0.5, -0.5]})
    written = rows(tmp_path / "samples.jsonl")
    assert [row["response"] for row in written] == ["a1.0", "a2.0", "a1.1"]
    assert [row["advantage"] for row in written] == [0.5, None, -0.5]
    assert written[0]["versions"] == [0, 1]


def test_tensorboard_reads_the_curves_without_torch_or_tensorflow(tmp_path: Path) -> None:
    """Scalars are readable by TensorBoard, under group/name; a resume purges the steps that are run again."""
    for start, value in ((0, 1.0), (2, 5.0)):
        sinks = make_sinks(tmp_path, Settings(tensorboard=True))
        sinks.rewind(start)
        for step in range(start, 4):
            sinks.step(step, {"loss": value, "unheard_of": 1.0})
        sinks.evaluation(evaluation(4))
        sinks.close()
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert {"learning/loss", "other/unheard_of", "eval/accuracy"} <= set(board.Tags()["scalars"])
    assert {scalar.step: scalar.value for scalar in board.Scalars("learning/loss")} == {0: 1.0, 1: 1.0, 2: 5.0, 3: 5.0}


def test_a_full_disk_stops_no_sink(tmp_path: Path) -> None:
    """With no file that can be written all calls return, losses are counted and each file is spoken of once."""
    for name in ("metrics", "samples", "evaluations"):
        (tmp_path / f"{name}.jsonl").mkdir()
    (tmp_path / "events.jsonl").mkdir()
    (tmp_path / "tensorboard").write_text("in the way")
    (tmp_path / "metrics.prom").mkdir()
    said: list[str] = []
    sinks = RunSinks(tmp_path, Recipe(Settings(tensorboard=True)), echo=said.append)
    for step in range(3):
        sinks.step(step, {"loss": 1.0})
        sinks.samples(step, [group(step, (1.0,))], {})
        sinks.evaluation(evaluation(step))
    sinks.publication(PublicationResult(1, 0, ("e0",), 0.1, 0, 0, 0, 0, 0, 0.01, 10))
    sinks.close()
    assert sinks.lost >= 12
    for name in ("metrics.jsonl", "samples.jsonl", "evaluations.jsonl", "tensorboard", "metrics.prom"):
        assert sum(line.startswith(f"{name}:") for line in said) == 1, said


def test_the_prometheus_file_has_help_type_and_value(tmp_path: Path) -> None:
    """metrics.prom holds the last step only, in the text format that node_exporter collects."""
    sinks = make_sinks(tmp_path)
    sinks.step(0, {"step_s": 2.0})
    sinks.step(1, {"step_s": 1.5})
    text = (tmp_path / "metrics.prom").read_text()
    assert "# TYPE hybridasync_step_s gauge\nhybridasync_step_s 1.5\n" in text
    assert "hybridasync_step 1.0" in text
    assert "# HELP hybridasync_step_s end-to-end step time" in prometheus_text({"step_s": 1.0})


def test_the_metric_names_are_unique_and_explained() -> None:
    """Each name has a meaning, and the constants are exactly the registered names."""
    constants = {value for key, value in vars(names).items() if key.isupper() and isinstance(value, str)}
    assert constants == set(names.METRICS)
    assert all(metric.meaning and metric.name == name for name, metric in names.METRICS.items())


def test_what_the_step_reports_is_registered() -> None:
    """The numbers of a batch have names of the list, so that every display knows their unit and meaning."""
    groups = [group(1, (1.0, 0.0)), group(2, (1.0, 1.0))]
    assert set(batch_metrics(3, groups, groups[:1])) <= set(names.METRICS)
    assert set(publication_metrics(None)) <= set(names.METRICS)


def test_observability_starts_without_heavy_imports() -> None:
    """The controller's logs, sinks and display import neither torch, TensorFlow nor matplotlib."""
    modules = ("sinks", "progress", "summary", "report", "findings", "resources", "clock")
    imports = "\n".join(f"import hybridasync.observability.{module}" for module in modules)
    script = f"import sys\n{imports}\nprint(sorted({{'torch', 'tensorflow', 'matplotlib'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_a_stopwatch_counts_overlapping_intervals_once() -> None:
    """A phase with several open intervals lasts from first start to last stop; a lap cuts an open one in two."""
    watch = Stopwatch()
    watch.start("busy", 0.0)
    watch.start("busy", 1.0)
    watch.stop("busy", 2.0)
    assert watch.lap(3.0) == {"busy": 3.0}
    watch.stop("busy", 5.0)
    assert not watch.is_open("busy")
    assert watch.lap(9.0) == {"busy": 2.0}
    assert watch.lap(10.0) == {"busy": 0.0}
    with pytest.raises(ValueError, match="isn't open"):
        watch.stop("busy", 11.0)


def test_resources_of_vanished_processes_count_as_nothing() -> None:
    """A worker that died doesn't break the gauge; the controller's own memory is there."""
    sample = ResourceGauge().sample(trainer=[2**22 - 1], rollout=[os.getpid()])
    assert sample[names.TRAINER_RSS_MIB] == 0.0
    assert sample[names.CONTROLLER_RSS_MIB] > 1.0
    assert sample[names.ROLLOUT_RSS_MIB] > 1.0
