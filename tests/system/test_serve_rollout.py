"""`hybridasync serve-rollout`: engines on a node of their own (another loopback address here), and runs over them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.system.gate import free_port
from tests.system.whole_run import ENVIRONMENT, HYBRIDASYNC, overrides

from hybridasync.data.sort_digits import prepare
from hybridasync.observability.process import descendants, wait_ended

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

HOST = "127.0.0.2"
TOKEN = {"HYBRIDASYNC_TOKEN": "serve"}
LIMIT_S = 90.0


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    prepare(folder, 0, digits=3, layers=1, hidden=32, heads=2, context_length=32, warm_start_rows=1)
    return folder


def recipe_of(task: Path, folder: Path) -> Path:
    path = folder / "recipe.toml"
    path.write_text(
        f"""
        [model]
        hf_checkpoint = "{task / "model"}"
        [data]
        prompt_data = "{task / "train.jsonl"}"
        [rollout]
        num_rollout = 3
        rollout_batch_size = 2
        n_samples_per_prompt = 2
        max_response_tokens = 4
        [reward]
        function = "exact_match"
        [algorithm]
        filter_zero_variance = false
        [engine]
        use_fault_tolerance = true
        """
    )
    return path


def status(port: int) -> dict[str, Any]:
    with suppress(httpx.HTTPError, ValueError):
        headers = {"Authorization": f"Bearer {TOKEN['HYBRIDASYNC_TOKEN']}"}
        answer = httpx.get(f"http://{HOST}:{port}/v1/status", headers=headers, timeout=2.0, trust_env=False)
        return dict(answer.json())
    return {}


def ready(port: int, *, but: int | None = None) -> dict[str, Any]:
    """Its status, once there is an engine that serves, and that isn't process `but`."""
    deadline = time.monotonic() + LIMIT_S
    while not ((found := status(port)).get("state") == "running" and found["engine_pid"] != but):
        assert time.monotonic() < deadline, found
        time.sleep(0.1)
    return found


@contextmanager
def serving(recipe: Path, folder: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    settings = {"engine.sidecar_port": port, "engine.device": "cpu"}
    command = [HYBRIDASYNC, "serve-rollout", str(recipe), "--host", HOST, "--folder", str(folder / "node")]
    process = subprocess.Popen(
        [*command, *overrides(settings)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=ENVIRONMENT | TOKEN,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_u01_engines_of_another_node_come_back_and_serve_run_after_run(task: Path, tmp_path: Path) -> None:
    """A run trains over its engine; its sidecar is killed: both come back at the same address, for the next run."""
    recipe, port = recipe_of(task, tmp_path), free_port()
    with serving(recipe, tmp_path, port) as server:
        first = ready(port)
        assert first["engine_url"].startswith(f"http://{HOST}:")
        family = descendants(server.pid)

        def train(name: str) -> dict[str, Any]:
            settings = {"engine.sidecar_url": [f"http://{HOST}:{port}"], "publication.weights_dir": str(tmp_path)}
            done = subprocess.run(
                [HYBRIDASYNC, "train", str(recipe), "--run-dir", str(tmp_path / name), *overrides(settings)],
                env=ENVIRONMENT | TOKEN,
                capture_output=True,
                text=True,
                timeout=200,
                check=False,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            return dict(json.loads((tmp_path / name / "summary.json").read_text()))

        assert train("one")["publications"] == 4
        (sidecar,) = [one for one in family if "hybridasync.sidecar" in " ".join(one.find().cmdline())]  # type: ignore[union-attr]
        os.kill(sidecar.pid, signal.SIGKILL)
        second = ready(port, but=first["engine_pid"])
        os.kill(second["engine_pid"], signal.SIGKILL)  # the next run has it started anew
        assert train("two")["publications"] == 4
        assert ready(port)["engine_pid"] not in (None, first["engine_pid"], second["engine_pid"])
        family |= descendants(server.pid)
        server.send_signal(signal.SIGTERM)
        said, _ = server.communicate(timeout=30)
        assert server.returncode == 0 and "Traceback" not in said, said
        assert f'engine.sidecar_url = ["http://{HOST}:{port}"]' in said
        assert "sidecar-0 ended (-9), its engine with it; both are started anew" in said
        assert not wait_ended(family, 10)


def test_killed_it_takes_its_engines_along(task: Path, tmp_path: Path) -> None:
    """SIGKILL: no sidecar and no engine is left."""
    port = free_port()
    with serving(recipe_of(task, tmp_path), tmp_path, port) as server:
        ready(port)
        family = descendants(server.pid)
        assert len(family) == 2
        server.kill()
        assert not wait_ended(family, 20)


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ((), {"HYBRIDASYNC_TOKEN": ""}, "HYBRIDASYNC_TOKEN: set it to a secret"),
        (("--host", "192.168.255.254"), TOKEN, "--host: can't listen on 192.168.255.254"),
        (("--host", "0.0.0.0"), TOKEN, "--host: 0.0.0.0 is every address of this node"),
        (("--host", "8.8.8.8"), TOKEN, "--host: 8.8.8.8 is a public address"),
        (("--host", "localhost"), TOKEN, "--host: localhost is 127.0.0.1 on this node"),
        (("--host", "no such host"), TOKEN, "--host: 'no such host' names no IPv4 address"),
        (
            ("--set", "engine.kind=attach", "--set", 'engine.url=["http://127.0.0.1:9"]'),
            TOKEN,
            "engine.kind: this command",
        ),
        (("--set", "model.hf_checkpoint=nowhere"), TOKEN, "model.hf_checkpoint: nowhere isn't a directory"),
    ],
)
def test_a_mistake_is_told_and_nothing_is_started(
    task: Path, tmp_path: Path, arguments: tuple[str, ...], environment: dict[str, str], message: str
) -> None:
    """Exit 2, one line that says what would do, no traceback."""
    command = [HYBRIDASYNC, "serve-rollout", str(recipe_of(task, tmp_path)), "--host", HOST, *arguments]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path / "node")],
        env=ENVIRONMENT | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert message in " ".join(done.stderr.split())
