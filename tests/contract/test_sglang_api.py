"""What a controller relies on in SGLang 0.5.23's HTTP API: generation, pausing, weights.

Each test holds for a real SGLang; what only the embedded engine promises is in test_embedded_engine.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import anyio
import httpx
import pytest
from tests.contract.kit import (
    CONTEXT,
    LONG,
    LONGEST,
    PROMPT,
    Flight,
    Json,
    Target,
    answered,
    assert_spans_exact,
    generate,
    in_flight,
    loads,
    output_logprobs,
    pickled,
    post,
    read_events,
    until,
)
from tests.engine_models import EOS, VOCAB, reference_logprobs

from hybridasync.weights.checksums import checksums
from hybridasync.weights.snapshot import read_tensors

# --- generation


async def test_answer_of_one_sample(client: httpx.AsyncClient) -> None:
    """One prompt and n = 1 give one object with ids, counts, finish reason, versions and latency."""
    answer = await generate(client, {"max_new_tokens": 5, "temperature": 1.0, "ignore_eos": True}, rid="one")
    meta = answer["meta_info"]
    assert len(answer["output_ids"]) == 5
    assert meta["id"] == "one"
    assert meta["finish_reason"] == {"type": "length", "length": 5}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(PROMPT), 5)
    assert meta["weight_version"] == "default"
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": 5}]
    assert meta["num_retractions"] == 0
    assert meta["e2e_latency"] > 0
    assert {"cached_tokens", "input_token_logprobs"} <= meta.keys()


async def test_each_prompt_of_a_batch_may_have_a_seed(target: Target, client: httpx.AsyncClient) -> None:
    """`sampling_seed` is taken in a list of parameters; log-probs stay those of the weights, whatever the noise."""
    sampling = [{"max_new_tokens": 6, "ignore_eos": True, "sampling_seed": seed} for seed in (2**63 - 1, 3, 3)]
    answers = await generate(client, sampling, input_ids=[PROMPT] * 3)  # type: ignore[arg-type]
    for answer in answers:
        assert_spans_exact(target, answer)
    if target.kind == "embedded":  # a real SGLang heeds seeds in its deterministic mode alone, which wants a GPU
        again = await generate(client, sampling[1])
        assert answers[0]["output_ids"] != answers[1]["output_ids"] == answers[2]["output_ids"] == again["output_ids"]


async def test_lists_for_batches_and_several_samples(client: httpx.AsyncClient) -> None:
    """Batches answer in order of prompts, samples of a prompt side by side, ids as asked for."""
    sampling = {"max_new_tokens": 3, "temperature": 0.0, "ignore_eos": True}
    batch = await generate(client, sampling, input_ids=[PROMPT, [7], [8, 9]], rid=["a", "b", "c"])
    assert [answer["meta_info"]["id"] for answer in batch] == ["a", "b", "c"]
    assert [answer["meta_info"]["prompt_tokens"] for answer in batch] == [6, 1, 2]
    alone = await generate(client, sampling, input_ids=[7])
    assert batch[1]["output_ids"] == alone["output_ids"]
    several = await generate(client, {**sampling, "n": 3}, input_ids=[[7], [8, 9]])
    assert [answer["meta_info"]["prompt_tokens"] for answer in several] == [1, 1, 1, 2, 2, 2]
    assert all(answer["output_ids"] == alone["output_ids"] for answer in several[:3])
    assert len({answer["meta_info"]["id"] for answer in several}) == 6
    three = await generate(client, {**sampling, "n": 3, "temperature": 1.0})
    assert len(three) == 3


async def test_finish_reasons(client: httpx.AsyncClient) -> None:
    """A stop id or the model's end-of-sequence id stops, is part of the output and is named; ignore_eos goes on."""
    greedy = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    prompts = [[token] for token in range(3, VOCAB)]
    answers = await generate(client, greedy, input_ids=prompts)
    prompt, ids = next(
        (prompt, answer["output_ids"])
        for prompt, answer in zip(prompts, answers, strict=True)
        if EOS not in answer["output_ids"]
    )
    stop = ids[-1]
    stopped = await generate(client, {**greedy, "ignore_eos": False, "stop_token_ids": [stop]}, input_ids=prompt)
    assert stopped["output_ids"] == ids[: ids.index(stop) + 1]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    many = await generate(client, {"max_new_tokens": 600, "temperature": 1.5, "n": 4})
    assert any(answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS} for answer in many)
    assert all(EOS not in answer["output_ids"][:-1] for answer in many)


