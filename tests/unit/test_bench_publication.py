"""The publication benchmark around its runs: plan, equality, report, evidence. The runs are files written by hand."""

from __future__ import annotations

import gzip
import io
import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import bench_kit
import pytest

from hybridasync.bench import evidence, publication
from hybridasync.bench.manifest import inequalities
from hybridasync.bench.plan import Plan, window
from hybridasync.bench.readings import TRIALS, EvidenceError, read_all
from hybridasync.bench.results import evaluate
from hybridasync.bench.task import prepare
from hybridasync.bench.variants import VARIANTS, chosen
from hybridasync.errors import ConfigError


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "bench"
    bench_kit.write_runs(out, bench_kit.plan())
    publication.finish(out)
    return out


@pytest.fixture
def finished(once: Path, tmp_path: Path) -> Path:
    """A complete benchmark, to be tampered with."""
    return Path(shutil.copytree(once, tmp_path / "bench"))


def test_r123_every_trial_has_every_variant_once_in_rotated_order() -> None:
    """R123: three trials rotate the order by one each; trials of one number have one seed, 20260802 and on."""
    jobs = bench_kit.plan(variants=("baseline", "zero_kl", "optimized"), trials=3).jobs()
    orders = [[job.variant for job in jobs if job.trial == trial] for trial in range(3)]
    assert orders == [
        ["baseline", "zero_kl", "optimized"],
        ["zero_kl", "optimized", "baseline"],
        ["optimized", "baseline", "zero_kl"],
    ]
    assert {job.trial: job.seed for job in jobs} == {0: 20260802, 1: 20260803, 2: 20260804}


def test_r123_the_window_of_twenty_steps_is_five_to_fifteen() -> None:
    """R123: 11 observations; another may be given, within the run."""
    assert window(20, None) == (5, 15)
    assert window(20, "0:19") == (0, 19)
    for wrong in ("5", "15:5", "5:20", "a:b"):
        with pytest.raises(ConfigError, match="--window"):
            window(20, wrong)


def test_every_variant_of_the_recipe_resolves_and_differs_only_in_what_it_declares() -> None:
    """R123: all else fixed; blocking or not, the resolved configurations differ in publication settings alone."""
    for blocking in (False, True):
        plan = bench_kit.plan(variants=tuple(VARIANTS), trials=1, blocking=blocking)
        dumps = [plan.config(job).model_dump() for job in plan.jobs()]
        sections = {name for one in dumps for name in one if one[name] != dumps[0][name]}
        assert sections == {"publication"}
        assert dumps[0]["algorithm"]["use_kl_loss"] is False


def test_an_unknown_variant_is_refused() -> None:
    """With the names that there are; their order is the table's, whatever was given."""
    assert chosen(["optimized", "zero_kl"]) == ("zero_kl", "optimized")
    assert chosen([]) == tuple(VARIANTS)
    with pytest.raises(ConfigError, match="unknown: fast; there are baseline, zero_kl"):
        chosen(["fast"])


def test_equal_manifests_may_differ_in_seed_and_declared_settings() -> None:
    """R123: anything else is told, with its name, the trials and both values."""
    made = [bench_kit.manifest_of(job) for job in bench_kit.plan().jobs()]
    assert inequalities(made) == []
    made[1]["config"]["optimizer.lr"] = 1e-5
    made[2]["packages"] = {"torch": "2.12.0"}
    found = inequalities(made)
    assert len(found) == 2
    assert "packages of 01-optimized differs from 00-zero_kl's: torch" in found[0]
    assert "setting optimizer.lr of 00-optimized" in found[1]


def test_data_may_follow_the_seed() -> None:
    """Data made with the seed differ between trials of different seeds, and must be equal within a pair."""
    made = [bench_kit.manifest_of(job) for job in bench_kit.plan().jobs()]
    for one in made:
        one["data"] = {"train.jsonl": str(one["seed"]) * 8}
    assert inequalities(made) == []
    made[3]["data"] = {"train.jsonl": "another"}
    assert [text.partition(":")[0] for text in inequalities(made)] == ["data of 01-zero_kl differs from 01-optimized's"]


def test_a_seed_or_a_varied_setting_that_is_not_the_variants_own_is_told() -> None:
    """A seed other than the planned one, and an interval that changes between trials of one variant."""
    made = [bench_kit.manifest_of(job) for job in bench_kit.plan().jobs()]
    made[0]["config"]["seed"] = 1
    made[3]["config"]["publication.update_weights_interval"] = 3
    assert any("setting seed" in text for text in inequalities(made))
    assert any("setting publication.update_weights_interval" in text for text in inequalities(made))


