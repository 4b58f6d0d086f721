"""What strategies, the scheduler and the engine tell each other about caches: plain data. Knows no cache."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, NamedTuple

import torch

from kernels.states import StateSpec
from kernels.types import LayerSpec

Miss = Literal["cold", "short", "evicted", "window", "busy", "salt", "bypass", "checkpoint"]
"""Why the first prompt token that open() did not find in the cache was not found.

cold: never cached, or evicted too long ago to be remembered, or cached by another tenant, which is not disclosed;
short: the remaining tokens do not fill a block; evicted: it was evicted to make room; window: the strategy drops old
tokens, so no later sequence can reuse its memory; busy: a running sequence holds it, and the strategy cannot share it;
salt: cached under another salt of the same tenant; bypass: the request limited the lookup (max_cached); checkpoint: the
keys are cached, but there is no checkpoint of the model's recurrent states.
"""


class Salt(NamedTuple):
    """Keeps sequences from sharing cached tokens: only sequences with equal salts share them."""

    tenant: str = ""  # identifies an API key; empty for requests without a key
    cache_salt: str = ""  # the request's `cache_salt`, which separates requests of one tenant
    shadow: bool = False  # whether the sequence only repeats a request to compare instances; it shares with such alone

    def differs_only_in_cache_salt(self, other: Salt) -> bool:
        """Return whether two salts, which differ, would be equal without a `cache_salt`."""
        return self.tenant == other.tenant and self.shadow == other.shadow


NO_SALT = Salt()


class SaltScope(NamedTuple):
    """A set of salts: those with this tenant and this cache_salt; None stands for every value."""

    tenant: str | None = None
    cache_salt: str | None = None

    def includes(self, salt: Salt) -> bool:
        """Return whether the scope includes a salt."""
        return self.tenant in (None, salt.tenant) and self.cache_salt in (None, salt.cache_salt)


EVERYTHING = SaltScope()


def count_reusable_tokens(tokens: Sequence[int], max_cached: int | None = None) -> int:
    """Return how many leading tokens open() may reuse: at most max_cached, never the last, whose logits are needed."""
    limit = len(tokens) - 1
    return max(0, limit if max_cached is None else min(limit, max_cached))


class Text(NamedTuple):
    """A text for which a sequence is opened: its tokens so far, and how they are cached."""

    ids: Sequence[int]
    salt: Salt = NO_SALT  # only tokens of sequences with an equal salt are found
    max_cached: int | None = None  # most tokens that may be found; None: any number
    priority: int = 0  # tokens of higher priority stay longer in the cache after close()
    # Seconds after close() from which they are evicted before all others; None: the option `ttl`
    ttl: float | None = None

    @property
    def num_reusable(self) -> int:
        """How many leading tokens may be found: never the last, whose logits are needed."""
        return count_reusable_tokens(self.ids, self.max_cached)


class Contract(NamedTuple):
    """The properties that a strategy instance guarantees, given its options and the model's layers."""

    exact: bool = True  # every key that the model's own attention uses is kept as it was computed
    rewind: int | None = None  # most tokens that truncate() may drop between two commits; None: any number
    replayable: bool = True  # a sequence that is closed and computed again from its first token gets the same state
    # The state and, with batch-invariant kernels, the attention do not depend on how tokens were split into rows
    chunk_invariant: bool = True
    # open() finds cached tokens in multiples of so many; None: it never finds any, so that checkpoints of a model's
    # recurrent states would be of no use
    granularity: int | None = None
    # A text may become longer than max_seq_len, though its prompt may not, as positions are counted within the cache.
    unbounded: bool = False


KEEPS_EVERYTHING = Contract()


class CacheUsage(NamedTuple):
    """The memory of an instance by use, in bytes; reserved = used + idle + wasted."""

    seats: int  # number of open sequences
    tokens: int  # number of committed tokens in open sequences; shared tokens count once
    reserved: int  # bytes of the blocks that the instance holds
    used: int  # bytes that hold tokens of open sequences or of pins
    idle: int  # bytes that hold tokens of closed sequences, kept for reuse
    wasted: int  # bytes of held blocks that hold no tokens
    limit: int  # maximum of `reserved`
    # bytes that open sequences hold outside of the regions, such as a scorer's memory of keys: in none of the others
    outside: int = 0


