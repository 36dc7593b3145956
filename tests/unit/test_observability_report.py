"""Progress display, summary and report."""

from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from hybridasync.observability.charts import draw_all, thin
from hybridasync.observability.findings import findings
from hybridasync.observability.progress import (
    NoProgress,
    PlainProgress,
    RichProgress,
    duration,
    make_progress,
    who_waits,
)
from hybridasync.observability.report import render, write_report
from hybridasync.observability.summary import RunRecords, read_run, write_summary

STEP: dict[str, Any] = {
    "reward_mean": 0.5, "accuracy": 0.5, "response_tok_s": 4000.0, "step_s": 1.0, "train_s": 0.3, "train_wait_s": 0.6,
    "engine_idle_s": 0.1, "publish_s": 0.05, "version_lag_mean": 1.0, "version_lag_max": 2.0, "pause_ms": 12.0,
    "response_tokens": 5.0, "entropy": 0.5, "logprob_gap_mean": 0.01, "logprob_gap_p99": 0.1,
}  # fmt: skip


def make_run(run_dir: Path, steps: int = 30) -> None:
    def lines(rows: list[dict[str, Any]]) -> str:
        return "".join(json.dumps(row) + "\n" for row in rows)

    metrics = [
        {"step": step, **STEP, "weight_version": step + 1, "publications": step + 2, "samples_trained": 8 * (step + 1)}
        for step in range(steps)
    ]
    evaluations = [
        {"step": step, "version": step, "accuracy": accuracy, "sampled_accuracy": accuracy - 0.05, "prompts": 64,
         "mean_response_tokens": 5.0, "truncated_fraction": 0.0, "logprob_gap_max": gap}
        for step, accuracy, gap in ((0, 0.2, 2e-6), (10, 0.6, 5e-6), (30, 0.9, 3e-6))
    ]  # fmt: skip
    sample = {"step": steps - 1, "prompt": "<script>alert(1)</script>", "response": "1259", "label": "1259"}
    sample |= {"reward": 1.0, "advantage": 0.7, "versions": [28, 29]}
    (run_dir / "metrics.jsonl").write_text(lines(metrics))
    (run_dir / "evaluations.jsonl").write_text(lines(evaluations))
    (run_dir / "samples.jsonl").write_text(lines([{**sample, "step": 0}, sample]))
    (run_dir / "config.resolved.toml").write_text('[model]\ndtype = "fp32"\n')


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.references: list[str] = []
        self.ids: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href") and value:
                self.references.append(value)
            if name == "id" and value:
                self.ids.append(value)


def test_the_summary_has_what_scripts_look_for(tmp_path: Path) -> None:
    """summary.json is built from the run's files: the counters, the first and the last evaluation, the largest gap."""
    make_run(tmp_path)
    write_summary(tmp_path, status="completed", wall_s=12.5, extra={"errors": 1})
    summary = json.loads((tmp_path / "summary.json").read_text())
    expected = {"status": "completed", "steps": 30, "weight_version": 30, "publications": 31, "samples_trained": 240}
    assert expected.items() <= summary.items()
    assert summary["eval"]["initial"]["accuracy"] == 0.2
    assert summary["eval"]["final"] == {
        "step": 30, "version": 30, "accuracy": 0.9, "sampled_accuracy": pytest.approx(0.85), "prompts": 64,
        "mean_response_tokens": 5.0, "truncated_fraction": 0.0,
    }  # fmt: skip
    assert (summary["logprob_gap_max"], summary["wall_s"], summary["errors"]) == (5e-6, 12.5, 1)


def test_a_run_that_did_nothing_has_a_summary_and_a_report(tmp_path: Path) -> None:
    """Without any file of the run both are written, with nulls and a word on what is missing."""
    summary = write_summary(tmp_path, status="failed", wall_s=0.1, extra={"error": "no engine came up"})
    assert summary["eval"] == {"initial": None, "final": None}
    assert write_report(tmp_path) == tmp_path / "report.html"
    page = (tmp_path / "report.html").read_text()
    assert "no engine came up" in page
    assert "No training step was completed" in page


