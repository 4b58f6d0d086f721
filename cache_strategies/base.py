"""The interface of a KV-cache strategy, as the scheduler, the engine and the model use it. Implements nothing.

One `KVCache` serves ALL sequences of one instance. A request opens a seat in it; the tokens of a seat that enter in a
step form a row; the rows of an instance become a plan, and the model calls the plan's `attend` once per layer. Within
a step only `commit` changes the cache's state, so that a failed step can be repeated. open, grow, crop, fork, discard
and close change it between steps.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor
from typing_extensions import TypeVar  # with `default`, which typing.TypeVar has from Python 3.13 on

from cache_strategies.arena import Arena
from kernels.ops import KVLocation, Ops
from kernels.store import KVStore
from kernels.types import LayerSpec

Miss = Literal["cold", "short", "evicted", "window", "busy", "salt", "bypass"]
"""Why the first prompt token that open() did not find in the cache was not found.

cold: never cached, or evicted too long ago to be remembered, or cached by another tenant, which is not disclosed;
short: the remaining tokens do not fill a block; evicted: it was evicted to make room; window: the strategy drops old
tokens, so no later sequence can reuse its memory; busy: a running sequence holds it, and the strategy cannot share it;
salt: cached under another salt of the same tenant; bypass: the request limited the lookup (max_cached).
"""


class Salt(NamedTuple):
    """Keeps sequences from sharing cached tokens: only sequences with equal salts share them."""

    tenant: str = ""  # identifies an API key; empty for requests without a key
    cache_salt: str = ""  # the request's `cache_salt`, which separates requests of one tenant


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


class Seat:
    """One sequence's state in one cache. Outside the strategy only length, cached and miss are read."""

    __slots__ = ("cached", "length", "miss")

    def __init__(self, length: int = 0) -> None:
        self.length = length  # number of committed tokens: the next row starts at this position
        self.cached = length  # number of tokens that open() found cached; may shrink until the seat's first row has run
        self.miss: Miss | None = "cold"  # why open() did not find more cached tokens; None: it found all reusable ones


SeatT = TypeVar("SeatT", bound=Seat, default=Seat)


class Row(NamedTuple, Generic[SeatT]):
    """The tokens of one seat that enter in a step: positions [seat.length, seat.length + num_tokens)."""

    seat: SeatT
    num_tokens: int


class Contract(NamedTuple):
    """The properties that a strategy instance guarantees, given its options and the model's layers."""

    exact: bool  # every key that the model's own attention uses is kept as it was computed
    shareable: bool  # sequences with a common prefix can share memory
    forkable: bool  # fork() can duplicate a seat if there is memory
    rewind: int | None  # maximum number of committed tokens that crop() may drop; None: any number
    replayable: bool  # a seat that is closed and computed again from its first token gets the same state
    chunk_invariant: bool  # a seat's state does not depend on how its tokens were split into rows
    max_row: int | None  # maximum number of tokens in a row, to which the scheduler splits prompts; None: no maximum
    reusable: bool = False  # a sequence can reuse the tokens of a closed one with the same prefix


KEEPS_EVERYTHING = Contract(
    exact=True,
    shareable=False,
    forkable=True,
    rewind=None,
    replayable=True,
    chunk_invariant=True,
    max_row=None,
)


class CacheUsage(NamedTuple):
    """The memory of an instance by use, in bytes; reserved = used + idle + wasted."""

    seats: int  # number of open seats
    tokens: int  # number of committed tokens in open seats; shared tokens count once
    reserved: int  # bytes of arena pages that the instance holds
    used: int  # bytes that hold tokens of open seats or of pins
    idle: int  # bytes that hold tokens of closed seats, kept for reuse
    wasted: int  # bytes of held pages that hold no tokens
    limit: int  # maximum of `reserved`


class Blocks(NamedTuple):
    """The numbers of an instance's blocks by state: in use, idle or pinned. A pinned block may also be in use."""

    in_use: int = 0  # referenced by open seats
    shared: int = 0  # blocks in use that several seats reference
    pending: int = 0  # blocks in use that can be found by hash, but are not computed yet
    pinned: int = 0
    idle: int = 0


class BlockEvents(NamedTuple):
    """The events of an instance's blocks since the last collect_block_events(). Times are in seconds, as in vLLM."""

    copies: int = 0  # number of shared blocks that were copied before a write (copy-on-write)
    lifetimes: Sequence[float] = ()  # seconds from allocation to eviction, of each evicted block
    idle_times: Sequence[float] = ()  # seconds from the last use to eviction, of each evicted block
    reuse_gaps: Sequence[float] = ()  # seconds from the last use to the reuse, of each idle block that was reused


