"""Types that models, strategies and kernels share: the attention of a layer, and the addresses of keys. Data only.

Letters in shapes: N tokens of a step (or of one strategy's slice of it), B rows, R seats, M blocks of the longest seat,
Hq / H query / KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class LayerSpec(NamedTuple):
    """The attention of one layer, as the MODEL defines it. A strategy may keep fewer keys, and never show more."""

    num_kv_heads: int
    num_q_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None = None  # a query sees itself and the window - 1 tokens before it; None: all
    scale: float = 1.0  # of the scores
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    sink_logits: Tensor | None = None  # [Hq], learned: one more logit in the softmax, with no value
    rotate: Callable[[Tensor, Tensor], Tensor] | None = (
        None  # (x [N,H,D], delta [N]) -> x rotated delta positions further
    )


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Slots:
    """The addresses of one strategy's keys in one step: the contract between strategies and kernels.

    Token position p of a seat is in slot(p) = p if p < sinks else sinks + (p - sinks) % ring (ring 0: slot(p) = p),
    that is in block table[seat, slot // block_size] at slot % block_size. Tensors are int32 on the device, and their
    memory addresses stay the same from step to step.
    """

    table: Tensor  # [R, M] block ids; rows are not copied, kernels look them up by row_seat
    block_size: int  # slots of a block
    row_seat: Tensor  # [B] row of the table
    q_start: Tensor  # [B + 1] offsets into the N tokens; decode rows (one token) stand first
    start: Tensor  # [B] position of the row's first token; < 0: padding, nothing is written or read
    kept: Tensor  # [B] slots in use before this step, for backends that read slots in order
    num_decode: int  # rows of one token; from this and the next two a backend chooses a kernel and its splits
    max_q: int  # longest row
    max_kv: int  # length of the longest sequence, this step included
    sinks: int = 0
    ring: int = 0

    @property
    def num_rows(self) -> int:
        return self.start.shape[0]

    def slot(self, position: Tensor) -> Tensor:
        """Return the slots of positions (>= 0), any shape."""
        if not self.ring:
            return position
        in_ring = self.sinks + (position - self.sinks) % self.ring
        return in_ring.where(position >= self.sinks, position)

    def locate(self, seat: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Return block and slot within it, int64, for positions in the rows `seat` of the table (both broadcast)."""
        slot = self.slot(position)
        return self.table[seat, slot // self.block_size].long(), slot % self.block_size
