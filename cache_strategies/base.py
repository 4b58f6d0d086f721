"""The seam: what a KV-cache strategy is to the scheduler, to the engine and to the model. Implements nothing.

One `KVCache` serves ALL sequences under one instance. A request takes a seat in it; the tokens of a seat that enter in
a step form a row; the rows of an instance become a plan, and the model calls the plan's `attend` once per layer. A step
moves state in `commit` alone, so that a failed one can be repeated; open, grow, crop, fork, discard and close do
between steps.
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
from typing_extensions import TypeVar  # with defaults; of typing from Python 3.13 on

from cache_strategies.arena import Arena
from kernels.ops import KVLocation, Ops
from kernels.store import KVStore
from kernels.types import LayerSpec

Miss = Literal["cold", "short", "evicted", "window", "busy", "salt", "bypass"]
"""Why open() found no more of a prompt than it did.

cold: it was never there, or so long ago that it is forgotten, or is another tenant's, of which nobody hears; short:
what is left does not fill a block; evicted: it had to make room; window: the strategy forgets, so that nobody could go
on from there; busy: it is there, but in use, and this strategy does not share; salt: it is there under another salt of
the same tenant; bypass: the request wanted no more to be looked up.
"""


class Salt(NamedTuple):
    """Separates sequences that must not share memory: only those with equal salts do."""

    tenant: str = ""  # stands for an API key; empty for requests without one
    cache_salt: str = ""  # the request's own, within its tenant


NO_SALT = Salt()


class SaltScope(NamedTuple):
    """Selects salts; None stands for every value."""

    tenant: str | None = None
    cache_salt: str | None = None

    def includes(self, salt: Salt) -> bool:
        """Return whether the scope includes a salt."""
        return self.tenant in (None, salt.tenant) and self.cache_salt in (None, salt.cache_salt)


EVERYTHING = SaltScope()


def count_reusable_tokens(tokens: Sequence[int], max_cached: int | None = None) -> int:
    """Return how many leading tokens open() may take from a cache: the last one is always computed, for its logits."""
    limit = len(tokens) - 1
    return max(0, limit if max_cached is None else min(limit, max_cached))


class Seat:
    """One request's place in one cache; to everybody else opaque but for two numbers and a word."""

    __slots__ = ("cached", "length", "miss")

    def __init__(self, length: int = 0) -> None:
        self.length = length  # committed tokens: the next row starts here
        self.cached = length  # of these, found at open; may shrink until the seat's first row has run
        self.miss: Miss | None = "cold"  # why open() found no more; None: it found all there could be


SeatT = TypeVar("SeatT", bound=Seat, default=Seat)


class Row(NamedTuple, Generic[SeatT]):
    """Tokens [seat.length, seat.length + num_tokens) of a seat enter in this step."""

    seat: SeatT
    num_tokens: int


class Contract(NamedTuple):
    """What an instance promises; derived from its options and the model's layers."""

    exact: bool  # every key that the model may see is kept as it was computed
    shareable: bool  # sequences with a common prefix can share its memory
    forkable: bool  # fork() may return a seat
    rewind: int | None  # committed tokens that crop may drop; None: any number
    replayable: bool  # recomputing all tokens from the first gives the same state
    chunk_invariant: bool  # the state does not depend on how the tokens were cut into rows
    max_row: int | None  # tokens a row may carry at most; the scheduler cuts chunks to it
    reusable: bool = False  # a later sequence can go on from where a closed one with the same beginning was


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
    """Where an instance's memory is, in bytes; reserved = used + idle + wasted."""

    seats: int  # open
    tokens: int  # committed in open seats, shared ones counted once
    reserved: int  # held in the arena
    used: int  # holding tokens of open seats, or of pins
    idle: int  # holding tokens of nobody, kept in case somebody wants them again
    wasted: int  # held and empty
    limit: int  # that it may hold at most


class Blocks(NamedTuple):
    """An instance's blocks; all are in use, or idle, or pinned and in use by nobody."""

    in_use: int = 0  # by open seats,
    shared: int = 0  # of these, by several,
    pending: int = 0  # of these, promised and not computed yet
    pinned: int = 0
    idle: int = 0


