"""What the sidecar and the publication rely on, for every server that claims the control routes."""

from __future__ import annotations

import httpx
import pytest
from tests.contract.kit import Target, loads, post

TARGETS = ("embedded", "sglang", "fake")


async def test_paused_is_not_ready(client: httpx.AsyncClient) -> None:
    """/ready is 200 while running and 503 while paused, in whichever mode; /health stays 200."""
    for mode in ("abort", "retract", "in_place"):
        assert (await client.get("/ready")).status_code == 200
        await post(client, "/pause_generation", mode=mode)
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/health")).status_code == 200
        await post(client, "/continue_generation")
    assert (await client.get("/ready")).status_code == 200


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_pause_and_continue_are_idempotent(client: httpx.AsyncClient, mode: str) -> None:
    """Twice is as good as once, and one continue is enough after two pauses."""
    for _ in range(2):
        answer = await post(client, "/pause_generation", mode=mode)
        assert answer.json()["status"] == "ok"
    for _ in range(2):
        await post(client, "/continue_generation")
        assert (await client.get("/ready")).status_code == 200


async def test_an_unknown_mode_pauses_nothing(client: httpx.AsyncClient) -> None:
    """400."""
    await post(client, "/pause_generation", 400, mode="freeze")
    assert (await client.get("/ready")).status_code == 200


async def test_an_unknown_request_can_be_aborted(client: httpx.AsyncClient) -> None:
    """200 and no body."""
    assert (await post(client, "/abort_request", rid="unknown")).content == b""


async def test_a_version_is_read_back(target: Target, client: httpx.AsyncClient) -> None:
    """The initial weights are "default"; an update while paused has its version at once."""
    assert (await client.get("/model_info")).json()["weight_version"] == "default"
    await post(client, "/pause_generation", mode="retract")
    body = {"model_path": str(target.directories["1"]), "weight_version": "1", "flush_cache": True}
    answer = await post(client, "/update_weights_from_disk", **body)
    assert answer.json()["success"] is True
    assert (await client.get("/model_info")).json()["weight_version"] == "1"
    await post(client, "/continue_generation")


async def test_an_idle_server_says_so(client: httpx.AsyncClient) -> None:
    """Also while it is paused."""
    for _ in range(2):
        idle = await loads(client)
        assert (idle["num_running_reqs"], idle["num_waiting_reqs"]) == (0, 0)
        await post(client, "/pause_generation", mode="retract")


async def test_a_server_says_its_version(client: httpx.AsyncClient) -> None:
    """The one that the suite is written for."""
    assert (await client.get("/server_info")).json()["version"] == "0.5.23"


async def test_checksums_are_in_ranks(client: httpx.AsyncClient) -> None:
    """One entry for each tensor-parallel rank: name → checksum."""
    (rank,) = (await post(client, "/weights_checker", action="checksum")).json()["ranks"]
    assert all(isinstance(value, str) for value in rank["checksums"].values())
