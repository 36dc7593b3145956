"""Rewrite the tables of docs/performance.md from the results of the benchmarks.

    python benchmarks/tables.py overlap.json engine.json

A table stands between `<!-- overlap -->` and `<!-- /overlap -->`, or the same with `engine`; its file says which.
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

DOCUMENT = Path(__file__).parent.parent / "docs" / "performance.md"
NOISY = 0.1
"""Share of the machine that others took, from which on a figure is marked."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, help="what --out of a benchmark wrote")
    parser.add_argument("--document", type=Path, default=DOCUMENT, help="default: docs/performance.md")
    options = parser.parse_args(argv)
    text = options.document.read_text(encoding="utf-8")
    for path in options.results:
        content = json.loads(path.read_text(encoding="utf-8"))
        name = content["benchmark"]
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if not pattern.search(text):
            sys.stderr.write(f"{options.document} has no place for {name!r}: <!-- {name} --> … <!-- /{name} -->\n")
            return 1
        section = TABLES[name](content["results"]) + _machine_line(content)
        text = pattern.sub(lambda match, section=section: match[1] + "\n" + section + "\n" + match[2], text)
    options.document.write_text(text, encoding="utf-8")
    return 0


def _overlap(results: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for result in results:
        rounds = result["rounds"]
        longer = [max(entry["generation_s"], entry["training_s"]) for entry in rounds]
        smaller = [min(entry["generation_s"], entry["training_s"]) for entry in rounds]
        shares = zip(smaller, longer, strict=True)
        pauses = [entry["pause_s"] / entry["hybrid_s"] for entry in rounds]
        cpu = [sum(entry["cpu_s"]["hybrid"].values()) / _separate_cpu(entry) for entry in rounds]
        rows.append(
            (
                f"{result['shape']}: {result['work']}",
                f"**{_spread(result['ratio'])}**",
                _spread(result["sequential"]),
                f"{median(low / high for low, high in shares):.2f}",
                f"{median(pauses):.0%}",
                f"{median(cpu):.2f}",
            )
        )
    header = (
        "shape",
        "hybrid step / larger half",
        "one after the other / larger half",
        "smaller half / larger half",
        "pause of the engines, share of the step",
        "CPU time, hybrid / both halves",
    )
    return _markdown(header, rows)


def _separate_cpu(entry: Mapping[str, Any]) -> float:
    return sum(entry["cpu_s"]["generation"].values()) + sum(entry["cpu_s"]["training"].values())


def _engine(results: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (
            f"{result['shape']}: {result['work']}",
            f"**{_spread(result['ratio']['http'])}**",
            _spread(result["ratio"]["in_process"]),
            _spread(result["client_cpu_share"]),
        )
        for result in results
    ]
    return _markdown(
        ("shape", "over HTTP / transformers", "in process / transformers", "client's CPU time / engine's"), rows
    )


def _transport(results: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (
            f"{result['shape']}: {result['work']}",
            transport,
            f"{result['bytes'] / 1e6:.1f} MB",
            f"**{_spread(found['ratio'])}**",
            _milliseconds(found["transfer_s"]),
            _milliseconds(found["pause_s"]),
        )
        for result in results
        for transport, found in result["transports"].items()
    ]
    header = ("shape, engine", "transport", "weights", "transfer / memory copy", "transfer, ms", "pause, ms")
    return _markdown(header, rows)


def _milliseconds(value: Mapping[str, float]) -> str:
    return f"{value['median'] * 1e3:.0f} ({value['low'] * 1e3:.0f} to {value['high'] * 1e3:.0f})"


TABLES = {"overlap": _overlap, "engine": _engine, "transport": _transport}


def _spread(value: Mapping[str, float]) -> str:
    return f"{value['median']:.2f} ({value['low']:.2f} to {value['high']:.2f})"


def _machine_line(content: Mapping[str, Any]) -> str:
    machine = content["machine"]
    others = max(result["foreign_cpu_share"] for result in content["results"])
    rounds = min(len(result["rounds"]) for result in content["results"])
    line = (
        f"\n{machine['date']}, {machine['cpus']} CPU cores ({machine['architecture']}), torch {machine['torch']}, "
        f"{machine['threads_per_process']} thread per process, {rounds} rounds: median (least to largest).\n"
    )
    if others > NOISY:
        line += (
            f"\n**Not a quiet machine**: other programs took {others:.0%} of its processor time. Only the ratios mean "
            "something, and those roughly.\n"
        )
    return line


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in lines)


if __name__ == "__main__":
    sys.exit(main())
