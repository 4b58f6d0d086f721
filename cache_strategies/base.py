"""The interface of a KV-cache strategy, as the scheduler, the engine and the model use it. Implements nothing.

One `KVCache` serves ALL sequences of one instance. A request opens a seat in it; the tokens of a seat that enter in a
step form a row; the rows of an instance become a plan, which says where each layer's keys are stored, or computes the
layer's attention itself. Within a step only `commit` changes the cache's state, so that a failed step can be repeated.
open, grow, crop, fork, discard and close change it between steps. The data in these calls is in types.py. What only
some strategies can do, such as pinning, is in features.py.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple

from pydantic import BaseModel, ConfigDict
from torch import Tensor
from typing_extensions import TypeVar  # with `default`, which typing.TypeVar has from Python 3.13 on

from cache_strategies.memory import InstanceMemory, Region
from cache_strategies.types import (
    NO_SALT,
    BlockEvents,
    Blocks,
    CacheUsage,
    Contract,
    Geometry,
    Miss,
    Salt,
    Sizes,
)
from kernels.arguments import check, check_new_tokens
from kernels.ops import KVLocation, Ops, QueryTap
from kernels.store import KVStore
from kernels.types import LayerSpec

INTERFACE_VERSION = 2  # of this interface; raised when classes written for the version before no longer work


class Seat:
    """One sequence's state in one cache. Outside the strategy only length, position, cached, miss and room are read."""

    __slots__ = ("cached", "length", "miss", "room")

    def __init__(self, length: int = 0) -> None:
        self.length = length  # number of committed tokens: the next row starts there in the text
        self.cached = length  # number of tokens that open() found cached; may shrink until the seat's first row has run
        self.miss: Miss | None = "cold"  # why open() did not find more cached tokens; None: it found all reusable ones
        # A row that ends here at the latest needs no grow(). 0, while something has to be done for every row
        self.room = 0

    @property
    def position(self) -> int:
        """The position of the seat's next token, at which the model applies RoPE; those of a row are consecutive.

        It is `length`, unless a strategy counts positions within the cache and rotates the keys that it keeps.
        """
        return self.length


SeatT = TypeVar("SeatT", bound=Seat, default=Seat)


class Row(NamedTuple, Generic[SeatT]):
    """The tokens of one seat that enter in a step: tokens [seat.length, seat.length + num_tokens) of its text."""

    seat: SeatT
    num_tokens: int


@dataclass(frozen=True)
class CacheSetup:
    """The arguments from which a strategy instance is built, in addition to its options."""

    name: str  # name of the instance
    geometry: Geometry
    memory: InstanceMemory
    ops: Ops
    model: str = ""  # identifies the model in block hashes, so that no keys of another model are reused
    clock: Callable[[], float] = time.monotonic

    def check_slots(self, locations: Sequence[KVLocation | None], num_tokens: int) -> None:
        """Raise ValueError unless the addresses by layer fit `num_tokens` tokens and lie in their stores."""
        for layer, location in {id(each): (i, each) for i, each in enumerate(locations)}.values():
            if location is not None:
                self.ops.check_slots(location.store, layer, location.at, num_tokens)


class Options(BaseModel):
    """Base class of a strategy kind's options, as given in the settings. Unknown options are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Plan(ABC, Generic[SeatT]):
    """One instance's part of a step. Valid until plan() of its cache is called again.

    A plan gives the addresses of its rows' keys in each layer, for kernels that compute all strategies at once. In a
    layer without addresses it computes attention itself, by attend() (a hook).
    """

    rows: Sequence[Row[SeatT]]  # the rows that were passed to plan()
    query_tap: QueryTap | None = None  # a request for copies of recent queries, which are there once the step has run

    def list_positions(self) -> Sequence[int]:
        """Return the position of each row's first token: that of its seat."""
        return [row.seat.position for row in self.rows]

    def kv_location(self, layer_idx: int) -> KVLocation | None:
        """Return where a layer's keys are stored; None if attend() computes the layer.

        Layers with the same addresses should get the same object, which is then checked and prepared once.
        """
        return None

    def list_kv_locations(self, num_layers: int) -> Sequence[KVLocation | None]:
        """Return kv_location() of all layers."""
        return [self.kv_location(layer) for layer in range(num_layers)]

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Write k and v, then compute attention: q [N,Hq,D], k [N,H,D], v [N,H,Dv] -> out [N,Hq,Dv].

        Called for layers without addresses only. N is the number of tokens of all rows: first those of rows[0], then
        those of rows[1], and so on. All keys and values are written before any are read; a second call gives the same
        result. q, k and v may be strided (only the last dimension is contiguous). `out` is overwritten.
        """
        raise NotImplementedError(f"{type(self).__name__} has no addresses for layer {layer_idx}, so it needs attend()")

    @abstractmethod
    def gather_kv(self, layer_idx: int, row: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return (K [S,H,D], V [S,H,Dv], their positions) that the last token of a row attends to.

        Positions are [S] and ascend, or [S, H] if heads keep different tokens; -1 fills up heads that keep fewer. They
        are those in the text: they say which tokens these are. A strategy that counts positions within the cache
        returns keys as it has rotated them: the last key at the token's own position, the one before it one lower, ...
        """


