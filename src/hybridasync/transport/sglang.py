"""The client of an engine: implements the port `InferenceServer` over SGLang 0.5.23's HTTP API.

SGLang's own words (`rid`, `output_token_logprobs`, `weight_versions`) stay in this file.
"""

from __future__ import annotations

import math
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, cast, get_args

from hybridasync.errors import ConfigError, EngineError, LocalProtocolError, Rejected, RemoteProtocolError
from hybridasync.http import Endpoint, bearer
from hybridasync.types import (
    Completion,
    FinishReason,
    PauseMode,
    SamplingParams,
    ServedWeights,
    VersionSpan,
    WeightSnapshot,
)
from hybridasync.weights.buckets import Bucket
from hybridasync.weights.checksums import overall

INITIAL_VERSION = "default"
"""What SGLang calls the weights that it started with; our weight version 0."""

BAD_REQUEST, NOT_FOUND = 400, 404

FINISH_REASONS = frozenset(get_args(FinishReason))

TESTED_VERSION = (0, 5, 23)
"""The contract suite runs against this one; a later one may have changed any route."""

OLDEST_VERSION = (0, 5, 6)
"""The first with the pause modes. Versions before 0.5.23 label a completion with one version, the last."""


@dataclass(frozen=True, slots=True)
class ServerVersion:
    """What a server says it is. `spans`: it tells which weights made which token."""

    text: str
    spans: bool

    @classmethod
    def parse(cls, text: str, *, server: str) -> ServerVersion:
        """Raises ConfigError outside the range that this client knows."""
        match = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
        number = tuple(map(int, match.groups())) if match else None
        if number is None or not OLDEST_VERSION <= number <= TESTED_VERSION:
            oldest, tested = (".".join(map(str, version)) for version in (OLDEST_VERSION, TESTED_VERSION))
            raise ConfigError(
                f"{server} is SGLang {text}; hybridasync knows {oldest} to {tested} and is tested with {tested}"
            )
        return cls(text, number >= TESTED_VERSION)


@dataclass(frozen=True, slots=True)
class ServerLayout:
    """What a server that weights are sent to holds, as far as it says."""

    ranks: int  # tensor-parallel ranks: each receives all that is sent and keeps its part
    dtype: str  # "auto": not known
    model_path: str  # the directory its weights came from


@dataclass(frozen=True, slots=True)
class GroupAddress:
    """Where the ranks of one engine meet the sender, who is rank 0 and serves the store."""

    name: str
    address: str
    port: int
    world_size: int
    backend: str


