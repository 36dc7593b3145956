"""The client of an engine: what it sends, what it makes of an answer, and what it refuses to believe (C45)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest
from tests.fake_engine import FakeEngine, serving

from hybridasync.errors import (
    ConfigError,
    EngineError,
    LocalProtocolError,
    OutcomeUnknown,
    Rejected,
    RemoteProtocolError,
)
from hybridasync.protocol.delivery import may_have_happened
from hybridasync.transport.sglang import ServerVersion, SglangServer, parse_completion, version_number
from hybridasync.types import SamplingParams, ServedWeights, VersionSpan, WeightSnapshot
from hybridasync.weights.checksums import overall

PARAMS = SamplingParams(max_new_tokens=8, temperature=0.7, n=2, stop_token_ids=(2,))
SNAPSHOT = WeightSnapshot(version=3, path="/snapshots/3", checksums={}, bytes=1, prepare_s=0.0)


@pytest.fixture
def fake() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def url(fake: FakeEngine) -> Iterator[str]:
    with serving(fake) as url:
        yield url


@pytest.fixture
async def engine(url: str) -> AsyncIterator[SglangServer]:
    async with SglangServer("engine-0", url, control_timeout_s=10, request_timeout_s=10) as server:
        yield server


def row(**changes: Any) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "finish_reason": {"type": "stop", "matched": 2},
        "weight_version": "1",
        "weight_versions": [{"version": "default", "start": 0, "end": 1}, {"version": "1", "start": 1, "end": 4}],
        "output_token_logprobs": [[-0.1, 1, None], [-0.2, 2, None], [-0.3, 4, None], [-0.4, 4, None]],
    }
    answer: dict[str, Any] = {"text": "hello", "output_ids": [1, 2, 4, 4], "meta_info": meta}
    for name, value in changes.items():
        (answer if name in answer else meta)[name] = value
    return answer


async def test_a_group_is_one_request(fake: FakeEngine, engine: SglangServer) -> None:
    """n completions of one prompt in one call, an id for each; ids, log-probs and versions of the same tokens."""
    fake.bodies["/generate"] = [row(), row(finish_reason={"type": "abort", "message": "x"})]
    first, second = await engine.generate("r-1", [5, 6], PARAMS)
    assert first.output_ids == (1, 2, 4, 4) and first.logprobs == (-0.1, -0.2, -0.3, -0.4)
    assert first.spans == (VersionSpan(0, 0, 1), VersionSpan(1, 1, 4))
    assert (first.finish_reason, second.finish_reason, first.engine) == ("stop", "abort", "engine-0")
    path, body = fake.calls[0]
    assert path == "/generate" and isinstance(body, dict)
    assert (body["rid"], body["input_ids"], body["return_logprob"]) == (["r-1_0", "r-1_1"], [[5, 6], [5, 6]], True)
    assert body["sampling_params"] == {
        "max_new_tokens": 8,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": -1,
        "stop_token_ids": [2],
    }


async def test_each_sample_has_a_seed_of_its_own(fake: FakeEngine, engine: SglangServer) -> None:
    """SGLang's `sampling_seed`, in a list of parameters for a group and in one set for a sample."""
    fake.bodies["/generate"] = [row(), row()]
    await engine.generate("r-1", [5, 6], replace(PARAMS, seeds=(7, 8)))
    fake.bodies["/generate"] = row()
    await engine.generate("r-2", [5, 6], replace(PARAMS, n=1, seeds=(9,)))
    group, single = (body["sampling_params"] for _, body in fake.calls if isinstance(body, dict))
    assert [each["sampling_seed"] for each in group] == [7, 8]
    assert single["sampling_seed"] == 9 and single["max_new_tokens"] == group[0]["max_new_tokens"] == 8


def test_an_aborted_request_that_made_nothing_is_an_empty_completion() -> None:
    """No tokens, no log-probs, no spans; not an error."""
    meta = {"finish_reason": {"type": "abort"}, "weight_version": "default"}
    completion = parse_completion({"output_ids": [], "meta_info": meta}, "e")
    assert (completion.output_ids, completion.spans, completion.oldest_version) == ((), (), None)


async def test_abort_names_every_sample(fake: FakeEngine, engine: SglangServer) -> None:
    """A request that failed is aborted by the ids of its samples; one that ended leaves nothing to remember."""
    fake.faults["/generate"] = [503]
    with pytest.raises(Rejected):
        await engine.generate("r-1", [5], PARAMS)
    await engine.abort("r-1")
    fake.bodies["/generate"] = [row(), row()]
    await engine.generate("r-2", [5], PARAMS)
    await engine.abort("r-2")
    aborted = [body["rid"] for path, body in fake.calls if path == "/abort_request" and isinstance(body, dict)]
    assert aborted == ["r-1_0", "r-1_1", "r-2"]


