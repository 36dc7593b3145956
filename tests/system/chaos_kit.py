"""What tests of struck runs have in common: which cells are struck this time, and what engines say of themselves."""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from collections.abc import Callable, Mapping

import httpx
from tests.system.chaos import PHASES, SIGNALS, WHO, Cell, World
from tests.system.gate import Point
from tests.system.rollout_side import TOKEN
from tests.system.whole_run import ENVIRONMENT, HYBRIDASYNC

SEED = int(os.environ.get("CHAOS_SEED", str(time.time_ns() % 10**6)))
"""Chooses the cells; printed with a failure."""


def some_cell(who: str, among: Mapping[str, Point] = PHASES) -> Cell:
    """All phases (of a pause: but one) and both signals are among those of one seed."""
    rng = random.Random(SEED)
    phases = rng.sample([*among] * (1 if len(among) >= len(WHO) else 2), len(WHO))
    signals = [*SIGNALS, *SIGNALS, rng.choice(list(SIGNALS))]
    rng.shuffle(signals)
    index = WHO.index(who)
    return Cell(who, phases[index], signals[index])


def resume_rollout(world: World, *arguments: str) -> tuple[int, list[dict[str, object]]]:
    done = subprocess.run(
        [HYBRIDASYNC, "resume-rollout", "--run-dir", str(world.run_dir), "--json", *arguments],
        env=ENVIRONMENT | {"HYBRIDASYNC_TOKEN": TOKEN},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, json.loads(done.stdout)


def engine_urls(world: World) -> list[str]:
    return [engine[0] for engine in world.side.engines if engine is not None]


def paused(world: World) -> list[bool]:
    """Of each engine, by its own word."""
    return [httpx.get(f"{url}/ready", trust_env=False).status_code == 503 for url in engine_urls(world)]


def until(condition: Callable[[], bool], limit_s: float) -> float:
    """Seconds until it holds."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < limit_s
        time.sleep(0.02)
    return time.monotonic() - started
