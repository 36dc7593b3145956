"""Checkpoints of model and optimizer in Megatron's `torch_dist` format, which loads at any TP, PP and DP.

A checkpoint is a folder. The caller makes it eligible for resuming once `save` came back on every rank; what is in it
before that is worth nothing.
"""

from __future__ import annotations

import os
import pickle
import queue
import shutil
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_finalize
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed.checkpoint.api import CheckpointException

from hybridasync.data.model_dir import parameter_count
from hybridasync.errors import CheckpointError

_RESHARDABLE = {"distrib_optim_sharding_type": "fully_reshardable"}
_UNREADABLE = (CheckpointingException, CheckpointException, OSError, EOFError, KeyError, RuntimeError, ValueError)


class _InProcessSave(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Writes in this process.

    Megatron forks a writer for each file and spawns a manager process for their results. A fork of a process with RPC
    threads and a CUDA context may hang, and the spawned one runs the main module again.
    """

    def __init__(self) -> None:
        super().__init__("torch_dist", 1, thread_count=1)

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> AsyncRequest:
        # The writer takes the queue that is there instead of starting a manager to make one.
        filesystem_async._results_queue = queue.SimpleQueue()
        return super().async_save(sharded_state_dict, checkpoint_dir)

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any) -> AsyncRequest:
        def write() -> None:
            if writer.write_buckets:
                _write_bucket(writer)

        return AsyncRequest(write, (), [lambda: save_state_dict_async_finalize(*save_state_dict_ret)])


def _write_bucket(writer: filesystem_async.FileSystemWriterAsync) -> None:
    """Write the one file of this rank; an error becomes a result, which fails the save on every rank together."""
    (bucket,) = writer.preload_tensors(writer.write_buckets, non_blocking=False)
    done: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
    running: queue.Queue[int] = queue.Queue()
    running.put(0)
    transforms = [writer.transforms] if hasattr(writer, "transforms") else []
    writer.write_preloaded_data(transforms, 0, bucket, done, running, use_fsync=True)
    _, result = done.get()
    writer.results_queue.put(_system_error(result) if isinstance(result, Exception) else {0: result})


def _system_error(error: BaseException) -> BaseException:
    """What the system said. torch's archive writer hides a full disk behind "unexpected pos 704 vs 598"."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    return found or error


def save(path: str | Path, gpt: Any, optimizer: Any, *, extra: Mapping[str, Any]) -> None:
    """Write model, optimizer (None: without) and `extra` to the folder `path`, which is empty or doesn't exist.

    `gpt` is the unwrapped model; `extra` holds plain values, the same on every rank. Collective. Raises CheckpointError
    on every rank.
    """
    folder = Path(path)
    state = _state(gpt, optimizer, loading=False)
    state["extra"] = dict(extra)
    _prepare_folder(folder, gpt, optimizer)
    try:
        dist_checkpointing.save(state, str(folder), _InProcessSave())
    except (CheckpointException, CheckpointingException, OSError) as error:
        raise CheckpointError(f"{folder} can't be written: {_reason(error)}") from error
    if dist.get_rank() == 0:
        for written in (*folder.iterdir(), folder):
            _fsync(written)
    dist.barrier()


def is_checkpoint(path: str | Path) -> bool:
    """Whether a folder holds weights in this format, as opposed to Hugging Face's."""
    return (Path(path) / "metadata.json").is_file()


def load(path: str | Path, gpt: Any, optimizer: Any) -> dict[str, Any]:
    """Fill model and optimizer (None: the model alone) from the folder `path`; answers `extra`.

    The layout may be another than the one that saved. Collective. Raises CheckpointError.
    """
    folder = Path(path)
    if not is_checkpoint(folder):
        raise CheckpointError(f"{folder} is not a complete checkpoint: it has no metadata.json")
    try:
        state = dist_checkpointing.load(_state(gpt, optimizer, loading=True), str(folder))
        gpt.load_state_dict(state["model"])
        if optimizer is not None:
            with torch.no_grad():
                optimizer.load_state_dict(state["optimizer"])
            _own_step(optimizer)
        return dict(state.get("extra", {}))
    except (*_UNREADABLE, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{folder} can't be loaded: {_reason(error)}") from error


def _state(gpt: Any, optimizer: Any, *, loading: bool) -> dict[str, Any]:
    model = gpt.sharded_state_dict()
    state: dict[str, Any] = {"model": model}
    if optimizer is not None:
        _make_adam_state(optimizer)
        if loading:
            for part in _parts(optimizer):
                _keep_step_out_of_shards(part)
        state["optimizer"] = optimizer.sharded_state_dict(model, is_loading=loading, metadata=_RESHARDABLE)
    return state


def _parts(optimizer: Any) -> Iterator[Any]:
    """The Megatron optimizers inside; each wraps a torch one as `.optimizer`, or None on a rank without parameters."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.optimizer is not None:
            yield part


def _make_adam_state(optimizer: Any) -> None:
    """torch's Adam makes its state in the first step; Megatron needs it to describe the shards before that."""
    for part in _parts(optimizer):
        adam = part.optimizer
        if not isinstance(adam, torch.optim.Adam | torch.optim.AdamW):
            continue
        for parameter in (parameter for group in adam.param_groups for parameter in group["params"]):
            state = adam.state[parameter]
            state.setdefault("step", torch.tensor(0.0))
            for moment in ("exp_avg", "exp_avg_sq"):
                if moment not in state:
                    state[moment] = torch.zeros_like(parameter)


def _keep_step_out_of_shards(part: Any) -> None:
    """Megatron-core 0.16.1 copies every entry of the state from the shards, but torch Adam's `step` isn't sharded.

    `DistributedOptimizer._set_main_param_and_optimizer_states` then fails with KeyError 'step'.
    """
    if isinstance(part, DistributedOptimizer) and isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW):
        part._set_main_param_and_optimizer_states = types.MethodType(_set_sharded_states, part)


def _set_sharded_states(self: Any, model_param: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    group, index = self.model_param_group_index_map[model_param]
    main_param = self.optimizer.param_groups[group]["params"][index]
    main_param.copy_(tensors["param"])
    for moment in ("exp_avg", "exp_avg_sq"):
        self.optimizer.state[main_param][moment].copy_(tensors[moment])


def _own_step(optimizer: Any) -> None:
    """Give each parameter a `step` of its own.

    Megatron-core 0.16.1 gives all of them one tensor, which torch's Adam then advances once for each parameter: a bias
    correction that is silently wrong. A checkpoint from before the first step has none at all.
    """
    for part in _parts(optimizer):
        if isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW):
            for state in part.optimizer.state.values():
                state["step"] = state.get("step", torch.tensor(0.0)).clone()


def _prepare_folder(folder: Path, gpt: Any, optimizer: Any) -> None:
    """Make the folder and see that there is room, before any rank enters a collective that others would wait in."""
    outcome: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            itemsize = next(gpt.parameters()).element_size()
            moments_and_main = 12 if optimizer is not None else 0
            needed = parameter_count(gpt.hf) * (itemsize + moments_and_main)
            free = shutil.disk_usage(folder).free
            if any(folder.iterdir()):
                outcome = ["it isn't empty"]
            elif free < needed:
                outcome = [f"it needs about {needed / 2**20:.0f} MiB, and {free / 2**20:.0f} MiB are free"]
        except OSError as error:
            outcome = [str(error)]
    dist.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        raise CheckpointError(f"{folder} can't be written: {outcome[0]}")


def _reason(error: BaseException) -> str:
    """The cause inside torch's wrapper, which else prints the trace of each rank."""
    if isinstance(error, CheckpointException) and error.failures:
        cause, _ = next(iter(error.failures.values()))
        return f"{type(cause).__name__}: {cause}"
    return f"{type(error).__name__}: {error}"


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