@dataclass(frozen=True)
class Geometry:
    """The model's layers and the maximum sizes of a batch: all that is known before memory is allocated."""

    layers: Sequence[LayerSpec]
    kv_dtype: torch.dtype
    max_seats: int
    max_seq_len: int
    max_num_batched_tokens: int


@dataclass(frozen=True)
class CacheSetup:
    """The arguments from which a strategy instance is built, in addition to its options."""

    name: str  # name of the instance, also as an owner of the arena's pages
    geometry: Geometry
    arena: Arena
    ops: Ops
    model: str = ""  # identifies the model in block hashes, so that no keys of another model are reused
    clock: Callable[[], float] = time.monotonic


class Options(BaseModel):
    """Base class of a strategy kind's options, as given in the settings. Unknown options are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class SeatShape(NamedTuple):
    """The arena memory that one sequence needs: the size and the number of its blocks."""

    block_bytes: int  # bytes of a block, which is allocated as consecutive pages
    blocks: int  # maximum number of blocks of a sequence; 0: the strategy does not use the arena


class Plan(ABC, Generic[SeatT]):
    """One instance's part of a step. Valid until plan() of its cache is called again."""

    rows: Sequence[Row[SeatT]]  # the rows that were passed to plan()

    @property
    def kv_location(self) -> KVLocation | None:
        """The store and slots of the rows, for a fused kernel in place of attend(); None: only attend() may be used."""
        return None

    @abstractmethod
    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Write k and v, then compute attention: q [N,Hq,D], k [N,H,D], v [N,H,Dv] -> out [N,Hq,Dv].

        N is the number of tokens of all rows: first those of rows[0], then those of rows[1], and so on. All keys and
        values are written before any are read; a second call gives the same result. q, k and v may be strided (only
        the last dimension is contiguous). `out` is overwritten.
        """

    @abstractmethod
    def gather_kv(self, layer_idx: int, row: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return (K [S,H,D], V [S,H,Dv], their positions [S], ascending) that the last token of a row attends to."""