class SglangServer:
    """One engine. Generation and control have clients of their own, so that neither waits for the other (C09)."""

    def __init__(
        self,
        name: str,
        base_url: str,
        *,
        control_timeout_s: float,
        request_timeout_s: float,
        api_key: str | None = None,
    ) -> None:
        """`control_timeout_s` is the deadline of a control call, `request_timeout_s` that of one generation."""
        self.name = name
        self._headers = bearer(api_key)
        self._timeouts = control_timeout_s, request_timeout_s
        self._samples: dict[str, int] = {}  # requests that may be running there → samples of each
        self._can_stage = True  # until it says that it has no such route
        self._connect(base_url)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    async def moved(self, base_url: str) -> None:
        """The engine was started anew, perhaps at another address. Nothing may be under way to the old one."""
        self._can_stage = True
        if base_url != self.base_url:
            await self._close()
            self._connect(base_url)

    async def version(self) -> ServerVersion:
        """Raises ConfigError for a server outside the known range."""
        answer = await self._control.call_json("version", "GET", "/server_info", server_errors="rejected")
        text = answer.get("version") if isinstance(answer, dict) else None
        if not isinstance(text, str):
            raise RemoteProtocolError(self.name, "version", f"no string `version` in {str(answer)[:200]}")
        return ServerVersion.parse(text, server=f"{self.name} ({self.base_url})")

    async def generate(self, rid: str, input_ids: Sequence[int], params: SamplingParams) -> tuple[Completion, ...]:
        """n completions of one prompt, in one request.

        Rejected has the status: 400 is the request's own fault and must not be retried, 429 and 5xx may be. Cancelling
        closes the connection, which SGLang notices after some seconds: call `abort` as well.
        """
        if not input_ids or min(input_ids) < 0:
            # SGLang's scheduler dies of a negative id, and every other request with it.
            raise LocalProtocolError(f"{self.name}: a prompt with no ids or a negative one must not be sent")
        rids = _sample_ids(rid, params.n)
        body: dict[str, object] = {"return_logprob": True, "sampling_params": _sampling_params(params)}
        if params.seeds:
            seeded = [_sampling_params(params) | {"sampling_seed": seed} for seed in params.seeds]
            body["sampling_params"] = seeded if params.n > 1 else seeded[0]
        if params.n == 1:
            body |= {"rid": rid, "input_ids": list(input_ids)}
        else:
            # Not SGLang's `n`: it gives samples ids that nobody is told, so that they couldn't be aborted, and it
            # computes the prompt once more beforehand.
            body |= {"rid": rids, "input_ids": [list(input_ids)] * params.n}
        self._samples[rid] = params.n
        answer = await self._data.call_json("generate", "POST", "/generate", json=body, server_errors="rejected")
        self._samples.pop(rid, None)  # unless it was aborted meanwhile
        rows = answer if isinstance(answer, list) else [answer]
        if len(rows) != params.n:
            raise RemoteProtocolError(self.name, "generate", f"{len(rows)} completions instead of {params.n}")
        try:
            return tuple(parse_completion(row, self.name) for row in rows)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise RemoteProtocolError(self.name, "generate", f"{type(error).__name__}: {error}") from error

    async def abort(self, rid: str) -> None:
        """Stop a request of this client, all of its samples; an unknown `rid` is no error."""
        for sample in _sample_ids(rid, self._samples.pop(rid, 1)):
            await self._control.call("abort", "POST", "/abort_request", json={"rid": sample})

    async def stage(self, snapshot: WeightSnapshot) -> bool:
        """Let the engine read and check the snapshot while it generates. SGLang has no such route: False."""
        if not self._can_stage:
            return False
        body = {"model_path": snapshot.path, "weight_version": str(snapshot.version)}
        if snapshot.base_version is not None:
            body["base_version"] = str(snapshot.base_version)
        try:
            await self._control.call("stage", "POST", "/stage_weights", json=body, server_errors="rejected")
        except Rejected as error:
            if error.status not in (404, 405):
                raise
            self._can_stage = False
            return False
        return True

    async def switch(self, snapshot: WeightSnapshot, mode: PauseMode) -> ServedWeights:
        """A drained engine retracts: a request that slips in is kept."""
        body = {
            "weight_version": str(snapshot.version),
            "checksum": overall(snapshot.checksums),
            "mode": "retract" if mode == "drain" else mode,
        }
        answer = await self._post("switch", "/switch_weights", body)
        version, paused_s = answer.get("weight_version"), answer.get("paused_s")
        if not isinstance(version, str) or not isinstance(paused_s, float) or not 0 <= paused_s < math.inf:
            raise RemoteProtocolError(self.name, "switch", f"version {version!r}, after {paused_s!r} s")
        return ServedWeights(version, self._sums_in(answer), paused_s)

    async def update_weights(self, snapshot: WeightSnapshot) -> None:
        """Load the snapshot from its folder; drop the prefix cache.

        After *any* error the weights have to be verified: SGLang answers 400 also when it loaded the weights but
        couldn't flush the cache, and an engine may be left half updated.
        """
        body = {"model_path": snapshot.path, **_closing(str(snapshot.version))}
        await self._post("update_weights", "/update_weights_from_disk", body)

    async def layout(self) -> ServerLayout:
        """Raises RemoteProtocolError where it has replicas or pipeline stages, whose ranks no group of ours counts."""
        answer = await self._control.call_json("layout", "GET", "/server_info", server_errors="rejected")
        try:
            replicas = int(answer.get("dp_size", 1)) * int(answer.get("pp_size", 1))
            layout = ServerLayout(int(answer["tp_size"]), str(answer.get("dtype", "auto")), str(answer["model_path"]))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RemoteProtocolError(self.name, "layout", f"{type(error).__name__}: {error}") from error
        if replicas != 1:
            raise RemoteProtocolError(self.name, "layout", "data-parallel replicas or pipeline stages")
        return layout

    @asynccontextmanager
    async def updating(self) -> AsyncIterator[None]:
        """Around `receive_weights` and `load_tensors`. Versions before 0.5.23 have no such session."""
        sessions = True
        try:
            await self._post("begin_update", "/begin_weight_update", {})
        except Rejected as error:
            if error.status == NOT_FOUND:
                sessions = False
            else:  # one was left open by an update that broke off
                await self._post("end_update", "/end_weight_update", {})
                await self._post("begin_update", "/begin_weight_update", {})
        try:
            yield
        except Rejected:
            if sessions:
                await self._post("end_update", "/end_weight_update", {})
            raise
        if sessions:
            await self._post("end_update", "/end_weight_update", {})

    async def join_group(self, group: GroupAddress) -> None:
        """Returns once every rank has joined, so the sender has to join meanwhile."""
        body = {
            "master_address": group.address,
            "master_port": group.port,
            "rank_offset": 1,
            "world_size": group.world_size,
            "group_name": group.name,
            "backend": group.backend,
        }
        await self._post("join_group", "/init_weights_update_group", body)

    async def leave_group(self, name: str) -> None:
        """Not being in it is no error."""
        try:
            await self._post("leave_group", "/destroy_weights_update_group", {"group_name": name})
        except Rejected as error:
            if error.status != BAD_REQUEST:
                raise

    async def receive_weights(self, bucket: Bucket, group: str, *, version: str | None) -> None:
        """Receive one broadcast. `version` goes with the last bucket, and only then the prefix cache is dropped."""
        body = {
            "names": bucket.names,
            "dtypes": bucket.dtypes,
            "shapes": bucket.shapes,
            "group_name": group,
            "load_format": "flattened_bucket",
        }
        await self._post("receive_weights", "/update_weights_from_distributed", body | _closing(version))

    async def load_tensors(self, payload: str, *, ranks: int, version: str | None) -> None:
        """`payload`: base64 of pickled (name, CPU tensor) pairs by value, the same for each tensor-parallel rank."""
        body = {"serialized_named_tensors": [payload] * ranks}
        await self._post("load_tensors", "/update_weights_from_tensor", body | _closing(version))

    async def weight_version(self) -> str:
        answer = await self._control.call_json("weight_version", "GET", "/model_info", server_errors="rejected")
        version = answer.get("weight_version") if isinstance(answer, dict) else None
        if not isinstance(version, str):
            raise RemoteProtocolError(self.name, "weight_version", f"no string `weight_version` in {answer!r}")
        return version

    async def checksums(self) -> Mapping[str, str]:
        """Parameter name → checksum; with several tensor-parallel ranks the names start with `rank<i>/`."""
        return self._sums_in(await self._check_weights())

    async def read_back(self) -> ServedWeights:
        """The embedded engine says version and checksums at once."""
        answer = await self._check_weights()
        sums = self._sums_in(answer)
        version = answer.get("weight_version")
        return ServedWeights(version if isinstance(version, str) else await self.weight_version(), sums)

    async def _check_weights(self) -> Any:
        return await self._control.call_json(
            "checksums", "POST", "/weights_checker", json={"action": "checksum"}, server_errors="rejected"
        )

    def _sums_in(self, answer: Any) -> Mapping[str, str]:
        try:
            ranks = [{str(name): str(value) for name, value in rank["checksums"].items()} for rank in answer["ranks"]]
        except (AttributeError, KeyError, TypeError) as error:
            raise RemoteProtocolError(self.name, "checksums", f"{type(error).__name__}: {error}") from error
        if len(ranks) == 1:
            return ranks[0]
        return {f"rank{i}/{name}": value for i, rank in enumerate(ranks) for name, value in rank.items()}

    async def in_flight(self) -> int:
        """Requests that run or wait in the engine's scheduler."""
        answer = await self._control.call_json("in_flight", "GET", "/v1/loads", server_errors="rejected")
        try:
            return sum(int(load["num_running_reqs"]) + int(load["num_waiting_reqs"]) for load in answer["loads"])
        except (KeyError, TypeError, ValueError) as error:
            raise RemoteProtocolError(self.name, "in_flight", f"{type(error).__name__}: {error}") from error

    async def healthy(self) -> bool:
        try:
            await self._control.call("healthy", "GET", "/health", server_errors="rejected")
        except EngineError:
            return False
        return True

    async def _post(self, operation: str, path: str, body: Mapping[str, object]) -> Mapping[str, Any]:
        answer = await self._control.call_json(operation, "POST", path, json=body)
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise RemoteProtocolError(self.name, operation, f"success isn't true in {answer!r}")
        return answer

    def _connect(self, base_url: str) -> None:
        control_s, request_s = self._timeouts
        self.base_url = base_url
        self._data = Endpoint(self.name, base_url, timeout_s=request_s, headers=self._headers, keep_alive=True)
        self._control = Endpoint(self.name, base_url, timeout_s=control_s, headers=self._headers)

    async def _close(self) -> None:
        await self._data.aclose()
        await self._control.aclose()


