"""The client of the controller against real servers: what it relies on in an answer, and what it can stop."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import pytest
from tests.contract.kit import CONTEXT, PROMPT, Target, until
from tests.engine_models import EOS, VOCAB, reference_logprobs

from hybridasync.errors import Rejected
from hybridasync.runtime.sglang_launch import RESERVED_TOKENS
from hybridasync.transport.sglang import SglangServer
from hybridasync.types import Completion, SamplingParams, VersionSpan, WeightSnapshot
from hybridasync.weights.checksums import checksums
from hybridasync.weights.snapshot import read_tensors

LONG = SamplingParams(max_new_tokens=1500, temperature=1.0, n=32)
"""The model ends a sample after 70 tokens on average: so many that one of them runs for seconds."""


@pytest.fixture
async def server(target: Target) -> AsyncIterator[SglangServer]:
    async with SglangServer("engine-0", target.url, control_timeout_s=60, request_timeout_s=120) as server:
        yield server
        await server.update_weights(snapshot(target, "default", version=0))


def snapshot(target: Target, name: str, *, version: int) -> WeightSnapshot:
    path = target.directories[name]
    sums = checksums(read_tensors(path), tie_word_embeddings=False)
    return WeightSnapshot(version=version, path=str(path), checksums=sums, bytes=1, prepare_s=0.0)


async def test_c43_a_group_has_the_log_probs_of_its_temperature(target: Target, server: SglangServer) -> None:
    """C43: at temperature 0.7, each sample; equal to Hugging Face's to 3e-5. A third are a stop id alone."""
    group = await server.generate("group", PROMPT, SamplingParams(max_new_tokens=20, temperature=0.7, n=16))
    assert len({sample.output_ids for sample in group}) > 1
    for sample in group:
        reference = reference_logprobs(target.models["default"], PROMPT, list(sample.output_ids), 0.7)
        assert sample.logprobs == pytest.approx(reference, abs=3e-5)
        assert sample.finish_reason == ("stop" if sample.output_ids[-1] == EOS else "length")


async def interrupted(server: SglangServer, rid: str, params: SamplingParams) -> list[Completion]:
    """What an abort in mid-generation leaves. A request that was over before it came, as on a machine that stands
    still for a moment, is sent anew."""

    async def under_way() -> bool:
        return await server.in_flight() > 0

    for attempt in range(10):

        async def stop(rid: str = f"{rid}-{attempt}") -> None:
            await until(under_way)
            await server.abort(rid)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stop)
            samples = list(await server.generate(f"{rid}-{attempt}", PROMPT, params))
            tasks.cancel_scope.cancel()
        if any(sample.finish_reason == "abort" for sample in samples):
            return samples
    pytest.fail("no abort came before the end of its request")


async def test_c45_ids_log_probs_and_spans_line_up_however_a_sample_ends(target: Target, server: SglangServer) -> None:
    """C45: stopped, cut and interrupted samples: the log-prob at i is that of id i after the ids before it."""
    samples = await interrupted(server, "interrupted", SamplingParams(1500, temperature=0.7, n=32))
    # A third of them meet their stop id before they are cut.
    samples += await server.generate("cut", PROMPT, SamplingParams(3, temperature=0.7, n=32))
    every_token = tuple(range(VOCAB))
    samples += await server.generate("stopped", PROMPT, SamplingParams(3, temperature=0.7, stop_token_ids=every_token))
    assert {sample.finish_reason for sample in samples} == {"abort", "length", "stop"}
    assert len(samples[-1].output_ids) == 1
    for sample in samples:
        ids = list(sample.output_ids)
        assert len(sample.logprobs) == len(ids) == sum(span.end - span.start for span in sample.spans)
        reference = reference_logprobs(target.models["default"], PROMPT, ids, 0.7)
        assert sample.logprobs == pytest.approx(reference, abs=1e-4)


async def test_c46_a_stop_at_the_limit_is_a_stop(server: SglangServer) -> None:
    """C46: the last allowed token is a stop id: not truncated."""
    greedy = SamplingParams(max_new_tokens=8, temperature=0.0)
    (free,) = await server.generate("free", PROMPT, greedy)
    end = free.output_ids.index(free.output_ids[-1]) + 1
    stopping = SamplingParams(max_new_tokens=end, temperature=0.0, stop_token_ids=(free.output_ids[-1],))
    (stopped,) = await server.generate("stopping", PROMPT, stopping)
    assert stopped.output_ids == free.output_ids[:end]
    assert stopped.finish_reason == "stop"