class KVCache(ABC, Generic[SeatT]):
    """Base class of all strategies: keeps the keys and values of one instance's sequences. SeatT is its type of seat.

    The scheduler calls the methods from seat_shape() to pinned_pages(): they handle token ids and seats on the host and
    start no device work. The engine calls the methods from poll() on, in its only device thread. Before a
    seat is in a plan, ready() and grow() must have returned True for it.
    """

    options_type: ClassVar[type[Options]] = Options
    contract: Contract  # set by __init__
    store: KVStore | None = None  # the keys and values in the arena; None if the strategy stores them in another way

    def __init__(self, setup: CacheSetup, options: Options) -> None:
        """Register as an owner in the arena. No page may be allocated yet: the instance's share is set later."""
        self.setup = setup
        self.options = options
        setup.arena.register_owner(setup.name, self)

    @property
    def name(self) -> str:
        return self.setup.name

    @property
    def limit_bytes(self) -> int:
        """The most memory, in bytes, that the instance could hold if all others shrank to their floors."""
        return self.setup.arena.capacity(self.name) * self.setup.arena.page_bytes

    @property
    def at_limit(self) -> bool:
        """Whether the instance can hold more memory only after its own sequences have freed some."""
        return self.setup.arena.at_limit(self.name)

    @property
    def draining(self) -> bool:
        """Whether the instance may exceed its lowered limit until its running requests end; no new ones start then."""
        return self.setup.arena.draining(self.name)

    # ---------------------------------------------------------------- scheduler
    @classmethod
    @abstractmethod
    def seat_shape(cls, options: Any, geometry: Geometry) -> SeatShape:
        """Return the arena memory that one sequence needs; called before the arena is made, to choose its pages."""

    @abstractmethod
    def bytes_for(self, num_tokens: int) -> int:
        """Return the peak bytes of a sequence of `num_tokens` tokens; a request for more than the limit is rejected."""

    def match(self, tokens: Sequence[int], *, salt: Salt = NO_SALT, max_cached: int | None = None) -> int:
        """Return how many leading tokens open() would find cached now, without changing anything."""
        return 0

    @abstractmethod
    def open(self, tokens: Sequence[int], *, salt: Salt = NO_SALT, max_cached: int | None = None) -> SeatT | None:
        """Return a seat for a sequence that begins with `tokens`; None if there is not enough memory now.

        The seat's first `length` tokens (at most max_cached, and never all of `tokens`) were found in the cache and
        need not be computed. Only tokens of sequences with an equal `salt` are found.
        """

    def retain(self, seat: SeatT, *, priority: int, ttl: float | None) -> None:
        """Set how long the seat's tokens stay cached after close().

        Tokens of higher priority are evicted later. Tokens that have been idle for `ttl` seconds (None: the instance's
        option `ttl`) are evicted before all others.
        """

    def ready(self, seat: SeatT) -> bool:
        """Return whether the seat can be scheduled now; False while its prefix loads or another seat computes it."""
        return True

    @abstractmethod
    def grow(self, seat: SeatT, num_tokens: int) -> bool:
        """Allocate memory for `num_tokens` tokens after seat.length; return False if there is not enough. Idempotent.

        After False the scheduler preempts a sequence and calls grow() again.
        """

    @abstractmethod
    def crop(self, seat: SeatT, length: int) -> None:
        """Drop the committed tokens from position `length` on. They may be at most contract.rewind tokens.

        During prefill, seat.length may become lower than `length`, as a strategy may drop whole blocks.
        """

    def fork(self, seat: SeatT) -> SeatT | None:
        """Return a second seat with the same tokens; None if the cache cannot do that now: then call open() instead."""
        return None

    def discard(self, seat: SeatT) -> None:
        """Keep other sequences from reusing this seat's NaN or infinite keys and values; called before close()."""

    @abstractmethod
    def close(self, seat: SeatT) -> None:
        """Free the seat's memory or keep it idle. If other seats wait for tokens that it computes, one takes over."""

    def idle_pages(self) -> int:
        """Return the number of pages that reclaim() could free: held, but not used by a seat or a pin."""
        return 0

    def reclaim(self, pages: int) -> int:
        """Free idle pages, the next to be evicted first, until at least `pages` are freed; return the number freed."""
        return 0

    def pinned_pages(self) -> Collection[int]:
        """Return the numbers of the pages with pinned blocks, which cannot be reclaimed."""
        return ()

    # ---------------------------------------------------------------- engine
    def poll(self) -> None:
        """Prepare for the next step, such as by dropping expired pins. Called before each step; must not block."""

    @abstractmethod
    def plan(self, rows: Sequence[Row[SeatT]]) -> Plan[SeatT]:
        """Return the plan of a step for these rows, of which decode rows (one token) come first.

        May be called again without a commit() in between: the earlier plan is then discarded.
        """

    @abstractmethod
    def commit(self, plan: Plan[SeatT], tokens: Sequence[Sequence[int]]) -> None:
        """Advance the seats of a plan after its step was computed. Must not fail.

        tokens[i] are the ids that stay in the seat of plan.rows[i]: fewer than planned if draft tokens were rejected.
        seat.length grows by their number. A negative id marks an embedding without a token id, which is never shared.
        """

    @abstractmethod
    def usage(self) -> CacheUsage:
        """Return the memory by use, from the bookkeeping on the host; called between steps."""

    def blocks(self) -> Blocks:
        """Return the numbers of blocks by state; all zero for a strategy without blocks. Called between steps."""
        return Blocks()

    def visible_positions(self, length: int, spec: LayerSpec) -> Tensor | None:
        """Return the positions [S], ascending, that the last of `length` tokens attends to in a layer.

        None if the strategy cannot know them beforehand.
        """
        return None

    def collect_block_events(self) -> BlockEvents | None:
        """Return the block events since the last call, and clear them; None if there were none."""
        return None

    @abstractmethod
    def check_integrity(self) -> None:
        """Assert that the internal bookkeeping is consistent. Called between steps (setting `check_integrity`)."""


# ---------------------------------------------------------------- optional features of a strategy
class PinError(Exception):
    """Raised if a prefix cannot be pinned; the message says why."""


class Pin(NamedTuple):
    """A prefix that stays in memory until the time `expires`, even while no sequence uses it."""

    id: str
    num_tokens: int
    num_bytes: int
    salt: Salt
    expires: float  # time at which the pin expires, in seconds on the monotonic clock


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


@runtime_checkable
class Inspectable(Protocol):
    """A cache that can list its seats and blocks."""

    def inspect(self) -> dict[str, Any]:
        """Return the open seats, and the numbers of blocks by state, as JSON."""
