"""The model over several ranks is the model on one."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.worker_kit import torchrun

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def output() -> str:
    """What two ranks printed; the checks are in worker_parallel_main.py, and any that fails ends the launch."""
    return torchrun(Path(__file__).with_name("worker_parallel_main.py"), 2)


@pytest.mark.parametrize("layout", ["tp=2 pp=1", "tp=1 pp=2"])
def test_layouts_equal_one_process(output: str, layout: str) -> None:
    """Logits of packed Llama and Qwen3, tied and untied, equal transformers; exports are bit-exact."""
    assert f"ok layout {layout}" in output


@pytest.mark.parametrize("layout", ["tp=2 pp=1", "tp=1 pp=2"])
def test_c44_padded_vocabulary_and_tied_embedding(output: str, layout: str) -> None:
    """Case C44: padding enters no softmax and leaves in no export; a changed tied row arrives once."""
    assert f"ok c44 {layout}" in output


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("layout", ["tp=1 pp=1", "tp=2 pp=1", "tp=1 pp=2"])
def test_checkpoint_of_data_parallel_two_resumes(output: str, dtype: str, distributed: bool, layout: str) -> None:
    """Saved with DP=2 and either optimizer, training goes on bit-exactly there and equally at TP=2 and PP=2."""
    assert f"ok checkpoint {dtype} distributed={distributed} {layout}" in output


@pytest.mark.parametrize("layout", ["tp=1 pp=1", "tp=2 pp=1", "tp=1 pp=2"])
def test_checkpoint_of_tensor_parallel_two_resumes(output: str, layout: str) -> None:
    """Saved at TP=2, training goes on bit-exactly there, and to 1e-5 in loss and every weight at DP=2 and PP=2."""
    assert f"ok checkpoint fp32 distributed=False {layout} saved at (2, 1)" in output


def test_checkpoint_before_the_first_step(output: str) -> None:
    """Optimizer state that doesn't exist yet saves and loads like a fresh start."""
    assert "ok before the first step" in output


def test_an_error_of_the_first_rank_reaches_all(output: str) -> None:
    """A folder that can't be written or loaded is one CheckpointError on every rank, and no rank hangs."""
    assert "ok errors" in output
