"""Types that models, strategies and kernels share: the attention of a layer, and the addresses of keys. Data only.

Letters in shapes: N tokens of a step (or of one strategy's slice of it), B rows, R seats (rows of the block table), M
blocks of the longest seat, Hq / H query / KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class LayerSpec(NamedTuple):
    """The attention of one layer, as the MODEL defines it. A strategy may keep fewer keys, but never shows more."""

    num_kv_heads: int
    num_q_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None = None  # a query sees itself and the window - 1 tokens before it; None: all tokens before it
    scale: float = 1.0  # of the scores
    softcap: float | None = None  # scores become softcap * tanh(score / softcap); None: they stay
    sink_logits: Tensor | None = None  # [Hq], learned: an additional logit in the softmax, with no value
    rotate: Callable[[Tensor, Tensor], Tensor] | None = (
        None  # (x [N,H,D], delta [N]) -> x, rotated (RoPE) by `delta` further positions
    )


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Slots:
    """The addresses of one strategy's keys in one step: what strategies pass to kernels.

    The token at position p of a seat is in slot(p) = p if p < sinks else sinks + (p - sinks) % ring (if ring is 0,
    slot(p) = p), that is in block table[seat, slot // block_size] at slot % block_size. Tensors are int32 on the
    device, and their memory addresses stay the same from step to step.
    """

    table: Tensor  # [R, M] block ids of each seat; kernels look up a row's seat by row_seat
    block_size: int  # slots of a block
    row_seat: Tensor  # [B] seat of each row: its row of the block table
    q_start: Tensor  # [B + 1] index of each row's first token among the N tokens; decode rows (one token) come first
    start: Tensor  # [B] position of the row's first token; negative for padding, which is neither read nor written
    kept: Tensor  # [B] number of slots in use before this step, for backends that read keys in the order of slots
    num_decode: int  # number of rows of one token; backends choose a kernel and its splits by this, max_q and max_kv
    max_q: int  # longest row
    max_kv: int  # number of tokens in the longest sequence, those of this step included
    sinks: int = 0
    ring: int = 0

    @property
    def num_rows(self) -> int:
        return self.start.shape[0]

    def slot(self, position: Tensor) -> Tensor:
        """Return the slots of positions (>= 0), in the shape of `position`."""
        if not self.ring:
            return position
        in_ring = self.sinks + (position - self.sinks) % self.ring
        return in_ring.where(position >= self.sinks, position)

    def locate(self, seat: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Return (block, slot within the block), int64, for positions in seats `seat`; the two arguments broadcast."""
        slot = self.slot(position)
        return self.table[seat, slot // self.block_size].long(), slot % self.block_size