class KVCache(ABC, Generic[SeatT]):
    """Base class of all strategies: keeps the keys and values of one instance's sequences. SeatT is its type of seat.

    The scheduler calls the methods from sizes() to pinned_blocks(): they handle token ids and seats on the host and
    start no device work. The engine calls the methods from poll() on, in its only device thread. Before a seat is in a
    plan, ready() must have returned True for it once, and grow() unless the row ends at seat.room or before.
    """

    interface_version: ClassVar[int]  # set by classes of plug-ins: the INTERFACE_VERSION for which they are written
    options_type: ClassVar[type[Options]] = Options
    contract: Contract  # set by __init__
    stores: Sequence[KVStore] = ()  # the keys and values in its regions, empty if they are stored in another way

    def __init__(self, setup: CacheSetup, options: Options) -> None:
        """Keep the arguments. A subclass makes its regions; it allocates no block yet."""
        self.setup = setup
        self.options = options

    @property
    def name(self) -> str:
        return self.setup.name

    # ---------------------------------------------------------------- scheduler
    @classmethod
    @abstractmethod
    def sizes(cls, options: Any, geometry: Geometry) -> Sizes:
        """Return the memory that a sequence takes: called before the KV memory is made, whose least size follows.

        It is also asked for the memory of each request; one that needs more than the limit is rejected. The number of
        tokens may be more than max_seq_len if the contract is `unbounded`.
        """

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
        """Return whether the seat can be scheduled now; False while its prefix loads or another seat computes it.

        It is asked until the first row of the seat was committed.
        """
        return True

    def row_limit(self, seat: SeatT) -> int | None:
        """Return the most tokens that the seat's next row may have; None: any number.

        It is at most contract.max_row. A strategy that acts at certain positions of a text ends rows there with this.
        """
        return self.contract.max_row

    @abstractmethod
    def grow(self, seat: SeatT, num_tokens: int) -> bool:
        """Allocate memory for `num_tokens` tokens after seat.length; return False if there is not enough. Idempotent.

        If a region has refused memory in this call, the scheduler then preempts a sequence and calls it again. It is
        not called for a row that ends at seat.room or before.
        """

    def crop(self, seat: SeatT, length: int) -> None:
        """Drop the committed tokens from position `length` on. They may be at most contract.rewind tokens.

        During prefill, and in the tokens that open() found cached, seat.length may become lower than `length`, as a
        strategy may drop whole blocks. The default only sets the seat's length.
        """
        assert length <= seat.length
        assert self.contract.rewind is None or seat.length - length <= self.contract.rewind, "more than contract.rewind"
        seat.length = length
        seat.cached = min(seat.cached, length)

    def fork(self, seat: SeatT) -> SeatT | None:
        """Return a second seat with the same tokens; None if the cache cannot do that now: then call open() instead."""
        return None

    def discard(self, seat: SeatT) -> None:
        """Keep other sequences from reusing this seat's NaN or infinite keys and values; called before close()."""

    @abstractmethod
    def close(self, seat: SeatT) -> None:
        """Free the seat's memory or keep it idle. If other seats wait for tokens that it computes, one takes over."""

    @property
    def idle_bytes(self) -> int:
        """The bytes that evict() could free: held, but not used by a seat or a pin."""
        return 0

    def evict(self, num_bytes: int) -> int:
        """Free idle blocks, the next to be evicted first, until `num_bytes` are freed; return the bytes freed."""
        return 0

    def pinned_blocks(self) -> Mapping[Region, Collection[int]]:
        """Return the pinned blocks by region, which cannot be evicted."""
        return {}

    # ---------------------------------------------------------------- engine
    def poll(self) -> None:
        """Prepare for the next step, such as by dropping expired pins. Called before each step; must not block."""

    @abstractmethod
    def plan(self, rows: Sequence[Row[SeatT]]) -> Plan[SeatT]:
        """Return the plan of a step for these rows, of which decode rows (one token) come first.

        May be called again without a commit() in between: the earlier plan is then discarded.
        """

    def attend(self, plan: Plan[SeatT], layer_idx: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Compute one layer for a plan's rows: at the addresses that the plan gives, or by its hook; see `Plan.attend`.

        Kernels that compute all strategies at once do the same without calling this. Raises ValueError, and writes
        nothing, if k and v do not have a row for each token of the plan and the layer's heads.
        """
        self.check_new_tokens(plan, layer_idx, k, v)
        location = plan.kv_location(layer_idx)
        if location is None:
            return plan.attend(layer_idx, q, k, v, out)
        ops, spec = self.setup.ops, self.setup.geometry.layers[layer_idx]
        ops.write_kv(location.store, layer_idx, k, v, location.at)
        ops.attend(out, q, location.store, layer_idx, location.at, spec, window=location.window)
        if plan.query_tap is not None and (queries := plan.query_tap.queries[layer_idx]) is not None:
            queries.copy_(q[plan.query_tap.tokens])
        return None

    def check_new_tokens(self, plan: Plan[SeatT], layer_idx: int, k: Tensor, v: Tensor) -> None:
        """Raise ValueError unless k [N,H,D] and v [N,H,Dv] are keys and values of a layer for all tokens of a plan.

        attend() calls it for every strategy, so that those with a hook need no checks of their own.
        """
        spec = self.setup.geometry.layers[layer_idx]
        check_new_tokens(k, v, (spec.num_kv_heads, spec.head_dim), (spec.num_kv_heads, spec.v_head_dim))
        num_tokens = sum(row.num_tokens for row in plan.rows)
        check(len(k) == num_tokens, "keys of {} tokens are given, and the rows of the plan have {}", len(k), num_tokens)

    def check_plan(self, plan: Plan[SeatT]) -> None:
        """Raise ValueError unless a plan's addresses fit its rows and lie in their stores.

        The engine does it for plug-ins before each step, and for all plans of a step that has failed: kernels check
        addresses as well, but do not know which strategy gave them.
        """
        num_tokens = sum(row.num_tokens for row in plan.rows)
        self.setup.check_slots(plan.list_kv_locations(len(self.setup.geometry.layers)), num_tokens)

    def commit(self, plan: Plan[SeatT], tokens: Sequence[Sequence[int]]) -> None:
        """Advance the seats of a plan after its step was computed. Must not fail.

        tokens[i] are the ids that stay in the seat of plan.rows[i]: fewer than planned if draft tokens were rejected.
        seat.length grows by their number, which is all that the default does. A negative id marks an embedding without
        a token id, which is never shared.
        """
        for row, ids in zip(plan.rows, tokens, strict=True):
            assert len(ids) <= row.num_tokens
            row.seat.length += len(ids)

    def compact(self, seat: SeatT) -> int | None:
        """Drop tokens of a seat, and free their memory. Called after each commit of a row of the seat.

        Return how many tokens were dropped, as count_dropped_tokens() counts them; None if nothing was compacted.
        May start device work. If it raises it is called once more, and must then succeed as at first; if it raises
        again, the seat's request ends, and no other.
        """
        return None

    @property
    def compacts(self) -> bool:
        """Whether the strategy overrides compact(), which is not called otherwise."""
        return getattr(self.compact, "__func__", None) is not KVCache.compact

    @abstractmethod
    def usage(self) -> CacheUsage:
        """Return the memory by use, from the bookkeeping on the host; called between steps."""

    def blocks(self) -> Blocks:
        """Return the numbers of blocks by state; all zero for a strategy without blocks. Called between steps."""
        return Blocks()

    def count_dropped_tokens(self, seat: SeatT) -> int:
        """Return how many committed tokens the seat's next token would use, but cannot see. Called between steps.

        A token counts in a layer if the layer's own attention would use its key for the next token, and the strategy
        does not let the next token see that key, or has dropped it. Keys outside of a layer's own window do not count.
        The result is the mean over the KV heads of all layers, rounded down: from 0, as in all exact instances, to
        seat.length. A strategy that drops keys overrides this.
        """
        return 0

    def token_budget(self, length: int) -> int | None:
        """Return how many tokens of a text are kept at most once tokens were dropped at this length; None: no budget.

        A token is kept if count_dropped_tokens() does not count it. A strategy that keeps a budget overrides this.
        """
        return None

    def visible_positions(self, length: int, spec: LayerSpec) -> Tensor | None:
        """Return the positions [S], ascending, that the last of `length` tokens attends to in a layer.

        None if the strategy cannot know them beforehand.
        """
        return None

    def collect_block_events(self) -> BlockEvents | None:
        """Return the block events since the last call, and clear them; None if there were none."""
        return None

    def check_integrity(self) -> None:
        """Assert that the internal bookkeeping is consistent. Called between steps (setting `check_integrity`)."""
