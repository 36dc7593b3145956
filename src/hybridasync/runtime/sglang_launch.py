"""How a real SGLang server is launched: the command line, and what it needs besides on a machine without a GPU."""

from __future__ import annotations

import os
from collections.abc import Mapping

from hybridasync.config.models import Config
from hybridasync.errors import ConfigError

CPU_ENVIRONMENT: Mapping[str, str] = {
    # Without it SGLang finds no platform that it knows.
    "SGLANG_USE_CPU_ENGINE": "1",
    # Its health probe generates a token, and then waits 20 s for one while the server is paused.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    "HF_HUB_OFFLINE": "1",
}

CPU_ARGUMENTS = (
    "--device",
    "cpu",
    "--attention-backend",
    "torch_native",
    # Its scheduler polls, and an idle one would keep a core from the trainer.
    "--sleep-on-idle",
    # By default the cache of keys and values gets seven tenths of the machine's memory.
    "--mem-fraction-static",
    "0.3",
    "--max-total-tokens",
    "65536",
)

RESERVED_TOKENS = 6
"""SGLang refuses a prompt that leaves no more of the context than this, as a continued sample's may."""

_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def reserved_tokens(config: Config) -> int:
    """How much of the context length the engines of a recipe keep for themselves."""
    return 0 if config.engine.kind == "embedded" else RESERVED_TOKENS


def launch_command(config: Config, *, device: str, address: tuple[str, ...]) -> list[str]:
    """The server's command line; `address` are host, port and what all kinds of engines share.

    What the recipe gives in `engine.args` comes last: SGLang takes the last of an option given twice. Raises
    ConfigError for what it can't do on this device.
    """
    engine = config.engine
    command = [str(engine.python), "-m", "sglang.launch_server", "--model-path", str(config.model.hf_checkpoint)]
    command += ["--skip-tokenizer-init", "--dtype", _DTYPES[engine.dtype or config.model.dtype]]
    command += ["--tp-size", str(engine.tensor_parallel_size), "--log-level-http", "warning"]
    if config.rollout.deterministic:
        if device == "cpu":
            raise ConfigError(
                'SGLang has no deterministic inference on a CPU: set it to false, or take engine.kind = "embedded"',
                setting="rollout.deterministic",
            )
        command.append("--enable-deterministic-inference")
    if device == "cpu":
        command += CPU_ARGUMENTS
    return [*command, *address, *engine.args]


def launch_environment(*, device: str, tensor_parallel_size: int) -> dict[str, str]:
    """Environment variables of the server beside those of its parent."""
    if device != "cpu":
        return {}
    environment = dict(CPU_ENVIRONMENT)
    if tensor_parallel_size > 1:
        # One rank for each NUMA node is SGLang's rule; named cores lift it.
        cores = sorted(os.sched_getaffinity(0))
        bound = [str(cores[rank % len(cores)]) for rank in range(tensor_parallel_size)]
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(bound)
    return environment