def test_a_full_disk_costs_summary_and_report_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither raises when it can't be written; stderr says which file is missing."""
    make_run(tmp_path)
    (tmp_path / "summary.json").mkdir()
    (tmp_path / "report.html").mkdir()
    assert write_summary(tmp_path, status="completed", wall_s=1.0)["steps"] == 0
    assert write_report(tmp_path) is None
    said = capsys.readouterr().err
    assert "summary.json" in said
    assert "report.html" in said


def test_the_report_is_one_file_that_fetches_nothing(tmp_path: Path) -> None:
    """Eight charts inline, no script, no external reference, ids unique over the page, text of samples escaped."""
    make_run(tmp_path)
    write_summary(tmp_path, status="completed", wall_s=12.5)
    text = render(tmp_path)
    page = Page(text)
    assert page.tags.count("svg") == 8
    assert "script" not in page.tags
    assert all(reference.startswith("#") for reference in page.references)
    assert len(page.ids) == len(set(page.ids))
    assert not re.search(r"https?://|@import|url\((?!#)", text)
    assert "&lt;script&gt;alert" in text
    assert "20.0% → 90.0%" in text
    assert len(text) < 600_000


def test_a_long_run_makes_no_larger_report() -> None:
    """More rows than a curve can show are merged: means, and the largest for maxima."""
    rows: list[dict[str, object]] = [
        {"step": step, "reward_mean": step % 2, "version_lag_max": step % 2} for step in range(10_000)
    ]
    thinned = thin(rows)
    assert len(thinned) <= 400
    assert thinned[0]["reward_mean"] == pytest.approx(0.5, abs=0.05)
    assert thinned[0]["version_lag_max"] == 1
    (chart, lag) = draw_all(rows, [])
    assert (chart.title, lag.title) == ("Reward", "Staleness")
    assert len(chart.svg) < 120_000


def records(metrics: list[dict[str, object]], evaluations: list[dict[str, object]], **summary: object) -> RunRecords:
    return RunRecords(tuple(metrics), tuple(evaluations), {"status": "completed", **summary}, '[model]\ndtype = "fp32"')


@pytest.mark.parametrize(
    ("change", "level", "says"),
    [
        ({"train_wait_s": 0.7}, "warn", "generation is the bottleneck"),
        ({"train_wait_s": 0.0, "engine_idle_s": 0.5}, "info", "training is the bottleneck"),
        ({"train_wait_s": 0.1, "engine_idle_s": 0.1}, "good", "kept each other busy"),
        ({"publish_s": 0.4}, "warn", "update_weights_interval"),
        ({"truncated_fraction": 0.5}, "warn", "max_response_tokens"),
        ({"clip_fraction": 0.5}, "warn", "clip range"),
        ({"tis_clip_fraction": 0.5}, "warn", "very stale"),
        ({"effective_sample_size": 0.2}, "warn", "effective sample size is 20%"),
        ({"groups_filtered": 3.0}, "info", "3.0 groups a step"),
        ({"nan_inf": 2}, "bad", "2 values were not finite"),
        ({"errors": 4}, "warn", "4 warnings and errors"),
    ],
)
def test_each_trouble_has_its_sentence(change: dict[str, object], level: str, says: str) -> None:
    """What a run's numbers show is said with the setting that changes it."""
    found = findings(records([{"step": step, **STEP, **change} for step in range(10)], []))
    assert any(finding.level == level and says in finding.text for finding in found), found


def test_trainer_and_engine_that_disagree_come_first() -> None:
    """A log-prob gap beyond rounding in fp32 is the first thing to look at; a small one is said to be good."""
    rows = [{"step": step, "accuracy": 0.5, "logprob_gap_max": 0.2} for step in (0, 5)]
    assert "don't compute the same model" in findings(records([{"step": 0, **STEP}], rows))[0].text
    rows = [{**row, "logprob_gap_max": 1e-6} for row in rows]
    assert any(f.level == "good" and "same model" in f.text for f in findings(records([{"step": 0, **STEP}], rows)))


