"""Divides a model's layers into groups by their window.

Layers with a window of w tokens need the keys of the latest w - 1 tokens only, so they get blocks of their own, which a
sequence can drop while it keeps those of layers without a window. Each group has a region for its blocks. Knows neither
sequences nor memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kernels.types import LayerSpec


def count_blocks_for_hit(window: int, block_size: int) -> int:
    """Return how many blocks before a token at the start of a block hold the tokens in its window; at least one."""
    return max(1, -(-(window - 1) // block_size))


def count_kept_blocks(window: int, block_size: int) -> int:
    """Return how many full blocks a sequence keeps in layers with a window.

    It is one more than the next token needs, so that the latest `block_size` tokens can be dropped again, and so that a
    later text that differs in the last block only still finds the blocks before it.
    """
    return count_blocks_for_hit(window, block_size) + 1


class LayerGroup(NamedTuple):
    """Layers with the same window, whose blocks are allocated and dropped together."""

    window: int | None  # None: all keys are kept
    layers: Sequence[int]
    num_columns: int = 1  # allocations of a block: one, or one for each KV head; 0: the group has no layers


@dataclass(frozen=True)
class LayerLayout:
    """The groups of a model's layers. The first one has no window, and has no layers if all have one."""

    groups: Sequence[LayerGroup]
    block_size: int

    @property
    def has_windows(self) -> bool:
        return len(self.groups) > 1

    @property
    def widest_group(self) -> int:
        """The number of the group that keeps most tokens: the first, unless it has no layers."""
        windows = [0 if group.window is None else group.window for group in self.groups]
        return 0 if self.groups[0].layers else windows.index(max(windows))

    @property
    def stored(self) -> Sequence[LayerGroup]:
        """The groups that have layers, and so a region: in order."""
        return [group for group in self.groups if group.layers]

    def describe(self) -> str:
        """Return in words which layers keep a window."""
        num_layers = sum(len(group.layers) for group in self.groups)
        windows = (
            f"{len(group.layers)} of {num_layers} layers keep a window of {group.window} tokens"
            for group in self.groups
            if group.window is not None
        )
        return ", ".join(windows)

    def count_blocks(self, group: LayerGroup, num_tokens: int, longest_row: int) -> int:
        """Return the largest number of blocks that a sequence of `num_tokens` tokens has in a group at one time.

        Its rows have at most `longest_row` tokens.
        """
        blocks = -(-num_tokens // self.block_size)
        if group.window is None:
            return blocks
        row_blocks = -(-(longest_row + self.block_size - 1) // self.block_size)  # it may begin at a block's last slot
        return min(blocks, count_kept_blocks(group.window, self.block_size) + row_blocks)


def group_by_window(
    layers: Sequence[LayerSpec], block_size: int, max_seq_len: int, *, by_head: bool = False
) -> LayerLayout:
    """Return the groups of a model's layers; with `by_head`, each KV head of those without a window has allocations.

    Windows that would drop no block of the longest sequence do not count.
    """
    members: dict[int | None, list[int]] = {None: []}
    for i, spec in enumerate(layers):
        window = spec.window
        if window is not None and count_kept_blocks(window, block_size) >= max_seq_len // block_size:
            window = None
        members.setdefault(window, []).append(i)
    full = members.pop(None)
    heads = max((layers[i].num_kv_heads for i in full), default=0)
    without_window = LayerGroup(None, full, heads if by_head else min(1, heads))
    return LayerLayout([without_window, *(LayerGroup(*each) for each in members.items())], block_size)
