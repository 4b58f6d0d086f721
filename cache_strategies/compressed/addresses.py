"""Groups of layers whose addresses are the same. Knows neither scorers nor budgets.

Layers that keep equally many keys share blocks and addresses. If each layer has a budget of its own, each is a group;
if each KV head has one, the blocks of a group hold one head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kernels.types import LayerSpec


class AddressGroup(NamedTuple):
    """Layers with the same addresses."""

    layers: Sequence[int]
    num_heads: int  # KV heads of each layer
    window: int | None  # what is kept in these layers, if not the budget: the tokens that their next query sees
    split_heads: bool  # whether each KV head has blocks of its own

    @property
    def num_columns(self) -> int:
        """The number of lists of blocks that a sequence has: one, or one for each KV head."""
        return self.num_heads if self.split_heads else 1


def group_layers(
    layers: Sequence[LayerSpec], windows: Sequence[int | None], *, by_layer: bool, by_head: bool
) -> list[AddressGroup]:
    """Divide layers with these windows into groups: one of all, if they are alike and keep equally many keys."""
    kinds = {(spec.num_kv_heads, window) for spec, window in zip(layers, windows, strict=True)}
    if not (by_layer or by_head) and len(kinds) == 1:
        return [AddressGroup(range(len(layers)), layers[0].num_kv_heads, windows[0], False)]
    return [
        AddressGroup([i], spec.num_kv_heads, window, by_head and window is None)
        for i, (spec, window) in enumerate(zip(layers, windows, strict=True))
    ]
