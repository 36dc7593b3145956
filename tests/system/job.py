"""Jobs of rpc_program.py: a small recipe, and ways to start and to look at them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from hybridasync.config.load import validate
from hybridasync.config.models import Config
from hybridasync.config.pipeline import resolve
from hybridasync.config.resolved import to_toml
from hybridasync.observability.process import ProcessId, descendants, wait_ended

PROGRAM = str(Path(__file__).parent / "rpc_program.py")
LAUNCH = (
    "import sys; from pathlib import Path; from hybridasync.config.load import load\n"
    "from hybridasync.config.pipeline import resolve; from hybridasync.runtime.launcher import launch\n"
    "resolved = resolve(load(sys.argv[1]))\n"
    "sys.exit(launch(resolved, run_dir=Path(sys.argv[2]), resume=False, program=(sys.argv[3],)))"
)


def config(**sections: dict[str, object]) -> Config:
    """Two workers, one node, loopback."""
    values: dict[str, dict[str, object]] = {
        "model": {"hf_checkpoint": "model"},
        "data": {"prompt_data": "train.jsonl"},
        "parallel": {"num_workers": 2},
        "rollout": {
            "num_rollout": 1,
            "rollout_batch_size": 2,
            "n_samples_per_prompt": 2,
            "max_response_tokens": 8,
        },
        "network": {"start_timeout_s": 60.0},
    }
    for name, settings in sections.items():
        values[name] = values.get(name, {}) | settings
    return resolve(validate(values, source="test")).config


class Job:
    """A job under `hybridasync.runtime.launcher`, in a run directory of its own."""

    def __init__(
        self, directory: Path, *, environment: dict[str, str] | None = None, **sections: dict[str, object]
    ) -> None:
        self.run_dir = directory / "run"
        recipe = directory / "recipe.toml"
        recipe.write_text(to_toml(config(**sections)))
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(recipe), str(self.run_dir), PROGRAM],
            env=os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.members: set[ProcessId] = set()

    def wait_until_up(self) -> dict[int, int]:
        """Rank → process id, once the controller has heard of every worker."""
        wait_for((self.run_dir / "pids").exists, 90)
        self.census()
        workers = map(int, (self.run_dir / "pids").read_text().split())
        return {0: int((self.run_dir / "controller.pid").read_text()), **dict(enumerate(workers, start=1))}

    def census(self) -> None:
        self.members |= descendants(self.process.pid) | {ProcessId.of(self.process.pid)}

    def finish(self, timeout_s: float = 60) -> tuple[int, str]:
        """Exit code and everything that went to the terminal's stderr; nothing of the job may be left."""
        _, errors = self.process.communicate(timeout=timeout_s)
        left = wait_ended(self.members, 10)
        assert not left, f"left behind: {left}\n{errors}"
        return self.process.returncode, errors


def wait_for(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.05)