async def test_abort_stops_every_sample_of_a_group(server: SglangServer) -> None:
    """One abort, and the request returns with what its samples had, long before the limit."""
    group = await interrupted(server, "long", LONG)  # some of them may have met their stop id already
    assert all(len(sample.output_ids) < LONG.max_new_tokens for sample in group)

    async def idle() -> bool:
        return await server.in_flight() == 0

    await until(idle)


async def test_a_cancelled_request_can_be_stopped_at_once(server: SglangServer) -> None:
    """After the cancellation and the abort, nothing runs, sooner than SGLang would notice the closed connection."""

    async def idle() -> bool:
        return await server.in_flight() == 0

    async def running() -> bool:
        return await server.in_flight() > 0

    sent: list[str] = []

    async def ask() -> None:
        while True:  # one after the other: the first may be over before it is seen
            sent.append(f"cancelled-{len(sent)}")
            await server.generate(sent[-1], PROMPT, LONG)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await until(running)
        tasks.cancel_scope.cancel()
    await server.abort(sent[-1])
    await until(idle, seconds=3)
    assert await server.in_flight() == 0


async def test_c07_a_publication_is_verified_by_version_and_checksum(target: Target, server: SglangServer) -> None:
    """C07: every parameter that the engine holds, by name, is the snapshot's; log-probs and spans are the new one's."""
    published = snapshot(target, "1", version=7)
    assert await server.checksums() == snapshot(target, "default", version=0).checksums
    await server.update_weights(published)
    assert await server.weight_version() == "7"
    assert await server.checksums() == published.checksums
    (sample,) = await server.generate("after", PROMPT, SamplingParams(max_new_tokens=10, temperature=1.0))
    reference = reference_logprobs(target.models["1"], PROMPT, list(sample.output_ids))
    assert sample.logprobs == pytest.approx(reference, abs=3e-5)
    assert sample.spans == (VersionSpan(7, 0, len(sample.output_ids)),)


async def test_c05_no_prefix_of_old_weights_survives(target: Target, server: SglangServer) -> None:
    """C05: the same long prompt, before and after an update: its log-probs are the new weights' alone."""
    prompt = PROMPT * 40
    params = SamplingParams(max_new_tokens=10, temperature=1.0)
    for name, version in (("default", 0), ("1", 3), ("default", 4)):
        await server.update_weights(snapshot(target, name, version=version))
        for _ in range(2):
            (sample,) = await server.generate(f"p{version}", prompt, params)
            reference = reference_logprobs(target.models[name], prompt, list(sample.output_ids))
            assert sample.logprobs == pytest.approx(reference, abs=1e-4)


async def test_c13_beyond_the_context_is_a_refusal(server: SglangServer) -> None:
    """C13: 400, for a group as for one sample; what leaves one token beside those that SGLang reserves is served."""
    for n in (1, 2):
        for length, tokens in ((CONTEXT, 1), (CONTEXT - 4, 5)):
            with pytest.raises(Rejected) as raised:
                await server.generate(f"r{n}", [5] * length, SamplingParams(max_new_tokens=tokens, n=n))
            assert raised.value.status == 400
    longest = SamplingParams(max_new_tokens=4, temperature=1.0)
    (whole,) = await server.generate("whole", [5] * (CONTEXT - RESERVED_TOKENS - 1), longest)
    assert len(whole.output_ids) == 4 or whole.finish_reason == "stop"


async def test_the_version_is_the_tested_one(server: SglangServer) -> None:
    """0.5.23, with spans."""
    assert (await server.version()).spans


async def test_weights_are_staged_where_the_server_can(target: Target, server: SglangServer) -> None:
    """The embedded engine prepares them and then only switches; SGLang has no such route, and loads as ever."""
    new = snapshot(target, "1", version=1)
    assert await server.stage(new) is (target.kind == "embedded")
    assert await server.weight_version() != "1"
    await server.update_weights(new)
    assert await server.weight_version() == "1" and await server.checksums() == new.checksums
