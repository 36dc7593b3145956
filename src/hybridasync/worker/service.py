"""What a training rank can be asked to do: the operations of the port `Trainer`, as plain functions.

Every rank makes the same calls with the same arguments, in its main thread, and gets the same answer.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import psutil
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel

from hybridasync.config.models import Config
from hybridasync.config.normalise import needs_reference
from hybridasync.config.publishing import goes_on_beside_training
from hybridasync.data.model_dir import parameter_count
from hybridasync.errors import ConfigError, LocalProtocolError
from hybridasync.protocol.decisions import Decisions
from hybridasync.types import StepResult, TrainBatch, TrainerInfo, TrainSample, WeightSnapshot
from hybridasync.weights.layout import engine_layout
from hybridasync.worker import checkpoints, export, parallel
from hybridasync.worker.hf_mapping import load_hf
from hybridasync.worker.model import DTYPES, ModelBundle, build
from hybridasync.worker.optimizer import OptimizerSettings, Phase, make_optimizer, wrap_for_training
from hybridasync.worker.published import PublishedCopy
from hybridasync.worker.train_step import StepRunner, TrainingPhase

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class _Built:
    """What `setup` made."""

    bundle: ModelBundle
    model: DistributedDataParallel
    runner: StepRunner


class Worker:
    """One training rank. The default process group, of all training ranks and no other, exists before this does."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._built: _Built | None = None
        self._phase: TrainingPhase | None = None
        self._phase_name = ""
        self._decisions = Decisions()
        self._published = PublishedCopy(compared=config.publication.delta)
        self._copies = config.publication.delta or goes_on_beside_training(config)

    def setup(self) -> TrainerInfo:
        """Build the model, load the initial weights, and the reference model where the loss needs one.

        Raises ConfigError for a model that can't be used with these settings.
        """
        layout = self._config.parallel
        place = parallel.init(layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size, self._config.seed)
        bundle = build(self._config, self._config.model.hf_checkpoint)
        if self._config.model.load is None:
            load_hf(bundle.gpt, self._config.model.hf_checkpoint)
        else:
            _load_weights(bundle.gpt, self._config.model.load, setting="model.load")
        reference = self._reference(bundle)
        model = wrap_for_training(bundle, distributed_optimizer=layout.use_distributed_optimizer)
        runner = StepRunner(self._config, bundle, place, model=model, reference=reference)
        self._built = _Built(bundle, model, runner)
        pids: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(pids, os.getpid())
        return TrainerInfo(
            parameters=parameter_count(bundle.hf),
            vocab_size=bundle.hf.vocab_size,
            context_length=bundle.hf.context_length,
            tensor_parallel=place.tp,
            pipeline_parallel=place.pp,
            data_parallel=place.dp,
            device=bundle.device.type,
            pids={rank + 1: pid for rank, pid in enumerate(pids)},
        )

    def start_phase(self, phase: str, total_steps: int) -> None:
        """A fresh optimizer and schedule for "warm_start" or "rl"; weights stay as they are."""
        name: Phase
        if phase == "warm_start":
            name = "warm_start"
        elif phase == "rl":
            name = "rl"
        else:
            raise LocalProtocolError(f"no phase {phase!r}; there are {', '.join(get_args(Phase))}")
        built = self._ready()
        settings = OptimizerSettings.of_phase(self._config, name, total_steps)
        self._phase = None  # the old moments go before the new ones come
        optimizer = make_optimizer(
            built.model,
            settings,
            dtype=built.bundle.dtype,
            distributed=self._config.parallel.use_distributed_optimizer,
        )
        self._phase, self._phase_name = TrainingPhase(optimizer, settings), name

    def train_step(self, batch: TrainBatch) -> StepResult:
        """One training step. Raises DivergedError, DataError."""
        if self._phase is None:
            raise LocalProtocolError("train_step came before start_phase")
        result = self._ready().runner.train_step(batch, self._phase)
        memory = {f"trainer_{name}": value for name, value in self.memory().items() if not name.startswith("rss")}
        return replace(result, metrics={**result.metrics, **memory})

    def logprobs(self, samples: Sequence[TrainSample]) -> list[list[float]]:
        """Log-probs of each sample's response tokens under the current weights, at the sampling temperature."""
        return self._ready().runner.logprobs(samples)

    def export_weights(self, version: int, path: str) -> WeightSnapshot:
        """Take the weights for the engines, in the type that they hold. Raises CheckpointError."""
        held, gpt = self._config.engine.dtype, self._ready().bundle.gpt
        engines = engine_layout(self._config.engine, kv_heads=gpt.hf.num_kv_heads, gpu_here=torch.cuda.is_available())
        dtype, published = DTYPES[held] if held else None, self._published if self._copies else None
        snapshot = export.export_snapshot(gpt, version, path, dtype=dtype, engines=engines, published=published)
        if self._config.publication.clear_cache_on_skipped_steps:
            self.clear_cache()
        return snapshot

    def write_weights(self, version: int, path: str) -> WeightSnapshot:
        """Write what `export_weights` took. On the first rank alone, in any thread. Raises CheckpointError."""
        return export.write_taken(self._published, version, path)

    def export_published(self, version: int, path: str) -> int:
        """With publication.delta: write the version exported last in full. Raises CheckpointError."""
        return export.export_published(self._ready().bundle.gpt, self._published, version, path=path)

    def clear_cache(self) -> None:
        """Give the memory that torch's CUDA allocator caches back to the device; nothing to do on a CPU."""
        torch.cuda.empty_cache()

    def decide(self, epoch: int, version: int, commit: bool) -> None:
        """What became of the publication of `version`. Once engines serve it, `keep_old_actor` keeps a copy of it.

        Raises LocalProtocolError for an epoch that isn't newer than the last one.
        """
        self._decisions.take(epoch, version, commit=commit)
        self._published.decided(version, commit=commit)
        if commit and self._config.algorithm.keep_old_actor:
            self._ready().runner.kept.keep(version)

    def reference_logprobs(self, samples: Sequence[TrainSample]) -> list[list[float]]:
        """As `logprobs`, under the reference model: what the KL penalty of the reward needs."""
        return self._ready().runner.logprobs(samples, reference=True)

    def save_checkpoint(self, path: str) -> None:
        """Write model and optimizer to the empty folder `path`. Raises CheckpointError."""
        optimizer = self._phase.optimizer if self._phase else None
        checkpoints.save(path, self._ready().bundle.gpt, optimizer, extra={"phase": self._phase_name})

    def load_checkpoint(self, path: str) -> None:
        """Load the model, and the optimizer if a phase has started. Raises CheckpointError."""
        checkpoints.load(path, self._ready().bundle.gpt, self._phase.optimizer if self._phase else None)

    def export_hf(self, path: str) -> None:
        """Write a directory that `transformers` loads. Raises CheckpointError."""
        export.export_hf(self._ready().bundle.gpt, path)

    def memory(self) -> dict[str, float]:
        """MiB, largest of all ranks: resident memory of the process, the copy of what was published, and on CUDA the
        allocator's, now and at most."""
        values = {
            "rss_mib": psutil.Process().memory_info().rss / MIB,
            "rss_peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "published_copy_mib": self._published.nbytes / MIB,
        }
        if torch.cuda.is_available():
            values |= {
                "allocated_mib": torch.cuda.memory_allocated() / MIB,
                "allocated_peak_mib": torch.cuda.max_memory_allocated() / MIB,
                "reserved_mib": torch.cuda.memory_reserved() / MIB,
                "reserved_peak_mib": torch.cuda.max_memory_reserved() / MIB,
            }
        largest = torch.tensor(list(values.values()), dtype=torch.float64, device=parallel.device())
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return dict(zip(values, largest.tolist(), strict=True))

    def close(self) -> None:
        """Give up model and groups; the default process group is the caller's."""
        self._phase = self._built = None
        parallel.close()

    def _ready(self) -> _Built:
        if self._built is None:
            raise LocalProtocolError("the worker isn't set up")
        return self._built

    def _reference(self, policy: ModelBundle) -> ModelBundle | None:
        """The frozen model of the KL terms, None when no coefficient needs it: then it is neither loaded nor run."""
        if not needs_reference(self._config):
            return None
        path = self._config.model.ref_load or self._config.model.load or self._config.model.hf_checkpoint
        built_like = self._config.model.hf_checkpoint if checkpoints.is_checkpoint(path) else path
        reference = build(self._config, built_like, setting="model.ref_load")
        if reference.hf.vocab_size != policy.hf.vocab_size:
            raise ConfigError(
                f"{path} has a vocabulary of {reference.hf.vocab_size}, the policy one of {policy.hf.vocab_size}; "
                "the KL loss compares them token by token",
                setting="model.ref_load",
            )
        _load_weights(reference.gpt, path, setting="model.ref_load")
        reference.module.requires_grad_(False)
        reference.module.eval()
        return reference


def _load_weights(gpt: Any, path: str, *, setting: str) -> None:
    """Weights alone, of a Hugging Face directory or of one checkpoint's model folder."""
    if checkpoints.is_checkpoint(path):
        checkpoints.load(path, gpt, None)
    else:
        load_hf(gpt, path, setting=setting)
