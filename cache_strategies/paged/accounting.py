"""Counts the blocks and the memory of a paged cache by use. Changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from operator import mul

from cache_strategies.paged.block_pool import BlockPool
from cache_strategies.paged.state import PagedState
from cache_strategies.types import Blocks, CacheUsage


class Accounting:
    """Counts blocks of several groups of layers, whose tokens take different numbers of bytes."""

    def __init__(self, pool: BlockPool, block_size: int, bytes_per_token: Sequence[float]) -> None:
        """Make an object that counts; `bytes_per_token` has the bytes of a token in the layers of each group."""
        self._pool = pool
        self._block_size = block_size
        self._bytes_per_token = bytes_per_token

    def count_usage(
        self, sequences: Iterable[PagedState], pinned: Iterable[int], reserved: int, limit: int
    ) -> CacheUsage:
        """Return the memory by use; `reserved` are the bytes of all blocks. Idle blocks count in full, with padding."""
        num_groups, num_sequences = len(self._bytes_per_token), 0
        full: list[set[int]] = [set() for _ in range(num_groups)]  # by group: blocks without a free slot
        partial: list[dict[int, int]] = [{} for _ in range(num_groups)]  # by group: tokens in others, by block
        for sequence in sequences:
            num_sequences += 1
            num_full, rest = divmod(sequence.length, self._block_size)
            full[0].update(sequence.blocks[:num_full])
            for group, held in enumerate(sequence.windowed, 1):
                full[group].update(block for i, block in held.items() if i < num_full)
            last = sequence.blocks[num_full] if num_full < len(sequence.blocks) else None
            for group, block in enumerate((last, *(held.get(num_full) for held in sequence.windowed))):
                if block is not None:
                    partial[group][block] = max(rest, partial[group].get(block, 0))
        tokens = self._count_tokens(full, partial)[0]
        for block in pinned:
            full[self._pool.group(block)].add(block)
        used, idle = self._count_bytes(self._count_tokens(full, partial)), self._pool.idle_bytes
        return CacheUsage(num_sequences, tokens, reserved, used, idle, reserved - used - idle, limit)

    def _count_tokens(self, full: Sequence[set[int]], partial: Sequence[Mapping[int, int]]) -> Sequence[int]:
        """Return the number of tokens in blocks, by group; a block may be full for one sequence only."""
        return [
            len(blocks) * self._block_size + sum(n for block, n in others.items() if block not in blocks)
            for blocks, others in zip(full, partial, strict=True)
        ]

    def _count_bytes(self, tokens: Sequence[int]) -> int:
        """Return the bytes of numbers of tokens, given by group."""
        return int(sum(map(mul, tokens, self._bytes_per_token)))

    def count_blocks(self, sequences: Iterable[PagedState], pinned: Collection[int], pending: int) -> Blocks:
        """Return the numbers of blocks by state, without those that take no memory."""
        references = Counter[int]()
        for sequence in sequences:
            references.update(sequence.blocks)
            for held in sequence.windowed:
                references.update(held.values())
        counts = [n for block, n in references.items() if block >= 0]  # others take no memory
        return Blocks(
            in_use=len(counts),
            shared=sum(1 for n in counts if n > 1),
            pending=pending,
            pinned=len(pinned),
            idle=self._pool.num_idle,
        )


def iter_blocks(sequence: PagedState) -> Iterator[tuple[int, int]]:
    """Yield (position, block) of all blocks that a sequence holds, in all groups of layers."""
    yield from enumerate(sequence.blocks)
    for held in sequence.windowed:
        yield from held.items()
