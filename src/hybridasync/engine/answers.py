"""Answers in the shape of SGLang 0.5.23 (`--skip-tokenizer-init`: no `text`)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response

from hybridasync.engine.requests import GeneratedSequence, Group


class JsonResponse(Response):
    """ASCII JSON: a lone surrogate that a client sent as an id can be sent back, which UTF-8 couldn't."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dump(content)


def dump(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode("ascii")


def request_error(message: str, status: int = 400) -> JsonResponse:
    """A request that was understood and refused."""
    return JsonResponse({"error": {"message": message}}, status_code=status)


def protocol_error(message: str, status: int, kind: str) -> JsonResponse:
    """A request that isn't one: malformed body, unknown route."""
    body = {"object": "error", "message": message, "type": kind, "param": None, "code": status}
    return JsonResponse(body, status_code=status)


def outcome(success: bool, message: str, **more: Any) -> JsonResponse:
    """Answer of the weight calls."""
    return JsonResponse({"success": success, "message": message, **more}, status_code=200 if success else 400)


def sequence_id(sequence: GeneratedSequence) -> str:
    group = sequence.group
    return group.rid if group.sampling.n == 1 else f"{group.rid}_{sequence.index}"


def finished_answer(sequence: GeneratedSequence, *, return_logprob: bool) -> dict[str, Any]:
    """The answer of a complete sequence."""
    ids = sequence.output_ids
    spans = sequence.spans(sequence.final_version, len(ids))
    meta = _meta(sequence, sequence.finish, tokens=len(ids), spans=spans)
    if return_logprob:
        meta.update(_logprobs(sequence.group, ids, sequence.output_logprobs))
    meta["e2e_latency"] = sequence.group.finished - sequence.group.created if sequence.group.finished else None
    return {"output_ids": ids, "meta_info": meta}


@dataclass(slots=True)
class Progress:
    """What a stream has sent of one sequence; chunks are cumulative."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[dict[str, Any]] = field(default_factory=list)

    def add(self, token: int, logprob: float, version: str) -> None:
        self.ids.append(token)
        self.logprobs.append(logprob)
        if self.spans and self.spans[-1]["version"] == version:
            self.spans[-1]["end"] = len(self.ids)
        else:
            self.spans.append({"version": version, "start": len(self.ids) - 1, "end": len(self.ids)})

    def answer(self, sequence: GeneratedSequence, *, return_logprob: bool) -> dict[str, Any]:
        meta = _meta(sequence, None, tokens=len(self.ids), spans=self.spans)
        if return_logprob:
            meta.update(_logprobs(sequence.group, self.ids, self.logprobs))
        return {"output_ids": self.ids, "meta_info": meta}


def _meta(
    sequence: GeneratedSequence, finish: dict[str, Any] | None, *, tokens: int, spans: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "id": sequence_id(sequence),
        "finish_reason": finish,
        "prompt_tokens": len(sequence.group.input_ids),
        "weight_version": spans[-1]["version"],
        "num_retractions": sequence.retractions,
        "completion_tokens": tokens,
        "reasoning_tokens": 0,
        "cached_tokens": 0,
        "weight_versions": spans,
    }


def _logprobs(group: Group, ids: list[int], logprobs: list[float]) -> dict[str, Any]:
    given = group.input_logprobs or []
    prompt = group.input_ids[len(group.input_ids) - len(given) :]
    return {
        "input_token_logprobs": [[value, token, None] for value, token in zip(given, prompt, strict=True)],
        "output_token_logprobs": [[value, token, None] for value, token in zip(logprobs, ids, strict=True)],
    }
