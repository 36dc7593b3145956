"""report.md, report.html and the tables. The texts are made of the results alone, so that they can be made again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hybridasync.bench.manifest import NAMED
from hybridasync.bench.measures import MEASURES
from hybridasync.bench.results import Compared, Results, Verdict, paired_csv, step_metrics_csv, summary_csv
from hybridasync.bench.variants import VARIANTS, compared_with, settings_of
from hybridasync.observability.charts import Chart
from hybridasync.observability.report import page

NOISY_PERCENT = 10.0
"""Share of the machine that other programs took, from which on the report says that it wasn't quiet."""

Table = tuple[Sequence[str], Sequence[Sequence[str]]]

MAIN = ("response_tok_s", "step_s", "publish_share", "pause_ms", "pause_ms_max", "version_lag_mean", "publication_lag")
_TIMES = (
    "train_s",
    "train_wait_s",
    "engine_idle_s",
    "export_s",
    "stage_s",
    "drain_s",
    "wait_s",
    "transfer_s",
    "verify_s",
    "resume_s",
)
_USE = (
    "cpu_percent",
    "trainer_cpu_percent",
    "engine_cpu_percent",
    "controller_cpu_percent",
    "trainer_peak_mib",
    "rollout_peak_mib",
    "trainer_reserved_mib",
    "published_mib",
)
_LEARNING = ("ratio_mean", "clip_fraction", "tis_mean", "tis_clip_fraction", "reward_mean")

BOUNDARY = (
    "What this doesn't show: whether a variant learns as well as another. The runs are short, their learning rate is "
    "small, and no held-out accuracy is measured, so no claim about convergence follows. Times are of this machine, "
    "this model and this length of responses; the share of a publication falls as steps get longer and grows with the "
    "model. The interval says how far trials and steps of this kind scatter here, not how other workloads would do."
)


def documents(results: Results) -> dict[str, str]:
    """Everything that is made of numbers alone, by file name."""
    return {
        "report.md": markdown(results),
        "summary.csv": summary_csv(results),
        "step_metrics.csv": step_metrics_csv(results),
        "paired.csv": paired_csv(results),
    }


def write(results: Results, out: Path) -> None:
    """All files of the report. Raises OSError."""
    from hybridasync.bench.curves import draw, standalone

    for name, text in documents(results).items():
        (out / name).write_text(text, encoding="utf-8")
    charts = draw(results.readings)
    (out / "curves").mkdir(exist_ok=True)
    for name, chart in charts.items():
        (out / "curves" / f"{name}.svg").write_text(standalone(chart), encoding="utf-8")
    (out / "report.html").write_text(html(results, list(charts.values())), encoding="utf-8")


def markdown(results: Results) -> str:
    lines = ["# Publication benchmark", "", headline(results), ""]
    for title, text, table in sections(results):
        lines += [f"## {title}", "", *([text, ""] if text else [])]
        if table is not None:
            lines += [*markdown_table(table), ""]
    lines += ["## Curves", "", *(f"![{name}](curves/{name}.svg)" for name in _curve_names()), ""]
    lines += ["## Boundary", "", BOUNDARY, ""]
    return "\n".join(lines)


def html(results: Results, charts: Sequence[Chart]) -> str:
    """One file, without scripts and without anything outside of it."""
    return page(
        "hybridasync.bench",
        headline=headline(results),
        status="completed" if results.sound else "failed",
        verdicts=[(one.decision, verdict_text(one)) for one in results.verdicts],
        sections=sections(results),
        charts=charts,
        boundary=BOUNDARY,
    )


def headline(results: Results) -> str:
    plan = results.readings.plan
    complete = sum(one.complete for one in results.readings.trials)
    total = len(results.readings.trials)
    way = " Variants of the reference publish the blocking way." if plan.blocking else ""
    return (
        f"{complete} of {total} trials complete: {len(plan.variants)} variants × {plan.trials} trials of {plan.steps} "
        f"steps of `{plan.recipe}`. Compared are steps {plan.first} to {plan.last} (0-based, both included); steps "
        f"before warm up.{way}"
    )


def sections(results: Results) -> list[tuple[str, str, Table | None]]:
    """Title, text and table, in the order of the report."""
    found: list[tuple[str, str, Table | None]] = [
        ("Verdict", "\n".join(_verdict_lines(results)), None),
        ("Variants", "", _variants(results)),
        (
            "Against each other",
            "Paired: trials of one seed. Ratios are geometric means over pairs, differences are means; in brackets "
            "95 % intervals of a bootstrap over pairs and, within them, steps. With few pairs an interval says little: "
            "look at the pairs. All of it is in paired.csv.",
            compared_table(results),
        ),
        ("Main figures", "Means over the window, then over trials.", measures_table(results, MAIN)),
        ("Times of a step", _quiet(results), measures_table(results, _TIMES)),
        (
            "Use of the machine",
            "Idle samples included; percent of one core, `cpu_percent` of all.",
            measures_table(results, _USE),
        ),
        ("Importance and reward", "", measures_table(results, _LEARNING)),
        ("Trials", "", _trials(results)),
    ]
    if results.readings.repeated:
        found.append(("Failed starts, repeated", "Kept apart: they say nothing about a variant.", _repeated(results)))
    found.append(("Where it ran", "", provenance(results)))
    return found


def verdict_text(verdict: Verdict) -> str:
    values = ", ".join(f"{value:.4g}" for value in verdict.values.values())
    reason = f" ({verdict.reason})" if verdict.reason else ""
    return f"{verdict.condition.text}: {verdict.decision}; trials: {values or 'none'}{reason}"


