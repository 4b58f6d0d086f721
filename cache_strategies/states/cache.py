"""Pairs any strategy with the states of recurrent layers, for models that have those beside layers with attention.

Neither knows of the other. The states after some tokens are of a fixed size and cannot be cut: a text goes on from
cached tokens only where the strategy has their keys and a slot has a checkpoint of their states. A row reads one slot
and writes another, so a step that failed can be repeated. Of a row whose drafts were rejected, only the tokens before
the last states that were kept within it are committed; the other accepted ones are computed again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from cache_strategies.base import CacheSetup, KVCache, KVSequence, Locations, Rows
from cache_strategies.block_hashes import STATES, BlockHash, BlockHasher
from cache_strategies.features import BlockData, Clearing, SelfChecking
from cache_strategies.states.prefix_names import PrefixNames
from cache_strategies.states.slots import StateSlots
from cache_strategies.types import EVERYTHING, CacheUsage, Geometry, SaltScope, Sizes, Text
from kernels.states import States, StateStore, compute_slot_bytes

INTERVAL = 1024  # tokens of a text between two checkpoints, if these are whole blocks
SLOTS_PER_SEQUENCE = 2  # one that a row reads, one that it writes
ZEROS = -1  # in place of the slot of the states before a text


class StateSequence(KVSequence):
    """A sequence of a strategy, and the states after its tokens.

    A row reads the slot `current` and writes `spare`; when it is committed, they change places. A slot that others use
    as well (a checkpoint, a fork) is never written: a new one is allocated for it.
    """

    def __init__(self, cache: StateCache, keys: KVSequence, names: PrefixNames, borders: Collection[int]) -> None:
        """Begin without any states. Checkpoints are made at the `borders`, besides those at regular intervals."""
        self.keys = keys
        self.names = names
        self.current: int | None = None  # the states after `length` tokens; None: after none
        self.spare: int | None = None  # for the states after the next row
        self._cache, self._slots = cache, cache.slots
        self._interval, self._borders = cache.interval, {*borders}
        self._num_located = 0  # tokens of the row that was located last
        self._kept: dict[int, int] = {}  # slots for the states within that row, by the number of its tokens
        self._published: list[BlockHash] = []  # the checkpoints that it has made
        cache.sequences.add(self)

    def _update(self) -> None:
        """Take over what the strategy's sequence says."""
        keys = self.keys
        self.length, self.found, self.stop, self.shift = keys.length, keys.found, keys.stop, keys.shift
        self.room = 0 if self.spare is None else keys.room

    def list_slots(self) -> list[int]:
        """Return the slots to which the sequence refers."""
        return [slot for slot in (self.current, self.spare, *self._kept.values()) if slot is not None]

    # ---------------------------------------------------------------- before a row
    def go_back(self) -> None:
        """Go back to the last checkpoint of which the strategy has all keys, or to the beginning."""
        self.miss = self.keys.miss
        while (last := self._find_checkpoint())[0] < self.keys.length:
            self.keys.truncate(last[0])
            self.miss = "checkpoint"
        before, self.current = self.current, last[1]
        if self.current is not None:
            self._slots.share(self.current)
        if before is not None:
            self._slots.release(before)
        self._update()

    def _find_checkpoint(self) -> tuple[int, int | None]:
        """Return the number of tokens and the slot of the last checkpoint among the tokens that have keys."""
        for num_tokens, name in self.names.list_names(self.keys.length):
            if (slot := self._slots.find(name)) is not None:
                return num_tokens, slot
        return 0, None

    def ready(self) -> bool:
        is_ready = self.keys.ready()
        if self.keys.length < self.length:  # another sequence has ended, which was to compute some of its tokens
            self.go_back()
        return is_ready

    def reserve(self, num_tokens: int) -> bool:
        is_reserved = self.allocate_spare() and self.keys.reserve(num_tokens)
        self._update()
        return is_reserved

    def allocate_spare(self) -> bool:
        """Allocate the slot that the next row writes, if there is none; return whether there is one."""
        if self.spare is None:
            self.spare = self._slots.allocate()
        return self.spare is not None

    def locate(self, num_tokens: int) -> dict[int, int]:
        """Choose the slots for states within the next row, by the number of its tokens; as far as there is memory."""
        self._drop_kept()
        self._num_located = num_tokens
        inside = range(self.length + 1, self.length + num_tokens)
        regular = range(-(-inside.start // self._interval) * self._interval, inside.stop, self._interval)
        for position in sorted({*regular, *(each for each in self._borders if each in inside)}):
            if self.names.can_name(position) and (slot := self._slots.allocate()) is not None:
                self._kept[position - self.length] = slot
        return self._kept

    def _is_checkpoint(self, num_tokens: int) -> bool:
        return num_tokens in self._borders or num_tokens % self._interval == 0

    def _drop_kept(self) -> None:
        for slot in self._kept.values():
            self._slots.release(slot)
        self._kept = {}

    # ---------------------------------------------------------------- after a row
    def count_committable(self, num_accepted: int) -> int:
        """Return how many of the accepted tokens of the located row can be committed: those up to states that exist."""
        if num_accepted == self._num_located:
            return num_accepted
        return max((count for count in self._kept if count <= num_accepted), default=0)

    def commit(self, ids: Sequence[int]) -> None:
        first, end = self.length, self.length + len(ids)
        self.keys.commit(ids)
        self.names.replace(first, ids)
        before = self.current
        if len(ids) == self._num_located:
            self.current, self.spare = self.spare, None
        else:
            self.current = self._kept.pop(len(ids))
        for count, slot in self._kept.items():
            if count < len(ids):
                self._publish(first + count, slot)
        self._drop_kept()
        if self._is_checkpoint(end):
            assert self.current is not None
            self._publish(end, self.current)
        if before is not None and self.spare is None and self._slots.is_private(before):
            self.spare = before
        elif before is not None:
            self._slots.release(before)
        self._update()

    def _publish(self, num_tokens: int, slot: int) -> None:
        """Make a slot the checkpoint of the first `num_tokens` tokens, if they have a name."""
        if (name := self.names.find(num_tokens)) is not None and self._slots.publish(name, slot):
            self._published.append(name)

    # ---------------------------------------------------------------- the sequence as a whole
    def compact(self) -> bool:
        has_dropped = self.keys.compact()
        self._update()
        return has_dropped

    def truncate(self, length: int) -> None:
        if length < self.length:
            self.keys.truncate(length)
            self.go_back()

    def fork(self) -> Self | None:
        if (keys := self.keys.fork()) is None:
            return None
        child = type(self)(self._cache, keys, self.names.fork(self.length), ())
        child.current, child.miss = self.current, self.miss
        if child.current is not None:
            self._slots.share(child.current)
        child._update()
        return child

    def close(self) -> None:
        if self.spoiled:
            self.keys.spoiled = True
            for name in self._published:
                self._slots.unpublish(name)
        for slot in self.list_slots():
            self._slots.release(slot)
        self._cache.sequences.remove(self)
        self.keys.close()


class PairedStrategy(NamedTuple):
    """The strategy beside which states are kept."""

    cls: type[KVCache]
    options: Any
    interval: int = INTERVAL


class StateCache(KVCache[StateSequence]):
    """The keys of a strategy, and the states beside them."""

    def __init__(self, setup: CacheSetup, options: PairedStrategy) -> None:
        super().__init__(setup, options)
        self.strategy = options.cls(replace(setup, memory=setup.memory.make_part()), options.options)
        self.stores = self.strategy.stores
        # A text goes back to a checkpoint only before its first commit
        self.contract = self.strategy.contract._replace(rewind=0)
        layers = setup.geometry.states
        region = setup.memory.region(compute_slot_bytes(layers), "recurrent states")
        self.slots, self.store = StateSlots(region), StateStore(region, layers)
        size = self.contract.granularity
        scope = f"{setup.name}\0states\0{setup.model}"
        self._hasher = None if size is None else BlockHasher(size, scope)
        self.interval = -(-options.interval // (size or 1)) * (size or 1)
        self.sequences: set[StateSequence] = set()
        self._located: Rows[Any] = Rows([], [])  # of the strategy's sequences

    @classmethod
    def sizes(cls, options: PairedStrategy, geometry: Geometry) -> Sizes:
        keys = options.cls.sizes(options.options, geometry)
        return Sizes(
            [*keys.block_bytes, compute_slot_bytes(geometry.states)],
            lambda num_tokens: [*keys.count_blocks(num_tokens), SLOTS_PER_SEQUENCE],
        )

    # ---------------------------------------------------------------- sequences
    def open(self, text: Text) -> StateSequence | None:
        keys = self.strategy.open(text)
        if keys is None:
            return None
        size = self.contract.granularity
        # Where another text may go on: before the last token of this one, and after what this one shares with others
        borders = [] if size is None else [each // size * size for each in (text.num_reusable, keys.length)]
        names = PrefixNames(self._hasher, text.ids, text.salt)
        opened = StateSequence(self, keys, names, borders)
        try:
            opened.go_back()
        except BaseException:
            opened.close()
            raise
        if not opened.allocate_spare():
            opened.close()
            return None
        return opened

    # ---------------------------------------------------------------- a step
    @staticmethod
    def count_committable(sequences: Sequence[Any], num_accepted: Sequence[int]) -> list[int]:
        """Return how many of the accepted tokens of located rows can be committed, by row."""
        return [each.count_committable(count) for each, count in zip(sequences, num_accepted, strict=True)]

    def locate(self, rows: Rows[StateSequence]) -> Locations:
        self._located = Rows([each.keys for each in rows.sequences], rows.counts)
        located = self.strategy.locate(self._located)
        kept = [
            (row, count, slot)
            for row, (sequence, num_tokens) in enumerate(zip(rows.sequences, rows.counts, strict=True))
            for count, slot in sequence.locate(num_tokens).items()
        ]
        read = [ZEROS if each.current is None else each.current for each in rows.sequences]
        write = [each.spare for each in rows.sequences]
        starts = [0, *accumulate(rows.counts)]
        device = self.store.memory.device
        tensors = (torch.tensor(each, dtype=torch.int32, device=device) for each in (starts, read, write, kept))
        q_start, reads, writes, keep = tensors
        return located._replace(states=States(self.store, q_start, reads, writes, keep.view(-1, 3)))

    def attend(self, layer: int, rows: Rows[Any], q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        self.strategy.attend(layer, self._located, q, k, v, out)

    def poll(self) -> None:
        self.strategy.poll()

    # ---------------------------------------------------------------- memory
    @property
    def idle_bytes(self) -> int:
        return self.strategy.idle_bytes + self.slots.idle_bytes

    def evict(self, num_bytes: int) -> int:
        freed = 0
        # Keys and checkpoints are of use together only, so neither takes more than half of what is idle
        while freed < num_bytes and self.slots.idle_bytes > self.strategy.idle_bytes:
            freed += self.slots.evict()
        if freed < num_bytes:
            freed += self.strategy.evict(num_bytes - freed)
        while freed < num_bytes and self.slots.idle_bytes:
            freed += self.slots.evict()
        return freed

    def clear(self, scope: SaltScope = EVERYTHING) -> int:
        """Remove the checkpoints of the salts in a scope, and what the strategy removes (features.Clearing)."""
        before = self.setup.memory.held_bytes
        if isinstance(self.strategy, Clearing):
            self.strategy.clear(scope)
        self.slots.clear(scope)
        for sequence in self.sequences:
            if scope.includes(sequence.names.salt):
                sequence.names.stop()
        return before - self.setup.memory.held_bytes

    # ---------------------------------------------------------------- data of blocks and checkpoints
    def list_data(self) -> Sequence[BlockHash]:
        """Return the names of what can be read: checkpoints, and the strategy's blocks (features.BlockData)."""
        blocks = self.strategy.list_data() if isinstance(self.strategy, BlockData) else ()
        return [*blocks, *self.slots.list_checkpoints()]

    def read_data(self, block_hash: BlockHash) -> Tensor | None:
        """Return a copy of what is in a checkpoint or a block, [bytes] uint8; None if there is none of this name."""
        if block_hash.group != STATES:
            return self.strategy.read_data(block_hash) if isinstance(self.strategy, BlockData) else None
        slot = self.slots.find(block_hash)
        return None if slot is None else self.store.slots[slot].clone()

    def write_data(self, block_hash: BlockHash, data: Tensor) -> bool:
        """Make a checkpoint or a block with this name and these bytes, as features.BlockData says."""
        if block_hash.group != STATES:
            return isinstance(self.strategy, BlockData) and self.strategy.write_data(block_hash, data)
        if data.nbytes != self.store.slot_bytes:
            raise ValueError(f"states have {self.store.slot_bytes} bytes, not {data.nbytes}")
        if self._hasher is None or self.slots.find(block_hash) is not None or (slot := self.slots.allocate()) is None:
            return False
        self.store.slots[slot].copy_(data)
        self.slots.publish(block_hash, slot)
        self.slots.release(slot)
        return True

    # ---------------------------------------------------------------- reports
    def count_visible(self, layer: int, length: int) -> int | None:
        return self.strategy.count_visible(layer, length)

    def add_usage(self, usage: CacheUsage) -> CacheUsage:
        """Return the strategy's use of memory with that of the states."""
        held, idle = self.slots.region.num_held * self.slots.region.size, self.slots.idle_bytes
        return usage._replace(reserved=usage.reserved + held, used=usage.used + held - idle, idle=usage.idle + idle)

    def check_integrity(self) -> None:
        if isinstance(self.strategy, SelfChecking):
            self.strategy.check_integrity()
        self.slots.check_integrity(slot for sequence in self.sequences for slot in sequence.list_slots())
