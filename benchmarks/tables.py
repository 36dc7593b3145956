"""Rewrite the tables of docs/performance.md from the results of the benchmarks.

    python benchmarks/tables.py publication/ overlap.json engine.json control.json peers.json pause.json …

A directory is one of `hybridasync bench publication`, and is verified first. A table stands between `<!-- overlap -->`
and `<!-- /overlap -->`, or the same with another benchmark's name; its file says which.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from hybridasync.bench import evidence
from hybridasync.bench.readings import EvidenceError
from hybridasync.bench.report import (
    MAIN,
    compared_table,
    headline,
    markdown_table,
    measures_table,
    provenance,
    verdict_text,
)

DOCUMENT = Path(__file__).parent.parent / "docs" / "performance.md"
NOISY = 0.1
"""Share of the machine that others took, from which on a figure is marked."""

Results = Sequence[Mapping[str, Any]]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, help="what --out of a benchmark wrote")
    parser.add_argument("--document", type=Path, default=DOCUMENT, help="default: docs/performance.md")
    options = parser.parse_args(argv)
    text = options.document.read_text(encoding="utf-8")
    for path in options.results:
        try:
            name, section = publication(path) if path.is_dir() else of_file(path)
        except (OSError, ValueError, KeyError, EvidenceError) as error:
            sys.stderr.write(f"{path}: {error}\n")
            return 1
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if not pattern.search(text):
            sys.stderr.write(f"{options.document} has no place for {name!r}: <!-- {name} --> … <!-- /{name} -->\n")
            return 1
        text = pattern.sub(lambda match, section=section: match[1] + "\n" + section + "\n" + match[2], text)
    options.document.write_text(text, encoding="utf-8")
    return 0


def publication(path: Path) -> tuple[str, str]:
    results = evidence.verify(path)
    lines = [headline(results), "", *markdown_table(measures_table(results, MAIN))]
    lines += ["", *markdown_table(compared_table(results))]
    lines += ["", *(f"* {verdict_text(one)}" for one in results.verdicts)]
    _, where = provenance(results)
    lines += ["", "; ".join(f"{what}: {which}" for what, which in where if what in ("hybridasync", "machine")) + "."]
    return "publication", "\n".join(lines) + "\n"


def of_file(path: Path) -> tuple[str, str]:
    content = json.loads(path.read_text(encoding="utf-8"))
    name = content["benchmark"]
    return name, TABLES[name](content["results"]) + machine_line(content)


def overlap(results: Results) -> str:
    rows = []
    for result in results:
        rounds = result["rounds"]
        causes = ("publication_s", "waiting_s", "slower_half_s", "controller_s")
        lost = [median(entry["loss"][cause] / entry["step_s"] for entry in rounds) for cause in causes]
        cpu = [sum(entry["cpu_s"]["both"].values()) / separate_cpu(entry) for entry in rounds]
        halves = [min(e["generation_s"], e["training_s"]) / max(e["generation_s"], e["training_s"]) for e in rounds]
        pinned = ", pinned" if result["pinned"] else ""
        rows.append(
            (
                f"{result['recipe']}, {result['mode']}{pinned}: {result['work']}",
                f"**{spread(result['efficiency'])}**",
                f"{1 / median(entry['sequential'] for entry in rounds):.2f}",
                f"{median(halves):.2f}",
                *(f"{share:.1%}" for share in lost),
                f"{median(cpu):.2f}",
            )
        )
    header = (
        "recipe, mode",
        "overlap efficiency",
        "one after the other",
        "smaller half / larger half",
        "lost to publication",
        "to waiting",
        "to a slower half",
        "to the controller",
        "CPU time, both / halves alone",
    )
    return table(header, rows)


def separate_cpu(entry: Mapping[str, Any]) -> float:
    return sum(entry["cpu_s"]["generation"].values()) + sum(entry["cpu_s"]["training"].values())


def engine(results: Results) -> str:
    rows = [
        (
            f"{result['shape']}: {result['work']}",
            f"**{spread(result['ratio']['http'])}**",
            spread(result["ratio"]["in_process"]),
            spread(result["client_cpu_share"]),
        )
        for result in results
    ]
    return table(
        ("shape", "over HTTP / transformers", "in process / transformers", "client's CPU time / engine's"), rows
    )


def control(results: Results) -> str:
    [result] = results
    plane, requests, steps = result["control_plane"], result["open_requests"], result["many_steps"]
    processes = f"{plane['processes']} (controller, {plane['workers']} workers, {plane['sidecars']} sidecar)"
    rows = [
        ("start to first answers of workers and sidecar", f"{plane['start_s']:.2f} s"),
        ("idle: processes / threads", f"{processes} / {plane['threads']}"),
        ("idle: memory, RSS / PSS", f"{plane['rss_mib']:.0f} / {plane['pss_mib']:.0f} MiB"),
        ("idle: processor", f"{plane['idle_cpu_percent']:.1f} % of a core"),
        ("call to both workers, p50 / p99", f"{plane['rpc_p50_ms']:.2f} / {plane['rpc_p99_ms']:.2f} ms"),
        ("call to the sidecar (HTTP), p50 / p99", f"{plane['http_p50_ms']:.2f} / {plane['http_p99_ms']:.2f} ms"),
        ("calls to both workers, 32 asked for at once", f"{plane['rpc_calls_per_s']:.0f} a second"),
        ("16 MiB to both workers and back", f"{plane['bulk_there_and_back_ms']:.0f} ms"),
        ("end", f"{plane['stop_s']:.2f} s"),
        ("left after SIGKILL of the controller", f"{plane['orphans']} processes; all gone in {plane['gone_s']:.2f} s"),
        *(
            (
                f"pause of {row['engines']} engines for a publication",
                f"{row['pause_ms']:.0f} ms ({row['engine_us']:.0f} µs each)",
            )
            for row in result["fan_out"]
        ),
        (
            f"event loop with {requests['requests']} requests open, timers late by p50 / p99 / max",
            " / ".join(f"{requests[f'held_lag_{what}_ms']:.1f}" for what in ("p50", "p99", "max")) + " ms",
        ),
        (
            f"while they are opened ({requests['open_s']:.1f} s), p99 / max",
            f"{requests['opening_lag_p99_ms']:.0f} / {requests['opening_lag_max_ms']:.0f} ms",
        ),
        (
            f"memory of the controller over {steps['steps']} steps",
            f"{steps['rss_mib'][0]:.0f} to {steps['rss_mib'][-1]:.0f} MiB, {steps['growth_mib']:+.1f} after the first "
            f"tenth; {1000 * steps['seconds'] / steps['steps']:.1f} ms a step",
        ),
    ]
    return table(("what", "found"), rows)


def transport(results: Results) -> str:
    rows = [
        (
            f"{result['shape']}: {result['work']}",
            name,
            f"{result['bytes'] / 1e6:.1f} MB",
            f"**{spread(found['ratio'])}**",
            milliseconds(found["transfer_s"]),
            milliseconds(found["pause_s"]),
        )
        for result in results
        for name, found in result["transports"].items()
    ]
    header = ("shape, engine", "transport", "weights", "transfer / memory copy", "transfer, ms", "pause, ms")
    return table(header, rows)


def pause(results: Results) -> str:
    """A switch takes tenths of a millisecond."""
    rows = []
    for result in results:
        staged, loaded = result["staged"], result["loaded"]
        rows.append(
            (
                f"{result['parameters'] / 1e6:.1f} M parameters, {result['dtype']}, {result['bytes'] / 1e6:.0f} MB",
                f"**{scaled(staged['pause_s'], 1e3, 2)}**",
                milliseconds(staged["transfer_s"]),
                f"**{milliseconds(result['drained']['pause_s'])}**",
                milliseconds(staged["stage_s"]),
                *(milliseconds(loaded[f"{part}_s"]) for part in ("pause", "wait", "transfer", "verify", "resume")),
            )
        )
    header = (
        "model",
        "standstill, staged, ms",
        "the request to switch",
        "standstill, drained: the whole request",
        "staging before it",
        "standstill, not staged, ms",
        "until paused",
        "load",
        "verification",
        "until it runs",
    )
    return table(header, rows)


def delta(results: Results) -> str:
    [result] = results
    ways = result["delta"], result["full"]
    share = scaled(result["bytes_share"], 100, 2)
    unequal = result["unequal"]
    rows = [
        ("written, MB", *(scaled(way["bytes"], 1e-6, 2) for way in ways)),
        ("of complete weights", f"**{share} %**", "100 %"),
        ("export (trainer), s", *(scaled(way["export_s"], 1, 2) for way in ways)),
        ("staging (engine), s", *(scaled(way["stage_s"], 1, 2) for way in ways)),
        (
            f"engine's weights not the trainer's, of {result['publications']} publications",
            f"{len(unequal)} ({result['deltas']} were deltas)",
            "–",
        ),
    ]
    title = f"{result['shape']}, {result['dtype']}, learning rate {result['lr']:g}"
    return table((title, "delta", "complete"), rows)


def memory(results: Results) -> str:
    [result] = results
    rows = [
        (
            role.removesuffix("_rss_mib"),
            *(f"{values[what]:.1f}" for what in ("first", "half", "last")),
            f"**{values['slope_mib_per_1000_steps']:+.1f}**",
        )
        for role, values in result["roles"].items()
    ]
    steps = result["steps"]
    header = (f"{steps} steps, resident MiB", "first step", "half-way", "last step", "slope of the second half / 1,000")
    return table(header, rows)


def scaled(value: Mapping[str, float], factor: float, digits: int) -> str:
    median, low, high = (f"{value[name] * factor:.{digits}f}" for name in ("median", "low", "high"))
    return f"{median} ({low} to {high})"


def milliseconds(value: Mapping[str, float]) -> str:
    return scaled(value, 1e3, 1)


def peers(results: Results) -> str:
    [result] = results
    lines = [table(result["training"]["header"], result["training"]["rows"])] if "training" in result else []
    if "control" in result:
        lines.append(table(result["control"]["header"], result["control"]["rows"]))
    return "\n".join(lines)


TABLES = {
    "overlap": overlap,
    "engine": engine,
    "control": control,
    "peers": peers,
    "transport": transport,
    "pause": pause,
    "delta": delta,
    "memory": memory,
}


def spread(value: Mapping[str, float]) -> str:
    return scaled(value, 1, 2)


def machine_line(content: Mapping[str, Any]) -> str:
    machine = content["machine"]
    shares = [result["foreign_cpu_share"] for result in content["results"] if "foreign_cpu_share" in result]
    rounds = [len(result["rounds"]) for result in content["results"] if "rounds" in result]
    many = f", {min(rounds)} rounds: median (least to largest)" if rounds else ""
    line = (
        f"\n{machine['date']}, {machine['cpus']} CPU cores ({machine['processor']}), torch {machine['torch']}, "
        f"{machine['threads_per_process']} thread per process{many}.\n"
    )
    if max(shares, default=0.0) > NOISY:
        line += (
            f"\n**Not a quiet machine**: other programs took {max(shares):.0%} of its processor time. Only the ratios "
            "mean something, and those roughly.\n"
        )
    return line


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(markdown_table((header, rows))) + "\n"


if __name__ == "__main__":
    sys.exit(main())