async def test_what_kills_a_server_is_not_sent(fake: FakeEngine, engine: SglangServer) -> None:
    """SGLang's scheduler dies of a negative token id."""
    for ids in ([], [5, -1]):
        with pytest.raises(LocalProtocolError):
            await engine.generate("r", ids, PARAMS)
    assert fake.calls == []


async def test_versions_of_the_server(fake: FakeEngine, engine: SglangServer) -> None:
    """0.5.23 has spans; older ones down to 0.5.6 are known to have none; others are refused by name."""
    assert await engine.version() == ServerVersion("0.5.23", spans=True)
    for text, spans in (("0.5.23.post1", True), ("0.5.15.post1", False), ("0.5.6", False)):
        fake.bodies["/server_info"] = {"version": text}
        assert await engine.version() == ServerVersion(text, spans=spans)
    for text in ("0.5.5", "0.5.24", "1.0.0", "nightly"):
        fake.bodies["/server_info"] = {"version": text}
        with pytest.raises(ConfigError, match=text):
            await engine.version()
    fake.bodies["/server_info"] = {}
    with pytest.raises(RemoteProtocolError):
        await engine.version()


def test_an_engine_without_spans_serves_one_version() -> None:
    """An older server says only which version it has at the end."""
    assert parse_completion(row(weight_versions=None), "e").spans == (VersionSpan(1, 0, 4),)


@pytest.mark.parametrize(
    "bad",
    [
        row(output_token_logprobs=[[-0.1, 1, None]] * 5),
        row(output_token_logprobs=None),
        row(output_token_logprobs=[[-0.1, 9, None]] * 4),
        row(finish_reason={"type": "tired"}),
        row(finish_reason=None),
        row(weight_versions=[{"version": "1", "start": 0, "end": 3}]),
        row(weight_versions=[{"version": "1", "start": 1, "end": 4}]),
        row(weight_versions=[{"version": "one", "start": 0, "end": 4}]),
        row(output_ids=None),
        {"meta_info": {}},
        [],
        "text",
    ],
)
async def test_c45_answers_that_do_not_line_up_are_refused(fake: FakeEngine, engine: SglangServer, bad: object) -> None:
    """C45: unequal lengths, foreign tokens, gaps in the versions: never zipped, never guessed."""
    fake.bodies["/generate"] = [bad, bad]
    with pytest.raises(RemoteProtocolError):
        await engine.generate("r", [5], PARAMS)


async def test_a_missing_completion_is_refused(fake: FakeEngine, engine: SglangServer) -> None:
    """Two were asked for, one came."""
    fake.bodies["/generate"] = row()
    with pytest.raises(RemoteProtocolError, match="1 completions instead of 2"):
        await engine.generate("r", [5], PARAMS)


@pytest.mark.parametrize("status", [400, 429, 500, 503])
async def test_a_refused_generation_says_with_which_status(fake: FakeEngine, engine: SglangServer, status: int) -> None:
    """C54: 400 is not to be retried, 429 and 5xx are; the caller sees which it was."""
    fake.faults["/generate"] = [status]
    with pytest.raises(Rejected) as raised:
        await engine.generate("r", [5], PARAMS)
    assert raised.value.status == status


async def test_weights_are_loaded_under_their_version_and_the_cache_is_dropped(
    fake: FakeEngine, engine: SglangServer
) -> None:
    """C05: the load and the flush are one call."""
    await engine.update_weights(SNAPSHOT)
    assert fake.calls[0][1] == {"model_path": "/snapshots/3", "weight_version": "3", "flush_cache": True}


async def test_a_failed_load_is_an_error_of_its_kind(fake: FakeEngine, engine: SglangServer) -> None:
    """400: refused; 500: nobody knows; 200 without success: not what the API allows."""
    fake.faults["/update_weights_from_disk"] = [400, 500]
    errors: list[type[EngineError]] = [Rejected, OutcomeUnknown, RemoteProtocolError]
    for error in errors:
        fake.bodies["/update_weights_from_disk"] = {"success": False}
        with pytest.raises(error):
            await engine.update_weights(SNAPSHOT)


