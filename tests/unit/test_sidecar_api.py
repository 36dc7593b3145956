"""The sidecar's HTTP API: statuses, token, bad requests, metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import anyio
import httpx
import pytest
from tests.sidecar_kit import B, Rig, txn

from hybridasync.errors import NotSent, Rejected
from hybridasync.protocol.transactions import ENDED, TransactionMachine
from hybridasync.sidecar.app import SidecarApi
from hybridasync.sidecar.host import NotSupportedError

TOKEN = "s3cret"


@dataclass
class Api:
    """The application in this process, with a fake engine behind it."""

    rig: Rig

    async def http(self, method: str, path: str, **options: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {TOKEN}"} | options.pop("headers", {})
        async with anyio.create_task_group() as tasks:
            application = SidecarApi(self.rig.control, token=TOKEN, tasks=tasks).application()
            transport = httpx.ASGITransport(application)
            async with httpx.AsyncClient(transport=transport, base_url="http://sidecar") as client:
                return await client.request(method, path, headers=headers, **options)


@pytest.fixture
def api() -> Api:
    return Api(Rig(TransactionMachine(session_cap=1)))


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/pause", b"{", 400),
        ("/v1/pause", b"[]", 400),
        ("/v1/pause", b"\xff", 400),
        ("/v1/pause", b'{"txn": "nonsense"}', 400),
        ("/v1/pause", b'{"txn": 3}', 400),
        ("/v1/pause", b'{"mode": "stop"}', 400),
        ("/v1/pause", b'{"lease_s": 0}', 400),
        ("/v1/pause", b'{"lease_s": NaN}', 400),
        ("/v1/pause", b'{"lease_s": "60"}', 400),
        ("/v1/pause", b'{"lease": 60}', 400),
        ("/v1/end", b'{"txn": "ha1:0:0"}', 400),
        ("/v1/renew", b'{"lease_s": 5}', 409),
        ("/v1/recover", b"{}", 400),
        ("/v1/fence", b'{"force": true}', 400),
        ("/v1/nothing", b"{}", 404),
        ("/v1/status", b"{}", 405),
    ],
)
async def test_bad_requests_are_refused_with_a_reason(api: Api, path: str, body: bytes, status: int) -> None:
    """A client's mistake is a 4xx and changes nothing."""
    answer = await api.http("POST", path, content=body)
    assert answer.status_code == status
    assert status in (404, 405) or answer.json()["error"]
    assert (await api.http("GET", "/v1/status")).json()["state"] == "running"


async def test_without_the_token_nothing_is_told(api: Api) -> None:
    """401 for a missing, wrong or odd token, on every route."""
    for header in ("", "Bearer", "Bearer wrong", f"Basic {TOKEN}", "Bearer \u00e9"):
        for path in ("/v1/status", "/metrics"):
            answer = await api.http("GET", path, headers={"Authorization": header.encode("latin-1")})
            assert answer.status_code == 401
    assert (await api.http("POST", "/v1/pause", headers={"Authorization": ""}, content=b"{")).status_code == 401


async def test_a_session_too_many_is_429(api: Api) -> None:
    """R91 over HTTP; the session that is known is served on."""
    assert (await api.http("POST", "/v1/end", json={"txn": txn(0)})).status_code == 200
    assert (await api.http("POST", "/v1/end", json={"txn": txn(0, B)})).status_code == 429
    assert (await api.http("POST", "/v1/end", json={"txn": txn(1)})).status_code == 200


async def test_an_engine_that_refuses_is_502_and_one_that_is_gone_is_424(api: Api) -> None:
    """Unknown or refused: the client has to compensate. Gone: nothing was done, nothing is owed."""
    api.rig.engine.failures["pause"] = [Rejected("e", "pause", 500)]
    assert (await api.http("POST", "/v1/pause", json={"txn": txn(0)})).status_code == 502
    assert api.rig.engine.flags == [True, False]
    api.rig.engine.failures["pause"] = [NotSent("e", "pause")]
    assert (await api.http("POST", "/v1/pause", json={"txn": txn(1)})).status_code == 424


async def test_a_plain_client_needs_no_id(api: Api) -> None:
    """The untagged pair: an empty body pauses and resumes."""
    assert (await api.http("POST", "/v1/pause")).json() == {"paused": True, "reason": "paused"}
    assert (await api.http("GET", "/v1/status")).json()["holder"] == "untagged"
    assert (await api.http("POST", "/v1/end")).json() == {"ended": True}
    assert api.rig.engine.flags == [True, False]


async def test_metrics_are_prometheus_text(api: Api) -> None:
    """State, leases and counters, one sample a line, with help and type."""
    answer = await api.http("GET", "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = answer.text.splitlines()
    samples = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert samples['hybridasync_sidecar_state{state="running"}'] == "1"
    assert samples["hybridasync_sidecar_engine_up"] == "1"
    assert float(samples["hybridasync_sidecar_pauses_total"]) >= 0
    assert sum(line.startswith("# TYPE") for line in lines) == sum(line.startswith("# HELP") for line in lines)


@pytest.mark.parametrize("launched", [True, False])
async def test_u1_a_fence_is_the_end_of_the_transactions_that_it_names(launched: bool) -> None:
    """U1, R78: the one that holds ends with the engine, a late pause of the other does nothing, a newer one pauses.

    Where the fence is refused, the pause is still owed a resume, and the sidecar tries it by itself.
    """
    rig = Rig()
    assert await rig.pause(txn(0), "retract")

    async def fence() -> None:
        if not launched:
            raise NotSupportedError("restart it by hand")
        rig.engine.paused = False

    rig.control._host.fence = fence  # type: ignore[method-assign]
    if launched:
        await rig.control.fence((txn(0), txn(1)))
        assert rig.machine.state == "running"
        assert not await rig.pause(txn(0), "retract")
        assert await rig.pause(txn(2), "retract")
    else:
        with pytest.raises(NotSupportedError):
            await rig.control.fence((txn(0), txn(1)))
        assert rig.machine.state == "recovery_required"
    assert not rig.machine.retains(txn(1)) or rig.machine.request_pause(txn(1), 0.0) == ENDED
