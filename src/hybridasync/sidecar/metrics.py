"""The sidecar's numbers in Prometheus' text format."""

from __future__ import annotations

from typing import get_args

from hybridasync.sidecar.control import Control
from hybridasync.types import SidecarState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

COUNTERS = {
    "pauses": "Pauses that were granted.",
    "ends": "Ends that were acknowledged, repeated ones included.",
    "rollbacks": "Pauses that were undone before they answered.",
    "leases_expired": "Pauses that the sidecar ended because nobody renewed them.",
    "resumes_failed": "Resumes after an expired lease that the engine refused.",
    "engine_exits": "Times that the engine's process ended.",
    "fences": "Times that the engine was killed on request.",
}


def exposition(control: Control, now: float) -> str:
    """`now` is on the clock of the leases, in seconds."""
    machine = control.machine
    lines = _family("state", "gauge", "1 for the state of the pause, 0 for the others.")
    lines += [_sample("state", f'{{state="{s}"}}', machine.state == s) for s in get_args(SidecarState) if s != "down"]
    holder = machine.holder
    gauges = {
        "engine_up": ("1 while there is an engine process to talk to.", control.host.client is not None),
        "torn": ("1 when a pause ended without its owner, in the middle of who knows what.", control.torn),
        "transactions": ("Transactions remembered, ended ones included.", machine.transactions),
        "sessions": ("Controller sessions remembered.", machine.sessions),
        "paused_seconds": (
            "Age of the current pause.",
            now - holder.since if holder is not None and holder.since is not None else 0.0,
        ),
        "lease_left_seconds": (
            "Time until the current pause ends by itself.",
            holder.lease_until - now if holder is not None and holder.lease_until is not None else 0.0,
        ),
        "engine_restarts": ("Times that the engine was started again.", control.host.restarts),
    }
    for name, (text, value) in gauges.items():
        lines += [*_family(name, "gauge", text), _sample(name, "", value)]
    for name, text in COUNTERS.items():
        lines += [*_family(f"{name}_total", "counter", text), _sample(f"{name}_total", "", control.counts[name])]
    return "\n".join(lines) + "\n"


def _family(name: str, kind: str, text: str) -> list[str]:
    return [f"# HELP hybridasync_sidecar_{name} {text}", f"# TYPE hybridasync_sidecar_{name} {kind}"]


def _sample(name: str, labels: str, value: float) -> str:
    return f"hybridasync_sidecar_{name}{labels} {float(value):g}"