def _closing(version: str | None) -> dict[str, object]:
    """What the last request of an update says. An earlier one names no version: it would label mixed weights."""
    return {"flush_cache": version is not None, **({"weight_version": version} if version is not None else {})}


def _sample_ids(rid: str, n: int) -> list[str]:
    return [rid] if n == 1 else [f"{rid}_{index}" for index in range(n)]


def _sampling_params(params: SamplingParams) -> dict[str, object]:
    return {
        "max_new_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "stop_token_ids": list(params.stop_token_ids),
    }


def parse_completion(row: Mapping[str, Any], engine: str) -> Completion:
    """One row of an answer of /generate. Raises ValueError, KeyError or TypeError for what the API doesn't allow.

    Ids, log-probs and version spans must describe the same tokens: a silent zip of unequal lists trains on the
    log-probs of other tokens (C45).
    """
    meta = row["meta_info"]
    output_ids = tuple(int(token) for token in row["output_ids"])
    scored = meta.get("output_token_logprobs") or []
    if len(scored) != len(output_ids):
        raise ValueError(f"{len(output_ids)} output ids but {len(scored)} log-probs")
    if tuple(int(entry[1]) for entry in scored) != output_ids:
        raise ValueError("the log-probs are of other tokens than the output ids")
    reason = meta["finish_reason"]["type"]
    if reason not in FINISH_REASONS:
        raise ValueError(f"unknown finish reason {reason!r}")
    return Completion(
        output_ids=output_ids,
        logprobs=tuple(float(entry[0]) for entry in scored),
        spans=_spans(meta, len(output_ids)),
        finish_reason=cast(FinishReason, reason),
        engine=engine,
    )


def version_number(version: object) -> int:
    """Our number for SGLang's name of a weight version. Raises ValueError if it isn't one of ours."""
    if version == INITIAL_VERSION:
        return 0
    if not isinstance(version, str) or not version.isascii() or not version.isdigit():
        raise ValueError(f"weight version {version!r} isn't a number")
    return int(version)


def _spans(meta: Mapping[str, Any], tokens: int) -> tuple[VersionSpan, ...]:
    """The spans of a completion, checked to cover 0..tokens without gaps. A server without spans serves one version."""
    if tokens == 0:
        return ()
    rows = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": tokens}]
    spans = tuple(VersionSpan(version_number(r["version"]), int(r["start"]), int(r["end"])) for r in rows)
    edges = [0, *(span.end for span in spans)]
    if [span.start for span in spans] != edges[:-1] or edges[-1] != tokens or any(s.start >= s.end for s in spans):
        raise ValueError(f"weight version spans {rows!r} don't cover {tokens} tokens")
    return spans
