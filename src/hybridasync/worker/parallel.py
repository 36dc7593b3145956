"""How the model lies over the training ranks: Megatron's groups over the default process group."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from hybridasync.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Layout:
    """This rank's place. Ranks are of the default group; `tp`, `pp`, `dp` are sizes."""

    rank: int
    tp: int
    tp_rank: int
    pp: int
    pp_rank: int
    dp: int
    dp_rank: int

    @property
    def first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def last_stage(self) -> bool:
        return self.pp_rank == self.pp - 1


def device() -> torch.device:
    """Where this rank computes: its current CUDA device, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def init(tp: int, pp: int, seed: int) -> Layout:
    """Make Megatron's process groups over the default group, which exists already, and seed every generator.

    Raises ConfigError when the number of ranks isn't a multiple of `tp` × `pp`.
    """
    ranks = dist.get_world_size()
    if ranks % (tp * pp):
        raise ConfigError(
            f"{ranks} workers can't be laid out as tensor parallel {tp} × pipeline parallel {pp}; "
            f"give a multiple of {tp * pp}",
            setting="parallel.num_workers",
        )
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    place = layout()
    # Pipeline stages hold different layers, so they must not draw the same numbers; tensor parallel ranks are told
    # apart by Megatron itself.
    stage_seed = seed + 100 * place.pp_rank
    random.seed(stage_seed)
    np.random.seed(stage_seed)
    torch.manual_seed(stage_seed)
    model_parallel_cuda_manual_seed(stage_seed)
    return place


def layout() -> Layout:
    """This rank's place in the groups that `init` made."""
    return Layout(
        rank=dist.get_rank(),
        tp=parallel_state.get_tensor_model_parallel_world_size(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp=parallel_state.get_pipeline_model_parallel_world_size(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        dp=parallel_state.get_data_parallel_world_size(),
        dp_rank=parallel_state.get_data_parallel_rank(),
    )


def close() -> None:
    """Destroy Megatron's groups; the default group is the caller's."""
    parallel_state.destroy_model_parallel()
