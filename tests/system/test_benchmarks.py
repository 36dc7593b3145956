"""`hybridasync bench`: it runs, checks what it wrote, and feeds the tables of docs/performance.md. Never how fast."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
TABLES = ROOT / "benchmarks" / "tables.py"
DOCUMENT = ROOT / "docs" / "performance.md"
SPREAD = {"median", "low", "high"}
TINY = "prepare.args={layers=1, hidden=32, heads=4, prompts=16}"


def run(*command: str, code: int = 0) -> str:
    """Output of a program."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=environment)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def bench(*arguments: str, code: int = 0) -> str:
    return run(sys.executable, "-m", "hybridasync_cli", "bench", *arguments, code=code)


def tabled(path: Path, folder: Path) -> str:
    """The document with the table of a result in it."""
    document = folder / "performance.md"
    document.write_text(DOCUMENT.read_text())
    run(sys.executable, str(TABLES), str(path), "--document", str(document))
    return document.read_text()


def only_result(path: Path, name: str) -> dict[str, Any]:
    content = json.loads(path.read_text())
    assert content["benchmark"] == name
    assert content["machine"]["cpus"] >= 1
    [result] = content["results"]
    return dict(result)


def test_r124_a_publication_benchmark_runs_and_verifies(tmp_path: Path) -> None:
    """R123, R124, R125: real runs, all complete, no sample lost; it verifies, and not with one byte changed."""
    out = tmp_path / "bench"
    options = ("--trials", "1", "--steps", "4", "--variants", "zero_kl,optimized", "--set", TINY)
    said = bench("publication", "--out", str(out), *options, "--accept", "optimized.pause_ms < 60000")
    assert "2 of 2 trials complete" in said
    assert "optimized.pause_ms < 60000: accepted" in said
    assert "follow from the raw logs" in bench("verify", str(out))
    assert "| optimized |" in tabled(out, tmp_path)
    report = (out / "report.md").read_text()
    assert "no sample lost, no error, every value finite" in report
    assert "are equal except for what variants declare" in report
    again = bench("publication", "--out", str(out), *options, code=2)
    assert "bench verify" in again
    with (out / "raw-evidence.tar.gz").open("r+b") as file:
        file.seek(100)
        byte = file.read(1)
        file.seek(100)
        file.write(bytes([byte[0] ^ 1]))
    assert "raw-evidence.tar.gz" in bench("verify", str(out), code=1)


def test_overlap_compares_the_pipeline_with_its_halves(tmp_path: Path) -> None:
    """One run measures generation, training and both, pinned; what is lost is told by cause, and adds up."""
    out = tmp_path / "overlap.json"
    options = ("--modes", "fully_async", "--rounds", "1", "--steps", "2", "--set", TINY)
    said = bench("overlap", *options, "--pin" if len(os.sched_getaffinity(0)) > 1 else "--no-pin", "--out", str(out))
    assert "overlap efficiency" in said
    result = only_result(out, "overlap")
    assert result["efficiency"].keys() == SPREAD
    [entry] = result["rounds"]
    assert entry["efficiency"] == pytest.approx(max(entry["generation_s"], entry["training_s"]) / entry["step_s"])
    causes = [value for name, value in entry["loss"].items() if name != "total_s"]
    assert sum(causes) == pytest.approx(entry["loss"]["total_s"], abs=1e-6)
    assert entry["response_tokens"] == entry["both_response_tokens"] == 8 * 4 * 24
    for phase in ("generation", "training", "both"):
        assert entry["cpu_s"][phase].keys() == {"controller", "trainer", "engine", "sidecar"}
    assert "bench-publication, fully_async" in tabled(out, tmp_path)


def test_engine_is_compared_with_transformers(tmp_path: Path) -> None:
    """The same groups are sampled in all three ways, and the ratios to `transformers` are in the file."""
    out = tmp_path / "engine.json"
    assert "response tokens per CPU-second" in bench("engine", "--shapes", "tiny", "--rounds", "1", "--out", str(out))
    result = only_result(out, "engine")
    assert result["ratio"].keys() == {"in_process", "http"}
    [entry] = result["rounds"]
    assert entry.keys() == {"transformers", "in_process", "http"}
    for measured in entry.values():
        assert measured["tokens"] > 0
        assert measured["cpu_s"] > 0
    assert "| tiny: " in tabled(out, tmp_path)