def test_falling_accuracy_and_entropy_are_said() -> None:
    """Both the wrong direction and the end of exploration are named."""
    metrics = [{"step": step, **STEP, "entropy": 1.0 / 10**step} for step in range(12)]
    texts = " ".join(
        f.text for f in findings(records(metrics, [{"step": 0, "accuracy": 0.9}, {"step": 9, "accuracy": 0.1}]))
    )
    assert "went from 90.0% to 10.0%" in texts
    assert "nearly deterministic" in texts


def test_a_torn_summary_reads_as_none(tmp_path: Path) -> None:
    """Files cut by a crash don't keep a report from being made of the rest."""
    make_run(tmp_path, steps=3)
    (tmp_path / "summary.json").write_text('{"status": "comp')
    assert read_run(tmp_path).summary == {}
    assert "running" in render(tmp_path)


def test_plain_progress_is_a_line_now_and_then() -> None:
    """Without a terminal: the phase and what it waits for, at most one line every two seconds, always the last step."""
    stream, now = io.StringIO(), iter(step * 0.5 for step in range(100))
    progress = PlainProgress(stream, clock=lambda: next(now))
    progress.phase("starting", waiting_for="engine-0")
    progress.phase("training", 20, completed=10)
    for _ in range(10):
        progress.advance(STEP)
    progress.note("evaluation: 50 %")
    progress.close()
    lines = [line.split(" ", 1)[1] for line in stream.getvalue().splitlines()]
    assert lines[0] == "starting, waiting for engine-0"
    assert lines[1] == "training, 20 steps, from step 10"
    assert lines[2].startswith(
        "training 11/20 · reward 0.500 · accuracy 0.500 · tok/s 4,000 · step 1.00 s · staleness 1.0 (max 2)"
    )
    assert "last pause 12 ms" in lines[2]
    assert "the trainer waits for samples 60% of the step" in lines[2]
    assert " left" in lines[2]
    assert lines[-2].startswith("training 20/20")
    assert len(lines) == 2 + 4 + 1


def test_rich_progress_shows_figures_and_leaves_notes() -> None:
    """On a terminal: bars, the figures of the last step and who waits; notes keep their brackets."""
    stream = io.StringIO()
    progress = RichProgress(stream, force_terminal=True)
    progress.phase("starting", waiting_for="the workers")
    progress.waiting_for("engine-0 to load the model")
    progress.phase("training", 2)
    progress.advance(STEP)
    progress.note("saved [bold]checkpoint[/bold]")
    progress.advance(STEP)
    progress.close()
    progress.close()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    for shown in (
        "engine-0 to load the model",
        "✓ starting",
        "2/2",
        "reward 0.500",
        "last pause 12 ms",
        "[bold]checkpoint[/bold]",
    ):
        assert shown in text, shown


@pytest.mark.parametrize("mode", ["rich", "plain", "off"])
def test_a_terminal_that_goes_away_ends_no_run(mode: Any) -> None:
    """Every call on a closed stream returns."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    progress = make_progress(mode, stream=stream)
    progress.phase("training", 3)
    progress.advance(STEP)
    progress.note("répété ✓ \ud800")
    stream.close()
    progress.note("gone")
    progress.advance(STEP)
    progress.phase("next", None)
    progress.close()
    assert stream.closed


def test_auto_is_plain_lines_where_there_is_no_terminal() -> None:
    """`auto` looks at the stream; `off` shows nothing."""
    assert isinstance(make_progress("auto", stream=io.StringIO()), PlainProgress)
    assert isinstance(make_progress("off"), NoProgress)


def test_durations_and_waiting_are_said_in_words() -> None:
    """Seconds, minutes and hours; nothing is claimed about waiting when it isn't known."""
    assert [duration(s) for s in (45, 200, 7500)] == ["45 s", "3 min 20 s", "2 h 05 min"]
    assert who_waits({"step_s": 1.0}) == ""
    assert who_waits({**STEP, "train_wait_s": 0.0, "engine_idle_s": 0.5}) == "the engines are idle 50% of the step"
