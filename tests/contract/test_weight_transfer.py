"""Weights that are sent, over a group or in requests: the same weights whatever the way, and nothing half-done counts.

Every promise is kept by the product's own sender, or is one of the routes that it relies on.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path

import anyio
import httpx
import pytest
import torch
from tests.contract.faults import Proxy, proxied
from tests.contract.kit import CONTEXT, PROMPT, Target, assert_spans_exact, generate, post
from tests.contract.test_client import snapshot
from tests.engine_models import saved_model

from hybridasync.errors import NotSent, OutcomeUnknown, Rejected
from hybridasync.runtime.sender import Sender
from hybridasync.runtime.transfer import SenderSettings
from hybridasync.transport.sender import Request
from hybridasync.types import SendTarget
from hybridasync.weights.buckets import buckets_of
from hybridasync.weights.group import close_group, open_group, serve_store, start_broadcast

ENGINE = "engine-0"
SOME, ALL = 20_000, 1 << 30
TIMEOUT = timedelta(seconds=30)
STUCK_S = 20.0
"""A transfer that nobody ends would end by itself after so long."""

MakeSender = Callable[..., Awaitable[Sender]]


@pytest.fixture
async def sender() -> AsyncIterator[MakeSender]:
    """Makes senders in this process, one at a time; the end of one closes its groups, as that of its process does."""
    async with AsyncExitStack() as stack:

        async def make(transport: str, bucket_bytes: int = ALL) -> Sender:
            await stack.aclose()
            settings = SenderSettings(transport, bucket_bytes, "gloo", "127.0.0.1", STUCK_S)
            return await stack.enter_async_context(Sender(settings))

        yield make


def request(target: Target, name: str, *, version: int, url: str | None = None, path: Path | None = None) -> Request:
    sent = snapshot(target, name, version=version)
    to = SendTarget(ENGINE, url or target.url, fresh=True)
    return Request((to,), str(path or sent.path), version, tuple(sent.checksums))


async def checksums(client: httpx.AsyncClient) -> dict[str, str]:
    answer = (await post(client, "/weights_checker", action="checksum")).json()
    return dict(answer["ranks"][0]["checksums"])


async def version(client: httpx.AsyncClient) -> str:
    return str((await client.get("/model_info")).json()["weight_version"])


@pytest.mark.parametrize("bucket_bytes", [1, SOME, ALL], ids=["each-tensor", "some", "all"])
@pytest.mark.parametrize("transport", ["collective", "tensor"])
async def test_c07_sent_weights_are_the_same_for_all_bucket_sizes(
    target: Target, client: httpx.AsyncClient, sender: MakeSender, *, transport: str, bucket_bytes: int
) -> None:
    """C07: every parameter's checksum, log-probs and the version; the version comes with the last bucket alone."""
    count = len(buckets_of(target.directories["1"], bucket_bytes))
    assert count == 1 if bucket_bytes == ALL else count > 2
    proxy = Proxy(target.url)
    with proxied(proxy) as url:
        assert await (await sender(transport, bucket_bytes)).send(request(target, "1", version=1, url=url)) == {}
    route = "/update_weights_from_" + ("distributed" if transport == "collective" else "tensor")
    assert proxy.seen.count(route) == count
    assert await version(client) == "1"
    assert await checksums(client) == snapshot(target, "1", version=1).checksums
    assert_spans_exact(target, await generate(client, {"max_new_tokens": 10, "ignore_eos": True}))


async def test_a_group_is_used_again_and_made_anew(
    target: Target, client: httpx.AsyncClient, sender: MakeSender
) -> None:
    """A second transfer goes over the same group; an engine that may be new, or a new sender, gets a new one."""
    proxy = Proxy(target.url)
    with proxied(proxy) as url:
        first = await sender("collective")
        for number, fresh in ((1, True), (2, False), (3, True)):
            to = SendTarget(ENGINE, url, fresh=fresh)
            name = "default" if number == 2 else "1"
            sums = snapshot(target, name, version=number).checksums
            asked = Request((to,), str(target.directories[name]), number, tuple(sums))
            assert await first.send(asked) == {}
            assert await checksums(client) == sums
        assert proxy.seen.count("/init_weights_update_group") == 2
        assert await (await sender("collective")).send(request(target, "default", version=4, url=url)) == {}
    assert await version(client) == "4"


