"""The embedded engine's own routes: weights are prepared while it generates, and the switch is one assignment."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import anyio
import httpx
import pytest
import torch
from tests.contract.kit import PROMPT, Json, Target, assert_spans_exact, generate, in_flight, post
from tests.engine_models import saved_model

from hybridasync.weights.checksums import checksums, overall
from hybridasync.weights.delta import bits, change_of, write_delta
from hybridasync.weights.snapshot import read_tensors

TARGETS = ("embedded",)
GREEDY: Json = {"max_new_tokens": 12, "ignore_eos": True}


@pytest.fixture
def delta(target: Target, tmp_path: Path) -> Iterator[Path]:
    """What leads from the initial weights, as version "default", to those of directory "1", as version "1"."""
    old = dict(read_tensors(target.directories["default"]))
    new = dict(read_tensors(target.directories["1"]))
    yield _delta(tmp_path / "delta", old, new, base="default")


def _delta(path: Path, old: dict[str, torch.Tensor], new: dict[str, torch.Tensor], *, base: str) -> Path:
    changes = {name: change for name, tensor in new.items() if (change := change_of(old[name], tensor)) is not None}
    write_delta(path, changes, version="1", base_version=base, dtype=torch.float32)  # type: ignore[arg-type]
    return path


def sums_of(target: Target, name: str) -> dict[str, str]:
    return checksums(read_tensors(target.directories[name]), tie_word_embeddings=False)


async def served_sums(client: httpx.AsyncClient) -> Json:
    sums: Json = (await post(client, "/weights_checker")).json()["ranks"][0]["checksums"]
    return sums


async def stage(client: httpx.AsyncClient, path: Path, status: int = 200, *, version: str = "1", **more: str) -> str:
    answer = await post(client, "/stage_weights", status, model_path=str(path), weight_version=version, **more)
    assert answer.json()["success"] is (status == 200)
    return str(answer.json()["message"])


async def switch(
    client: httpx.AsyncClient, sums: Json | None, status: int = 200, *, version: str = "1", **more: str
) -> str:
    """`sums` is what the controller has published."""
    body = {"weight_version": version, "checksum": overall(sums or {}), **more}
    answer = (await post(client, "/switch_weights", status, **body)).json()
    if status == 200:
        read = (await post(client, "/weights_checker")).json()
        assert 0 < answer.pop("paused_s") < 1
        assert answer == read and answer["weight_version"] == version
    return str(answer["message"])


async def test_staging_changes_nothing_before_the_switch(target: Target, client: httpx.AsyncClient) -> None:
    """Version, checksums and tokens are the old ones until the switch, and exactly the new ones after it."""
    await stage(client, target.directories["1"])
    assert await served_sums(client) == sums_of(target, "default")
    assert (await client.get("/model_info")).json()["weight_version"] == "default"
    assert_spans_exact(target, await generate(client, GREEDY))
    await switch(client, sums_of(target, "1"))
    assert await served_sums(client) == sums_of(target, "1")
    info = (await client.get("/model_info")).json()
    assert (info["weight_version"], info["model_path"]) == ("1", str(target.directories["1"]))
    assert_spans_exact(target, await generate(client, GREEDY))


async def test_requests_live_through_staging_and_switch(target: Target, client: httpx.AsyncClient) -> None:
    """Generation goes on while weights are staged, and with them after the switch."""
    async with in_flight(client, count=2) as flights:
        await stage(client, target.directories["1"])
        assert all(flight.answer is None for flight in flights)
        await switch(client, sums_of(target, "1"))
        assert (await client.get("/ready")).status_code == 200
    for flight in flights:
        assert_spans_exact(target, flight.answer)
        assert [span["version"] for span in flight.answer["meta_info"]["weight_versions"]] == ["default", "1"]


@pytest.mark.parametrize("mode", ["retract", "abort", "in_place"])
async def test_an_engine_that_somebody_has_paused_does_not_switch(
    target: Target, client: httpx.AsyncClient, mode: str
) -> None:
    """Its pause is somebody's, and stays; what is staged stays too, and nothing has changed."""
    async with in_flight(client, count=2) as flights:
        await stage(client, target.directories["1"])
        await post(client, "/pause_generation", mode=mode)
        assert await switch(client, sums_of(target, "1"), 400) == "The engine is paused."
        assert (await client.get("/ready")).status_code == 503
        assert await served_sums(client) == sums_of(target, "default")
        await post(client, "/continue_generation")
    for flight in flights:
        assert [span["version"] for span in flight.answer["meta_info"]["weight_versions"]] == ["default"]
    await switch(client, sums_of(target, "1"))


