"""Where blocks of the KV memory lie: what a space has to do, and which of the two kinds of space a device has.

address_ranges.py has the one for CPUs under Linux, one_tensor.py that for all others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, Protocol

import torch

from cache_strategies.address_ranges import AddressRanges, can_reserve_addresses
from cache_strategies.one_tensor import OneTensor
from kernels.store import PagedMemory


class Placement(PagedMemory, Protocol):
    """Where the blocks of one region lie. A block has one or more pages; its number is that of the first."""

    @property
    def num_used(self) -> int:
        """Return the number of blocks in use."""
        ...

    @property
    def extent(self) -> int:
        """Return the number of pages up to the last one that was ever used."""
        ...

    def take(self, count: int) -> list[int] | None:
        """Return the numbers of unused blocks, which are in use now; None if they do not fit between other blocks.

        Raises MemoryError if the operating system has not enough memory.
        """
        ...

    def give(self, blocks: Iterable[int]) -> None:
        """Take back blocks. Raises ValueError for one that is not in use."""
        ...

    def list_used(self) -> list[int]:
        """Return the numbers of all blocks in use, ascending."""
        ...

    def close(self) -> None:
        """Give back all memory. No block is used any more."""
        ...


class PinnedBlocks(NamedTuple):
    """Pinned blocks of one region, whose memory has pages of its own or shares them with other regions."""

    blocks: Collection[int]  # numbers of their first pages
    num_pages: int  # of a block


class Space(Protocol):
    """The memory in which regions lie."""

    @property
    def device(self) -> torch.device: ...

    @property
    def warm_bytes(self) -> int:
        """Return the bytes that the operating system has provided, whether or not they are in use."""
        ...

    def round_block(self, block_bytes: int) -> int:
        """Return the bytes that a block of `block_bytes` bytes takes."""
        ...

    def place(self, block_bytes: int) -> Placement: ...

    def warm_up(self, num_bytes: int) -> None:
        """Take memory from the operating system until there are so many bytes. Raises MemoryError if it has less."""
        ...

    def can_grow(self) -> bool:
        """Return whether the operating system has memory for some more blocks; called after it had too little."""
        ...

    def count_usable_bytes(self, block_bytes: int, pinned: Sequence[PinnedBlocks]) -> int:
        """Return how many bytes blocks of a size could fill if no block but the pinned ones was in use."""
        ...


def find_space(device: torch.device | str) -> type[AddressRanges] | type[OneTensor]:
    """Return the type of space for a device.

    On Linux, the memory of a CPU is provided by the system as blocks are used. Elsewhere, and where the system refuses
    to reserve addresses, all of it is allocated at once.
    """
    return AddressRanges if torch.device(device).type == "cpu" and can_reserve_addresses() else OneTensor
