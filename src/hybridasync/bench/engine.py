"""Response tokens per CPU-second of the embedded engine against `transformers` generate, same model and prompts.

Three ways to sample the same groups, in turn within one run, each on one thread:

  transformers  one generate() call with num_return_sequences, left-padded; it isn't asked for log-probs
  in process    the engine's scheduler and decoder thread, log-probs included
  http          the engine as a process, one request per group; its own processor time, and apart the client's

The model is random, so that responses end at random: lengths are mixed. Only tokens up to the end of a response count.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import anyio
import torch

from hybridasync.bench.measure import Foreign, Spread, cpu_seconds
from hybridasync.data.sort_digits import SPECIAL, VOCABULARY, write_model
from hybridasync.engine.requests import Group, Sampling
from hybridasync.engine.server import build_service
from hybridasync.engine.service import EngineService
from hybridasync.errors import OperatingError
from hybridasync.transport.sglang import SglangServer
from hybridasync.types import SamplingParams

PAD, EOS = 0, 2
ENGINE_ROWS = 1024  # engine.max_running_requests of a recipe
START_TIMEOUT_S = 120


@dataclass(frozen=True, slots=True)
class Shape:
    """`prompt_tokens` is the range of prompt lengths, `repeats` how often the work is done in one measurement."""

    layers: int
    hidden: int
    prompts: int
    samples: int
    prompt_tokens: tuple[int, int]
    max_new_tokens: int
    repeats: int

    def __str__(self) -> str:
        low, high = self.prompt_tokens
        lengths = str(low) if low == high else f"{low} to {high}"
        return (
            f"{self.layers} layers, hidden {self.hidden}; {self.prompts} prompts of {lengths} tokens × {self.samples} "
            f"samples of at most {self.max_new_tokens} tokens"
        )

    def draw(self, rng: random.Random) -> list[list[int]]:
        ordinary = range(len(SPECIAL), len(VOCABULARY))
        return [rng.choices(ordinary, k=rng.randint(*self.prompt_tokens)) for _ in range(self.prompts)]


SHAPES = {
    "quickstart": Shape(2, 128, 32, 16, (11, 11), max_new_tokens=8, repeats=6),
    "larger": Shape(4, 256, 32, 8, (8, 48), max_new_tokens=96, repeats=1),
    "tiny": Shape(1, 32, 2, 2, (4, 6), max_new_tokens=4, repeats=1),
}

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Measured:
    tokens: int
    cpu_s: float
    wall_s: float
    client_cpu_s: float = 0.0

    @property
    def rate(self) -> float:
        """Response tokens per CPU-second."""
        return self.tokens / self.cpu_s


class Transformers:
    def __init__(self, path: Path, shape: Shape) -> None:
        from transformers import AutoModelForCausalLM  # takes seconds

        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self._shape = shape

    def __call__(self, prompts: Prompts) -> Measured:
        cpu, wall = time.process_time(), time.perf_counter()
        longest = max(map(len, prompts))
        ids = torch.tensor([[PAD] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=(ids != PAD).long(),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                num_return_sequences=self._shape.samples,
                max_new_tokens=self._shape.max_new_tokens,
                eos_token_id=EOS,
                pad_token_id=PAD,
            )
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        return Measured(_response_tokens(output[:, longest:]), cpu, wall)


def _response_tokens(rows: torch.Tensor) -> int:
    """Up to the first end-of-text of each row, itself included."""
    ended_before = (rows == EOS).cumsum(-1) - (rows == EOS).long()
    return int((ended_before == 0).sum())


class InProcess:
    def __init__(self, service: EngineService, shape: Shape) -> None:
        self._service, self._shape = service, shape
        self._sampling = Sampling(shape.max_new_tokens, n=shape.samples, stop_token_ids=(EOS,))

    def __call__(self, prompts: Prompts) -> Measured:
        cpu, wall = time.process_time(), time.perf_counter()
        waiting: list[Future[Group]] = []
        for prompt in prompts:
            done: Future[Group] = Future()
            group = Group(uuid4().hex, prompt, self._sampling, done.set_result)
            self._service.submit([group], done.set_exception)
            waiting.append(done)
        groups = [done.result() for done in waiting]
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        tokens = sum(len(sequence.output_ids) for group in groups for sequence in group.sequences)
        return Measured(tokens, cpu, wall)


class OverHttp:
    def __init__(self, url: str, pid: int, shape: Shape) -> None:
        self._url, self._pid, self._shape = url, pid, shape

    def __call__(self, prompts: Prompts) -> Measured:
        return anyio.run(self._generate, prompts)

    async def _generate(self, prompts: Prompts) -> Measured:
        params = SamplingParams(self._shape.max_new_tokens, n=self._shape.samples)
        tokens = 0

        async def one(prompt: Sequence[int]) -> None:
            nonlocal tokens
            completions = await server.generate(uuid4().hex, prompt, params)
            tokens += sum(len(completion.output_ids) for completion in completions)

        async with SglangServer("engine", self._url, control_timeout_s=30, request_timeout_s=600) as server:
            cpu, own, wall = cpu_seconds(self._pid), time.process_time(), time.perf_counter()
            async with anyio.create_task_group() as tasks:
                for prompt in prompts:
                    tasks.start_soon(one, prompt)
            cpu = max(cpu_seconds(self._pid) - cpu, 0.01)  # the resolution of a process's times
            return Measured(tokens, cpu, time.perf_counter() - wall, time.process_time() - own)


@contextmanager
def engine_process(model: Path, folder: Path) -> Iterator[tuple[str, int]]:
    """URL and process id of an engine."""
    announce = folder / f"{uuid4().hex}.json"
    command = [sys.executable, "-m", "hybridasync.engine", "--model-path", str(model), "--port", "0"]
    command += ["--max-running-requests", str(ENGINE_ROWS), "--announce", str(announce)]
    with subprocess.Popen(command) as process:
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not announce.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise OperatingError("the engine didn't start")
                time.sleep(0.05)
            yield str(json.loads(announce.read_text())["url"]), process.pid
        finally:
            process.terminate()


def in_process_service(model: Path) -> EngineService:
    return build_service(
        Namespace(
            model_path=model,
            device="cpu",
            dtype="fp32",
            context_length=None,
            max_total_tokens=None,
            max_running_requests=ENGINE_ROWS,
            random_seed=0,
            weight_version="default",
        )
    )


def measure(name: str, shape: Shape, rounds: int) -> dict[str, Any]:
    """All three systems in turn, `rounds` times. Raises OperatingError when the engine doesn't start."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with tempfile.TemporaryDirectory(prefix="hybridasync-bench-") as folder:
        model = Path(folder) / "model"
        write_model(model, seed=0, layers=shape.layers, hidden=shape.hidden, heads=4, context_length=256)
        with engine_process(model, Path(folder)) as (url, pid):
            service = in_process_service(model)
            systems: dict[str, Callable[[Prompts], Measured]] = {
                "transformers": Transformers(model, shape),
                "in_process": InProcess(service, shape),
                "http": OverHttp(url, pid, shape),
            }
            foreign = Foreign([os.getpid(), pid])
            measured = _rounds(systems, shape, rounds)
            others = foreign.share()
            service.thread.stop()
    ratios = {
        system: Spread.of(entry[system].rate / entry["transformers"].rate for entry in measured)
        for system in ("in_process", "http")
    }
    return {
        "shape": name,
        "work": str(shape),
        "tokens_per_cpu_s": {system: Spread.of(entry[system].rate for entry in measured) for system in systems},
        "ratio": ratios,
        "client_cpu_share": Spread.of(entry["http"].client_cpu_s / entry["http"].cpu_s for entry in measured),
        "foreign_cpu_share": others,
        "rounds": measured,
    }


def _rounds(systems: dict[str, Callable[[Prompts], Measured]], shape: Shape, rounds: int) -> list[dict[str, Measured]]:
    rng = random.Random(0)
    torch.manual_seed(0)
    order = list(systems)
    for system in order:  # caches, lazy imports
        systems[system](shape.draw(rng))
    found = []
    for _ in range(rounds):
        works = [shape.draw(rng) for _ in range(shape.repeats)]
        found.append({system: _sum([systems[system](work) for work in works]) for system in order})
        order.append(order.pop(0))  # nobody always goes first
    return found


def _sum(parts: Sequence[Measured]) -> Measured:
    return Measured(
        sum(part.tokens for part in parts),
        sum(part.cpu_s for part in parts),
        sum(part.wall_s for part in parts),
        sum(part.client_cpu_s for part in parts),
    )