async def test_a_stream_goes_on_across_a_switch(target: Target, client: httpx.AsyncClient) -> None:
    """Its tokens come without a gap, the first ones of the old weights and the last ones of the new ones."""
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 800, "ignore_eos": True}, "stream": True}
    await stage(client, target.directories["1"])
    sums = sums_of(target, "1")  # before the stream, which doesn't wait for them
    last: Json = {}
    async with client.stream("POST", "/generate", json={**body, "return_logprob": True}) as answer:
        seen = 0
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                last, seen = json.loads(line.removeprefix("data: ")), seen + 1
                if seen == 3:
                    await switch(client, sums)
    assert len(last["output_ids"]) == 800
    assert [span["version"] for span in last["meta_info"]["weight_versions"]] == ["default", "1"]
    assert_spans_exact(target, last)


async def test_a_switch_that_aborts_ends_what_is_in_flight(target: Target, client: httpx.AsyncClient) -> None:
    """With mode abort requests come back with what they had, all of it made by the old weights."""
    async with in_flight(client, count=2) as flights:
        await stage(client, target.directories["1"])
        await switch(client, sums_of(target, "1"), mode="abort")
    for flight in flights:
        assert flight.answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert [span["version"] for span in flight.answer["meta_info"]["weight_versions"]] == ["default"]


async def test_what_was_not_published_is_not_switched_to(target: Target, client: httpx.AsyncClient) -> None:
    """A late switch of another controller, or a broken copy: the engine compares checksums before it switches."""
    await stage(client, target.directories["1"])
    assert "checksums differ" in await switch(client, sums_of(target, "default"), 400)
    assert await served_sums(client) == sums_of(target, "default")
    await switch(client, sums_of(target, "1"))
    assert await served_sums(client) == sums_of(target, "1")


async def test_a_delta_gives_the_very_bits(target: Target, client: httpx.AsyncClient, delta: Path) -> None:
    """What changed, applied to the live weights, is the new version to the last bit; the live ones aren't touched."""
    await stage(client, delta, base_version="default")
    assert await served_sums(client) == sums_of(target, "default")
    await switch(client, sums_of(target, "1"))
    assert await served_sums(client) == sums_of(target, "1")
    assert_spans_exact(target, await generate(client, GREEDY))


async def test_one_bit_of_difference_is_kept(target: Target, client: httpx.AsyncClient, tmp_path: Path) -> None:
    """A single changed value in one part of a fused parameter changes that parameter's checksum and no other."""
    old = dict(read_tensors(target.directories["default"]))
    new = {name: tensor.clone() for name, tensor in old.items()}
    bits(new["model.layers.1.self_attn.k_proj.weight"])[7] ^= 1
    await stage(client, _delta(tmp_path / "bit", old, new, base="default"), base_version="default")
    await switch(client, checksums(new.items(), tie_word_embeddings=False))
    served, before = await served_sums(client), sums_of(target, "default")
    assert served == checksums(new.items(), tie_word_embeddings=False)
    different = [name for name in served if served[name] != before[name]]
    assert different == ["model.layers.1.self_attn.qkv_proj.weight"]


