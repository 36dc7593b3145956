"""Keeping a pause: its lease is renewed, and known to be over before the engine can have been resumed by it.

confirmed at t ─▶ renew at t + 1/3 ─▶ confirmed: from there on again
                      └─▶ no answer: again and again ─▶ t + lease: the pause counts as over
                      └─▶ refused: it is over
"""

from __future__ import annotations

import anyio

from hybridasync.drivers.fleet import Engine
from hybridasync.errors import EngineError, Rejected
from hybridasync.ports import MetricSink

RETRY_SHARE = 0.05
"""Of a lease, between a renewal that failed and the next one."""


async def until_lost(engine: Engine, txn: str, lease_s: float, *, since: float, sink: MetricSink) -> str:
    """Renew until cancelled; answers why the pause is over, or may be. `since`: when it was asked for.

    A lease begins at the sidecar after it was asked for, so that it never ends before what is counted here.
    """
    until = since + lease_s
    while True:
        await anyio.sleep(max(0.0, until - 2 * lease_s / 3 - anyio.current_time()))
        asked = anyio.current_time()
        try:
            # A pause may be confirmed after what its lease would have been: it gets one renewal all the same.
            with anyio.fail_after(min(lease_s / 3, until - asked) if until > asked else lease_s / 3):
                await engine.sidecar.renew(txn, lease_s)
        except Rejected as error:
            return f"its pause ended during the swap: {error}"
        except (EngineError, TimeoutError) as error:
            cause = str(error) or "no answer in time"
            sink.event("lease_renewal_failed", level="warning", engine=engine.name, cause=cause)
            pause_s = min(RETRY_SHARE * lease_s, until - anyio.current_time())
            if pause_s <= 0:
                return f"its lease couldn't be renewed: {cause}"
            await anyio.sleep(pause_s)
            if anyio.current_time() >= until:
                return f"its lease couldn't be renewed: {cause}"
        else:
            until = asked + lease_s