class BlockEvents(NamedTuple):
    """What has happened to an instance's blocks since the last collect_block_events(). Seconds, as vLLM counts them."""

    copies: int = 0  # blocks copied before somebody wrote into a shared one
    lifetimes: Sequence[float] = ()  # of what was evicted, from when it was given its text
    idle_times: Sequence[float] = ()  # of the same, from when somebody used it last
    reuse_gaps: Sequence[float] = ()  # of what somebody used again, likewise


@dataclass(frozen=True)
class Geometry:
    """The model's layers, and how much may come at once: what is known before there is any memory."""

    layers: Sequence[LayerSpec]
    kv_dtype: torch.dtype
    max_seats: int
    max_seq_len: int
    max_num_batched_tokens: int


@dataclass(frozen=True)
class CacheSetup:
    """What every strategy is built from."""

    name: str  # of the instance; its owner's name in the arena
    geometry: Geometry
    arena: Arena
    ops: Ops
    model: str = ""  # what tells its keys from those of other models
    clock: Callable[[], float] = time.monotonic


class Options(BaseModel):
    """Options of a kind, as settings give them; a kind subclasses it. Unknown ones are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class SeatShape(NamedTuple):
    """Arena memory of one sequence."""

    block_bytes: int  # taken in one piece
    blocks: int  # of the longest sequence; 0: a strategy that takes nothing from the arena


class Plan(ABC, Generic[SeatT]):
    """One instance's slice of one step. Valid until the next plan() of its cache."""

    rows: Sequence[Row[SeatT]]  # as plan() was given them

    @property
    def kv_location(self) -> KVLocation | None:
        """Where the keys lie, if attend() does nothing but write and attend there: then others may do it for it."""
        return None

    @abstractmethod
    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Attend: q [N,Hq,D], k [N,H,D], v [N,H,Dv] -> out [N,Hq,Dv]. All rows write, then all read; repeatable.

        The tokens of rows[0] come first, then those of rows[1], and so on. q, k and v are views with strides of their
        own (only the last dimension is dense); `out` is not initialised.
        """

    @abstractmethod
    def gather_kv(self, layer_idx: int, row: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return K [S,H,D], V [S,H,Dv] and positions [S] that the row's last token sees, in the order of positions."""


