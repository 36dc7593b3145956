"""Sampling for rows that each have their own parameters, without a loop over rows.

As SGLang 0.5.23: log-probs are of the distribution at the row's temperature, and top-p, top-k and min-p don't
renormalise them; temperature 0 is greedy, with log-probs at temperature 1. A row with a seed draws what SGLang draws
in its deterministic mode: the noise is a hash of seed, position and token, so that company and order change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

TOP_K_ALL = 1 << 30
_WORD = 0xFFFFFFFF
_NOISE_ELEMENTS = 1 << 24
"""Rows × vocabulary whose noise is made at once: it takes some 40 bytes for each."""


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Parameters of M rows, each [M]. The flags say whether any row needs the step, so that most batches skip it."""

    inverse_temperature: torch.Tensor
    greedy: torch.Tensor  # bool
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor  # int64
    seeded: torch.Tensor  # bool
    position: torch.Tensor  # of the last token of the context, 0-based
    any_greedy: bool
    any_filter: bool
    any_seeded: bool


def sample(logits_MV: torch.Tensor, rows: RowSampling, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Token [M] and its log-prob [M].

    Gumbel-max: argmax(log p + G) with G standard Gumbel noise is a draw from p.
    """
    logprobs = torch.log_softmax(logits_MV * rows.inverse_temperature[:, None], dim=-1)
    kept = _filtered(logprobs, rows) if rows.any_filter else logprobs
    # clamped: an exponential of exactly 0 would make noise of infinity, which beats every filter
    noise = torch.empty_like(kept).exponential_(generator=generator).clamp_min_(1e-30).log_().neg_()
    if rows.any_greedy:
        noise.masked_fill_(rows.greedy[:, None], 0.0)
    tokens = (kept + noise).argmax(-1)
    if rows.any_seeded:
        seeded, vocabulary = rows.seeded.nonzero()[:, 0], kept.shape[-1]
        at_once = max(1, _NOISE_ELEMENTS // vocabulary)
        for start in range(0, len(seeded), at_once):
            chosen = seeded[start : start + at_once]
            draw = seeded_noise(rows.seed[chosen], rows.position[chosen], vocabulary).add_(kept[chosen])
            tokens[chosen] = draw.argmax(-1)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


def seeded_noise(seed_M: torch.Tensor, position_M: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Standard Gumbel noise [M, V] in fp64: SGLang 0.5.23's `multinomial_with_seed`, from a hash of 32 bits.

    https://github.com/sgl-project/sglang/blob/main/python/sglang/srt/layers/sampler.py
    """
    uniform = _hashed(seed_M, position_M, vocabulary).double() / _WORD
    # both ends clamped: noise of infinity would beat every filter
    uniform.log_().clamp_(min=torch.finfo(torch.float64).min, max=-(2.0**-32)).neg_()
    return uniform.log_().neg_()


def _hashed(seed_M: torch.Tensor, position_M: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """MurmurHash3 (x86, 32 bits; https://en.wikipedia.org/wiki/MurmurHash) of seed, position and token, [M, V]."""
    blocks = (seed_M & _WORD, (seed_M >> 32) & _WORD, position_M & _WORD)
    row = torch.zeros_like(seed_M)
    for block in blocks:
        row = _mixed(row, block)
    mixed = _mixed(row[:, None], torch.arange(vocabulary, device=seed_M.device)[None])
    mixed ^= 16  # bytes hashed
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed ^= mixed >> shift
        mixed.mul_(factor).bitwise_and_(_WORD)
    mixed ^= mixed >> 16
    return mixed


def _mixed(hashed: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """One block of the hash. Words of 32 bits in int64: a product that overflows keeps its lower bits."""
    block = _rotated(block * 0xCC9E2D51 & _WORD, 15) * 0x1B873593 & _WORD
    return (_rotated(hashed ^ block, 13) * 5 + 0xE6546B64) & _WORD


def _rotated(word: torch.Tensor, bits: int) -> torch.Tensor:
    return (word << bits | word >> (32 - bits)) & _WORD


def _filtered(logprobs: torch.Tensor, rows: RowSampling) -> torch.Tensor:
    """Log-probs with -inf for what top-k, top-p or min-p exclude; only rows that ask for it are sorted."""
    active = ((rows.top_k < logprobs.shape[-1]) | (rows.top_p < 1) | (rows.min_p > 0)).nonzero()[:, 0]
    ordered, order = logprobs[active].sort(dim=-1, descending=True)
    probs = ordered.exp()
    rank = torch.arange(logprobs.shape[-1], device=logprobs.device)
    excluded = rank >= rows.top_k[active][:, None]
    # a token stays if the mass before it hasn't reached top_p: the first always does
    excluded |= probs.cumsum(-1) - probs > rows.top_p[active][:, None]
    excluded |= probs < probs[:, :1] * rows.min_p[active][:, None]
    excluded[:, 0] = False
    kept = ordered.masked_fill(excluded, -torch.inf)
    result = logprobs.clone()
    result[active] = torch.empty_like(kept).scatter_(-1, order, kept)
    return result
