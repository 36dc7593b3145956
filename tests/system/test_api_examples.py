"""The examples of docs/api.md, run as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).parents[2] / "docs" / "api.md"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def example(name: str, folder: Path) -> Path:
    blocks = dict(re.findall(r"```python title=(\S+)\n(.*?)```", DOCUMENT.read_text(), flags=re.DOTALL))
    path = folder / name
    path.write_text(blocks[name])
    return path


@pytest.mark.slow
def test_the_example_of_a_plain_script_starts_its_own_workers(tmp_path: Path) -> None:
    """Three steps and an evaluation of version 3, then everything is gone and the exit code is 0."""
    script = example("plain.py", tmp_path)
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert [f"step {i}: reward" in done.stdout for i in range(4)] == [True, True, True, False]
    assert "at weight version 3" in done.stdout


@pytest.mark.slow
def test_the_example_of_a_torchrun_job_serves_on_the_other_ranks(tmp_path: Path) -> None:
    """Under torchrun with three ranks, rank 0 runs the loop over two data-parallel workers, and exports the policy."""
    script = example("job.py", tmp_path)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", str(script)]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "step 2: loss" in done.stdout
    assert (tmp_path / "runs/job/policy/model.safetensors").is_file()
