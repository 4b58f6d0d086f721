"""The optional features of a strategy: protocols that a subclass of `KVCache` implements by having their methods.

The server and the plug-in kit see by isinstance() whether an instance has a feature. All methods are called between
steps.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from cache_strategies.base import Rows
from cache_strategies.block_hashes import BlockHash
from cache_strategies.memory import Region
from cache_strategies.types import (
    EVERYTHING,
    BlockEvents,
    BlockInfo,
    BlockNaming,
    Blocks,
    CachedPrefix,
    CacheUsage,
    Pin,
    Salt,
    SaltScope,
)


@runtime_checkable
class Reporting(Protocol):
    """A cache that says how it uses its memory; for others all held bytes that are not idle count as used."""

    def usage(self) -> CacheUsage:
        """Return the memory by use, from the bookkeeping on the host."""

    def blocks(self) -> Blocks:
        """Return the numbers of blocks by state."""


@runtime_checkable
class Budgeted(Protocol):
    """A cache that keeps a budget of tokens."""

    def budget(self, length: int) -> int | None:
        """Return how many tokens of a text of this length are kept at most; None: there is no budget."""


@runtime_checkable
class Gathering(Protocol):
    """A cache whose keys can be read, by tests, the plug-in kit and the adapter for transformers."""

    def gather(self, layer: int, rows: Rows[Any], row: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return (K [S,H,D], V [S,H,Dv], their positions) that the last token of a located row attends to.

        Positions are [S] and ascend, or [S, H] if heads keep different tokens; -1 fills up heads that keep fewer. They
        are those in the text: they say which tokens these are. A strategy that counts positions within the cache
        returns keys as it has rotated them: the last key at the token's own position, the one before it one lower, ...
        """


@runtime_checkable
class SelfChecking(Protocol):
    """A cache that can check its bookkeeping."""

    def check_integrity(self) -> None:
        """Assert that the internal bookkeeping is consistent. Called between steps (setting `check_integrity`)."""


@runtime_checkable
class BlockCounting(Protocol):
    """A cache that counts what happens to its blocks."""

    def collect_block_events(self) -> BlockEvents | None:
        """Return the block events since the last call, and clear them; None if there were none."""


@runtime_checkable
class Aging(Protocol):
    """A cache that evicts what was not used for the longest time, so that others can age beside its blocks."""

    @property
    def evicted_used_at(self) -> float | None:
        """When the block that was evicted last had been used last, on the setup's clock; None: none was evicted yet."""
        ...


@runtime_checkable
class Clearing(Protocol):
    """A cache whose idle memory can be freed by an operator."""

    def clear(self, scope: SaltScope = EVERYTHING) -> int:
        """Remove the pins of the salts in a scope, and free their idle memory; return the number of bytes freed.

        Memory in use stays until its sequences end, but later sequences cannot reuse it.
        """


@runtime_checkable
class Pinning(Protocol):
    """A cache in which prefixes can be pinned."""

    def pin(self, tokens: Sequence[int], *, salt: Salt, ttl: float) -> Pin:
        """Pin the longest cached prefix of `tokens` for `ttl` seconds.

        Raises PinError if no block of it is cached, or if the longest sequence would no longer fit into the memory.
        """

    def unpin(self, pin_id: str) -> bool:
        """Remove a pin; return whether there was a pin with that id."""

    def pins(self) -> Sequence[Pin]: ...

    def pinned_blocks(self) -> Mapping[Region, Collection[int]]:
        """Return the pinned blocks by region, which cannot be evicted."""


@runtime_checkable
class Inspectable(Protocol):
    """A cache that can list its sequences and blocks."""

    def inspect(self) -> dict[str, Any]:
        """Return the open sequences, and the numbers of blocks by state, as JSON."""


@runtime_checkable
class BlockMarking(Protocol):
    """A cache that knows more about its blocks than that they are in use."""

    def mark_blocks(self, region: Region, states: Tensor) -> None:
        """Write a `BlockState` for each block that the cache holds in a region into `states` [blocks] uint8."""


@runtime_checkable
class BlockDescribing(Protocol):
    """A cache that knows what is in a block."""

    def describe_block(self, region: Region, block: int) -> BlockInfo | None:
        """Return what is known about a block of a region; None if the cache does not hold it."""


@runtime_checkable
class PrefixListing(Protocol):
    """A cache that can list the prefixes that later sequences would find, as a tree."""

    def list_prefixes(self, limit: int) -> tuple[Sequence[CachedPrefix], int]:
        """Return up to `limit` nodes of the tree, parents before their children, and the number of nodes left out.

        Nodes with pins, in use or with hits come before others, and these by their latest use. The parent of a node
        that is returned is returned, too.
        """

    def pin_prefix(self, prefix_id: str, *, ttl: float) -> Pin:
        """Pin all tokens up to the end of a cached prefix, as pin() does. Raises PinError, also for an unknown id."""

    def drop_prefix(self, prefix_id: str) -> int | None:
        """Drop a node and all nodes after it from the cache, and the pins that end with them.

        Return the number of bytes freed, or None for an unknown id. Memory in use stays until its sequences end, but
        later sequences cannot reuse it, nor what these sequences compute from now on.
        """


@runtime_checkable
class BlockNames(Protocol):
    """A cache that can name the blocks that later sequences would find, so that requests are sent to where they are.

    The name of a block is that of config/block_hashes.py, with the salt of the sequence that left it.
    """

    def block_naming(self) -> BlockNaming | None:
        """Return what the names are made of; None if the instance keeps no blocks for later sequences."""

    def list_block_names(self) -> Collection[int]:
        """Return the names of all blocks that can be found, each in 32 bits; their order means nothing."""


@runtime_checkable
class BlockData(Protocol):
    """A cache whose blocks can be read and written as bytes, so that they outlive it: on a disk, or in another process.

    Two caches understand each other's bytes if they have the same options, model and dtype; so do their hashes.
    """

    def list_data(self) -> Sequence[BlockHash]:
        """Return the hashes of all blocks that can be read now, of every group of layers."""

    def read_data(self, block_hash: BlockHash) -> Tensor | None:
        """Return a copy of what is in a block, [bytes] uint8; None if there is no computed block with this hash."""

    def write_data(self, block_hash: BlockHash, data: Tensor) -> bool:
        """Make a block with this hash and these bytes, idle until a sequence finds it.

        Return False if there is one already, or if there is not enough memory. Raises ValueError for a hash or for data
        that no block of this cache can have. The caller must know that the data are those of the hash.
        """


def check_data(data: Tensor, size: int) -> None:
    """Raise ValueError unless data for `BlockData.write_data` are so many bytes."""
    if data.dtype is not torch.uint8 or data.shape != (size,):
        raise ValueError(f"there should be {size} bytes of data [{size}] uint8, not {list(data.shape)} {data.dtype}")