async def test_versions_checksums_and_loads_are_read_back(fake: FakeEngine, engine: SglangServer) -> None:
    """What the publication verifies with; the names of several ranks stay apart."""
    assert await engine.weight_version() == "default"
    fake.running, fake.waiting = 2, 3
    assert await engine.in_flight() == 5
    fake.bodies["/weights_checker"] = {"ranks": [{"checksums": {"a": "1", "b": "2"}}]}
    assert await engine.checksums() == {"a": "1", "b": "2"}
    fake.bodies["/weights_checker"] = {"ranks": [{"checksums": {"a": "1"}}, {"checksums": {"a": "2"}}]}
    assert await engine.checksums() == {"rank0/a": "1", "rank1/a": "2"}
    fake.bodies["/weights_checker"] = {"ranks": None}
    with pytest.raises(RemoteProtocolError):
        await engine.checksums()


async def test_health_is_a_yes_or_a_no(fake: FakeEngine, engine: SglangServer) -> None:
    """An error of the probe is a no."""
    assert await engine.healthy()
    fake.faults["/health"] = [503]
    assert not await engine.healthy()


def test_version_numbers() -> None:
    """ "default" is version 0; names that aren't ours are refused."""
    assert [version_number(name) for name in ("default", "0", "17")] == [0, 0, 17]
    for name in ("v1", "-1", "1.0", "", "²", None, 3):
        with pytest.raises(ValueError):
            version_number(name)


async def test_a_server_that_cannot_stage_is_asked_once(fake: FakeEngine, engine: SglangServer) -> None:
    """404 means no such route: from then on nothing is sent, until the engine is another process."""
    assert [await engine.stage(SNAPSHOT) for _ in range(2)] == [False, False]
    await engine.update_weights(SNAPSHOT)
    assert [path for path, _ in fake.calls] == ["/update_weights_from_disk"] and fake.version == "3"


async def test_what_was_staged_is_only_switched_to(fake: FakeEngine, engine: SglangServer) -> None:
    """The base goes along when the snapshot is a delta; the switch names version and checksums."""
    fake.can_stage = True
    fake.bodies["/switch_weights"] = {
        "success": True,
        "ranks": [{"checksums": {"a": "1"}}],
        "weight_version": "3",
        "paused_s": 0.25,
    }
    assert await engine.stage(replace(SNAPSHOT, base_version=2))
    for mode in ("drain", "abort"):
        assert await engine.switch(SNAPSHOT, mode) == ServedWeights("3", {"a": "1"}, 0.25)  # type: ignore[arg-type]
    checksum = overall(SNAPSHOT.checksums)
    assert fake.calls == [
        ("/stage_weights", {"model_path": "/snapshots/3", "weight_version": "3", "base_version": "2"}),
        ("/switch_weights", {"weight_version": "3", "checksum": checksum, "mode": "retract"}),
        ("/switch_weights", {"weight_version": "3", "checksum": checksum, "mode": "abort"}),
    ]


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"weight_version": "3", "ranks": []},
        {"weight_version": "3", "ranks": [], "paused_s": "soon"},
        {"weight_version": "3", "ranks": [], "paused_s": 10**400},
        {"weight_version": "3", "ranks": [], "paused_s": -1.0},
        {"weight_version": "3", "paused_s": 0.1},
        {"success": False, "weight_version": "3", "ranks": [], "paused_s": 0.1},
    ],
)
async def test_a_switch_whose_answer_makes_no_sense_is_no_switch(
    fake: FakeEngine, engine: SglangServer, answer: dict[str, object]
) -> None:
    """Nobody can say what it serves: no refusal, but an outcome that is unknown."""
    fake.can_stage = True
    fake.bodies["/switch_weights"] = {"success": True, **answer}
    with pytest.raises(RemoteProtocolError) as caught:
        await engine.switch(SNAPSHOT, "retract")
    assert may_have_happened(caught.value)


async def test_what_is_read_back_is_of_one_moment_where_the_server_says_so(
    fake: FakeEngine, engine: SglangServer
) -> None:
    """The embedded engine's checksums come with their version, in one call; SGLang is asked for it as well."""
    fake.version = "5"
    answer = {"ranks": [{"checksums": {"a": "1"}}]}
    fake.bodies["/weights_checker"] = answer
    assert await engine.read_back() == ServedWeights("5", {"a": "1"})
    assert [path for path, _ in fake.calls] == ["/weights_checker", "/model_info"]
    fake.bodies["/weights_checker"] = {**answer, "weight_version": "6"}
    assert await engine.read_back() == ServedWeights("6", {"a": "1"})
    assert [path for path, _ in fake.calls][2:] == ["/weights_checker"]