def test_results_follow_from_the_raw_logs(tmp_path: Path) -> None:
    """R121, R124: throughput by tokens and time, publications in the window, the verdict in every pair, no loss."""
    results = evaluate(read_all(bench_kit.write_runs(tmp_path, bench_kit.plan())))
    assert results.sound
    assert results.passed
    [verdict] = results.verdicts
    assert verdict.values == pytest.approx({0: 1.25, 1: 1.25})
    throughput = next(one for one in results.compared if one.measure.name == "response_tok_s")
    assert throughput.interval.estimate == pytest.approx(1.25)
    optimized = results.readings.of("optimized")[0]
    assert [step["published"] for step in optimized.steps] == [0, 1, 0, 1]
    assert [step["pause_ms"] for step in optimized.steps] == pytest.approx([0, 200, 0, 200])
    assert [step["rollout_peak_mib"] for step in optimized.steps] == [300, 301, 302, 303]
    assert [step["in_window"] for step in optimized.steps] == [0, 1, 1, 1]


def test_r122_a_publication_is_booked_to_the_step_that_caused_it(tmp_path: Path) -> None:
    """R122: also when it ended after the next step's row was written; the initial one belongs to no step."""
    work = bench_kit.write_runs(tmp_path, bench_kit.plan())
    events = work / TRIALS / "00-zero_kl" / "run" / "events.jsonl"
    events.write_text("".join(reversed(events.read_text().splitlines(keepends=True))))
    steps = read_all(work).of("zero_kl")[0].steps
    assert [step["published"] for step in steps] == [1, 1, 1, 1]


def test_r112_failures_of_the_infrastructure_are_kept_apart(tmp_path: Path) -> None:
    """R112, R125: a trial that never started leaves the verdict open and the other trials' figures alone."""
    plan = bench_kit.plan()
    work = bench_kit.write_runs(tmp_path, plan)
    job = plan.jobs()[0]
    bench_kit.write_ended(work / TRIALS / job.name, job, status="infrastructure", steps=0)
    aside = work / TRIALS / f"{job.name}-attempt-1"
    bench_kit.write_ended(aside, job, status="infrastructure", steps=0)
    results = evaluate(read_all(work))
    assert not results.sound
    assert [verdict.decision for verdict in results.verdicts] == ["undecided"]
    assert len(results.readings.repeated) == 1
    assert len(results.compared[0].interval.pairs) == 1


def test_lost_samples_and_errors_are_problems(tmp_path: Path) -> None:
    """R124: a complete run with fewer samples than planned isn't sound."""
    work = bench_kit.write_runs(tmp_path, bench_kit.plan())
    metrics = work / TRIALS / "00-zero_kl" / "run" / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    rows[2] |= {"samples": 30.0, "errors": 1}
    rows[3] |= {"errors": 1}
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    problems = evaluate(read_all(work)).problems
    assert "00-zero_kl: 2 of 128 samples are missing" in problems
    assert any("1 warnings or errors" in text for text in problems)


def test_r125_the_report_has_everything(finished: Path) -> None:
    """R125, R126: Markdown, three tables, curves with axes, one self-contained HTML page, archive and checksums."""
    names = {path.relative_to(finished).as_posix() for path in finished.rglob("*") if path.is_file()}
    assert {"report.md", "report.html", "summary.csv", "step_metrics.csv", "paired.csv"} <= names
    assert {evidence.ARCHIVE, evidence.INDEX, evidence.SUMS} <= names
    curves = [name for name in names if name.startswith("curves/")]
    assert len(curves) >= 3
    assert all("<svg" in (finished / name).read_text() for name in curves)
    report = (finished / "report.md").read_text()
    for part in ("Verdict", "**accepted**", "1.250", "What this doesn't show", "commit abc", "torch 2.13.0"):
        assert part in report
    page = (finished / "report.html").read_text()
    assert "<script" not in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert len((finished / "step_metrics.csv").read_text().splitlines()) == 1 + 4 * 4
    assert not (finished / publication.WORK).exists()


def test_what_was_written_verifies(finished: Path) -> None:
    """Every byte, and the tables made again from the archive."""
    assert evidence.verify(finished).passed


