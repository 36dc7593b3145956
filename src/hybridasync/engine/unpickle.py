"""Named tensors out of a pickle that anybody may have sent.

`/update_weights_from_tensor` takes pickles by value, as SGLang does. Only the handful of names that plain CPU tensors
need can be looked up, storages are read by torch's own weights-only loader, and a tensor can't reach past its storage.
"""

from __future__ import annotations

import base64
import binascii
import collections
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch


class PayloadError(ValueError):
    """Not a pickle of named CPU tensors by value."""


class BucketEntry:
    """Stands in for SGLang's FlattenedTensorMetadata: its fields, no behaviour."""

    name: str
    shape: Any
    dtype: Any
    start_idx: int
    end_idx: int


def named_tensors(payload: str, load_format: str | None) -> list[tuple[str, torch.Tensor]]:
    """`payload` is base64; `load_format` None: a pickled list of (name, tensor); "flattened_bucket": SGLang's bucket.

    Raises PayloadError.
    """
    try:
        raw = base64.b64decode(payload, validate=True)
        value = _Unpickler(io.BytesIO(raw)).load()
        if load_format is None:
            return _pairs(value)
        if load_format == "flattened_bucket":
            return _bucket(value)
    except PayloadError:
        raise
    except binascii.Error as error:
        raise PayloadError(f"not base64: {error}") from error
    except Exception as error:  # hostile bytes make the pickle machine raise any type
        raise PayloadError(f"can't be unpickled: {type(error).__name__}: {error}") from error
    raise PayloadError(f"load_format {load_format!r} isn't supported; null and 'flattened_bucket' are")


def _pairs(value: object) -> list[tuple[str, torch.Tensor]]:
    pairs = list(value.items()) if isinstance(value, dict) else value
    if not isinstance(pairs, list | tuple):
        raise PayloadError(f"a list of (name, tensor) is expected, not {type(value).__name__}")
    result = []
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise PayloadError("a list of (name, tensor) is expected")
        name, tensor = pair
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise PayloadError("a list of (name, tensor) is expected")
        result.append((name, tensor))
    return result


def _bucket(value: object) -> list[tuple[str, torch.Tensor]]:
    if not isinstance(value, dict) or not isinstance(value.get("flattened_tensor"), torch.Tensor):
        raise PayloadError("a flattened bucket has a tensor `flattened_tensor` and a list `metadata`")
    flat = value["flattened_tensor"].reshape(-1).view(torch.uint8)
    result = []
    for entry in value["metadata"]:
        fields: dict[str, Any] = entry if isinstance(entry, dict) else entry.__dict__
        if not isinstance(fields["dtype"], torch.dtype):
            raise PayloadError("a bucket's metadata has a torch dtype for each tensor")
        piece = flat[int(fields["start_idx"]) : int(fields["end_idx"])].clone().view(fields["dtype"])
        result.append((str(fields["name"]), piece.reshape(tuple(fields["shape"]))))
    return result


def _load_storage(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _rebuild_tensor(storage: Any, *layout: Any) -> torch.Tensor:
    offset, size, stride = layout[0], tuple(layout[1]), tuple(layout[2])
    memory, dtype = storage._untyped_storage, storage.dtype  # the public accessor warns of deprecation
    reach = 1 + offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    if offset < 0 or min((*size, *stride, 0)) < 0 or (0 not in size and reach * dtype.itemsize > memory.nbytes()):
        raise PayloadError("a tensor reaches past its storage")
    return torch.empty(0, dtype=dtype).set_(memory, offset, size, stride)


def _rebuild_parameter(data: torch.Tensor, *_: object) -> torch.Tensor:
    return data


def _encode(text: str, *_: object) -> bytes:
    """How pickle protocol 2 spells bytes."""
    return text.encode("latin1")


_ALLOWED: dict[tuple[str, str], Callable[..., Any] | type | torch.dtype] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("_codecs", "encode"): _encode,
    ("torch", "Size"): torch.Size,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch.storage", "_load_from_bytes"): _load_storage,
    ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"): BucketEntry,
}
_ALLOWED.update(
    (("torch", name), getattr(torch, name))
    for name in ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int16", "int32", "int64", "bool")
)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise PayloadError(f"{module}.{name} isn't allowed: send CPU tensors by value (pickle.dumps)") from None