async def test_what_does_not_fit_is_refused_and_nothing_is_staged(
    target: Target, client: httpx.AsyncClient, delta: Path, tmp_path: Path
) -> None:
    """Other shapes, another base, a base that isn't live, no file: 400, the old weights serve, nothing is staged."""
    saved_model(tmp_path / "wide", hidden_size=64)
    assert "old weights are kept" in await stage(client, tmp_path / "wide", 400)
    assert "has shape" in await stage(client, tmp_path / "wide", 400)
    assert "can't be applied to default" in await stage(client, delta, 400, base_version="7")
    assert "(version, base, type)" in await stage(client, delta, 400, version="2", base_version="default")
    assert "delta.safetensors" in await stage(client, target.directories["1"], 400, base_version="default")
    assert "no model.safetensors" in await stage(client, tmp_path / "nowhere", 400)
    assert "nothing is" in await switch(client, None, 400)
    assert await served_sums(client) == sums_of(target, "default")


async def test_a_delta_to_other_weights_of_the_same_name_does_not_verify(
    target: Target, client: httpx.AsyncClient, delta: Path
) -> None:
    """Two engines at different bases: where the label deceives, the checksums of the result don't."""
    path = str(target.directories["1"])
    await post(client, "/update_weights_from_disk", model_path=path, weight_version="default")
    old, new = (dict(read_tensors(target.directories[name])) for name in ("default", "1"))
    bits(new["model.norm.weight"])[:] = bits(old["model.norm.weight"])  # a tensor that the delta leaves alone
    partial = _delta(delta.parent / "partial", old, new, base="default")
    await stage(client, partial, base_version="default")
    published = checksums(new.items(), tie_word_embeddings=False)
    assert "checksums differ" in await switch(client, published, 400)
    assert await served_sums(client) == sums_of(target, "1")
    await post(
        client, "/update_weights_from_disk", model_path=str(target.directories["default"]), weight_version="default"
    )


async def test_a_switch_without_its_version_staged_is_refused(target: Target, client: httpx.AsyncClient) -> None:
    """Nothing staged, or another version, which stays staged."""
    assert "nothing is" in await switch(client, None, 400)
    await stage(client, target.directories["1"])
    assert "version 1 is" in await switch(client, None, 400, version="2")
    await switch(client, sums_of(target, "1"))
    assert "nothing is" in await switch(client, None, 400)


async def test_a_second_staging_replaces_the_first(target: Target, client: httpx.AsyncClient) -> None:
    """The last one counts, and a refused one leaves nothing to switch to."""
    await stage(client, target.directories["1"], version="5")
    await stage(client, target.directories["1"])
    assert "version 1 is" in await switch(client, None, 400, version="5")
    await stage(client, Path("/nowhere"), 400)
    assert "nothing is" in await switch(client, None, 400)


@pytest.mark.parametrize("how", ["disk", "session"])
async def test_another_way_to_load_drops_what_was_staged(target: Target, client: httpx.AsyncClient, how: str) -> None:
    """A full update, and a session for single tensors, leave no staged weights: there are never three sets."""
    await stage(client, target.directories["1"], version="2")
    if how == "disk":
        path = str(target.directories["1"])
        await post(client, "/update_weights_from_disk", model_path=path, weight_version="1")
    else:
        await post(client, "/begin_weight_update")
        await post(client, "/end_weight_update")
    assert "nothing is" in await switch(client, None, 400, version="2")


async def test_a_client_that_goes_away_does_no_harm(target: Target, client: httpx.AsyncClient, tmp_path: Path) -> None:
    """Staging whose client gives up at any moment leaves an engine that serves, and that stages the next version."""
    shutil.copytree(target.directories["1"], tmp_path / "copy")
    for delay_s in (0.0, 0.002, 0.005):
        with anyio.move_on_after(delay_s):
            await stage(client, tmp_path / "copy", version="8")
        assert (await served_sums(client)) == sums_of(target, "default")
    await stage(client, target.directories["1"])
    await switch(client, sums_of(target, "1"))
    assert await served_sums(client) == sums_of(target, "1")