async def test_c05_no_prefix_of_old_weights_survives_a_transfer(
    target: Target, client: httpx.AsyncClient, sender: MakeSender
) -> None:
    """C05: the same long prompt before and after: its log-probs are those of the new weights alone."""
    prompt = PROMPT * 40
    sampling = {"max_new_tokens": 4, "temperature": 0.0, "ignore_eos": True}
    for number, name in ((1, "1"), (2, "default"), (3, "1")):
        assert await (await sender("tensor", SOME)).send(request(target, name, version=number)) == {}
        answers = [await generate(client, sampling, input_ids=prompt) for _ in range(2)]
        with torch.no_grad():
            logits = target.models[name](torch.tensor([prompt])).logits[0, -1]
        first = answers[0]["output_ids"][0]
        for answer in answers:
            assert answer["output_ids"][0] == first
            expected = logits.log_softmax(-1)[first].item()
            assert answer["meta_info"]["output_token_logprobs"][0][0] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("transport", ["collective", "tensor"])
async def test_c07_other_parameters_are_refused_before_the_first_byte(
    target: Target, client: httpx.AsyncClient, tmp_path: Path, *, sender: MakeSender, transport: str
) -> None:
    """C07: a name that one side lacks, another shape, another type: an error that says which; nothing was changed."""
    before = await checksums(client)
    asked = request(target, "1", version=9)
    lacking = Request(asked.targets, asked.path, 9, asked.parameters[1:])
    saved_model(tmp_path / "wide", hidden_size=64, max_position_embeddings=CONTEXT)
    wide = request(target, "1", version=9, path=tmp_path / "wide")
    model = saved_model(tmp_path / "half", max_position_embeddings=CONTEXT)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "half")
    half = request(target, "1", version=9, path=tmp_path / "half")
    absent = request(target, "1", version=9, path=tmp_path / "absent")
    wrong_ones = ((lacking, asked.parameters[0]), (wide, "shape"), (half, "bfloat16"), (absent, "can't be read"))
    for wrong, words in wrong_ones:
        error = (await (await sender(transport)).send(wrong))[ENGINE]
        assert isinstance(error, NotSent)
        assert words in str(error)
    assert await checksums(client) == before
    assert await version(client) == "default"


@pytest.mark.parametrize("status", [400, 500])
@pytest.mark.parametrize("transport", ["collective", "tensor"])
async def test_c04_an_error_in_mid_transfer_ends_it_at_once(
    target: Target, client: httpx.AsyncClient, sender: MakeSender, *, transport: str, status: int
) -> None:
    """C04: the second bucket is answered with an error: no version moves, nothing hangs, a whole transfer mends it."""
    route = "/update_weights_from_" + ("distributed" if transport == "collective" else "tensor")
    with proxied(Proxy(target.url, route, turn=2, status=status)) as url:
        started = time.monotonic()
        error = (await (await sender(transport, SOME)).send(request(target, "1", version=5, url=url)))[ENGINE]
        assert time.monotonic() - started < STUCK_S / 2
    assert isinstance(error, Rejected if status == 400 else OutcomeUnknown)
    assert await version(client) == "default"
    mixed = await checksums(client)
    assert mixed != snapshot(target, "default", version=0).checksums
    assert mixed != snapshot(target, "1", version=1).checksums
    assert await (await sender(transport)).send(request(target, "1", version=6)) == {}
    assert await version(client) == "6"
    assert await checksums(client) == snapshot(target, "1", version=6).checksums


async def test_routes_of_a_group(target: Target, client: httpx.AsyncClient) -> None:
    """Joined once, left once; weights come within a session alone, from a group that there is; 400 otherwise."""
    bucket = buckets_of(target.directories["1"], ALL)[0]
    body = {
        "names": bucket.names,
        "dtypes": bucket.dtypes,
        "shapes": bucket.shapes,
        "group_name": "test",
        "load_format": "flattened_bucket",
        "weight_version": "1",
    }
    await post(client, "/destroy_weights_update_group", 400, group_name="test")
    store = serve_store("127.0.0.1", TIMEOUT)
    address = {"master_address": "127.0.0.1", "master_port": store.port, "rank_offset": 1, "world_size": 2}

    async def join() -> None:
        await post(client, "/init_weights_update_group", **address, group_name="test", backend="gloo")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(join)
        group = await anyio.to_thread.run_sync(
            lambda: open_group(store, 0, 2, name="test", backend="gloo", timeout=TIMEOUT)
        )
    assert "between" in (await post(client, "/update_weights_from_distributed", 400, **body)).json()["message"]
    await post(client, "/begin_weight_update")
    await post(client, "/update_weights_from_distributed", 400, **{**body, "group_name": "other"})
    work = start_broadcast(group, bucket.flat)
    await post(client, "/update_weights_from_distributed", **body)
    work.wait()
    await post(client, "/end_weight_update")
    assert await version(client) == "1"
    assert await checksums(client) == snapshot(target, "1", version=1).checksums
    await post(client, "/destroy_weights_update_group", group_name="test")
    await post(client, "/destroy_weights_update_group", 400, group_name="test")
    close_group(group)
