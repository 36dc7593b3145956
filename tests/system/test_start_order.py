"""What a start makes, and in which order."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybridasync import app, load
from hybridasync.app import Run
from hybridasync.config.sizing import Sizing, resolve_sizing
from hybridasync.runtime import inputs
from hybridasync.transport.rpc import RpcTrainer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SETTINGS = (
    "rollout.rollout_batch_size=16",
    "rollout.n_samples_per_prompt=2",
    "rollout.num_epoch=3",
    "rollout.num_rollout=20",
    "data.prompt_data={data}",
    "warm_start.steps=0",
    "warm_start.data=none",
    "eval.eval_interval=3",
    "eval.max_prompts=2",
    "eval.skip_eval_before_train=true",
    "observability.progress=off",
)


async def test_r37_sizing_is_settled_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R37, R41: 64 prompts by 16, three epochs and a cap of 20: 12 steps, resolved once, before the first process.

    Workers receive the 12, and the schedule the four steps of an epoch, on a real start with workers and engines.
    """
    order: list[tuple[str, Any]] = []

    def spied(place: object, name: str, note: Callable[..., tuple[str, Any]]) -> None:
        real = getattr(place, name)

        def spy(*args: Any, **arguments: Any) -> Any:
            order.append(note(*args, **arguments))
            return real(*args, **arguments)

        monkeypatch.setattr(place, name, spy)

    def resolving(*args: Any, **arguments: Any) -> Sizing:
        sizing = resolve_sizing(*args, **arguments)
        order.append(("sized", sizing[:2]))
        return sizing

    monkeypatch.setattr(inputs, "resolve_sizing", resolving)
    spied(subprocess.Popen, "__init__", lambda *_, **__: ("process", None))
    spied(app, "running_engines", lambda config, _: ("engines", config.rollout.num_rollout))
    spied(app, "connect", lambda config, _: ("workers", config.rollout.num_rollout))
    spied(RpcTrainer, "call", lambda _, name, *args, **__: (name, args[0] if args else None))
    spied(app, "schedule_of", lambda _, **numbers: ("schedule", numbers))

    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"sort {n}=", "label": "1"}) + "\n" for n in range(1000, 1064)))
    config = load("quickstart-fast", [setting.replace("{data}", str(data)) for setting in SETTINGS])
    async with Run(config, run_dir=tmp_path / "run") as run:
        assert run.num_rollout == 12

    kinds = [kind for kind, _ in order]
    assert kinds.count("sized") == 1 and order[0] == ("sized", (12, 4))
    assert {"process", "engines", "workers", "configure"} <= set(kinds)
    received = dict(order)
    assert received["engines"] == received["workers"] == received["configure"].rollout.num_rollout == 12
    assert received["schedule"] == {"num_rollout": 12, "steps_per_epoch": 4}
