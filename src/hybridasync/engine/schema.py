"""Request bodies of SGLang 0.5.23's HTTP API, as far as a batch of token ids needs them.

Unknown fields of a body are ignored and sampling parameters that aren't known are refused, as there. What SGLang can
and this engine can't (stop strings, grammars, penalties, log-probs of other tokens) is refused when it is asked for.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from hybridasync.engine.requests import RequestError, Sampling
from hybridasync.engine.sampling import TOP_K_ALL

MAX_SAMPLES_PER_CALL = 65536
MAX_STOP_IDS = 1024
_GREEDY_BELOW = 1e-6
_DEFAULT_MAX_NEW_TOKENS = 128
_UNSUPPORTED_SAMPLING: dict[str, tuple[object, ...]] = {  # name → values that ask for nothing
    "stop": (None, "", []),
    "stop_regex": (None, "", []),
    "json_schema": (None, ""),
    "regex": (None, ""),
    "ebnf": (None, ""),
    "structural_tag": (None, ""),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_new_tokens": (None, 0),
    "logit_bias": (None, {}),
    "beam_width": (None, 1),
    "watermark": (None,),
}
_IGNORED_SAMPLING = frozenset(
    {
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "no_stop_trim",
        "stream_interval",
        "custom_params",
    }
)


def _ids_1d(value: object, where: str = "") -> list[int]:
    if not isinstance(value, list) or any(type(item) is not int for item in value):
        raise ValueError(f"{where}must be a list of integers")
    return value


def _input_ids(value: object) -> object:
    if isinstance(value, list) and value and isinstance(value[0], list):
        return [_ids_1d(row, f"row {index}: ") for index, row in enumerate(value)]
    return None if value is None else _ids_1d(value)


class Body(BaseModel):
    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class GenerateBody(Body):
    rid: str | list[str] | None = None
    text: str | list[str] | None = None
    input_ids: Annotated[Any, BeforeValidator(_input_ids)] = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    token_ids_logprob: list[Any] | None = None
    stream: bool = False


class SamplingBody(BaseModel):
    """Sampling parameters; null means the default."""

    model_config = ConfigDict(extra="forbid")

    max_new_tokens: int | None = Field(_DEFAULT_MAX_NEW_TOKENS, ge=0)
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = TOP_K_ALL
    min_p: float = Field(0.0, ge=0, le=1)
    n: int = Field(1, ge=1, le=MAX_SAMPLES_PER_CALL)
    ignore_eos: bool = False
    stop_token_ids: list[int] = Field(default_factory=list, max_length=MAX_STOP_IDS)
    sampling_seed: int | None = Field(None, ge=-(2**63), lt=2**63)


class PauseBody(Body):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class AbortBody(Body):
    rid: str | None = None
    abort_all: bool = False


class UpdateFromDiskBody(Body):
    model_path: str
    weight_version: str | None = None
    abort_all_requests: bool = False
    flush_cache: bool = True


class StageWeightsBody(Body):
    """`base_version`: the folder holds a delta to this version, which must be live."""

    model_path: str
    weight_version: str
    base_version: str | None = None


class SwitchBody(Body):
    """`checksum` of all parameters together, as `weights.checksums.overall` has it."""

    weight_version: str
    checksum: str
    mode: Literal["abort", "retract"] = "retract"


class UpdateFromTensorBody(Body):
    serialized_named_tensors: list[Annotated[str, StringConstraints(min_length=1)]] = Field(min_length=1)
    load_format: str | None = None
    weight_version: str | None = None
    abort_all_requests: bool = False
    flush_cache: bool = True


class JoinGroupBody(Body):
    master_address: str
    master_port: int = Field(ge=1, le=65535)
    rank_offset: int = Field(ge=0)
    world_size: int = Field(ge=1)
    group_name: Annotated[str, StringConstraints(min_length=1)] = "weight_update_group"
    backend: Literal["gloo", "nccl"] = "nccl"


class LeaveGroupBody(Body):
    group_name: str = "weight_update_group"


class UpdateFromDistributedBody(Body):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"
    load_format: Literal["flattened_bucket"] | None = None
    weight_version: str | None = None
    abort_all_requests: bool = False
    flush_cache: bool = True


class UpdateVersionBody(Body):
    new_version: str
    abort_all_requests: bool = True


class CheckWeightsBody(Body):
    action: str = "checksum"
    skip_tensor_list: list[str] | None = None


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a request is checked against. `context_length` in tokens, prompt and output together."""

    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PromptRequest:
    rid: str
    input_ids: list[int]
    sampling: Sampling
    return_logprob: bool
    logprob_start: int


