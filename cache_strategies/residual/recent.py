"""The first and the latest tokens of each open sequence as they were computed: a block with a ring buffer for each.

    slots   | sinks | ring: residual_length + max_row - 1         |
    token p   p < sinks: p;  otherwise: sinks + (p - sinks) % ring

Tokens that a sequence has not computed itself, as they were found in the cache, are copied from the quantized blocks,
and so are those that the ring has overwritten and that truncate() has made the latest again. Sinks may come from
shared_sinks.py, as they were computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from cache_strategies.base import CacheSetup, Rows
from cache_strategies.block_table import BlockTable
from cache_strategies.paged.cache import PagedSequence
from cache_strategies.residual.options import ResidualOptions
from cache_strategies.sliding_window import INT32_MAX
from cache_strategies.types import Geometry
from kernels.kv_formats import as_formats
from kernels.ops import KVLocation
from kernels.store import KVStore, compute_block_bytes
from kernels.types import Slots


class RingSequence(PagedSequence):
    """A paged sequence with a block for its first and latest tokens."""

    ring: int | None = None  # number of its block; None: it has none yet
    is_stale = True  # whether the block may lack tokens that the next row reads, as they were found or overwritten
    # What the block has as it was computed: the tokens from here on, and the sinks from there on
    computed_from = computed_sinks_from = INT32_MAX

    def truncate(self, length: int) -> None:
        super().truncate(length)
        self.is_stale = True


class RecentTokens:
    """The blocks of all sequences, and the addresses of a step's rows in them."""

    def __init__(self, setup: CacheSetup, options: ResidualOptions) -> None:
        """Make the region; `options` say how large a block is."""
        geometry = setup.geometry
        self.sinks, self.length = options.sinks, options.residual_length
        self.max_row, self.ring = options.compute_max_row(geometry), options.compute_ring_size(geometry)
        self.slots = self.sinks + self.ring  # of a block
        self._ops, self._layers = setup.ops, geometry.layers
        self.region = setup.memory.region(compute_ring_bytes(options, geometry), "latest keys and values as computed")
        self.store = KVStore(self.region, geometry.layers, self.slots, geometry.kv_dtype)
        setup.ops.prepare(geometry.layers, geometry.kv_dtype, as_formats(geometry.kv_dtype))
        self._table = BlockTable(geometry.max_seats, 1, self.slots, setup.memory.device, [self.store.num_blocks])
        self.at: Slots  # of the latest step

    # ---------------------------------------------------------------- blocks
    def allocate(self, sequence: RingSequence) -> bool:
        """Allocate the block of a sequence; return False if there is not enough memory."""
        found = self.region.allocate()
        if found is None:
            return False
        (sequence.ring,) = found
        self._table.write_blocks(sequence.index, 0, found)
        return True

    def release(self, sequence: RingSequence) -> None:
        """Free the block of a sequence, if it has one."""
        if sequence.ring is not None:
            self.region.release([sequence.ring])
            sequence.ring = None

    def fork(self, parent: RingSequence, child: RingSequence) -> bool:
        """Give a fork a copy of its parent's block; return False if there is not enough memory."""
        if not self.allocate(child):
            return False
        assert parent.ring is not None
        assert child.ring is not None
        self._ops.copy_blocks(self.store, [parent.ring], [child.ring])
        child.is_stale, child.computed_from = parent.is_stale, parent.computed_from
        child.computed_sinks_from = parent.computed_sinks_from
        return True

    def count_used_bytes(self, sequences: Iterable[RingSequence]) -> int:
        """Return the bytes of the slots that hold tokens of sequences."""
        return sum(min(each.length, self.slots) for each in sequences) * self.store.block_bytes // self.slots

    # ---------------------------------------------------------------- rows
    def find_stop(self, length: int) -> int:
        """Return where the next row of a sequence must end.

        A row is no longer than the ring allows, and either none of its queries reads quantized keys or each does.
        """
        stop, first = length + self.max_row, self.sinks + self.length
        return min(stop, first) if length < first else stop

    def locate(
        self, rows: Rows[Any], whole: Sequence[KVLocation], restore_sinks: Callable[[RingSequence], bool]
    ) -> None:
        """Find the addresses of rows, and copy tokens that their blocks lack from the quantized ones, `whole` by layer.

        `restore_sinks` copies the sinks of a sequence as they were computed, and returns False if it cannot. Nothing
        more is copied if it is called again with the same rows.
        """
        self.at = self._table.make_slots(rows, sinks=self.sinks, ring=self.ring)
        for row, sequence in enumerate(rows.sequences):
            assert isinstance(sequence, RingSequence)
            if sequence.is_stale:
                self._fill(sequence, row, whole, restore_sinks)
            # The row overwrites what is before
            sequence.computed_from = max(sequence.computed_from, rows.end(row) - self.ring)

    def _fill(
        self,
        sequence: RingSequence,
        row: int,
        whole: Sequence[KVLocation],
        restore_sinks: Callable[[RingSequence], bool],
    ) -> None:
        """Copy the tokens that the next query reads in full, and that the sequence has not computed or has lost."""
        length = sequence.length
        sequence.computed_from = min(sequence.computed_from, length)
        sequence.computed_sinks_from = min(sequence.computed_sinks_from, self.sinks, length)
        if sequence.computed_sinks_from and restore_sinks(sequence):
            sequence.computed_sinks_from = 0
        self._copy(sequence, row, range(sequence.computed_sinks_from), whole)
        self._copy(sequence, row, range(max(self.sinks, length - self.length + 1), sequence.computed_from), whole)
        sequence.is_stale = False

    def _copy(self, sequence: RingSequence, row: int, positions: range, whole: Sequence[KVLocation]) -> None:
        """Copy tokens of a row's sequence from its quantized blocks to its own block."""
        for layer, (spec, location) in enumerate(zip(self._layers, whole, strict=True)):
            # A layer with a window has not kept the tokens before that of the next query
            first = positions.start if spec.window is None else max(positions.start, sequence.length - spec.window + 1)
            if first < positions.stop:
                indices = torch.arange(first, positions.stop, device=self.store.device)
                k, v = self._ops.gather(location.store, layer, location.at, row, indices)
                k, v = (each.to(self.store.k(layer).dtype) for each in (k, v))
                self._ops.write_kv(self.store, layer, k, v, self._address(sequence.index, first, len(indices)))

    def _address(self, index: int, start: int, count: int) -> Slots:
        """Return the addresses of `count` tokens of one sequence, from the position `start` on."""
        table_row, q_start, starts = (
            torch.tensor(numbers, dtype=torch.int32, device=self.store.device)
            for numbers in ([index], [0, count], [start])
        )
        return Slots(
            self._table.tables[0],
            self.slots,
            table_row,
            q_start,
            starts,
            num_decode=int(count == 1),
            max_q=count,
            max_kv=start + count,
            sinks=self.sinks,
            ring=self.ring,
        )

    def gather(self, layer: int, row: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a located row's tokens, which must be in its block."""
        return self._ops.gather(self.store, layer, self.at, row, positions)

    def check_integrity(self, sequences: Iterable[RingSequence]) -> None:
        """Assert that each open sequence has a block of its own, and that no other blocks are allocated."""
        held = [each.ring for each in sequences]
        assert None not in held
        assert self.region.num_held == len(held) == len(set(held))


def compute_ring_bytes(options: ResidualOptions, geometry: Geometry) -> int:
    """Return the bytes of a sequence's block."""
    slots = options.sinks + options.compute_ring_size(geometry)
    return compute_block_bytes(geometry.layers, slots, geometry.kv_dtype)