def test_one_changed_byte_of_any_file_is_found(finished: Path) -> None:
    """R125: whichever file it is, the lists of checksums included, and wherever in it; its name is told."""
    for path in sorted(path for path in finished.rglob("*") if path.is_file()):
        before = path.read_bytes()
        for at in (0, len(before) // 2, len(before) - 1):
            path.write_bytes(before[:at] + bytes([before[at] ^ 1]) + before[at + 1 :])
            with pytest.raises(EvidenceError) as error:
                evidence.verify(finished)
            assert path.name in str(error.value)
        path.write_bytes(before)
    assert evidence.verify(finished).passed


def test_a_missing_or_an_extra_file_is_found(finished: Path) -> None:
    """R125: the directory has exactly the files that were sealed."""
    extra = finished / "more.txt"
    extra.write_text("x")
    with pytest.raises(EvidenceError, match=r"more\.txt isn't in SHA256SUMS"):
        evidence.verify(finished)
    extra.unlink()
    (finished / "curves" / "pause.svg").unlink()
    with pytest.raises(EvidenceError, match=r"curves/pause\.svg is missing"):
        evidence.verify(finished)


def repacked(finished: Path, change: Callable[[str, bytes], bytes | None]) -> None:
    """Change members of the archive and seal it again: what someone would do who cheats."""
    buffer = io.BytesIO()
    with (
        tarfile.open(finished / evidence.ARCHIVE) as old,
        tarfile.open(fileobj=buffer, mode="w") as new,
    ):
        for member in old.getmembers():
            file = old.extractfile(member)
            content = change(member.name, file.read() if file else b"")
            if content is not None:
                member.size = len(content)
                new.addfile(member, io.BytesIO(content))
    (finished / evidence.ARCHIVE).write_bytes(gzip.compress(buffer.getvalue()))
    evidence.seal(finished, without=publication.WORK)


def test_every_file_in_the_archive_is_indexed(finished: Path) -> None:
    """One byte changed in a member, or a member left out, with the outer checksums made anew: the index finds it."""
    with tarfile.open(finished / evidence.ARCHIVE) as archive:
        names = archive.getnames()
    packed = (finished / evidence.ARCHIVE).read_bytes()
    for chosen_name in names:
        repacked(finished, lambda name, content, one=chosen_name: content + b" " if name == one else content)
        with pytest.raises(EvidenceError, match="differs from its line") as error:
            evidence.verify(finished)
        assert chosen_name in str(error.value)
        (finished / evidence.ARCHIVE).write_bytes(packed)
    repacked(finished, lambda name, content: None if name == names[-1] else content)
    with pytest.raises(EvidenceError, match=f"{names[-1]} is missing"):
        evidence.verify(finished)


@pytest.mark.parametrize("name", ["../outside", "/tmp/outside"])
def test_an_archive_that_would_write_elsewhere_is_refused(finished: Path, tmp_path: Path, name: str) -> None:
    """Evidence comes from others: unpacking it writes below the folder made for it, and nothing but files."""
    with tarfile.open(finished / evidence.ARCHIVE, "w:gz") as archive:
        archive.addfile(tarfile.TarInfo(name))
    evidence.seal(finished, without=publication.WORK)
    with pytest.raises(EvidenceError, match="isn't a file below"):
        evidence.verify(finished)


def test_tables_that_do_not_follow_from_the_logs_are_found(finished: Path) -> None:
    """A better number in summary.csv, with all checksums made anew."""
    table = finished / "summary.csv"
    table.write_text(table.read_text().replace("768", "999", 1))
    evidence.seal(finished, without=publication.WORK)
    with pytest.raises(EvidenceError, match=r"summary\.csv isn't what the raw logs"):
        evidence.verify(finished)
    table.unlink()
    evidence.seal(finished, without=publication.WORK)
    with pytest.raises(EvidenceError, match=r"summary\.csv isn't what the raw logs"):
        evidence.verify(finished)


def test_a_complete_or_foreign_directory_is_left_alone(finished: Path, tmp_path: Path) -> None:
    """Each refusal says what to do; a stopped benchmark with the same plan goes on."""
    with pytest.raises(ConfigError, match="bench verify"):
        publication.prepare(bench_kit.plan(), finished)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(ConfigError, match="isn't an empty directory"):
        publication.prepare(bench_kit.plan(), tmp_path / "other")
    stopped = tmp_path / "stopped"
    work = publication.prepare(bench_kit.plan(), stopped)
    assert publication.prepare(bench_kit.plan(), stopped) == work
    with pytest.raises(ConfigError, match="with other options"):
        publication.prepare(bench_kit.plan(steps=8), stopped)


def test_a_plan_survives_its_file() -> None:
    """And what isn't a plan is refused."""
    plan = bench_kit.plan()
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(ValueError, match="not the plan"):
        Plan.from_json("{}")


def test_the_task_never_ends_a_response(tmp_path: Path) -> None:
    """All trials have the same model and prompts, and its logit of the end of text is far below all others."""
    import torch
    from transformers import AutoModelForCausalLM

    for seed in (1, 2):
        prepare(tmp_path / str(seed), seed, layers=2, hidden=64, heads=4)
    for name in ("model/model.safetensors", "prompts.jsonl"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()
    assert len((tmp_path / "1" / "prompts.jsonl").read_text().splitlines()) == 16
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "1" / "model", dtype=torch.float32)
    logits = model(torch.tensor([[1, 20, 30, 40, 50]])).logits[0]
    others = torch.cat([logits[:, :2], logits[:, 3:]], dim=1)
    assert (others.min(dim=1).values - logits[:, 2]).min() > 20
