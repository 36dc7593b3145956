"""report.html: one file that shows how a run went, and that can be mailed: no script, no external resource."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import jinja2

from hybridasync.observability.findings import findings
from hybridasync.observability.jsonl import Row, complain, read, replace_atomically
from hybridasync.observability.progress import duration
from hybridasync.observability.summary import RunRecords, read_run

MAX_SAMPLES = 8
MAX_SAMPLE_CHARACTERS = 600


def write_report(run_dir: Path) -> Path | None:
    """Write report.html from the files of the run directory. None, and a word on stderr, if the disk won't have it."""
    path = run_dir / "report.html"
    try:
        replace_atomically(path, render(run_dir).encode("utf-8", "replace"))
    except OSError as error:
        complain(f"report.html: {error}")
        return None
    return path


def render(run_dir: Path) -> str:
    """The HTML text. Raises OSError if a file of the run can't be read."""
    from hybridasync.observability.charts import draw_all

    records = read_run(run_dir)
    return page(
        "hybridasync.observability",
        name=run_dir.resolve().name,
        status=str(records.summary.get("status", "running")),
        headline=headline(records),
        findings=findings(records),
        charts=draw_all(records.metrics, records.evaluations),
        evaluations=[_evaluation_cells(row) for row in records.evaluations],
        samples=_last_samples(run_dir),
        summary=json.dumps(records.summary, indent=2, ensure_ascii=False),
        config=records.config_toml,
    )


def page(package: str, **values: object) -> str:
    """The page `report.html.j2` of a package, filled in, with the style that all reports share."""

    def text(owner: str, name: str) -> str:
        return files(owner).joinpath(name).read_text(encoding="utf-8")

    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    style = text("hybridasync.observability", "report.css")
    return environment.from_string(text(package, "report.html.j2")).render(style=style, **values)


def headline(records: RunRecords) -> list[tuple[str, str]]:
    """Label and value of the numbers on top of the page; what isn't known is left out."""
    summary = records.summary
    first = records.evaluations[0] if records.evaluations else {}
    last = records.evaluations[-1] if records.evaluations else {}
    cells = [
        ("held-out accuracy, greedy", _from_to(first, last, "accuracy")),
        ("held-out accuracy, sampled", _from_to(first, last, "sampled_accuracy")),
        ("training steps", _integer(summary.get("steps"))),
        ("samples trained", _integer(summary.get("samples_trained"))),
        ("publications", _integer(summary.get("publications"))),
        ("weight version", _integer(summary.get("weight_version"))),
        ("response tokens / s", _integer(summary.get("response_tok_s"))),
        ("log-prob gap, same weights", _scientific(summary.get("logprob_gap_max"))),
        ("wall time", _duration(summary.get("wall_s"))),
        ("errors", _integer(summary.get("errors"))),
    ]
    return [(label, value) for label, value in cells if value]


def _from_to(first: Row, last: Row, name: str) -> str:
    before, after = first.get(name), last.get(name)
    if not isinstance(before, (int, float)) or not isinstance(after, (int, float)):
        return ""
    return f"{before:.1%}" if first is last else f"{before:.1%} → {after:.1%}"


def _integer(value: object) -> str:
    return f"{value:,.0f}" if isinstance(value, (int, float)) else ""


def _scientific(value: object) -> str:
    return f"{value:.1e}" if isinstance(value, (int, float)) else ""


def _duration(value: object) -> str:
    return duration(value) if isinstance(value, (int, float)) else ""


def _evaluation_cells(row: Row) -> list[str]:
    def share(name: str) -> str:
        return f"{value:.1%}" if isinstance(value := row.get(name), (int, float)) else "–"

    length = row.get("mean_response_tokens")
    return [
        _integer(row.get("step")),
        _integer(row.get("version")),
        share("accuracy"),
        share("sampled_accuracy"),
        f"{length:.1f}" if isinstance(length, (int, float)) else "–",
        share("truncated_fraction"),
        _scientific(row.get("logprob_gap_max")) or "–",
    ]


def _last_samples(run_dir: Path) -> list[Row]:
    latest: list[Row] = []
    for row in read(run_dir / "samples.jsonl"):
        if latest and latest[0].get("step") != row.get("step"):
            latest = []
        latest.append(row)
    return [
        {name: _cut(value) if isinstance(value, str) else value for name, value in row.items()}
        for row in latest[:MAX_SAMPLES]
    ]


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SAMPLE_CHARACTERS else text[:MAX_SAMPLE_CHARACTERS] + "…"
