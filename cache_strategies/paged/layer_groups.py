"""Divides a model's layers into groups by their window, and each group into parts whose blocks have equal bytes.

Layers with a window of w tokens need the keys of the latest w - 1 tokens only, so they get blocks of their own, which a
sequence can drop while it keeps those of layers without a window. A block of a group is made of one allocation for each
part of the group. As all parts of all groups have (nearly) equal bytes, any group can use the memory that another
frees. Where bytes differ, the largest part sets the size, and the difference is padding. Knows neither sequences nor
memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from kernels.store import compute_block_bytes
from kernels.types import LayerSpec

MAX_PADDING = 1 / 32  # the share of memory that padding may take without parts of fewer layers being tried


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
    # The layers' numbers; a block has one allocation for each part. If KV heads have allocations of their own, the same
    # layers come once for each head.
    parts: Sequence[Sequence[int]]

    @property
    def num_layers(self) -> int:
        return len({layer for part in self.parts for layer in part})


@dataclass(frozen=True)
class LayerLayout:
    """The groups of a model's layers. The first one has no window, and has no parts if all layers have one."""

    groups: Sequence[LayerGroup]
    block_size: int
    part_bytes: int  # bytes of a block of one part
    padding: float  # largest share of a sequence's blocks that is padding, whatever its length
    num_columns: int = 1  # how many parts of the first group have the same layers: one, or one for each KV head

    @property
    def has_windows(self) -> bool:
        return len(self.groups) > 1

    @property
    def widest_group(self) -> int:
        """The number of the group that keeps most tokens: the first, unless it has no parts."""
        windows = [0 if group.window is None else group.window for group in self.groups]
        return 0 if self.groups[0].parts else windows.index(max(windows))

    @property
    def parts(self) -> Sequence[Sequence[int]]:
        """The parts of all groups, in order."""
        return [part for group in self.groups for part in group.parts]

    def describe(self) -> str:
        """Return in words which layers keep a window, and what the division of layers wastes."""
        num_layers, longest = sum(group.num_layers for group in self.groups), max(map(len, self.parts))
        windows = (
            f"{group.num_layers} of {num_layers} layers keep a window of {group.window} tokens"
            for group in self.groups
            if group.window is not None
        )
        return (
            f"{', '.join(windows)}; a block has up to {longest} layers, and at most {self.padding:.1%} of the "
            "memory is padding"
        )

    def count_part_blocks(self, num_tokens: int, longest_row: int) -> int:
        """Return the largest number of allocations, one per block and part, of a sequence of `num_tokens` tokens.

        Its rows have at most `longest_row` tokens.
        """
        return sum(len(group.parts) * self.count_blocks(group, num_tokens, longest_row) for group in self.groups)

    def count_blocks(self, group: LayerGroup, num_tokens: int, longest_row: int) -> int:
        """Return the largest number of blocks that a sequence of `num_tokens` tokens has in a group at one time."""
        blocks = -(-num_tokens // self.block_size)
        if group.window is None:
            return blocks
        row_blocks = -(-(longest_row + self.block_size - 1) // self.block_size)  # it may begin at a block's last slot
        return min(blocks, count_kept_blocks(group.window, self.block_size) + row_blocks)


def divide_layers(
    layers: Sequence[LayerSpec],
    block_size: int,
    max_seq_len: int,
    dtype: torch.dtype,
    *,
    head_bytes: Sequence[int] | None = None,
) -> LayerLayout:
    """Return the groups of a model's layers; one group of all layers if dropping blocks would save no memory.

    If `head_bytes` has for each layer the bytes of one KV head in a block, each head of the layers that keep all keys
    has an allocation of its own.
    """
    sizes = [compute_block_bytes([spec], block_size, dtype) for spec in layers]
    single = _make_single(layers, sizes if head_bytes is None else head_bytes, block_size, head_bytes is not None)
    members = _group_by_window(layers, block_size, max_seq_len)
    if not any(members[window] for window in members if window is not None):
        return single
    columns = 1
    if head_bytes is not None and members[None]:
        columns = max(layers[i].num_kv_heads for i in members[None])
        sizes = [head_bytes[i] if i in members[None] else size for i, size in enumerate(sizes)]
    layouts = [
        _pack(members, sizes, part_bytes, block_size, columns) for part_bytes in _iter_part_bytes(members, sizes)
    ]
    lengths = (block_size, max_seq_len)  # in a short text all groups have as many blocks, in the longest they do not
    layouts = [replace(each, padding=max(_padding(each, sizes, n) for n in lengths)) for each in layouts]
    accepted = [layout for layout in layouts if layout.padding <= MAX_PADDING]
    best = accepted[0] if accepted else min(layouts, key=lambda layout: layout.padding)
    is_smaller = _count_bytes(best, max_seq_len) < _count_bytes(single, max_seq_len)
    return best if is_smaller else single


def _make_single(layers: Sequence[LayerSpec], sizes: Sequence[int], block_size: int, by_head: bool) -> LayerLayout:
    """Return the layout of one group of all layers, which take `sizes` bytes of an allocation."""
    columns = max(spec.num_kv_heads for spec in layers) if by_head else 1
    group = LayerGroup(None, [range(len(layers))] * columns)
    return LayerLayout([group], block_size, sum(sizes), padding=0.0, num_columns=columns)


def _group_by_window(layers: Sequence[LayerSpec], block_size: int, max_seq_len: int) -> dict[int | None, Sequence[int]]:
    """Return the numbers of the layers by window; None, which comes first, is for windows that drop no block, too."""
    members: dict[int | None, list[int]] = {None: []}
    for i, spec in enumerate(layers):
        window = spec.window
        if window is not None and count_kept_blocks(window, block_size) >= max_seq_len // block_size:
            window = None
        members.setdefault(window, []).append(i)
    return dict(members)


def _iter_part_bytes(members: dict[int | None, Sequence[int]], sizes: Sequence[int]) -> Iterator[int]:
    """Yield the sizes of a part to be compared, largest first: those of the first layers of each group."""
    found = {sum(sizes[i] for i in group[:n]) for group in members.values() for n in range(1, len(group) + 1)}
    yield from sorted((size for size in found if size >= max(sizes)), reverse=True)


def _pack(
    members: dict[int | None, Sequence[int]], sizes: Sequence[int], part_bytes: int, block_size: int, columns: int
) -> LayerLayout:
    """Return the layout whose parts have as many layers as fit into `part_bytes`.

    Those of layers without a window come `columns` times.
    """
    groups = []
    for window, group in members.items():
        parts: list[list[int]] = []
        room = 0
        for i in group:
            if sizes[i] > room:
                parts.append([])
                room = part_bytes
            parts[-1].append(i)
            room -= sizes[i]
        groups.append(LayerGroup(window, [part for part in parts for _ in range(columns if window is None else 1)]))
    return LayerLayout(groups, block_size, part_bytes, padding=0.0, num_columns=columns)


def _count_bytes(layout: LayerLayout, num_tokens: int) -> int:
    """Return the bytes of a sequence while it decodes."""
    return layout.part_bytes * layout.count_part_blocks(num_tokens, longest_row=1)


def _padding(layout: LayerLayout, sizes: Sequence[int], num_tokens: int) -> float:
    """Return the share of a sequence's blocks that is padding while it decodes."""
    used = sum(
        sizes[i] * layout.count_blocks(group, num_tokens, longest_row=1)
        for group in layout.groups
        for part in group.parts
        for i in part
    )
    return 1 - used / _count_bytes(layout, num_tokens)