class KVCache(ABC, Generic[SeatT]):
    """A strategy for keeping keys and values, with seats of a type of its own.

    The first group of methods is the scheduler's: host only, token ids and seats, no device work. The second is the
    engine's: called from the one device thread, once per step. A seat that is scheduled was ready() and grown first.
    """

    options_type: ClassVar[type[Options]] = Options
    contract: Contract  # set by __init__
    store: KVStore | None = None  # keys and values in the arena, of strategies that use `kernels.store`

    def __init__(self, setup: CacheSetup, options: Options) -> None:
        """Register with the arena. The share is set later, so nothing may be taken from it yet."""
        self.setup = setup
        self.options = options
        setup.arena.register_owner(setup.name, self)

    @property
    def name(self) -> str:
        return self.setup.name

    @property
    def limit_bytes(self) -> int:
        """What it could hold if all others went down to their floors."""
        return self.setup.arena.capacity(self.name) * self.setup.arena.page_bytes

    @property
    def at_limit(self) -> bool:
        """Whether only its own sequences can make room for it."""
        return self.setup.arena.at_limit(self.name)

    @property
    def draining(self) -> bool:
        """Whether it holds more than its limit, which was lowered: nobody may begin."""
        return self.setup.arena.draining(self.name)

    # ---------------------------------------------------------------- scheduler
    @classmethod
    @abstractmethod
    def seat_shape(cls, options: Any, geometry: Geometry) -> SeatShape:
        """Return what a sequence takes; called before there is any memory, as the arena is cut to fit all instances."""

    @abstractmethod
    def bytes_for(self, num_tokens: int) -> int:
        """Return the peak memory of a sequence of that many tokens. One above the limit is refused, never queued."""

    def match(self, tokens: Sequence[int], *, salt: Salt = NO_SALT, max_cached: int | None = None) -> int:
        """Return how many leading tokens open() would find now. Changes nothing."""
        return 0

    @abstractmethod
    def open(self, tokens: Sequence[int], *, salt: Salt = NO_SALT, max_cached: int | None = None) -> SeatT | None:
        """Return a seat for a sequence that begins with these tokens; None if there is no room now.

        Its first `cached` == `length` tokens (at most max_cached) need not be computed again; the last one always is.
        Only tokens of sequences with an equal `salt` are found.
        """

    def retain(self, seat: SeatT, *, priority: int, ttl: float | None) -> None:
        """Set how long what the seat leaves stays: higher priorities longer; after `ttl` seconds it goes first.

        A ttl of None is that of the options.
        """

    def ready(self, seat: SeatT) -> bool:
        """Return whether to schedule the seat in this step; False while it waits for another's prefill or a restore."""
        return True

    @abstractmethod
    def grow(self, seat: SeatT, more: int) -> bool:
        """Take room for `more` tokens after seat.length. Idempotent. Return False if a sequence must be preempted."""

    @abstractmethod
    def crop(self, seat: SeatT, length: int) -> None:
        """Drop committed tokens from `length` on; at most contract.rewind of them.

        While its prompt is computed, seat.length may come out somewhat lower.
        """

    def fork(self, seat: SeatT) -> SeatT | None:
        """Return a second seat with the same tokens; None: open it from the tokens instead."""
        return None

    def discard(self, seat: SeatT) -> None:
        """Hide from later sequences what of the seat is not finite: the model computed no numbers. close() follows."""

    @abstractmethod
    def close(self, seat: SeatT) -> None:
        """Free the seat's memory, or keep it idle. A seat that waits for tokens it had to compute inherits the work."""

    def idle_pages(self) -> int:
        """Return the number of pages it holds that nobody uses: reclaim() would give them."""
        return 0

    def reclaim(self, pages: int) -> int:
        """Give idle pages back to the arena, oldest first, until that many are given; return the number given."""
        return 0

    def pinned_pages(self) -> Collection[int]:
        """Return the pages that stay though nobody uses them."""
        return ()

    # ---------------------------------------------------------------- engine
    def poll(self) -> None:
        """Begin a step: land finished restores. Never waits."""

    @abstractmethod
    def plan(self, rows: Sequence[Row[SeatT]]) -> Plan[SeatT]:
        """Return the step's plan; decode rows (one token) stand first.

        May be called again without a commit in between: the step before it then never was.
        """

    @abstractmethod
    def commit(self, plan: Plan[SeatT], tokens: Sequence[Sequence[int]]) -> None:
        """Commit tokens[i], the ids that ENTERED in plan.rows[i], possibly fewer than planned. Cannot fail.

        This is where seat.length moves on.
        A negative id is an embedding without a token: kept, never shared.
        """

    @abstractmethod
    def usage(self) -> CacheUsage:
        """Return where the memory is, by the host's books, between steps."""

    def blocks(self) -> Blocks:
        """Return the numbers of blocks, by the host's books; all zero if it has none."""
        return Blocks()

    def visible_positions(self, length: int, spec: LayerSpec) -> Tensor | None:
        """Return the positions [S], ascending, that the last of `length` tokens sees in a layer; None if not known."""
        return None

    def collect_block_events(self) -> BlockEvents | None:
        """Return the events since the last call, and clear them; None if there were none. Called after each step."""
        return None

    @abstractmethod
    def check_integrity(self) -> None:
        """Assert that the books add up, for the open seats it knows; see the setting `check_integrity`."""


# ---------------------------------------------------------------- what a strategy may have besides
class PinError(Exception):
    """A prefix cannot be pinned; the message says why."""


class Pin(NamedTuple):
    """A prefix that stays in memory though nobody may be using it."""

    id: str
    num_tokens: int
    num_bytes: int
    salt: Salt
    expires: float  # monotonic seconds


@runtime_checkable
class Clearing(Protocol):
    """A cache that can be cleared."""

    def clear(self, scope: SaltScope = EVERYTHING) -> int:
        """Free the idle memory of a scope and return its bytes. Memory in use is not found again."""


@runtime_checkable
class Pinning(Protocol):
    """A cache in which prefixes can be pinned."""

    def pin(self, tokens: Sequence[int], *, salt: Salt, ttl: float) -> Pin:
        """Hold the longest known beginning of a text. Raises PinError."""

    def unpin(self, pin_id: str) -> bool:
        """Release a pin; return whether there was one of that id."""

    def pins(self) -> Sequence[Pin]: ...


@runtime_checkable
class Inspectable(Protocol):
    """A cache that shows what it holds."""

    def inspect(self) -> dict[str, Any]:
        """Return its seats, and its blocks by state, as JSON."""