@pytest.mark.parametrize(
    "sampling", [{"temperature": 1.0}, {"temperature": 0.7}, {"top_p": 0.8}, {"top_k": 5}, {"temperature": 0.0}]
)
async def test_logprobs_are_of_the_distribution_at_the_temperature(
    target: Target, client: httpx.AsyncClient, sampling: Json
) -> None:
    """Log-probs equal Hugging Face's at the sampling temperature; top-p and top-k don't renormalise them."""
    answer = await generate(client, {"max_new_tokens": 30, "ignore_eos": True, **sampling})
    temperature = sampling.get("temperature", 1.0) or 1.0
    reference = reference_logprobs(target.models["default"], PROMPT, answer["output_ids"], temperature)
    assert output_logprobs(answer) == pytest.approx(reference, abs=3e-5)


async def test_input_logprobs(target: Target, client: httpx.AsyncClient) -> None:
    """From logprob_start_len on, the first without a value; none by default."""
    reference = reference_logprobs(target.models["default"], PROMPT[:1], PROMPT[1:])
    for start in (0, 2):
        answer = await generate(client, {"max_new_tokens": 1, "temperature": 1.0}, logprob_start_len=start)
        values, tokens, _ = zip(*answer["meta_info"]["input_token_logprobs"], strict=True)
        assert list(tokens) == PROMPT[start:]
        assert values[0] is None
        assert list(values[1:]) == pytest.approx(reference[start:], abs=3e-5)
    answer = await generate(client, {"max_new_tokens": 1, "temperature": 1.0})
    assert answer["meta_info"]["input_token_logprobs"] == []


async def test_streaming(client: httpx.AsyncClient) -> None:
    """Server-sent events grow by a token each, the last has the finish reason, then comes the end mark."""
    body = {
        "input_ids": PROMPT,
        "stream": True,
        "return_logprob": True,
        "sampling_params": {"max_new_tokens": 6, "ignore_eos": True},
    }
    answer = await client.post("/generate", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events: list[Any] = read_events(answer.text)
    lengths = [len(event["output_ids"]) for event in events]
    assert lengths == sorted(lengths)
    assert lengths[-1] == 6
    assert all(event["meta_info"]["finish_reason"] is None for event in events[:-1])
    assert events[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 6}
    assert len(events[-1]["meta_info"]["output_token_logprobs"]) == 6
    body["sampling_params"] = {"max_new_tokens": 4, "ignore_eos": True, "n": 2}
    events = read_events((await client.post("/generate", json=body)).text)
    assert {event["index"] for event in events} == {0, 1}


# --- pausing


async def test_retract_keeps_requests_open_across_an_update(target: Target, client: httpx.AsyncClient) -> None:
    """Retracted requests finish normally under the new weights, and each span is exact for its version."""
    async with in_flight(client, count=3) as flights:
        await post(client, "/pause_generation", mode="retract")
        path = str(target.directories["1"])
        answer = await post(client, "/update_weights_from_disk", model_path=path, weight_version="1")
        assert answer.json()["success"] is True
        assert [flight.answer for flight in flights] == [None] * 3
        await post(client, "/continue_generation")
    for flight in flights:
        meta = flight.answer["meta_info"]
        assert meta["finish_reason"] == {"type": "length", "length": LONG["max_new_tokens"]}
        assert meta["num_retractions"] == 1
        assert [span["version"] for span in meta["weight_versions"]] == ["default", "1"]
        assert_spans_exact(target, flight.answer)


async def test_streams_survive_an_update(target: Target, client: httpx.AsyncClient) -> None:
    """A stream that was retracted goes on where it was, and its last event has both spans."""
    text = []

    async def read() -> None:
        body = {"input_ids": PROMPT, "stream": True, "return_logprob": True, "rid": "stream"}
        body["sampling_params"] = {**LONG, "max_new_tokens": 800}
        async with client.stream("POST", "/generate", json=body) as answer:
            text.append("".join([part async for part in answer.aiter_text()]))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)

        async def moving() -> bool:
            return bool((await loads(client))["num_used_tokens"] > 30)

        await until(moving)
        await post(client, "/pause_generation", mode="retract")
        await post(client, "/update_weights_from_disk", model_path=str(target.directories["1"]), weight_version="1")
        await post(client, "/continue_generation")
    last: Any = read_events(text[0])[-1]
    assert len(last["output_ids"]) == 800
    assert_spans_exact(target, last)


