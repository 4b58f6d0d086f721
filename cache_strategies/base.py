"""The interface of a KV-cache strategy, as the scheduler, the engine and the model use it. Implements nothing.

One `KVCache` serves all sequences of one instance. A text opens a sequence in it (`KVSequence`); the tokens that enter
in a step are the rows of an instance (`Rows`), for which the cache says where each layer's keys are (`Locations`), or
computes the layer's attention itself. Within a step only `commit` changes a sequence, so that a failed step can be
repeated. The data in these calls is in types.py. What only some strategies can do, such as pinning, is in features.py.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, Self

from pydantic import BaseModel, ConfigDict
from torch import Tensor
from typing_extensions import TypeVar  # with `default`, which typing.TypeVar has from Python 3.13 on

from cache_strategies.memory import InstanceMemory
from cache_strategies.types import Contract, Geometry, Miss, Sizes, Text
from kernels.ops import KVLocation, Ops, QueryTap
from kernels.states import States
from kernels.store import KVStore

INTERFACE_VERSION = 3  # of this interface; raised when classes written for the version before no longer work


class KVSequence(ABC):
    """One text in one cache. The sequence sets its fields in its own methods; the engine reads them."""

    length: int = 0  # tokens whose keys are there. It grows in commit() alone
    found: int = 0  # how many of them open() found in the cache; may fall until the first commit
    miss: Miss | None = "cold"  # why it did not find more; None: it found all that may be reused
    room: int = 0  # the next row may end at this position without reserve(); 0: reserve() is called for each row
    stop: int | None = None  # the next row must not end after this position; None: it may end anywhere
    shift: int = 0  # the position of the next token, at which the model applies RoPE, is length - shift
    spoiled: bool = False  # set by the engine before close(): the keys may be NaN, and nobody else may find them

    @abstractmethod
    def reserve(self, num_tokens: int) -> bool:
        """Allocate memory for `num_tokens` tokens after `length`; return False if there is not enough. Idempotent.

        If a region has refused memory in this call, the scheduler then preempts a sequence and calls it again. What was
        reserved and is not committed may be freed by the next commit().
        """

    @abstractmethod
    def commit(self, ids: Sequence[int]) -> None:
        """Keep the first len(ids) tokens of the row that was located and computed; fewer if drafts were rejected.

        `length` grows by their number. A negative id marks an embedding without a token id, which is never shared.
        """

    @abstractmethod
    def close(self) -> None:
        """Free the memory or keep it idle. If others wait for tokens that this one computes, one of them takes over."""

    def ready(self) -> bool:
        """Return whether a row can be scheduled now; False while another sequence computes the prefix.

        It is asked until the first commit.
        """
        return True

    def compact(self) -> bool:
        """Drop tokens, and free their memory; return whether that was done. Called after each commit.

        May start device work. If it raises it is called once more, and must then succeed as at first; if it raises
        again, the request ends, and no other.
        """
        return False

    def truncate(self, length: int) -> None:
        """Drop the tokens from position `length` on: at most contract.rewind ones.

        Before the first commit any number may be dropped, and `length` may become lower than asked for, as a strategy
        may drop whole blocks.
        """
        assert length <= self.length
        self.length, self.found = length, min(self.found, length)

    def fork(self) -> Self | None:
        """Return a second sequence with the same tokens; None if that cannot be done now: then open() is called."""
        return None


S = TypeVar("S", bound=KVSequence, default=KVSequence)
S_co = TypeVar("S_co", bound=KVSequence, default=KVSequence, covariant=True)


class Rows(Generic[S_co]):
    """The tokens that enter in a step: for each row a sequence, and the number of its tokens after `length`.

    Decode rows (one token) come first.
    """

    __slots__ = ("counts", "drafts", "longest", "num_decode", "num_tokens", "sequences")

    def __init__(self, sequences: Sequence[S_co], counts: Sequence[int], drafts: Sequence[int] | None = None) -> None:
        self.sequences = sequences
        self.counts = counts  # numbers of tokens
        self.drafts = drafts  # how many of them, at the end of each row, may be rejected; None: none
        self.num_decode = counts.count(1)
        assert 1 not in counts[self.num_decode :], "decode rows must come first"
        self.num_tokens = sum(counts)
        self.longest = max(counts, default=1)

    def __len__(self) -> int:
        return len(self.counts)

    def end(self, row: int) -> int:
        """Return the number of tokens of a row's text with those of the row."""
        return self.sequences[row].length + self.counts[row]


