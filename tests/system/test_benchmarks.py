"""benchmarks/: they run, and write what the tables of docs/performance.md are made from. Never how fast."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
DOCUMENT = BENCHMARKS.parent / "docs" / "performance.md"
SPREAD = {"median", "low", "high"}


def run(program: str, *arguments: str) -> str:
    """Standard output of a benchmark."""
    command = [sys.executable, str(BENCHMARKS / program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def quick(name: str, folder: Path) -> tuple[dict[str, Any], str]:
    """The one result of `--quick`, and what was printed. Its table is put into a copy of the document."""
    out, document = folder / f"{name}.json", folder / "performance.md"
    printed = run(f"{name}.py", "--quick", "--out", str(out))
    content = json.loads(out.read_text())
    assert content["benchmark"] == name
    assert content["machine"]["cpus"] >= 1
    document.write_text(DOCUMENT.read_text())
    run("tables.py", str(out), "--document", str(document))
    assert "| quick: " in document.read_text()
    [result] = content["results"]
    assert 0 <= result["foreign_cpu_share"] <= 1
    return result, printed


def test_overlap_compares_the_pipeline_with_its_halves(tmp_path: Path) -> None:
    """One run measures generation, training and the hybrid step of the same work, and leaves the ratio in the file."""
    result, printed = quick("overlap", tmp_path)
    assert "hybrid / max(generation, training)" in printed
    assert result["ratio"].keys() == SPREAD
    [entry] = result["rounds"]
    assert entry["ratio"] == pytest.approx(entry["hybrid_s"] / max(entry["generation_s"], entry["training_s"]))
    assert entry["response_tokens"] > 0
    assert entry["hybrid_response_tokens"] > 0
    for phase in ("generation", "training", "hybrid"):
        assert entry["cpu_s"][phase].keys() == {"controller", "trainer", "engine", "sidecar"}


def test_engine_is_compared_with_transformers(tmp_path: Path) -> None:
    """The same groups are sampled in all three ways, and the ratios to `transformers` are in the file."""
    result, printed = quick("engine", tmp_path)
    assert "response tokens per CPU-second" in printed
    assert result["ratio"].keys() == {"in_process", "http"}
    [entry] = result["rounds"]
    assert entry.keys() == {"transformers", "in_process", "http"}
    for measured in entry.values():
        assert measured["tokens"] > 0
        assert measured["cpu_s"] > 0


def test_transports_are_compared_with_a_memory_copy(tmp_path: Path) -> None:
    """Each transport brings the same weights, verified; times, bytes and ratios to a copy are in the file."""
    result, printed = quick("transport", tmp_path)
    assert "transfer / memory copy" in printed
    assert result["bytes"] > 0
    assert result["transports"].keys() == {"disk", "collective", "tensor"}
    [entry] = result["rounds"]
    for transport, found in result["transports"].items():
        assert found.keys() == {"transfer_s", "pause_s", "ratio"}
        assert 0 < entry[transport]["transfer_s"] < entry[transport]["pause_s"]


@pytest.mark.parametrize("program", ["overlap.py", "engine.py", "transport.py", "tables.py"])
def test_help_says_what_is_measured(program: str) -> None:
    """`--help` explains the options."""
    assert "--out" in (text := run(program, "--help")) or "--document" in text
