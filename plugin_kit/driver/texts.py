"""Random texts with the queries, keys and values that a model would compute for them. Knows no cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.types import LayerSpec

THETA = 50.0  # so small that in short texts every dimension of a head turns


def rotate(x: Tensor, delta: Tensor) -> Tensor:
    """Return x [N,H,D], rotated by `delta` [N] further positions: a `LayerSpec.rotate`. Computed in float64."""
    half = x.shape[2] // 2
    angle = delta.double()[:, None, None] * THETA ** (-torch.arange(half, dtype=torch.float64) / half)
    a, b = x.double().split(half, 2)
    rotated = torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), 2)
    return rotated.to(x.dtype).where((delta != 0)[:, None, None], x)


MODEL = (  # two layers that have little in common
    LayerSpec(2, 4, 16, 8, scale=0.25, rotate=rotate),
    LayerSpec(
        *(1, 3, 8, 8), window=24, scale=0.4, softcap=4.0, sink_logits=torch.tensor([0.5, -1.0, 2.0]), rotate=rotate
    ),
)


@dataclass(frozen=True)
class RandomText:
    """Token ids and, for each layer, the q [T,Hq,D], k [T,H,D], v [T,H,Dv] that a model would compute for them.

    q and k are rotated (RoPE) at the tokens' positions in the text.
    """

    ids: list[int]
    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]

    def __len__(self) -> int:
        return len(self.ids)

    def head(self, n: int) -> RandomText:
        """Return the text's first n tokens."""
        return RandomText(self.ids[:n], *([x[:n] for x in part] for part in (self.q, self.k, self.v)))


def random_text(seed: int, length: int, layers: Sequence[LayerSpec], dtype: torch.dtype = torch.float32) -> RandomText:
    """Return a random text, which has no common prefix with texts of other seeds."""
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int, dim: int) -> Tensor:
        return torch.randn(length, heads, dim, generator=generator).to(dtype)

    return RandomText(
        ids=[seed * 100_000 + i for i in range(length)],
        q=[draw(spec.num_q_heads, spec.head_dim) for spec in layers],
        k=[draw(spec.num_kv_heads, spec.head_dim) for spec in layers],
        v=[draw(spec.num_kv_heads, spec.v_head_dim) for spec in layers],
    )


def spliced(a: RandomText, b: RandomText, at: int) -> RandomText:
    """Return `a` up to a position and `b` from there on."""

    def join(x: list[Tensor], y: list[Tensor]) -> list[Tensor]:
        return [torch.cat((i[:at], j[at:])) for i, j in zip(x, y, strict=True)]

    return RandomText(a.ids[:at] + b.ids[at:], join(a.q, b.q), join(a.k, b.k), join(a.v, b.v))


def with_poison(text: RandomText, tokens: Iterable[int], poison: float) -> RandomText:
    """Return the text with all numbers of some tokens replaced by NaN or infinity."""
    at = torch.tensor([*tokens])

    def changed(part: list[Tensor]) -> list[Tensor]:
        return [x.index_fill(0, at, poison) for x in part]

    return replace(text, q=changed(text.q), k=changed(text.k), v=changed(text.v))
