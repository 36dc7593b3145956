"""How long the start of a run waits for sidecars that are elsewhere: as the recipe says."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from tests.unit.test_delivery import answering, stalls, tcp_server

from hybridasync.config.models import Config
from hybridasync.errors import EngineError, OutcomeUnknown, leading_cause
from hybridasync.runtime.engines import running_engines

DOWN = {
    "engine_url": "http://127.0.0.1:9",
    "engine_kind": "sglang",
    "engine_pid": None,
    "state": "down",
    "weight_version": None,
    "txn": None,
    "holder": None,
    "since": None,
    "lease_left_s": None,
    "torn": False,
    "healthy": False,
    "detail": "",
}


def recipe(url: str, *, http_s: float, init_s: float) -> Config:
    return Config.model_validate(
        {
            "model": {"hf_checkpoint": "unused"},
            "data": {"prompt_data": "unused.jsonl"},
            "rollout": {
                "num_rollout": 1,
                "rollout_batch_size": 1,
                "n_samples_per_prompt": 1,
                "max_response_tokens": 1,
            },
            "engine": {"kind": "sglang", "sidecar_url": [url], "rollout_engine_init_timeout": init_s},
            "publication": {"rollout_http_timeout": http_s},
        }
    )


async def started(config: Config, run_dir: Path) -> tuple[BaseException, float]:
    """Why engines didn't come up, and after how many seconds."""
    began = time.monotonic()
    with pytest.raises(BaseExceptionGroup) as raised:
        async with running_engines(config, run_dir):
            pass
    return leading_cause(raised.value), time.monotonic() - began


async def test_r107_the_deadline_of_a_control_call_is_the_recipes(tmp_path: Path) -> None:
    """R107: a sidecar that says nothing is given up after rollout_http_timeout, far before engines' 1800 s."""
    async with tcp_server(stalls) as url:
        error, took_s = await started(recipe(url, http_s=0.5, init_s=1800.0), tmp_path)
    assert isinstance(error, OutcomeUnknown) and error.operation == "status"
    assert took_s >= 0.5


async def test_r107_the_time_to_come_up_is_the_recipes(tmp_path: Path) -> None:
    """R107: a sidecar whose engine stays down is given up after rollout_engine_init_timeout, which is named."""
    async with tcp_server(answering("200 OK", json.dumps(DOWN).encode())) as url:
        error, took_s = await started(recipe(url, http_s=17.0, init_s=0.7), tmp_path)
    assert isinstance(error, EngineError) and "engine.rollout_engine_init_timeout = 0.7 s" in str(error)
    assert took_s >= 0.7