async def test_abort_returns_what_was_made(target: Target, client: httpx.AsyncClient) -> None:
    """Pausing with abort ends requests with status 200, finish reason abort and the tokens so far."""
    async with in_flight(client, count=2) as flights:
        await post(client, "/pause_generation", mode="abort")
        for flight in flights:
            await until(lambda flight=flight: answered(flight))
        for flight in flights:
            assert flight.answer["meta_info"]["finish_reason"]["type"] == "abort"
            assert 0 < len(flight.answer["output_ids"]) < LONG["max_new_tokens"]
            assert_spans_exact(target, flight.answer)
        await post(client, "/continue_generation")


async def test_in_place_freezes_and_goes_on(target: Target, client: httpx.AsyncClient) -> None:
    """Frozen requests make no token, can't be flushed, and go on as if nothing had been."""
    async with in_flight(client) as flights:
        await post(client, "/pause_generation", mode="in_place")
        before = (await loads(client))["num_used_tokens"]
        await anyio.sleep(0.3)
        assert (await loads(client))["num_used_tokens"] == before
        assert flights[0].answer is None
        await post(client, "/flush_cache", status=400)
        await post(client, "/continue_generation")
    assert flights[0].answer["meta_info"]["num_retractions"] == 0
    assert_spans_exact(target, flights[0].answer)


async def test_an_update_that_cannot_flush_is_reported_as_torn(target: Target, client: httpx.AsyncClient) -> None:
    """In place with requests in flight, the update answers 400 although the weights changed; /model_info stays old."""
    async with in_flight(client) as flights:
        await post(client, "/pause_generation", mode="in_place")
        path = str(target.directories["1"])
        answer = await post(client, "/update_weights_from_disk", 400, model_path=path, weight_version="1")
        assert answer.json()["success"] is False
        assert (await client.get("/model_info")).json()["weight_version"] == "default"
        await post(client, "/continue_generation")
    assert flights[0].answer["meta_info"]["weight_version"] == "1"
    # with the server idle, the same update again makes it whole
    await post(client, "/update_weights_from_disk", model_path=path, weight_version="1")
    assert (await client.get("/model_info")).json()["weight_version"] == "1"


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_requests_that_arrive_while_paused_are_held(client: httpx.AsyncClient, mode: str) -> None:
    """They are neither refused nor served, a second pause changes nothing, and continue serves them."""
    await post(client, "/pause_generation", mode=mode)
    assert (await client.get("/ready")).status_code == 503
    held = Flight()

    async def ask() -> None:
        held.answer = await generate(client, {"max_new_tokens": 2, "ignore_eos": True})

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await anyio.sleep(0.2)
        await post(client, "/pause_generation", mode=mode)
        await anyio.sleep(0.1)
        assert held.answer is None
        await post(client, "/continue_generation")
    assert held.answer["meta_info"]["finish_reason"]["type"] == "length"
    await post(client, "/continue_generation")
    assert (await client.get("/ready")).status_code == 200


async def test_bad_pause_mode(client: httpx.AsyncClient) -> None:
    """An unknown mode is 400 and pauses nothing."""
    await post(client, "/pause_generation", 400, mode="freeze")
    assert (await client.get("/ready")).status_code == 200


async def test_flush(client: httpx.AsyncClient) -> None:
    """Works when idle and when retracted; 400 while requests run."""
    assert (await client.post("/flush_cache")).status_code == 200
    async with in_flight(client):
        await post(client, "/flush_cache", 400)
        await post(client, "/pause_generation", mode="retract")
        await post(client, "/flush_cache")
        await post(client, "/continue_generation")
        await post(client, "/abort_request", abort_all=True)


# --- aborting