def _verdict_lines(results: Results) -> list[str]:
    lines = [
        f"* **{one.decision}**: `{one.condition.text}`; {verdict_text(one).partition('; ')[2]}"
        for one in results.verdicts
    ]
    if not results.verdicts:
        lines.append("* No threshold was stated (`--accept`).")
    lines += [f"* **Not comparable**: {text}" for text in results.unequal]
    lines += [f"* **Problem**: {text}" for text in results.problems]
    if results.sound:
        lines.append("* Every trial is complete: no sample lost, no error, every value finite, no reference model.")
        lines.append("* Configurations, packages, source, data and machine are equal except for what variants declare.")
    return lines


def _variants(results: Results) -> Table:
    plan = results.readings.plan
    rows = []
    for name in plan.variants:
        own = settings_of(name, blocking=plan.blocking)
        rows.append((name, VARIANTS[name].meaning, ", ".join(f"`{key}={value}`" for key, value in own.items())))
    return ("variant", "publishes", "settings"), rows


def compared_table(results: Results) -> Table:
    """A row for each pair of variants, a column for each measure that could be compared."""
    names = list(dict.fromkeys(one.measure.name for one in results.compared))
    by_pair: dict[tuple[str, str], dict[str, Compared]] = {}
    for one in results.compared:
        by_pair.setdefault((one.variant, one.against), {})[one.measure.name] = one
    rows = []
    for (variant, against), found in by_pair.items():
        first = found.get(names[0])
        pairs = ", ".join(_value(value, first) for value in first.interval.pairs) if first else "–"
        cells = [_estimate(found[name]) if name in found else "–" for name in names]
        rows.append([f"{variant} / {against}", cells[0], pairs, *cells[1:]])
    if not rows:
        return ("variants",), []
    kinds = {one.measure.name: one for one in results.compared}
    titles = [f"{kinds[n].measure.meaning}, {_unit(kinds[n])}" for n in names]
    return ("variants", titles[0], "its pairs", *titles[1:]), rows


def _unit(one: Compared) -> str:
    return "ratio" if one.kind == "ratio" else f"difference{', ' + one.measure.unit if one.measure.unit else ''}"


def _estimate(one: Compared) -> str:
    low, high = (_value(bound, one) for bound in (one.interval.low, one.interval.high))
    return f"**{_value(one.interval.estimate, one)}** [{low}, {high}]"


def _value(value: float, compared: Compared) -> str:
    if compared.kind == "ratio":
        return f"{value:.3f}"
    return f"{value:+.3g}"


def measures_table(results: Results, names: Sequence[str]) -> Table:
    """Means over the window, then over complete trials; a row for each variant."""
    header = ["variant"]
    for name in names:
        measure = MEASURES[name]
        header.append(f"{measure.meaning}{f', {measure.unit}' if measure.unit else ''}")
    rows = []
    for variant in results.readings.plan.variants:
        complete = results.readings.complete(variant)
        values = [[MEASURES[name].value(one.window()) for one in complete] for name in names]
        rows.append([variant, *(f"{sum(own) / len(own):.4g}" if own else "–" for own in values)])
    return header, rows


def _trials(results: Results) -> Table:
    rows = []
    for one in results.readings.trials:
        counts = (one.samples, one.lost, sum(step["published"] for step in one.steps))
        numbers = [f"{value:.0f}" for value in (*counts, one.last("errors"), one.last("nan_inf"))]
        throughput = f"{MEASURES['response_tok_s'].value(one.window()):.4g}"
        head = (
            one.job.name,
            str(one.job.seed),
            one.ended.status,
            f"{one.ended.wall_s:.1f}",
            f"{one.ended.start_s:.1f}",
        )
        rows.append((*head, *numbers, throughput))
    header = ("trial", "seed", "status", "wall, s", "start, s", "samples", "lost", "publications", "errors", "NaN, Inf")
    return (*header, "response tokens/s"), rows


def _repeated(results: Results) -> Table:
    return ("trial", "attempt", "reason"), [
        (f"{one.trial:02d}-{one.variant}", str(one.attempts), one.reason) for one in results.readings.repeated
    ]


def _quiet(results: Results) -> str:
    steps = [step for one in results.readings.trials for step in one.window()]
    others = sum(step["others_percent"] for step in steps) / max(1, len(steps))
    line = f"Other programs took {others:.1f} % of the machine's processor time meanwhile."
    if others > NOISY_PERCENT:
        line += " **Not a quiet machine**: only the ratios mean something, and those roughly."
    return line


def provenance(results: Results) -> Table:
    """What ran, and where, as the first trial's manifest has it; all trials' are equal."""
    manifests = [one.manifest for one in results.readings.trials if one.manifest]
    if not manifests:
        return ("what", "which"), []
    first = manifests[0]
    source, machine, packages = first["source"], first["machine"], first["packages"]
    rows = [
        ("hybridasync", f"{source['version']}, commit {source['commit'] or 'unknown (no checkout)'}"),
        ("its source", f"{source['files']} files, SHA-256 {source['sha256']}"),
        ("packages", ", ".join(f"{name} {packages[name]}" for name in NAMED if name in packages)),
        (
            "machine",
            f"{machine['usable_cpus']} of {machine['cpus']} cores of {machine['processor']}, "
            f"{machine['memory_mib']} MiB, {machine['architecture']}, Linux {machine['kernel']}",
        ),
        ("GPUs", ", ".join(machine["gpus"]) or "none"),
        ("Python", machine["python"]),
        ("environment", ", ".join(f"{name}={value}" for name, value in first["environment"].items()) or "nothing set"),
        ("compared with", compared_with(results.readings.plan.variants)),
    ]
    return ("what", "which"), rows


def markdown_table(table: Table) -> list[str]:
    """Its lines."""
    header, rows = table
    cells = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in cells]


def _curve_names() -> Mapping[str, object]:
    from hybridasync.bench.curves import CHARTS

    return CHARTS
