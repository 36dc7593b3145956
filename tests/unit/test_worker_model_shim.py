"""Megatron-core on a CPU: the rewrites do what they say, or nothing runs."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

from hybridasync.worker import mcore_cpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="where CUDA is present nothing is rewritten")


@pytest.mark.parametrize("entry", mcore_cpu.REWRITES, ids=lambda entry: entry.name)
def test_each_rewrite_matches_in_each_of_its_modules(entry: mcore_cpu.Rewrite) -> None:
    """Every module that a rewrite names exists, imports, and has been changed by it."""
    for module in entry.modules:
        importlib.import_module(f"megatron.core.{module}")
        assert mcore_cpu.matches[entry.name, module] > 0


def test_a_rewrite_that_finds_nothing_is_an_import_error() -> None:
    """Another release of Megatron-core fails at import, naming the rewrite and the module."""
    with pytest.raises(
        ImportError, match=r"'read RNG state' in megatron\.core\.tensor_parallel\.random; .*needs 0\.16\.1"
    ):
        mcore_cpu.rewrite("tensor_parallel.random", "torch.cuda.current_device()")


def test_megatron_imported_too_early_is_an_import_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever imports Megatron first learns the name of the module, instead of a CUDA error much later."""
    others = [finder for finder in sys.meta_path if not isinstance(finder, mcore_cpu._Finder)]
    monkeypatch.setattr(sys, "meta_path", others)
    with pytest.raises(ImportError, match=r"megatron\.core\.\S+ was imported before hybridasync\.worker"):
        mcore_cpu.install()
    assert sys.meta_path == others


def test_torch_is_unchanged() -> None:
    """Only Megatron's modules are compiled differently: torch.cuda still says what it says."""
    from megatron.core.tensor_parallel import random as megatron_random

    assert megatron_random._get_cuda_rng_state().equal(torch.get_rng_state())
    with pytest.raises((AssertionError, RuntimeError)):
        torch.cuda.current_device()
