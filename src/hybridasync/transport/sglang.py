"""The client of an engine: implements the port `InferenceServer` over SGLang 0.5.23's HTTP API.

SGLang's own words (`rid`, `output_token_logprobs`, `weight_versions`) stay in this file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self, cast, get_args

from hybridasync.errors import EngineError, RemoteProtocolError
from hybridasync.http import Endpoint, bearer
from hybridasync.types import Completion, FinishReason, SamplingParams, VersionSpan, WeightSnapshot

INITIAL_VERSION = "default"
"""What SGLang calls the weights that it started with; our weight version 0."""

FINISH_REASONS = frozenset(get_args(FinishReason))


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
        self.base_url = base_url
        headers = bearer(api_key)
        self._data = Endpoint(name, base_url, timeout_s=request_timeout_s, headers=headers, keep_alive=True)
        self._control = Endpoint(name, base_url, timeout_s=control_timeout_s, headers=headers)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._data.aclose()
        await self._control.aclose()

    async def generate(self, rid: str, input_ids: Sequence[int], params: SamplingParams) -> tuple[Completion, ...]:
        """n completions of one prompt, in one request.

        Rejected has the status: 400 is the request's own fault and must not be retried, 429 and 5xx may be. Cancelling
        closes the connection, which SGLang notices after some seconds: call `abort` as well.
        """
        body = {
            "rid": rid,
            "input_ids": list(input_ids),
            "return_logprob": True,
            "sampling_params": _sampling_params(params),
        }
        answer = await self._data.call_json("generate", "POST", "/generate", json=body, server_errors="rejected")
        rows = answer if isinstance(answer, list) else [answer]
        if len(rows) != params.n:
            raise RemoteProtocolError(self.name, "generate", f"{len(rows)} completions instead of {params.n}")
        try:
            return tuple(parse_completion(row, self.name) for row in rows)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise RemoteProtocolError(self.name, "generate", f"{type(error).__name__}: {error}") from error

    async def abort(self, rid: str) -> None:
        """Stop a request; an unknown `rid` is no error.

        A real SGLang gives the samples of a request with n > 1 ids of its own, so that there only the closed connection
        stops them.
        """
        await self._control.call("abort", "POST", "/abort_request", json={"rid": rid})

    async def update_weights(self, snapshot: WeightSnapshot) -> None:
        """Load the snapshot from its folder and drop the prefix cache. The engine must be paused.

        After *any* error the weights have to be verified: SGLang answers 400 also when it loaded the weights but
        couldn't flush the cache, and an engine may be left half updated.
        """
        body = {"model_path": snapshot.path, "weight_version": str(snapshot.version), "flush_cache": True}
        answer = await self._control.call_json("update_weights", "POST", "/update_weights_from_disk", json=body)
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise RemoteProtocolError(self.name, "update_weights", f"success isn't true in {answer!r}")

    async def weight_version(self) -> str:
        answer = await self._control.call_json("weight_version", "GET", "/model_info", server_errors="rejected")
        version = answer.get("weight_version") if isinstance(answer, dict) else None
        if not isinstance(version, str):
            raise RemoteProtocolError(self.name, "weight_version", f"no string `weight_version` in {answer!r}")
        return version

    async def checksums(self) -> Mapping[str, str]:
        """Parameter name → checksum; with several tensor-parallel ranks the names start with `rank<i>/`."""
        answer = await self._control.call_json(
            "checksums", "POST", "/weights_checker", json={"action": "checksum"}, server_errors="rejected"
        )
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


def _sampling_params(params: SamplingParams) -> dict[str, object]:
    return {
        "max_new_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "n": params.n,
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