def test_control_plane_alone_is_measured(tmp_path: Path) -> None:
    """Start, idle use, calls, what a SIGKILL leaves (nothing), fan-out, open requests, memory over steps."""
    out = tmp_path / "control.json"
    bench(
        "control", "--idle-s", "0.5", "--engines", "1,3", "--requests", "20", "--steps", "30", "--out", str(out)
    )  # fmt: skip
    result = only_result(out, "control")
    plane = result["control_plane"]
    assert plane["processes"] == 4
    assert plane["orphans"] == 0
    assert plane["rpc_p50_ms"] > 0
    assert [row["engines"] for row in result["fan_out"]] == [1, 3]
    assert result["open_requests"]["requests"] == 20
    assert len(result["many_steps"]["rss_mib"]) == 10
    assert "left after SIGKILL" in tabled(out, tmp_path)


def test_transports_are_compared_with_a_memory_copy(tmp_path: Path) -> None:
    """Each transport brings the same weights, verified; times, bytes and ratios to a copy are in the file."""
    out = tmp_path / "transport.json"
    printed = run(sys.executable, str(TABLES.with_name("transport.py")), "--quick", "--out", str(out))
    assert "transfer / memory copy" in printed
    result = only_result(out, "transport")
    assert result["bytes"] > 0
    assert result["transports"].keys() == {"disk", "collective", "tensor"}
    [entry] = result["rounds"]
    for transport, found in result["transports"].items():
        assert found.keys() == {"transfer_s", "pause_s", "ratio"}
        assert 0 < entry[transport]["transfer_s"] < entry[transport]["pause_s"]
    assert "| quick: " in tabled(out, tmp_path)


@pytest.mark.parametrize("command", ["publication", "overlap", "engine", "control"])
def test_help_says_what_is_measured(command: str) -> None:
    """`--help` explains the options and how long it takes."""
    said = bench(command, "--help")
    assert "--out" in said
    assert "minute" in said


def script(name: str, *arguments: str) -> dict[str, Any]:
    """The one result of a script of benchmarks/ in its smallest form."""
    out = Path(arguments[-1])
    run(sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), "--quick", "--out", str(out))
    return only_result(out, name)


def test_the_pause_is_measured_with_real_engines(tmp_path: Path) -> None:
    """Staged, drained and loaded publications of two snapshots in turn, each part of the pause apart."""
    result = script("pause", str(tmp_path / "pause.json"))
    for way in ("staged", "drained", "loaded"):
        assert set(result[way]) == {f"{part}_s" for part in ("stage", "wait", "transfer", "verify", "resume", "pause")}
        assert result[way]["pause_s"]["median"] > 0
    assert "M parameters, fp32" in tabled(tmp_path / "pause.json", tmp_path)


def test_deltas_of_a_real_trainer_arrive_to_the_last_bit(tmp_path: Path) -> None:
    """Five Adam steps in bf16: each a delta smaller than everything, each verified, and the last against it whole."""
    result = script("delta", str(tmp_path / "delta.json"))
    assert (result["publications"], result["deltas"], result["unequal"]) == (5, 5, [])
    assert 0 < result["bytes_share"]["high"] < 1
    assert "| 0 (5 were deltas) |" in tabled(tmp_path / "delta.json", tmp_path)


def test_memory_is_followed_over_the_steps_of_a_run(tmp_path: Path) -> None:
    """A short run; trainer, engine and controller have a first and a last value and a slope."""
    result = script("memory", str(tmp_path / "memory.json"))
    assert result["steps"] == 8 and set(result["roles"]) == {
        f"{role}_rss_mib" for role in ("trainer", "rollout", "controller")
    }
    assert all(role["first"] > 0 for role in result["roles"].values())
    assert "| trainer | " in tabled(tmp_path / "memory.json", tmp_path)