def prompt_requests(body: GenerateBody, limits: ModelLimits) -> tuple[list[PromptRequest], bool]:
    """The prompts of a call, and whether the answer is one object (one prompt, one sample). Raises RequestError."""
    _refuse_unsupported(body)
    ids = body.input_ids
    if ids is None:
        raise RequestError("input_ids should be provided: the engine takes token ids, not text.")
    if not ids:
        raise RequestError("input_ids cannot be empty.")
    single = not isinstance(ids[0], list)
    prompts: list[list[int]] = [ids] if single else ids
    count = len(prompts)
    samplings = [
        parse_sampling(given, len(prompt), limits)
        for given, prompt in zip(
            _per_prompt(body.sampling_params or {}, count, "sampling_params"), prompts, strict=True
        )
    ]
    if len({sampling.n for sampling in samplings}) > 1:
        raise RequestError("The parallel_sample_num should be the same for all samples in sample params.")
    if count * samplings[0].n > MAX_SAMPLES_PER_CALL:
        raise RequestError(f"A call may ask for {MAX_SAMPLES_PER_CALL} samples at most, not {count * samplings[0].n}.")
    wanted = _per_prompt(body.return_logprob or False, count, "return_logprob")
    starts = _per_prompt(-1 if body.logprob_start_len is None else body.logprob_start_len, count, "logprob_start_len")
    requests = [
        _checked(PromptRequest(rid, prompt, sampling, logprob, start if logprob else -1), limits)
        for rid, prompt, sampling, logprob, start in zip(
            _rids(body.rid, count, single), prompts, samplings, wanted, starts, strict=True
        )
    ]
    return requests, single and samplings[0].n == 1


def parse_sampling(given: dict[str, Any], prompt_tokens: int, limits: ModelLimits) -> Sampling:
    """Raises RequestError (pydantic's ValidationError for a wrong type is a ValueError, too)."""
    known = {key: value for key, value in given.items() if key not in _IGNORED_SAMPLING}
    for name, neutral in _UNSUPPORTED_SAMPLING.items():
        if known.pop(name, None) not in neutral:
            raise RequestError(f"sampling parameter {name} isn't supported by the embedded engine.")
    kept = {key: value for key, value in known.items() if value is not None or key == "max_new_tokens"}
    body = SamplingBody.model_validate(kept)
    if body.top_k == 0 or body.top_k < -1:
        raise RequestError(f"top_k must be -1 (disable) or at least 1, got {body.top_k}.")
    room = limits.context_length - prompt_tokens
    stops = {*limits.eos_token_ids, *body.stop_token_ids} if not body.ignore_eos else set()
    return Sampling(
        max_new_tokens=max(room, 0) if body.max_new_tokens is None else body.max_new_tokens,
        temperature=0.0 if body.temperature < _GREEDY_BELOW else body.temperature,
        top_p=body.top_p,
        top_k=TOP_K_ALL if body.top_k == -1 else min(body.top_k, TOP_K_ALL),
        min_p=body.min_p,
        n=body.n,
        stop_token_ids=tuple(sorted(token for token in stops if 0 <= token < limits.vocab_size)),
        seed=body.sampling_seed,
    )


def _refuse_unsupported(body: GenerateBody) -> None:
    if body.text is not None:
        raise RequestError("text isn't supported by the embedded engine: send input_ids.")
    if body.top_logprobs_num not in (None, 0) or body.token_ids_logprob:
        raise RequestError("log-probs of other tokens than the sampled one aren't supported by the embedded engine.")


def _per_prompt(value: Any, count: int, name: str) -> list[Any]:
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"The length of {name} should be equal to the batch size ({count}), not {len(value)}.")
    return value


def _rids(given: str | list[str] | None, count: int, single: bool) -> list[str]:
    if not given:
        return [uuid.uuid4().hex for _ in range(count)]
    if isinstance(given, str):
        return [given] if single else [f"{given}_{index}" for index in range(count)]
    if len(given) != count:
        raise RequestError("The specified rids length mismatch with the batch_size for batch processing.")
    if len(set(given)) != count:
        raise RequestError("Duplicate request IDs detected within the request.")
    return given


def _checked(request: PromptRequest, limits: ModelLimits) -> PromptRequest:
    length, context = len(request.input_ids), limits.context_length
    if length == 0:
        raise RequestError("input_ids cannot be empty.")
    if length >= context:
        raise RequestError(f"The input ({length} tokens) is longer than the model's context length ({context} tokens).")
    total = length + request.sampling.max_new_tokens
    if total > context:
        raise RequestError(
            f"Requested token count exceeds the model's maximum context length of {context} tokens. You requested a "
            f"total of {total} tokens: {length} tokens from the input and {request.sampling.max_new_tokens} new tokens."
        )
    if min(request.input_ids) < 0 or max(request.input_ids) >= limits.vocab_size:
        raise RequestError(f"input_ids contains a token id outside the valid range [0, {limits.vocab_size}).")
    if request.logprob_start < -1 or request.logprob_start > length:
        raise RequestError(f"logprob_start_len must be in [-1, {length}], got {request.logprob_start}.")
    return request
