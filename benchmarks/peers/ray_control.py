"""Ray as a control plane: two actors that answer what they are given. Runs in Ray's environment.

Speaks as the driver of `hybridasync bench control` does: a line of JSON when both actors have answered, another with
the times of calls for each line `calls` on stdin, and the end for any other.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import ray

ACTORS = 2
CALLS, BULK = 1500, 16 * 2**20
IN_FLIGHT = 32


@ray.remote  # type: ignore[untyped-decorator]
class Echo:
    def answer(self, value: Any) -> Any:
        return value


def main() -> None:
    dashboard = sys.argv[1] == "dashboard"
    ray.init(include_dashboard=dashboard, num_cpus=2, logging_level="ERROR", log_to_driver=False)
    actors = [Echo.remote() for _ in range(ACTORS)]

    def call(value: Any = 0) -> None:
        ray.get([actor.answer.remote(value) for actor in actors])

    call()
    say({"ready": True})
    while sys.stdin.readline().strip() == "calls":
        rpc = timed(call, CALLS)
        started = time.perf_counter()
        for _ in range(CALLS // IN_FLIGHT):
            ray.get([actor.answer.remote(0) for _ in range(IN_FLIGHT) for actor in actors])
        rate = IN_FLIGHT * (CALLS // IN_FLIGHT) / (time.perf_counter() - started)
        say({"rpc": rpc, "http": [], "calls_per_s": rate, "bulk": timed(partial(call, bytes(BULK)), 10)})
    ray.shutdown()


def timed(call: Callable[[], None], count: int) -> list[float]:
    found = []
    for _ in range(count):
        started = time.perf_counter()
        call()
        found.append(time.perf_counter() - started)
    return found


def say(what: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
