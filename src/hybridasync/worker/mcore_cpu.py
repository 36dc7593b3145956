"""Megatron-core 0.16 on machines without CUDA: gloo and CPU tensors.

`megatron.core` names the CUDA device literally in a few dozen places (`device="cuda"`, `torch.cuda.current_device()`,
`.cuda()`, `tensor.type() == "torch.cuda.FloatTensor"`). `install` adds an import hook that compiles the modules of
`REWRITES`, and no others, with those literals pointing at the CPU. Nothing on disk and nothing in `torch` changes, and
where CUDA is present nothing happens at all.

A rewrite that finds nothing in a module where it must is an ImportError that names both: another release of
Megatron-core must not half work.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import re
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType, ModuleType

import torch

_PREFIX = "megatron.core."


@dataclass(frozen=True)
class Rewrite:
    """One replacement and the modules (under `megatron.core`) in which it has to match at least once."""

    name: str
    pattern: re.Pattern[str]
    replacement: str
    modules: frozenset[str]


def _rewrite(name: str, pattern: str, replacement: str, *, modules: str) -> Rewrite:
    return Rewrite(name, re.compile(pattern), replacement, frozenset(modules.split()))


REWRITES = (
    _rewrite(
        "move to CUDA",
        r"\.cuda\((?:non_blocking=True|torch\.cuda\.current_device\(\))?\)",
        "",
        modules="""dist_checkpointing.exchange_utils models.common.embeddings.rope_utils optimizer.distrib_optimizer
        models.common.language_module.language_module optimizer.grad_scaler optimizer.optimizer tensor_parallel.data
        utils""",
    ),
    _rewrite(
        "current device",
        r"torch\.cuda\.current_device\(\)",
        "torch.device('cpu')",
        modules="""dist_checkpointing.strategies.async_utils dist_checkpointing.strategies.state_dict_saver
        distributed.distributed_data_parallel distributed.param_and_grad_buffer
        models.common.embeddings.rotary_pos_embedding models.common.embeddings.yarn_rotary_pos_embedding
        optimizer.distrib_optimizer
        optimizer.optimizer pipeline_parallel.p2p_communication tensor_parallel.data tensor_parallel.layers
        tensor_parallel.mappings tensor_parallel.random tensor_parallel.utils timers transformer.module utils""",
    ),
    _rewrite(
        "device literal",
        r"""device=(["'])cuda\1""",
        "device='cpu'",
        modules="""dist_checkpointing.exchange_utils dist_checkpointing.strategies.state_dict_saver
        distributed.param_and_grad_buffer optimizer.clip_grads optimizer.grad_scaler optimizer.optimizer
        pipeline_parallel.schedules tensor_parallel.data transformer.utils utils""",
    ),
    _rewrite(
        "tensor type",
        r"torch\.cuda\.(Float|Half|BFloat16)Tensor",
        r"torch.\1Tensor",
        modules="optimizer.clip_grads optimizer.distrib_optimizer optimizer.optimizer transformer.module",
    ),
    _rewrite(
        "synchronize",
        r"torch\.cuda\.synchronize\(\)",
        "None",
        modules="""dist_checkpointing.strategies.async_utils dist_checkpointing.strategies.filesystem_async
        dist_checkpointing.strategies.fully_parallel dist_checkpointing.tensor_aware_state_dict
        distributed.distributed_data_parallel pipeline_parallel.p2p_communication timers utils""",
    ),
    _rewrite(
        "read RNG state", r"torch\.cuda\.get_rng_state\(\)", "torch.get_rng_state()", modules="tensor_parallel.random"
    ),
    _rewrite(
        "read RNG state of a device",
        r"torch\.cuda\.random\.get_rng_state\(device=device\)",
        "torch.get_rng_state()",
        modules="tensor_parallel.random",
    ),
    _rewrite(
        "write RNG state",
        r"(?m)^    _lazy_call\(cb\)$",
        "    torch.set_rng_state(new_state)",
        modules="tensor_parallel.random",
    ),
    _rewrite("seed", r"torch\.cuda\.manual_seed\(", "torch.manual_seed(", modules="tensor_parallel.random"),
)

MODULES = frozenset(module for rewrite in REWRITES for module in rewrite.modules)

matches: dict[tuple[str, str], int] = {}
"""(rewrite name, module) → number of matches, of the modules imported so far."""


def rewrite(module: str, source: str) -> str:
    """`source` of `megatron.core.<module>` for the CPU. Raises ImportError if a rewrite that must match doesn't."""
    for entry in REWRITES:
        if module not in entry.modules:
            continue
        source, count = entry.pattern.subn(entry.replacement, source)
        if count == 0:
            raise ImportError(
                f"megatron-core {importlib.metadata.version('megatron-core')}: nothing to rewrite for "
                f"'{entry.name}' in megatron.core.{module}; on a machine without CUDA hybridasync needs 0.16.1",
                name=_PREFIX + module,
            )
        matches[entry.name, module] = count
    return source


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        """Compile from source: the .pyc cache holds the unchanged module, and must go on holding it."""
        path = self.get_filename(fullname)
        source = importlib.util.decode_source(self.get_data(path))
        return compile(rewrite(fullname.removeprefix(_PREFIX), source), path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(_PREFIX) or fullname.removeprefix(_PREFIX) not in MODULES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if (
            spec is not None
            and spec.origin is not None
            and isinstance(spec.loader, importlib.machinery.SourceFileLoader)
        ):
            spec.loader = _Loader(fullname, spec.origin)
        return spec


def active() -> bool:
    """Whether this process runs Megatron-core on the CPU."""
    return not torch.cuda.is_available()


def install() -> None:
    """Add the import hook, unless CUDA is available. Idempotent. Raises ImportError if Megatron is imported already."""
    if not active():
        # With one queue, kernels start in the order in which Megatron overlaps them with communication.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        return
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    early = sorted(name for name in sys.modules if name.removeprefix(_PREFIX) in MODULES and name.startswith(_PREFIX))
    if early:
        raise ImportError(f"{early[0]} was imported before hybridasync.worker, so it can't be prepared for the CPU")
    sys.meta_path.insert(0, _Finder())


def silence_known_warnings() -> None:
    """What Megatron-core says of absent optional packages, of its own deprecated calls and of CUDA settings on a CPU.

    None of it is news, and none of it can be acted on.
    """
    silenced: tuple[tuple[str, type[Warning]], ...] = (
        (r"Apex is not installed", UserWarning),
        (r"Transformer Engine and Apex are not installed", UserWarning),
        (r"full scope is deprecated", UserWarning),
        (r"The \.grad attribute of a Tensor that is not a leaf Tensor", UserWarning),
        (r"The following imports from `dynamic_context.py`", DeprecationWarning),
        (r"`torch.jit.script(_method)?` is deprecated", DeprecationWarning),
        (r"`load_state_dict` is deprecated", FutureWarning),
        (r"Please use DTensor instead", FutureWarning),
    )
    for message, category in silenced:
        warnings.filterwarnings("ignore", message=message, category=category)
    if active():
        warnings.filterwarnings("ignore", message="When using async grad allreduce", category=UserWarning)
