"""The 64-bit content hash of a tensor that SGLang 0.5.23 computes on CUDA (`kernels/ops/memory/gpu_tensor_hash.py`).

The tensor's bytes are little-endian 32-bit words v_i, zero-padded to whole words. Tiles of 8192 words each give two
32-bit sums of fmix32(v_i ^ p(i)), with p(i) = (i·C + seed) ^ rotl(i), which are mixed with the number of bytes; tiles
are added modulo 2^64; splitmix64 finishes. fmix32 is MurmurHash3's finaliser, splitmix64 that of Steele et al., 2014.
"""

from __future__ import annotations

import torch

_SEED = 0x243F6A88
_SEEDS = (_SEED, (_SEED * 0x9E3779B1 ^ 0xDEADBEEF) & 0xFFFFFFFF)
_POSITION_FACTORS = (0x27D4EB2D, 0x165667B1)
_ROTATIONS = (15, 13)
_TILE_WORDS = 8192
_CHUNK_TILES = 256
"""Tiles at once: words are widened to 64 bits, so that a chunk needs some tens of MB beside the tensor."""

_WORD = 0xFFFFFFFF
_LONG = 0xFFFFFFFFFFFFFFFF


def gpu_hash(tensor: torch.Tensor) -> str:
    """Sixteen hexadecimal digits; computed where the tensor lies."""
    octets = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if octets.numel() == 0:
        return f"{0:016x}"
    words = torch.nn.functional.pad(octets, (0, -octets.numel() % 4)).view(torch.int32)
    total, size = 0, words.numel()
    for start in range(0, size, _TILE_WORDS * _CHUNK_TILES):
        chunk = words[start : start + _TILE_WORDS * _CHUNK_TILES].long() & _WORD
        total += _chunk_sum(chunk, start, size)
    return f"{_splitmix64(total & _LONG):016x}"


def _chunk_sum(chunk: torch.Tensor, start: int, size: int) -> int:
    """The sum over the chunk's tiles, each (h1 << 32) | h2."""
    index = torch.arange(start, start + chunk.numel(), device=chunk.device) & _WORD
    halves = []
    for seed, factor, rotation in zip(_SEEDS, _POSITION_FACTORS, _ROTATIONS, strict=True):
        rotated = (index << rotation | index >> (32 - rotation)) & _WORD
        position = (_times(index, factor) + seed & _WORD) ^ rotated
        mixed = _fmix32(chunk ^ position)
        mixed = torch.nn.functional.pad(mixed, (0, -mixed.numel() % _TILE_WORDS))
        sums = mixed.view(-1, _TILE_WORDS).sum(1) & _WORD
        halves.append(_fmix32(sums ^ (size * 4 & _WORD)))
    high, low = (int(half.sum()) for half in halves)  # at most 256 words of 32 bits: no overflow
    return (high << 32) + low


def _fmix32(words: torch.Tensor) -> torch.Tensor:
    words = words ^ words >> 16
    words = _times(words, 0x85EBCA6B)
    words = words ^ words >> 13
    words = _times(words, 0xC2B2AE35)
    return words ^ words >> 16


def _times(words: torch.Tensor, factor: int) -> torch.Tensor:
    """The product modulo 2^32: int64 wraps around modulo 2^64, which leaves the lower half as it must be."""
    return words * factor & _WORD


def _splitmix64(value: int) -> int:
    value ^= value >> 30
    value = value * 0xBF58476D1CE4E5B9 & _LONG
    value ^= value >> 27
    value = value * 0x94D049BB133111EB & _LONG
    return value ^ value >> 31
