"""What the tests of the contract share: the target, requests in flight, and what an exact answer is."""

from __future__ import annotations

import base64
import json
import pickle
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import httpx
import torch
from tests.engine_models import reference_logprobs
from transformers import PreTrainedModel

CONTEXT = 2048
PROMPT = [5, 9, 17, 33, 12, 60]
LONG = {"max_new_tokens": 1000, "temperature": 1.0, "ignore_eos": True}
LONGEST = {**LONG, "max_new_tokens": 2000}
"""For what nobody waits for: all that the context has room for, so that it can't be over before it was seen."""
Json = dict[str, Any]


async def generate(client: httpx.AsyncClient, sampling: Json, **body: Any) -> Any:
    answer = await client.post(
        "/generate", json={"input_ids": PROMPT, "return_logprob": True, "sampling_params": sampling, **body}
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


async def post(client: httpx.AsyncClient, path: str, status: int = 200, **body: Any) -> httpx.Response:
    answer = await client.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer


async def loads(client: httpx.AsyncClient) -> Json:
    entry: Json = (await client.get("/v1/loads")).json()["loads"][0]
    return entry


async def until(condition: Callable[[], Awaitable[bool]], seconds: float = 20) -> None:
    with anyio.fail_after(seconds):
        while not await condition():  # noqa: ASYNC110 - what is waited for happens in another process
            await anyio.sleep(0.02)


class Flight:
    """A long request on its way; `answer` is None until it returns."""

    answer: Any = None


@asynccontextmanager
async def in_flight(
    client: httpx.AsyncClient, *, tokens: int = 20, count: int = 1, **body: Any
) -> AsyncIterator[list[Flight]]:
    """`count` long requests that have made about `tokens` tokens each; leaving the block waits for their answers."""

    async def run(flight: Flight, index: int) -> None:
        flight.answer = await generate(client, LONG, **{"rid": f"flight-{index}", **body})

    async with anyio.create_task_group() as tasks:
        flights = [Flight() for _ in range(count)]
        for index, flight in enumerate(flights):
            tasks.start_soon(run, flight, index)

        async def moving() -> bool:
            load = await loads(client)
            return bool(load["num_running_reqs"] == count and load["num_used_tokens"] >= count * (tokens + len(PROMPT)))

        await until(moving)
        yield flights


def output_logprobs(answer: Json) -> list[float]:
    triples = answer["meta_info"]["output_token_logprobs"]
    assert [triple[1] for triple in triples] == answer["output_ids"]
    return [triple[0] for triple in triples]


def assert_spans_exact(target: Target, answer: Json) -> None:
    """Spans cover the output without gaps, and each has the log-probs of its version's weights."""
    spans, ids = answer["meta_info"]["weight_versions"], answer["output_ids"]
    assert [span["start"] for span in spans] == [0, *[span["end"] for span in spans[:-1]]]
    assert spans[-1]["end"] == len(ids)
    assert answer["meta_info"]["weight_version"] == spans[-1]["version"]
    for span in spans:
        reference = reference_logprobs(target.models[span["version"]], PROMPT, ids)
        served = output_logprobs(answer)
        assert max(abs(served[i] - reference[i]) for i in range(span["start"], span["end"])) < 3e-5


@dataclass(frozen=True)
class Target:
    """A running server and the two weight versions that tests move it between."""

    kind: str
    url: str
    process: subprocess.Popen[bytes] | None  # None: in this process
    directories: dict[str, Path]
    models: dict[str, PreTrainedModel]


async def answered(flight: Flight) -> bool:
    return flight.answer is not None


def pickled(named: list[tuple[str, torch.Tensor]]) -> list[str]:
    return [base64.b64encode(pickle.dumps(named)).decode()]


def read_events(text: str) -> list[dict[str, object]]:
    """The JSON events of a server-sent-event body; its end mark is checked."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]