async def test_abort_by_id(target: Target, client: httpx.AsyncClient) -> None:
    """Only the named request ends; unknown ids are no error; the others go on."""
    async with in_flight(client, count=2) as flights:
        answer = await post(client, "/abort_request", rid="flight-0")
        assert answer.content == b""
        await post(client, "/abort_request", rid="unknown")
        await until(lambda: answered(flights[0]))
        assert flights[0].answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert flights[1].answer is None
        await post(client, "/abort_request", abort_all=True)
    assert flights[1].answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert_spans_exact(target, flights[1].answer)


async def test_abort_while_paused(target: Target, client: httpx.AsyncClient) -> None:
    """A retracted request returns at once with the beginning of what it had; one frozen in place after continue."""
    async with in_flight(client, tokens=60) as flights:
        await post(client, "/pause_generation", mode="retract")
        await post(client, "/abort_request", rid="flight-0")
        await until(lambda: answered(flights[0]))
        assert flights[0].answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(flights[0].answer["output_ids"]) >= 50
        assert_spans_exact(target, flights[0].answer)
    await post(client, "/continue_generation")
    async with in_flight(client) as flights:
        await post(client, "/pause_generation", mode="in_place")
        await post(client, "/abort_request", rid="flight-0")
        await anyio.sleep(0.2)
        assert flights[0].answer is None
        await post(client, "/continue_generation")
    assert flights[0].answer["meta_info"]["finish_reason"]["type"] == "abort"


async def test_a_client_that_leaves_frees_the_engine(client: httpx.AsyncClient) -> None:
    """After a disconnect nothing runs any more, and the request id can be used again."""

    async def running() -> bool:
        return bool((await loads(client))["num_running_reqs"] == 1)

    async def idle() -> bool:
        return bool((await loads(client))["num_running_reqs"] == 0)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(generate, client, LONGEST, rid="gone"))
        await until(running)
        tasks.cancel_scope.cancel()
    await until(idle)
    assert len((await generate(client, {"max_new_tokens": 1}, rid="gone"))["output_ids"]) == 1


async def test_duplicate_id(client: httpx.AsyncClient) -> None:
    """An id that is in flight is refused with 400; the first request isn't disturbed."""
    async with in_flight(client) as flights:
        answer = await post(client, "/generate", 400, input_ids=PROMPT, rid="flight-0")
        assert "Duplicate request ID" in answer.json()["error"]["message"]
        await post(client, "/generate", 400, input_ids=[PROMPT, PROMPT], rid=["x", "x"])
        assert flights[0].answer is None
        await post(client, "/abort_request", abort_all=True)


# --- weights


async def test_update_from_disk(target: Target, client: httpx.AsyncClient) -> None:
    """Version and checksums read back are those of the directory, and so are the log-probs."""
    path = target.directories["1"]
    answer = (await post(client, "/update_weights_from_disk", model_path=str(path), weight_version="1")).json()
    assert answer["success"] is True
    assert {"message", "num_paused_requests"} <= answer.keys()
    assert (await client.get("/model_info")).json()["weight_version"] == "1"
    served = (await post(client, "/weights_checker", action="checksum")).json()
    assert served["ranks"][0]["checksums"] == checksums(read_tensors(path), tie_word_embeddings=False)
    assert served["success"] is True
    assert len(served["per_engine_checksum"]) == 64
    generated = await generate(client, {"max_new_tokens": 20, "ignore_eos": True})
    assert generated["meta_info"]["weight_version"] == "1"
    assert_spans_exact(target, generated)


async def test_a_missing_directory_keeps_the_old_weights(target: Target, client: httpx.AsyncClient) -> None:
    """400, and weights and version are what they were."""
    body = {"model_path": str(target.directories["1"]) + "-missing", "weight_version": "1"}
    answer = (await post(client, "/update_weights_from_disk", 400, **body)).json()
    assert answer["success"] is False
    assert (await client.get("/model_info")).json()["weight_version"] == "default"
    assert_spans_exact(target, await generate(client, {"max_new_tokens": 5}))


async def test_update_without_pause_waits_for_requests_in_flight(target: Target, client: httpx.AsyncClient) -> None:
    """Requests in flight finish under the old weights first; later ones get the new ones."""
    async with in_flight(client, tokens=1) as flights:
        path = str(target.directories["1"])
        await post(client, "/update_weights_from_disk", model_path=path, weight_version="1")
        await until(lambda: answered(flights[0]))  # its answer comes over another connection
    assert flights[0].answer["meta_info"]["weight_version"] == "default"
    after = await generate(client, {"max_new_tokens": 5})
    assert after["meta_info"]["weight_version"] == "1"


