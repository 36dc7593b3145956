"""The decoder's arithmetic: Llama and Qwen3 over a key-value cache, prefill and one-token steps.

Shape suffixes: P prompts, M rows written, B rows decoded, T prompt tokens, S cache positions, H query heads,
K key-value heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from hybridasync.engine.model_config import ModelConfig
from hybridasync.engine.weights import Layer, Weights


class KVCache:
    """Keys and values, [layers, rows, K, positions, D]; grows in both directions as sequences need it."""

    def __init__(self, config: ModelConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        self._shape = (config.layers, config.kv_heads, config.head_dim)
        self._like = torch.empty(0, device=device, dtype=dtype)
        self.rows = self.positions = 0
        self.clear()

    def clear(self) -> None:
        """Forget everything and give the memory back."""
        self.rows = self.positions = 0
        self.keys = self.values = self._allocate(0, 0)

    def reserve(self, rows: int, positions: int) -> None:
        """Have room for at least these; keeps what is there."""
        if rows <= self.rows and positions <= self.positions:
            return
        new_rows, new_positions = max(rows, self.rows), max(positions, self.positions)
        for name in ("keys", "values"):  # one after the other: less memory is held twice
            grown = self._allocate(new_rows, new_positions)
            grown[:, : self.rows, :, : self.positions] = getattr(self, name)
            setattr(self, name, grown)
        self.rows, self.positions = new_rows, new_positions

    def move(self, source: torch.Tensor, target: torch.Tensor, positions: int) -> None:
        """Copy the first `positions` of the rows `source` to the rows `target` (disjoint sets)."""
        self.keys[:, target, :, :positions] = self.keys[:, source, :, :positions]
        self.values[:, target, :, :positions] = self.values[:, source, :, :positions]

    def _allocate(self, rows: int, positions: int) -> torch.Tensor:
        layers, kv_heads, head_dim = self._shape
        return self._like.new_zeros((layers, rows, kv_heads, positions, head_dim))


class Decoder:
    """Stateless but for the rotary tables; weights and cache are arguments."""

    def __init__(self, config: ModelConfig, *, context_length: int, device: torch.device, dtype: torch.dtype) -> None:
        self.config = config
        frequencies = torch.tensor(config.inv_freq, dtype=torch.float32)
        angles = torch.outer(torch.arange(context_length, dtype=torch.float32), frequencies)
        doubled = torch.cat([angles, angles], -1)
        self._cos = doubled.cos().to(device=device, dtype=dtype)
        self._sin = doubled.sin().to(device=device, dtype=dtype)
        self.device = device

    def prefill(
        self,
        weights: Weights,
        prompts: Sequence[Sequence[int]],
        cache: KVCache,
        *,
        rows: torch.Tensor,
        src: torch.Tensor,
        width_multiple: int = 1,
    ) -> torch.Tensor:
        """Hidden states [P, T, hidden] (final norm applied) of prompts padded on the right; row rows[m] gets the keys
        and values of prompt src[m], so that all samples of a prompt share one pass."""
        longest = max(len(prompt) for prompt in prompts)
        longest = min(-(-longest // width_multiple) * width_multiple, self._cos.shape[0])
        ids_PT = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], device=self.device)
        rotation = self._cos[:longest, None], self._sin[:longest, None]
        x = F.embedding(ids_PT, weights.embedding)
        for index, layer in enumerate(weights.layers):
            q, k, v = self._qkv(x, layer, rotation)
            cache.keys[index][rows, :, :longest] = k[src]
            cache.values[index][rows, :, :longest] = v[src]
            grouped = self.config.heads != self.config.kv_heads
            # padding is on the right, so the causal mask hides it from every real token
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
            x = self._rest(x, out.transpose(1, 2).flatten(2), layer)
        return self._norm(x, weights.norm)

    def step(
        self, weights: Weights, last_B: torch.Tensor, length_B: torch.Tensor, *, cache: KVCache, positions: int
    ) -> torch.Tensor:
        """Logits [B, V] in fp32 after token `last_B` at position `length_B`; writes its keys and values there."""
        config, batch = self.config, last_B.shape[0]
        rows = torch.arange(batch, device=self.device)
        rotation = self._cos[length_B][:, None, None], self._sin[length_B][:, None, None]
        visible = torch.arange(positions, device=self.device) <= length_B[:, None]
        mask = torch.zeros(visible.shape, device=self.device, dtype=self._cos.dtype).masked_fill_(~visible, -torch.inf)
        groups = config.heads // config.kv_heads
        mask = mask[:, None, None].expand(batch, 1, groups, positions)
        x = F.embedding(last_B, weights.embedding)[:, None]
        for index, layer in enumerate(weights.layers):
            q, k, v = self._qkv(x, layer, rotation)
            keys, values = cache.keys[index], cache.values[index]
            keys[rows, :, length_B] = k[:, :, 0]
            values[rows, :, length_B] = v[:, :, 0]
            # the query heads of one key-value head stand where query positions would: nothing is expanded
            q = q.reshape(batch, config.kv_heads, groups, config.head_dim)
            out = F.scaled_dot_product_attention(
                q, keys[:batch, :, :positions], values[:batch, :, :positions], attn_mask=mask
            )
            x = self._rest(x, out.reshape(batch, 1, -1), layer)
        return self.logits(weights, self._norm(x[:, 0], weights.norm))

    @staticmethod
    def logits(weights: Weights, hidden: torch.Tensor) -> torch.Tensor:
        """[..., V] in fp32 from hidden states after the final norm."""
        return F.linear(hidden, weights.head).float()

    def _qkv(
        self, x: torch.Tensor, layer: Layer, rotation: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query [N, H, T, D], key and value [N, K, T, D], rotated. Query and key are treated as one: half the calls."""
        config, (batch, length, _) = self.config, x.shape
        fused = F.linear(self._norm(x, layer.input_norm), layer.qkv, layer.qkv_bias)
        fused = fused.view(batch, length, config.heads + 2 * config.kv_heads, config.head_dim)
        both, v = torch.split(fused, [config.heads + config.kv_heads, config.kv_heads], dim=2)
        if layer.qk_norm is not None:
            both = F.rms_norm(both, (config.head_dim,), None, config.norm_eps) * layer.qk_norm
        both = _rotate(both, *rotation).transpose(1, 2)
        return both[:, : config.heads], both[:, config.heads :], v.transpose(1, 2)

    def _rest(self, x: torch.Tensor, attention: torch.Tensor, layer: Layer) -> torch.Tensor:
        """Output projection and gated feed-forward network, with their residuals."""
        x = x + F.linear(attention, layer.out, layer.out_bias)
        gate, up = F.linear(self._norm(x, layer.post_norm), layer.gate_up, layer.gate_up_bias).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, layer.down, layer.down_bias)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.config.norm_eps)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin
