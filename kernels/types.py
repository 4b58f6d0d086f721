"""Types that models, strategies and kernels share: the attention of a layer, and the addresses of keys. Data only.

Letters in shapes: N tokens of a step (or of one strategy's slice of it), B rows of the step, R rows of the block table,
M blocks of the longest one, Hq / H query / KV heads, D head dim.
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
    # [H, D] float32, about the mean of the layer's keys, subtracted before they are quantized (kv_formats.py). None:
    # unknown. Layers with a softcap or sink logits must have none, as a shift of all scores changes their result
    k_mean: Tensor | None = None

    @property
    def ignores_shift(self) -> bool:
        """Whether attention stays the same if a number is added to all scores of a query."""
        return not self.softcap and self.sink_logits is None


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Slots:
    """The addresses of one strategy's keys in one step: what strategies pass to kernels.

    The tokens that a strategy keeps of a seat have the indices 0, 1, 2, ... in the order of their positions; as long as
    it has dropped none, a token's index is its position. The token with index i is in slot(i) = i if i < sinks else
    sinks + (i - sinks) % ring (if ring is 0, slot(i) = i), that is in block table[r, slot // block_size] at slot %
    block_size, where r is the table row of the row. A query sees tokens up to its own index.

    If `table_row` and `start` have a column for each KV head, each head has a table row and indices of its own, and a
    block holds one head (`KVStore.split_heads`); heads may then keep different tokens, and different numbers of them.
    Tensors are dense int32 on the device, and their memory addresses stay the same from step to step.
    """

    table: Tensor  # [R, M] block ids
    block_size: int  # slots of a block
    table_row: Tensor  # [B] or [B, H] the table row of each row of the step, or of each of its KV heads
    q_start: Tensor  # [B + 1] index of each row's first token among the N tokens; decode rows (one token) come first
    start: Tensor  # [B] or [B, H] index of the row's first token: how many tokens are kept before it; padding: negative
    num_decode: int  # number of rows of one token; backends choose a kernel and its splits by this, max_q and max_kv
    max_q: int  # longest row
    max_kv: int  # largest index of a token of this step, plus one
    sinks: int = 0
    ring: int = 0
    # [N] or [N, H] for layers with a window, if tokens were dropped: the index of the oldest token in each query's
    # window. None: the window is counted in indices, as they are positions or the layers have no window.
    window_start: Tensor | None = None
    # Number of tokens of the rows, if the numbers in the tensors were checked on the host (`check_entries` of
    # arguments.py); None: an operation checks them, which on a GPU waits for the GPU.
    num_tokens: int | None = None

    @property
    def num_rows(self) -> int:
        return self.start.shape[0]

    @property
    def split_heads(self) -> bool:
        """Whether each KV head has a table row of its own."""
        return self.table_row.dim() == 2

    def slot(self, index: Tensor) -> Tensor:
        """Return the slots of tokens with these indices (>= 0), in the shape of `index`."""
        if not self.ring:
            return index
        in_ring = self.sinks + (index - self.sinks) % self.ring
        return in_ring.where(index >= self.sinks, index)

    def locate(self, table_row: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return (block, slot within the block), int64, for indices in rows of the table; the arguments broadcast."""
        slot = self.slot(index)
        return self.table[table_row, slot // self.block_size].long(), slot % self.block_size