async def test_update_from_tensors_needs_a_session(target: Target, client: httpx.AsyncClient) -> None:
    """begin, update, end; 400 outside, for a second begin and for a second end."""
    named = [(name, tensor.detach().clone()) for name, tensor in target.models["1"].state_dict().items()]
    middle = len(named) // 2
    await post(client, "/update_weights_from_tensor", 400, serialized_named_tensors=pickled(named[:1]))
    await post(client, "/end_weight_update", 400)
    await post(client, "/begin_weight_update")
    await post(client, "/begin_weight_update", 400)
    await post(client, "/update_weights_from_tensor", serialized_named_tensors=pickled(named[:middle]))
    assert (await client.get("/model_info")).json()["weight_version"] == "default"
    payload = pickled(named[middle:])
    await post(client, "/update_weights_from_tensor", serialized_named_tensors=payload, weight_version="1")
    await post(client, "/end_weight_update")
    await post(client, "/end_weight_update", 400)
    generated = await generate(client, {"max_new_tokens": 20, "ignore_eos": True})
    assert generated["meta_info"]["weight_version"] == "1"
    assert_spans_exact(target, generated)


async def test_version_alone(client: httpx.AsyncClient) -> None:
    """The version can be set without weights, and is read back everywhere."""
    answer = await post(client, "/update_weight_version", new_version="7")
    assert answer.json()["new_version"] == "7"
    assert (await client.get("/model_info")).json()["weight_version"] == "7"
    generated = await generate(client, {"max_new_tokens": 2})
    assert generated["meta_info"]["weight_version"] == "7"


# --- errors and information


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"input_ids": []},
        {"input_ids": "5"},
        {"input_ids": [1, "a"]},
        {"input_ids": [[1], 2]},
        {"input_ids": [1.5]},
        {"input_ids": [5] * CONTEXT},
        {"input_ids": [5] * (CONTEXT - 10), "sampling_params": {"max_new_tokens": 20}},
        {"input_ids": [5], "sampling_params": {"temperature": -1}},
        {"input_ids": [5], "sampling_params": {"top_p": 0}},
        {"input_ids": [5], "sampling_params": {"top_k": 0}},
        {"input_ids": [5], "sampling_params": {"max_new_tokens": -1}},
        {"input_ids": [5], "sampling_params": "greedy"},
        {"input_ids": [[5], [6]], "rid": ["a"]},
    ],
    ids=lambda body: str(body)[:40],
)
async def test_bad_requests_are_refused(client: httpx.AsyncClient, body: Json) -> None:
    """Status 400 with a message, at once."""
    answer = await post(client, "/generate", 400, **body)
    assert answer.json()


async def test_not_json(client: httpx.AsyncClient) -> None:
    """Bytes that aren't JSON are 400; an unknown route is 404, a wrong method 405."""
    headers = {"content-type": "application/json"}
    for content in (b"{", b"\xff\xfe", b"[]", b"null", b""):
        assert (await client.post("/generate", content=content, headers=headers)).status_code == 400
    assert (await client.get("/no_such_route")).status_code == 404
    assert (await client.get("/generate")).status_code == 405


async def test_information(target: Target, client: httpx.AsyncClient) -> None:
    """Health, model and server information answer, under the old names too; loads count what runs."""
    assert (await client.get("/health")).status_code == 200
    assert (await client.get("/health_generate")).status_code == 200
    for path in ("/model_info", "/get_model_info"):
        info = (await client.get(path)).json()
        assert info["model_path"] == str(target.directories["default"])
        assert info["is_generation"] is True
    for path in ("/server_info", "/get_server_info"):
        info = (await client.get(path)).json()
        assert info["version"] == "0.5.23"
        assert info["max_total_num_tokens"] > 0
        assert isinstance(info["internal_states"], list)
    idle = await loads(client)
    assert (idle["num_running_reqs"], idle["num_waiting_reqs"]) == (0, 0)
    async with in_flight(client, count=2):
        await post(client, "/abort_request", abort_all=True)
