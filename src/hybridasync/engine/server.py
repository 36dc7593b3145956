"""`python -m hybridasync.engine`: the embedded engine as a process."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import torch
import uvicorn

from hybridasync.engine.app import build_app
from hybridasync.engine.loop import DecoderThread
from hybridasync.engine.model import Decoder, KVCache
from hybridasync.engine.model_config import ModelConfig
from hybridasync.engine.rows import Rows
from hybridasync.engine.scheduler import Limits, Scheduler
from hybridasync.engine.service import EngineService, EngineSettings
from hybridasync.engine.weights import WeightStore
from hybridasync.errors import ConfigError
from hybridasync.http import answer_at_once
from hybridasync.observability.heap import settled_heap
from hybridasync.observability.process import die_with_parent
from hybridasync.weights.snapshot import read_tensors

DTYPES = {"fp32": torch.float32, "float32": torch.float32, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16}
_CACHE_FRACTION = {"cpu": 0.25, "cuda": 0.35}
"""Share of the free memory that the cache may take. While it grows, old and new keys are held at once; and on CPU the
trainer and other engines live in the same memory."""
_log = logging.getLogger(__name__)


class _Server(uvicorn.Server):
    """Announces itself once connections are accepted."""

    def __init__(self, config: uvicorn.Config, *, announce: Path | None, url: str, port: int) -> None:
        super().__init__(config)
        self._announcement = announce, {"url": url, "port": port, "pid": os.getpid()}

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGTERM is how the engine is meant to end: exit code 0, where uvicorn would raise the signal once more."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.handle_exit)
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        path, content = self._announcement
        if path is not None:
            _write_atomically(path, json.dumps(content))


def main(argv: Sequence[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT; 0 then, 2 with one line on standard error for a mistake of the user's."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=arguments.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if arguments.die_with_parent:
        die_with_parent(signal.SIGKILL)
    try:
        with _bind(arguments.host, arguments.port) as listener:
            service = build_service(arguments)
            with settled_heap():
                _serve(service, listener, arguments)
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


def build_service(arguments: argparse.Namespace) -> EngineService:
    """Load the model and start the decoder's thread. Raises ConfigError."""
    device, dtype = _device(arguments.device), DTYPES[arguments.dtype]
    config = ModelConfig.from_directory(arguments.model_path)
    store = WeightStore(config, device=device, dtype=dtype)
    try:
        weights = store.load(read_tensors(arguments.model_path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{arguments.model_path}: {error}", setting="--model-path") from error
    context = min(arguments.context_length or config.context_length, config.context_length)
    budget = arguments.max_total_tokens or _cache_budget(config, device, dtype)
    context = min(context, budget)
    generator = torch.Generator(device=device).manual_seed(arguments.random_seed)
    scheduler = Scheduler(
        Decoder(config, context_length=context, device=device, dtype=dtype),
        weights,
        Rows(KVCache(config, device=device, dtype=dtype), device=device, max_total_tokens=budget),
        limits=Limits(arguments.max_running_requests, budget),
        generator=generator,
        version=arguments.weight_version,
    )
    settings = EngineSettings(
        model_path=str(arguments.model_path),
        device=arguments.device,
        dtype=arguments.dtype,
        max_running_requests=arguments.max_running_requests,
        context_length=context,
        max_total_tokens=budget,
        random_seed=arguments.random_seed,
    )
    thread = DecoderThread(scheduler)
    thread.start()
    return EngineService(thread, scheduler, store=store, settings=settings)


def _serve(service: EngineService, listener: socket.socket, arguments: argparse.Namespace) -> None:
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    config = uvicorn.Config(
        build_app(service, api_key=arguments.api_key),
        log_level=arguments.log_level,
        access_log=False,
        timeout_graceful_shutdown=1,
        timeout_keep_alive=75,
        lifespan="off",
    )
    _log.info("serving %s at %s", service.model_path, url)
    try:
        _Server(config, announce=arguments.announce, url=url, port=port).run(sockets=[listener])
    finally:
        service.thread.stop()


def _bind(host: str, port: int) -> socket.socket:
    """Before the model is loaded, so that a port that is taken shows at once. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(f"can't listen on {host}:{port}: {error}", setting="--port") from error
    answer_at_once(listener)
    return listener


def _device(name: str) -> torch.device:
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"{name} was asked for, but torch finds no CUDA device", setting="--device")
    return torch.device(name)


def _cache_budget(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> int:
    """Tokens that the key-value cache may hold."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    budget = free * _CACHE_FRACTION[device.type] / (config.kv_elements_per_token * dtype.itemsize)
    return max(int(budget), 1)


def _write_atomically(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        file.write(text)
    Path(file.name).replace(path)


DESCRIPTION = "The embedded engine. For example: hybridasync engine --model-path runs/mine/hf --port 30000"


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} isn't at least 1")
    return value


def _seed(text: str) -> int:
    value = int(text)
    if not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"{value} isn't between 0 and 2**63 - 1")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hybridasync engine", description=DESCRIPTION)
    parser.add_argument("--model-path", "--model", required=True, help="Hugging Face directory")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000, help="0: the system chooses")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="fp32", choices=tuple(DTYPES))
    parser.add_argument("--max-running-requests", type=_positive, default=256, help="sequences decoded together")
    parser.add_argument("--context-length", type=_positive, help="default and upper limit: the model's")
    parser.add_argument(
        "--max-total-tokens", type=_positive, help="tokens in the cache; default: a share of free memory"
    )
    parser.add_argument("--random-seed", type=_seed, default=0)
    parser.add_argument("--weight-version", default="default")
    parser.add_argument(
        "--api-key", default=os.environ.get("HYBRIDASYNC_ENGINE_API_KEY"), help="bearer token to require"
    )
    parser.add_argument("--announce", type=Path, help="file that gets url, port and pid once requests are accepted")
    parser.add_argument("--log-level", default="warning", choices=("debug", "info", "warning", "error"))
    parser.add_argument("--die-with-parent", action=argparse.BooleanOptionalAction, default=True)
    return parser