class Locations(NamedTuple):
    """Where the keys and values of a step's rows are. Valid until locate() is called again."""

    # By layer; None: attend() computes the layer. Layers with equal addresses have the same object, which is then
    # checked and prepared once
    by_layer: Sequence[KVLocation | None]
    tap: QueryTap | None = None  # a request for copies of recent queries, which are there when commit() is called
    states: States | None = None  # of layers with recurrent states (states/cache.py); strategies leave it out


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


class KVCache(ABC, Generic[S]):
    """Base class of all strategies: keeps the keys and values of one instance's sequences, which are of type S.

    sizes(), open(), reserve(), close(), idle_bytes and evict() work on the host, and start no device work. locate(),
    attend(), commit() and compact() are called in the engine's only device thread. Before a sequence is in a row,
    ready() must have returned True for it once, and reserve() unless the row ends at `room` or before.
    """

    interface_version: ClassVar[int]  # set by classes of plug-ins: the INTERFACE_VERSION for which they are written
    options_type: ClassVar[type[Options]] = Options
    contract: Contract = Contract()
    stores: Sequence[KVStore] = ()  # in its regions; the kernels are tried in them at the start

    def __init__(self, setup: CacheSetup, options: Any) -> None:
        """Keep the arguments. A subclass makes its regions; it allocates no block yet."""
        self.setup = setup
        self.options = options

    @property
    def name(self) -> str:
        return self.setup.name

    @classmethod
    @abstractmethod
    def sizes(cls, options: Any, geometry: Geometry) -> Sizes:
        """Return the memory that a sequence takes: called before the KV memory is made, whose least size follows.

        It is also asked for the memory of each request; one that needs more than the limit is rejected. The number of
        tokens may be more than max_seq_len if the contract is `unbounded`.
        """

    @abstractmethod
    def open(self, text: Text) -> S | None:
        """Return a sequence for a text; None if there is not enough memory now.

        Its first `length` tokens (at most text.num_reusable) were found in the cache and need not be computed.
        """

    @abstractmethod
    def locate(self, rows: Rows[S]) -> Locations:
        """Return where the keys of rows are to be written and read. May run copies.

        May be called again without commits in between, with other rows: the last call counts.
        """

    def attend(self, layer: int, rows: Rows[S], q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Write k and v, then compute attention: q [N,Hq,D], k [N,H,D], v [N,H,Dv] -> out [N,Hq,Dv].

        Called for layers without addresses, with the rows that were located. N is the number of tokens of all rows:
        first those of row 0, then those of row 1, and so on. All keys and values are written before any are read; a
        second call gives the same result. q, k and v may be strided (only the last dimension is contiguous). `out` is
        overwritten.
        """
        raise NotImplementedError(f"{type(self).__name__} has no addresses for layer {layer}, so it needs attend()")

    def poll(self) -> None:
        """Prepare for the next step, such as by dropping expired pins; must not block.

        Called before each step, and before rows of a failed step are repeated one by one.
        """

    @property
    def idle_bytes(self) -> int:
        """The bytes that evict() could free: held, but not used by a sequence or a pin."""
        return 0

    def evict(self, num_bytes: int) -> int:
        """Free idle blocks, the next to be evicted first, until `num_bytes` are freed; return the bytes freed."""
        return 0

    def count_visible(self, layer: int, length: int) -> int | None:
        """Return how many of the first `length` tokens the next one sees in a layer.

        It is the mean over the layer's KV heads, rounded down. None: all that the model's own attention lets it see. A
        strategy that drops keys overrides this.
        """
        return None
