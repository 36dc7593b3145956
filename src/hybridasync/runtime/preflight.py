"""What can be known to be wrong before anything is started: model, data, reward function, engines, ports.

Without torch, so that a mistake is told within a second or two.
"""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from hybridasync.config.models import Config
from hybridasync.config.prepared import PLACEHOLDER
from hybridasync.config.start import is_megatron, resolve_start
from hybridasync.data.jsonl import Row, read_rows
from hybridasync.data.model_dir import check_model_dir
from hybridasync.errors import ConfigError
from hybridasync.rewards.functions import resolve_function
from hybridasync.rewards.registry import load_reward
from hybridasync.runtime.interface import check_interface

READ_WHOLE_BYTES = 64 * 2**20
"""Larger data files are read only when the run starts: reading them twice would cost more than a late message."""


def preflight(config: Config) -> None:
    """Check everything that the run will read. What is made by `prepare` is checked when it has been made.

    Raises: ConfigError that carries everything found.
    """
    errors = []
    for check in _checks(config):
        try:
            check()
        except ConfigError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ConfigError("\n".join([f"{len(errors)} things are in the way:", *(f"  {error}" for error in errors)]))


def check_model(config: Config) -> None:
    """The policy, the weights it starts from, and the reference model where there is one. Raises ConfigError."""
    parallel, model = config.parallel, config.model
    named = {"model.hf_checkpoint": model.hf_checkpoint, "model.load": model.load, "model.ref_load": model.ref_load}
    paths = {setting: path for setting, path in named.items() if path is not None}
    known = [setting for setting, path in paths.items() if PLACEHOLDER not in path]
    if len(known) == len(paths):
        resolve_start(model)
    for setting in known:
        if not is_megatron(paths[setting]):
            sizes = (parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size)
            check_model_dir(paths[setting], *sizes, setting=setting)


def check_data_file(setting: str, path: str | None, keys: tuple[str, ...]) -> None:
    """The file is there, can be parsed, and its first row has the fields. Raises ConfigError."""
    if path is None or PLACEHOLDER in path:
        return
    file = Path(path)
    if file.is_file() and file.stat().st_size > READ_WHOLE_BYTES:
        return
    first: Row = read_rows(file, setting=setting)[0]
    for key in keys:
        if key not in first.fields:
            fields = ", ".join(map(repr, first.fields)) or "none"
            raise ConfigError(f"{first.place}: no field {key!r}; it has {fields}", setting=setting)


def check_sglang(config: Config) -> None:
    """The interpreter of SGLang's environment exists. Raises ConfigError."""
    engine = config.engine
    if engine.kind == "sglang" and engine.python and not engine.sidecar_url and shutil.which(engine.python) is None:
        raise ConfigError(
            f"{engine.python} isn't an executable; give the Python interpreter of SGLang's environment "
            "(`hybridasync sglang setup DIR` makes one for the CPU, docs/sglang.md says how on a GPU)",
            setting="engine.python",
        )


def check_ports(config: Config) -> None:
    """Ports that were given are free now. Raises ConfigError that names the taken one."""
    engine, count = config.engine, config.engine.num_engines
    launched: list[tuple[str, int, int]] = []
    if not engine.sidecar_url and not config.run.debug_train_only:
        launched.append(("engine.sidecar_port", engine.sidecar_port, count))
        if engine.kind != "attach":
            launched.append(("engine.port", engine.port, count))
    if config.network.nnodes == 1:
        launched.append(("network.master_port", config.network.master_port, 1))
    for setting, first, number in launched:
        for port in range(first, first + number) if first else ():
            if not _is_free(port):
                raise ConfigError(f"port {port} is taken; give another, or 0 to let the system choose", setting=setting)


def _checks(config: Config) -> Iterator[Callable[[], object]]:
    data, evaluation = config.data, config.eval
    both = tuple(key for key in (data.prompt_key, data.label_key) if key)  # label_key "" is data without answers
    if config.prepare.function is not None:
        function = config.prepare.function
        yield lambda: resolve_function(function, setting="prepare.function")
    yield lambda: check_model(config)
    if not config.run.debug_train_only:
        if config.rollout.rollout_global_dataset:
            yield lambda: check_data_file("data.prompt_data", data.prompt_data, both)
            for path in data.extra_prompt_data:
                yield partial(check_data_file, "data.extra_prompt_data", path, both)
        elif data.prompt_function is not None:
            maker = data.prompt_function
            yield lambda: resolve_function(maker, setting="data.prompt_function")
        if evaluation.eval_interval is not None:
            yield lambda: check_data_file("eval.eval_prompt_data", evaluation.eval_prompt_data, both)
        yield lambda: load_reward(config.reward)
        yield lambda: check_sglang(config)
    if config.warm_start.steps:
        yield lambda: check_data_file("warm_start.data", config.warm_start.data, ("prompt", "response"))
    yield lambda: check_interface(config.network)
    yield lambda: check_ports(config)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As servers do: a port that only waits for late packets of an old connection is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
