"""Sampling for rows that each have their own parameters, without a loop over rows.

As SGLang 0.5.23: log-probs are of the distribution at the row's temperature, and top-p, top-k and min-p don't
renormalise them; temperature 0 is greedy, with log-probs at temperature 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

TOP_K_ALL = 1 << 30


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Parameters of M rows, each [M]. The flags say whether any row needs the step, so that most batches skip it."""

    inverse_temperature: torch.Tensor
    greedy: torch.Tensor  # bool
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    any_greedy: bool
    any_filter: bool


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
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


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
