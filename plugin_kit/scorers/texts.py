"""Random texts to be scored: keys, values and queries of one layer, and the keys that are left at each boundary."""

from __future__ import annotations

import torch
from torch import Tensor

from cache_strategies.scorers.base import Past, Scorer
from kernels.types import LayerSpec

H, G, D, V = 2, 3, 16, 12  # KV heads, query heads of each, dimensions of keys and of values
ROTATED = 12  # dimensions that RoPE rotates
THETA = 100.0


def rotate(x: Tensor, delta: Tensor, rotated: int = ROTATED, theta: float = THETA) -> Tensor:
    """Rotate x [N,H,D] by RoPE as a model does: of the first `rotated` dimensions, i with i + rotated / 2."""
    frequencies = theta ** (-torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
    angle = (delta.double()[:, None] * frequencies)[:, None]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b, rest = x.split([rotated // 2, rotated // 2, x.shape[-1] - rotated], dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def layer_specs() -> dict[str, LayerSpec]:
    """Return layers whose attention differs, by name."""
    plain = LayerSpec(H, H * G, D, V, scale=0.35, rotate=rotate)
    return {
        "plain": plain,
        "softcap": plain._replace(softcap=1.5),
        "sinks": plain._replace(sink_logits=torch.linspace(-1, 3, H * G)),
        "window": plain._replace(window=9),
        "one head": LayerSpec(1, 1, D, V, scale=1.0, rotate=rotate),
    }


class ScoredText:
    """A text of one layer, which boundaries divide, and the keys that are left of it."""

    def __init__(self, spec: LayerSpec, generator: torch.Generator, length: int, layer_idx: int = 3) -> None:
        H, Hq = spec.num_kv_heads, spec.num_q_heads
        self.spec = spec
        self.layer_idx = layer_idx
        shared = torch.randn(H, spec.head_dim, generator=generator)  # keys of a head resemble each other
        self.keys = torch.randn(length, H, spec.head_dim, generator=generator) + shared
        self.values = torch.randn(length, H, spec.v_head_dim, generator=generator)
        self.queries = torch.randn(length, Hq, spec.head_dim, generator=generator) + 0.5
        self.length = 0
        self.positions = torch.zeros(H, 0, dtype=torch.int64)
        self.state: dict[str, Tensor] = {}
        self.key_state: dict[str, Tensor] = {}
        self._generator = generator

    def read(self, num_tokens: int, scorer: Scorer) -> Past:
        """Return the layer's past at the boundary `num_tokens` further on."""
        new = torch.arange(self.length, self.length + num_tokens)
        self.positions = torch.cat((self.positions, new.expand(len(self.positions), -1)), dim=1)
        self.key_state = {n: torch.nn.functional.pad(x, (0, num_tokens)) for n, x in self.key_state.items()}
        self.length += num_tokens
        return self.past(num_tokens, scorer)

    def past(self, num_new: int, scorer: Scorer) -> Past:
        """Return the layer's past at the boundary where the text is, anew."""
        num_queries = num_new if scorer.num_queries is None else min(scorer.num_queries, self.length)
        queries = self.queries[self.length - num_queries : self.length] if num_queries else None
        heads = torch.arange(self.spec.num_kv_heads)
        return Past(
            self.layer_idx,
            self.spec,
            self.length,
            num_new,
            self.positions,
            lambda: self.keys[self.positions.T, heads],
            lambda: self.values[self.positions.T, heads],
            queries,
            dict(self.state),
            dict(self.key_state),
        )

    def drop(self, past: Past, num_kept: int, same_in_all_heads: bool) -> None:
        """Keep random keys of the past, others in each head."""
        draws = torch.rand(self.positions.shape, generator=self._generator)
        if same_in_all_heads:
            draws = draws[:1].expand_as(draws)
        self.keep_highest(past, draws, num_kept)

    def keep_highest(self, past: Past, scores: Tensor, num_kept: int) -> None:
        """Keep the keys of the past with the highest scores in each head, and what the scorer has stored of them."""
        kept = scores.argsort(dim=1, descending=True)[:, :num_kept].sort(dim=1).values
        self.positions = self.positions.gather(1, kept)
        self.state = past.state
        self.key_state = {name: x.gather(1, kept) for name, x in past.key_state.items()}
