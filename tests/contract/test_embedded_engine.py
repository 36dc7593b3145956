"""What only the embedded engine promises: where SGLang dies, deadlocks or has no answer, it stays and says why."""

from __future__ import annotations

import base64
import json
import os
import pickle
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.contract.kit import (
    LONGEST,
    PROMPT,
    Target,
    answered,
    assert_spans_exact,
    generate,
    in_flight,
    loads,
    pickled,
    post,
    until,
)
from tests.engine_models import VOCAB, saved_model

from hybridasync.engine.app import _ROUTES
from hybridasync.engine.unpickle import BucketEntry, PayloadError, named_tensors

TARGETS = ("embedded",)


async def test_abort_of_several_samples_by_their_one_id(client: httpx.AsyncClient) -> None:
    """A request for n samples is one request: its id aborts them all."""
    answers: list[Any] = []

    async def ask() -> None:
        answers.extend(await generate(client, {**LONGEST, "n": 4}, rid="group"))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)

        async def running() -> bool:
            return bool((await loads(client))["num_running_reqs"] == 4)

        await until(running)
        await post(client, "/abort_request", rid="group")
    assert [answer["meta_info"]["id"] for answer in answers] == [f"group_{index}" for index in range(4)]
    assert all(answer["meta_info"]["finish_reason"]["type"] == "abort" for answer in answers)


async def test_abort_after_in_place_does_not_deadlock(target: Target, client: httpx.AsyncClient) -> None:
    """SGLang hangs for good here; this engine ends what was frozen."""
    async with in_flight(client) as flights:
        await post(client, "/pause_generation", mode="in_place")
        await post(client, "/pause_generation", mode="abort")
        await until(lambda: answered(flights[0]))
    assert flights[0].answer["meta_info"]["finish_reason"]["type"] == "abort"
    await post(client, "/continue_generation")
    assert_spans_exact(target, await generate(client, {"max_new_tokens": 5}))


async def test_a_token_id_that_is_none_is_refused(client: httpx.AsyncClient) -> None:
    """SGLang's scheduler dies of a negative id, and answers one between the vocabulary and its padding."""
    for ids in ([VOCAB], [-1]):
        answer = await post(client, "/generate", 400, input_ids=ids)
        assert "valid range" in answer.text


async def test_an_aborted_request_keeps_every_token(target: Target, client: httpx.AsyncClient) -> None:
    """Also while retracted, where SGLang returns what its scheduler had passed on, a multiple of 50 tokens."""
    async with in_flight(client) as flights:
        await post(client, "/pause_generation", mode="retract")
        await post(client, "/abort_request", rid="flight-0")
        await until(lambda: answered(flights[0]))
        assert len(flights[0].answer["output_ids"]) > 10
    await post(client, "/continue_generation")
    assert_spans_exact(target, flights[0].answer)


async def test_weights_of_another_model_are_refused(target: Target, client: httpx.AsyncClient, tmp_path: Path) -> None:
    """A wrong shape on disk or in a tensor, or an unknown name, is 400 before anything is touched."""
    saved_model(tmp_path / "wide", hidden_size=64)
    before = (await post(client, "/weights_checker")).json()["per_engine_checksum"]
    await post(client, "/update_weights_from_disk", 400, model_path=str(tmp_path / "wide"), weight_version="9")
    await post(client, "/update_weights_from_disk", 400, model_path="/\0", weight_version="9")
    await post(client, "/begin_weight_update")
    for named in ([("model.norm.weight", torch.ones(7))], [("model.nothing", torch.ones(3))], "nonsense"):
        payload = pickled(named)  # type: ignore[arg-type]
        answer = await post(client, "/update_weights_from_tensor", 400, serialized_named_tensors=payload)
        assert "old weights are kept" in answer.json()["message"]
    await post(client, "/end_weight_update")
    assert (await post(client, "/weights_checker")).json()["per_engine_checksum"] == before
    assert (await client.get("/model_info")).json()["weight_version"] == "default"


async def test_generation_goes_on_while_weights_are_read(
    target: Target, client: httpx.AsyncClient, tmp_path: Path
) -> None:
    """An update that fails its checks costs the requests in flight nothing but time."""
    saved_model(tmp_path / "wide", hidden_size=64)
    async with in_flight(client) as flights:
        await post(client, "/update_weights_from_disk", 400, model_path=str(tmp_path / "wide"))
        assert flights[0].answer is None
    assert flights[0].answer["meta_info"]["finish_reason"]["type"] == "length"
    assert_spans_exact(target, flights[0].answer)


class Harm:
    """Unpickles by calling a function of the sender's choice."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


async def test_hostile_pickles_are_not_executed(target: Target, client: httpx.AsyncClient, tmp_path: Path) -> None:
    """Nothing outside the short list of names is looked up, let alone called."""
    await post(client, "/begin_weight_update")
    harm = base64.b64encode(pickle.dumps([("x", Harm(tmp_path / "made"))])).decode()
    answer = await post(client, "/update_weights_from_tensor", 400, serialized_named_tensors=[harm])
    assert "isn't allowed" in answer.json()["message"]
    assert not (tmp_path / "made").exists()
    for payload in ("%%%", "AAAA", base64.b64encode(b"\x80\x05\x95").decode()):
        await post(client, "/update_weights_from_tensor", 400, serialized_named_tensors=[payload])
    assert (await client.get("/health_generate")).status_code == 200


def test_a_tensor_cannot_reach_past_its_storage() -> None:
    """A forged stride or offset would read memory that isn't the sender's."""
    honest = pickle.dumps([("x", torch.arange(6.0)[2:])], protocol=2)
    [(name, tensor)] = named_tensors(base64.b64encode(honest).decode(), None)
    assert name == "x"
    assert tensor.tolist() == [2, 3, 4, 5]
    forged = honest.replace(b"K\x02K\x04\x85", b"K\x02K\xff\x85")
    assert forged != honest
    with pytest.raises(PayloadError, match="past its storage"):
        named_tensors(base64.b64encode(forged).decode(), None)


async def test_flattened_bucket(target: Target, client: httpx.AsyncClient) -> None:
    """SGLang's bucket of one flat tensor and its metadata is understood."""
    named = [(name, tensor.detach()) for name, tensor in target.models["1"].state_dict().items()]
    flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for _, tensor in named])
    start, metadata = 0, []
    for name, tensor in named:
        end = start + tensor.nbytes
        metadata.append(
            {"name": name, "shape": tensor.shape, "dtype": tensor.dtype, "start_idx": start, "end_idx": end}
        )
        start = end
    bucket = pickle.dumps({"flattened_tensor": flat, "metadata": metadata})
    await post(client, "/begin_weight_update")
    body = {"serialized_named_tensors": [base64.b64encode(bucket).decode()], "load_format": "flattened_bucket"}
    await post(client, "/update_weights_from_tensor", **body, weight_version="1")
    await post(client, "/end_weight_update")
    assert_spans_exact(target, await generate(client, {"max_new_tokens": 10, "ignore_eos": True}))
    assert BucketEntry.__annotations__.keys() == metadata[0].keys()


async def test_unsupported_parameters_are_named(client: httpx.AsyncClient) -> None:
    """What SGLang can and this engine can't is refused, never ignored."""
    for name, value in (("stop", ["x"]), ("frequency_penalty", 0.5), ("regex", "a+"), ("no_such", 1)):
        answer = await post(client, "/generate", 400, input_ids=PROMPT, sampling_params={name: value})
        assert name in answer.text
    await post(client, "/generate", 400, text="hello")
    await generate(client, {"max_new_tokens": 1, "stop": None, "frequency_penalty": 0.0, "sampling_seed": 3})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = st.sampled_from(
    [
        "input_ids",
        "rid",
        "sampling_params",
        "stream",
        "return_logprob",
        "logprob_start_len",
        "mode",
        "model_path",
        "weight_version",
        "serialized_named_tensors",
        "load_format",
        "names",
        "dtypes",
        "shapes",
        "group_name",
        "new_version",
        "action",
        "skip_tensor_list",
        "abort_all",
        "text",
    ]
)
SAMPLING = st.dictionaries(
    st.sampled_from(["max_new_tokens", "temperature", "top_p", "top_k", "min_p", "n", "stop_token_ids", "ignore_eos"]),
    st.integers(-3, 9) | st.floats() | st.none() | st.lists(st.integers(-5, 99), max_size=3),
)
IDS = st.lists(st.integers(-2, 80), max_size=9)
BODY = st.one_of(
    JSON,
    st.dictionaries(FIELDS, JSON, max_size=5),
    st.fixed_dictionaries(
        {"input_ids": IDS | st.lists(IDS, max_size=3)},
        optional={
            "sampling_params": SAMPLING | st.lists(SAMPLING, max_size=2),
            "rid": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=3),
            "stream": st.booleans(),
            "return_logprob": st.booleans(),
            "logprob_start_len": st.integers(-3, 12),
        },
    ),
)
POSTS = sorted(path for path, methods, _ in _ROUTES if "POST" in methods)


# too_slow is said of a machine, too, that stands still for a second
@settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(path=st.sampled_from(POSTS), body=BODY, cut=st.integers(0, 400))
def _fuzz(client: httpx.Client, path: str, *, body: Any, cut: int) -> None:
    content = json.dumps(body).encode()
    content = content[:-1] if cut == 0 else content
    try:
        # a request that is held because another example paused the engine isn't answered
        answer = client.post(path, content=content, timeout=httpx.Timeout(20, read=0.5 if path == "/generate" else 20))
    except httpx.ReadTimeout:
        assert path == "/generate"
        client.post("/continue_generation", json={})
        return
    assert answer.status_code < 500, (path, body, answer.text)
    if path == "/pause_generation":
        client.post("/continue_generation", json={})
    if answer.headers.get("content-type") == "application/json":
        answer.json()


async def test_nothing_that_a_client_sends_ends_the_engine(target: Target, client: httpx.AsyncClient) -> None:
    """Random JSON at every route is answered below 500, and afterwards the engine is exact."""
    with httpx.Client(base_url=target.url, trust_env=False) as fuzzer:
        await anyio.to_thread.run_sync(_fuzz, fuzzer)
    await post(client, "/continue_generation")
    for content in (b"[" * 100_000, b'{"input_ids": ' + b"9" * 10_000 + b"}", b'{"rid": "\\ud800", "input_ids": [5]}'):
        answer = await client.post("/generate", content=content)
        assert answer.status_code in (200, 400)
    await post(client, "/abort_request", abort_all=True)
    await client.post("/end_weight_update", json={})
    await post(
        client, "/update_weights_from_disk", model_path=str(target.directories["default"]), weight_version="default"
    )
    assert_spans_exact(target, await generate(client, {"max_new_tokens": 20, "ignore_eos": True}))
    assert (await loads(client))["num_running_reqs"] == 0
