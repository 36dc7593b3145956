"""What a run reads before anything is started: prepared files, tokenizer, prompts, reward function, sizes."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridasync.config.models import Config
from hybridasync.config.names import value_of
from hybridasync.config.prepared import FOLDER, with_prepared
from hybridasync.config.sizing import Sizing, resolve_sizing, sizing_line, sizing_warnings, with_sizing
from hybridasync.config.start import Start, is_megatron, resolve_start, with_start
from hybridasync.data.generated import Generated
from hybridasync.data.mixture import Mixture
from hybridasync.data.model_dir import ModelFacts, check_model_dir, parameter_count
from hybridasync.data.source import PromptDataset, PromptStream, load_prompts
from hybridasync.data.tokenizer import TextTokenizer, load_tokenizer
from hybridasync.data.warm_start import SupervisedDataset, load_warm_start
from hybridasync.errors import ConfigError
from hybridasync.rewards.functions import resolve_function
from hybridasync.rewards.registry import Reward, load_reward
from hybridasync.runtime.environment import workers_here
from hybridasync.runtime.sglang_launch import reserved_tokens
from hybridasync.transport.weights import SnapshotFolder
from hybridasync.types import Prompt

BYTES_PER_PARAMETER = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True, slots=True)
class Inputs:
    """`config` has real paths and the resolved number of steps. `notes` are lines for the log."""

    config: Config
    start: Start
    model: ModelFacts
    tokenizer: TextTokenizer
    reward: Reward
    sizing: Sizing
    context_length: int  # prompt and completion together, in trainer and engines
    dataset: PromptDataset | Mixture | Generated | None  # None with run.debug_train_only
    eval_prompts: Sequence[Prompt]
    warm_start: SupervisedDataset | None
    notes: Sequence[str]

    def source(self) -> PromptStream:
        """A fresh stream of the training prompts."""
        if self.dataset is None:
            raise ConfigError(
                "there are no prompts to train on: run.debug_train_only is set", setting="data.prompt_data"
            )
        config = self.config
        return PromptStream(
            self.dataset, seed=config.seed, shuffle=config.data.shuffle, num_epoch=config.rollout.num_epoch
        )

    def snapshot_folder(self, run_dir: Path) -> SnapshotFolder:
        """In shared memory only where all who read the snapshots are on one node with worker rank 1, their writer."""
        engine, sent = self.config.engine, self.config.publication.transport != "disk"
        writer_is_here = workers_here(self.config.parallel.num_workers) > 0
        return SnapshotFolder(
            run_dir,
            self.config.publication.weights_dir,
            local=(sent or not (engine.sidecar_url or engine.url)) and writer_is_here,
            model_bytes=parameter_count(self.model) * BYTES_PER_PARAMETER[self.config.model.dtype],
        )


def read_inputs(written: Config, run_dir: Path) -> Inputs:
    """Everything checked and in memory. Blocking: seconds for large data. Raises ConfigError."""
    prepare(written, run_dir)
    config = with_prepared(written, run_dir)
    parallel = config.parallel
    sizes = (parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size)
    model = check_model_dir(config.model.hf_checkpoint, *sizes)
    start = resolve_start(config.model)
    for setting in ("model.load", "model.ref_load"):
        path = value_of(config, setting)
        if path is not None and not is_megatron(path):
            check_model_dir(path, *sizes, setting=setting)
    config = with_start(config, start)
    tokenizer = load_tokenizer(config.model.hf_checkpoint)
    context = min(model.context_length, config.engine.context_length or model.context_length) - reserved_tokens(config)
    notes = [f"weights of {start.load} ({start.setting})"]
    dataset, eval_prompts = None, list[Prompt]()
    if not config.run.debug_train_only:
        dataset = _prompts(config, tokenizer, context)
        notes.append(dataset.summary)
        eval_prompts = _eval_prompts(config, tokenizer, context)
    counted = dataset if isinstance(dataset, PromptDataset | Mixture) else None
    size = len(counted) if counted else 0
    sizing = resolve_sizing(config, size, loaded=counted.loaded if counted else None)
    if counted:
        notes += [sizing_line(config, sizing, size), *sizing_warnings(config, sizing, size)]
    warm_start = None
    if config.warm_start.steps:
        warm_start = load_warm_start(
            str(config.warm_start.data), data=config.data, tokenizer=tokenizer, context_length=context
        )
        notes.append(warm_start.summary)
    return Inputs(
        config=with_sizing(config, sizing),
        start=start,
        model=model,
        tokenizer=tokenizer,
        reward=load_reward(config.reward),
        sizing=sizing,
        context_length=context,
        dataset=dataset,
        eval_prompts=eval_prompts,
        warm_start=warm_start,
        notes=notes,
    )


def _prompts(config: Config, tokenizer: TextTokenizer, context_length: int) -> PromptDataset | Mixture | Generated:
    data = config.data
    if not config.rollout.rollout_global_dataset:
        name = str(data.prompt_function)
        function = resolve_function(name, setting="data.prompt_function")
        limit = min(context_length - 1, data.max_prompt_tokens or context_length - 1)
        return Generated(name, function, data, tokenizer, limit)
    first = load_prompts(str(data.prompt_data), data=data, tokenizer=tokenizer, context_length=context_length)
    if not data.extra_prompt_data:
        return first
    further = [
        load_prompts(
            path,
            data=data,
            tokenizer=tokenizer,
            context_length=context_length,
            name=f"{Path(path).stem}-{number}",
            setting="data.extra_prompt_data",
        )
        for number, path in enumerate(data.extra_prompt_data, start=1)
    ]
    files = (first, *further)
    return Mixture(files, data.weights or tuple(float(len(file)) for file in files))


def prepare(config: Config, run_dir: Path) -> None:
    """Call the recipe's `prepare` function, once for a run directory and these arguments."""
    section = config.prepare
    if section.function is None:
        return
    folder, partial = run_dir / FOLDER, run_dir / f"{FOLDER}.partial"
    wanted = {"function": section.function, "seed": config.seed, "args": section.args}
    stamp = folder / "prepared.json"
    if stamp.is_file() and json.loads(stamp.read_text()) == wanted:
        return
    function = resolve_function(section.function, setting="prepare.function")
    _check_arguments(function, section.args)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        function(partial, config.seed, **section.args)
        (partial / stamp.name).write_text(json.dumps(wanted))
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    except OSError as error:
        raise ConfigError(f"can't write {error.filename or partial}: {error.strerror}", setting="run.dir") from error


def _check_arguments(function: object, args: dict[str, object]) -> None:
    if not callable(function):
        raise ConfigError(f"{function!r} can't be called", setting="prepare.function")
    try:
        inspect.signature(function).bind(Path(), 0, **args)
    except TypeError as error:
        raise ConfigError(f"function(directory, seed, **args): {error}", setting="prepare.args") from error


def _eval_prompts(config: Config, tokenizer: TextTokenizer, context_length: int) -> list[Prompt]:
    section = config.eval
    if section.eval_prompt_data is None:
        return []
    dataset = load_prompts(
        section.eval_prompt_data,
        data=config.data,
        tokenizer=tokenizer,
        context_length=context_length,
        name="eval",
        setting="eval.eval_prompt_data",
    )
    return dataset.prompts(section.max_prompts)