class Blocks(NamedTuple):
    """The numbers of an instance's blocks by state: in use, idle or pinned. A pinned block may also be in use."""

    in_use: int = 0  # referenced by open sequences
    shared: int = 0  # blocks in use that several sequences reference
    pending: int = 0  # blocks in use that can be found by hash, but are not computed yet
    pinned: int = 0
    idle: int = 0


class BlockState(IntEnum):
    """What a block of a region is used for; of several states that apply, the last in this list."""

    FREE = 0
    IDLE = 1  # kept for reuse, and freed when memory is needed
    IN_USE = 2  # of one sequence
    SHARED = 3  # of several sequences
    PENDING = 4  # one sequence computes it, and others may wait for it
    PINNED = 5


class BlockInfo(NamedTuple):
    """What a cache knows about one of its blocks."""

    first_token: int | None  # number of tokens before those of the block in its sequences; None: unknown
    num_tokens: int | None  # number of computed tokens in the block; None: unknown
    references: int  # number of sequences that use the block
    num_pins: int  # number of pins that keep it in memory
    age: float | None = None  # seconds since the block was allocated, or got its hash; None: unknown
    idle: float | None = None  # seconds since the block was last used; None: it is in use or pinned
    # Id of the cached prefix that ends with the block, as in `CachedPrefix`; None: it has none
    prefix: str | None = None


class BlockEvents(NamedTuple):
    """The events of an instance's blocks since the last collect_block_events(). Times are in seconds, as in vLLM."""

    copies: int = 0  # number of shared blocks that were copied before a write (copy-on-write)
    lifetimes: Sequence[float] = ()  # seconds from allocation to eviction, of each evicted block
    idle_times: Sequence[float] = ()  # seconds from the last use to eviction, of each evicted block
    reuse_gaps: Sequence[float] = ()  # seconds from the last use to the reuse, of each idle block that was reused


@dataclass(frozen=True)
class Geometry:
    """The model's layers and the maximum sizes of a batch: all that is known before memory is allocated."""

    layers: Sequence[LayerSpec]  # those with attention
    kv_dtype: torch.dtype
    max_seats: int
    max_seq_len: int
    max_num_batched_tokens: int
    states: Sequence[StateSpec] = ()  # layers with recurrent states, which are kept beside any strategy
    end_ids: Collection[int] = ()  # tokens that end a text, or a message of a conversation


class Sizes(NamedTuple):
    """The memory that a sequence takes, by region, in the order in which the strategy makes its regions."""

    block_bytes: Sequence[int] = ()  # bytes of a block; empty: the strategy has no regions
    # Of a sequence of so many tokens: the most blocks that it holds at one time, by region
    count_blocks: Callable[[int], Sequence[int]] = lambda num_tokens: ()

    def count_bytes(self, num_tokens: int, round_block: Callable[[int], int]) -> int:
        """Return the most bytes that a sequence holds at one time; a block takes round_block(bytes) bytes."""
        counts = self.count_blocks(num_tokens)
        return sum(count * round_block(size) for count, size in zip(counts, self.block_bytes, strict=True))


class BlockNaming(NamedTuple):
    """What is needed to compute the names of an instance's blocks from tokens: config.block_hashes.BlockNamer."""

    block_size: int  # number of tokens in a block
    root: bytes  # the hash before a sequence's first block


class PinError(Exception):
    """Raised if a prefix cannot be pinned; the message says why."""


class Pin(NamedTuple):
    """A prefix that stays in memory until the time `expires`, even while no sequence uses it."""

    id: str
    num_tokens: int
    num_bytes: int
    salt: Salt
    expires: float  # time at which the pin expires, in seconds on the monotonic clock


class CachedPrefix(NamedTuple):
    """A node in the tree of an instance's cached prefixes: tokens that follow those of the node's parent.

    A node has as many tokens as possible. It ends where sequences go on differently, where a pin ends, and where the
    number of references or hits changes. A node without a parent begins a sequence, or, if `first_token` is not 0, the
    tokens before it are not cached: then it cannot be reused until they are computed again.
    """

    id: str  # identifies all tokens up to the end of the node, and the salt; no other instance has the same id
    parent: str | None  # id of the node before it
    salt: Salt
    first_token: int  # number of tokens before the node
    num_tokens: int
    num_bytes: int
    references: int  # number of sequences that use it
    hits: int  # number of times that open() found all tokens up to its end; at least those of each node after it
    age: float  # seconds since its last tokens could first be found
    idle: float | None  # seconds since its last tokens were used; None: they are in use or pinned
    pins: Sequence[str] = ()  # ids of the pins that end with it
