"""Keeps recurrent states beside the keys of any strategy, for models that have both kinds of layers.

The strategy does not know of the states. The states after some tokens are of a fixed size and cannot be cut: a text
goes on from cached tokens only where the strategy has their keys and a slot has a checkpoint of their states. A row
reads one slot and writes another, so a step that failed can be repeated. The states before a row's drafts are kept as
well: if drafts are rejected, the tokens before them are committed, and the accepted ones are computed again.

Which states of a text are kept for others, as checkpoints, is a policy's choice (cache_strategies/checkpoints). Texts
that are open promise their checkpoints: a text with the same beginning waits for one instead of computing the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, count
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from cache_strategies.base import CacheSetup, KVCache, KVSequence, Locations, Rows
from cache_strategies.block_hashes import STATES, BlockHash, BlockHasher
from cache_strategies.checkpoints.base import CheckpointOptions, OpenedText
from cache_strategies.features import Aging, BlockData, Clearing, SelfChecking, check_data
from cache_strategies.states.prefix_names import PrefixNames
from cache_strategies.states.slots import StateSlots
from cache_strategies.types import EVERYTHING, CacheUsage, Geometry, SaltScope, Sizes, Text
from config.sizes import share_to_bytes
from kernels.states import NO_SLOT, States, StateStore, compute_slot_bytes

LEAST_BLOCK = 16  # tokens of a block by which checkpoints are named, where a strategy finds any number of tokens
SLOTS_PER_SEQUENCE = 2  # one that a row reads, one that it writes


class StateSequence(KVSequence):
    """A sequence of a strategy, and the states after its tokens.

    A row reads `read_slot` and writes `write_slot`; when it is committed, they change places. A slot that others use as
    well (a checkpoint, a fork) is never written: a new one is allocated for it.
    """

    def __init__(
        self,
        cache: StateCache,
        keys: KVSequence,
        names: PrefixNames,
        text: OpenedText,
        write_slot: int | None = None,
    ) -> None:
        """Begin without any states."""
        self.keys = keys
        self.names = names
        self.read_slot: int | None = None  # the states after `length` tokens; None: after none
        self.write_slot = write_slot
        self.recomputed = 0
        self._cache, self._slots, self._text = cache, cache.slots, text
        self._num_found_keys = keys.length
        self._awaited: BlockHash | None = None  # a checkpoint that another sequence has promised; `length` is there
        # The checkpoint of the last whole blocks, until there are more, and the last one before it
        self._end: tuple[BlockHash, tuple[int, BlockHash | None]] | None = None
        self._promised: dict[int, BlockHash] = {}  # checkpoints that others may wait for, by number of tokens
        self._last_checkpoint: tuple[int, BlockHash | None] = 0, None  # of the text: its tokens and its name
        self._num_located = 0  # tokens of the row that was located last
        self._placed: list[int] = []  # after how many tokens of the text the policy wants checkpoints in that row
        self._kept: dict[int, int] = {}  # slots for the states within that row, by the number of its tokens
        self._number = next(cache.counter)
        cache.sequences.add(self)

    def _copy_fields(self) -> None:
        """Copy the fields that the engine reads from the strategy's sequence."""
        keys = self.keys
        self.length, self.found, self.stop, self.shift = keys.length, keys.found, keys.stop, keys.shift
        self.room = 0 if self.write_slot is None else keys.room
        self.recomputed = max(0, self._num_found_keys - self.found)

    def list_slots(self) -> list[int]:
        """Return the slots to which the sequence refers."""
        return [slot for slot in (self.read_slot, self.write_slot, *self._kept.values()) if slot is not None]

    # ---------------------------------------------------------------- before a row
    def restore_checkpoint(self, *, may_wait: bool = True) -> None:
        """Truncate to the last checkpoint whose keys are all there, to nothing if there is none.

        With `may_wait` it may be one that another sequence has promised.
        """
        self.miss = self.keys.miss
        self.drop_promises()
        while (last := self._find_checkpoint(may_wait))[0] < (length := self.keys.length):
            self.keys.truncate(last[0])
            self.miss = "checkpoint"
            if not self.keys.length < length:
                raise ValueError(f"a sequence has {self.keys.length} tokens after truncate({last[0]})")
        num_tokens, name = last
        self._last_checkpoint = last
        slot = None if name is None else self._slots.find(name)
        self._awaited = name if slot is None else None
        self._start_from(slot)
        self._copy_fields()
        self._promise(num_tokens)

    def _start_from(self, slot: int | None) -> None:
        """Let the next row read a checkpoint's slot; None: begin without states."""
        before, self.read_slot = self.read_slot, slot
        if slot is not None:
            self._slots.share(slot)
            self._slots.hit(slot)
        if before is not None:
            self._slots.release(before)

    def _find_checkpoint(self, may_wait: bool) -> tuple[int, BlockHash | None]:
        """Return the number of tokens and the name of the last checkpoint among the tokens that have keys."""
        for num_tokens, name in self.names.list_names(self.keys.length):
            # Only those of older sequences are awaited, so that no two wait for each other
            owner = self._cache.promises.get(name) if may_wait else None
            if self._slots.find(name) is not None or (owner is not None and owner._number < self._number):
                return num_tokens, name
        return 0, None

    def _promise(self, length: int) -> None:
        """Promise the checkpoints of the text that will be made after more than `length` tokens."""
        if not self._cache.keeps_checkpoints:
            return
        for position in self._list_checkpoints(length + 1, self._text.num_reusable + 1):
            name = self.names.find(position)
            if name is not None and self._slots.find(name) is None and name not in self._cache.promises:
                self._cache.promises[name] = self
                self._promised[position] = name

    def drop_promises(self, num_tokens: int | None = None) -> None:
        """Withdraw the promises of checkpoints after at most so many tokens; None: all."""
        for position in [each for each in self._promised if num_tokens is None or each <= num_tokens]:
            del self._cache.promises[self._promised.pop(position)]

    def ready(self) -> bool:
        is_ready = self.keys.ready()
        if self.keys.length < self.length:  # another sequence has ended, which was to compute some of this one's tokens
            self._num_found_keys = self.keys.length
            self.restore_checkpoint()
        if self._awaited is not None:
            if (slot := self._slots.find(self._awaited)) is not None:
                self._awaited = None
                self._start_from(slot)
            elif self._awaited not in self._cache.promises:
                self.restore_checkpoint(may_wait=False)  # equal texts would else run one after the other
        return is_ready and self._awaited is None

    def reserve(self, num_tokens: int) -> bool:
        if self.keys.length < self.length or self._awaited is not None:  # another one has ended since ready()
            self._num_found_keys = min(self._num_found_keys, self.keys.length)
            self.restore_checkpoint(may_wait=False)
        if self.write_slot is None:
            self.write_slot = self._slots.allocate()
        is_reserved = self.write_slot is not None and self.keys.reserve(num_tokens)
        self._copy_fields()
        return is_reserved

    def locate(self, num_tokens: int, num_drafts: int) -> dict[int, int]:
        """Return the slots for states within the next row, by the number of its tokens; as far as there is memory.

        The last `num_drafts` of its tokens may be rejected: the states before them are kept, too.
        """
        self.drop_kept()
        self._num_located = num_tokens
        end = self.length + num_tokens
        before_drafts = end - num_drafts
        self._placed = sorted(self._list_checkpoints(self.length + 1, end + 1))
        wanted = {*self._placed} - {end}
        wanted |= {before_drafts} if num_drafts else set()
        for position in sorted(wanted, key=lambda each: (each != before_drafts, each)):
            if (slot := self._slots.allocate()) is not None:
                self._kept[position - self.length] = slot
        return self._kept

    def _list_checkpoints(self, first: int, end: int) -> Iterator[int]:
        """Yield after how many tokens, from `first` on and before `end`, checkpoints are to be made."""
        for position in {*self._cache.policy.place(self._text, first, end)}:
            if first <= position < end and self.names.is_boundary(position):
                yield position

    def drop_kept(self) -> None:
        """Free the slots for states within a row."""
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
        before = self.read_slot
        if len(ids) == self._num_located:
            self.read_slot, self.write_slot = self.write_slot, None
        else:
            self.read_slot = self._kept.pop(len(ids))
        self._publish_checkpoints(first, end)
        self.drop_promises(end)
        self.drop_kept()
        if before is not None and self.write_slot is None and self._slots.is_private(before):
            self.write_slot = before
        elif before is not None:
            self._slots.release(before)
        self._copy_fields()

    def _publish_checkpoints(self, first: int, end: int) -> None:
        """Make checkpoints of the states within a committed row, where the policy wants them, and of its end.

        That of the end lasts until the text has more whole blocks: it is where the next turn of a conversation goes on.
        """
        slots = {first + count: slot for count, slot in self._kept.items()} | {end: self.read_slot}
        placed = [each for each in self._placed if each <= end]
        is_new_end = end not in placed and self.names.is_boundary(end)
        if self._end is not None and (placed or is_new_end):
            name, before = self._end
            if self._slots.unpublish_end(name, self._number) and self._last_checkpoint[1] == name:
                self._last_checkpoint = before
            self._end = None
        for position in placed:
            self._publish(position, slots.get(position))
        if is_new_end:
            before = self._last_checkpoint
            end_name = self._publish(end, self.read_slot, is_end=True)
            self._end = None if end_name is None else (end_name, before)

    def _publish(self, num_tokens: int, slot: int | None, *, is_end: bool = False) -> BlockHash | None:
        """Make the states after so many tokens a checkpoint, if there is room for one; return its name.

        With `is_end` it is that of the text's end, which lasts until there is a later one.
        """
        name = self.names.find(num_tokens)
        if name is not None and not is_end:
            self._slots.keep(name)
        if slot is None or name is None or self._slots.find(name) is not None or not self._cache.make_room():
            return None
        before, inner = self._last_checkpoint
        is_branch = num_tokens == self._text.num_shared and self.recomputed > 0
        self._slots.publish(name, slot, num_tokens, num_tokens - before, is_branch=is_branch)
        if is_end:
            self._slots.mark_end(name, self._number)
        if inner is not None:
            self._slots.mark_inner(inner)
        self._last_checkpoint = num_tokens, name
        return name

    # ---------------------------------------------------------------- the sequence as a whole
    def compact(self) -> bool:
        has_dropped = self.keys.compact()
        self._copy_fields()
        return has_dropped

    def truncate(self, length: int) -> None:
        if length < self.keys.length:
            self.keys.truncate(length)
        if self.keys.length < self.length:
            self.restore_checkpoint()

    def fork(self) -> Self | None:
        if (keys := self.keys.fork()) is None:
            return None
        self._copy_fields()
        check_new(keys, self._cache.sequences)
        child = type(self)(self._cache, keys, self.names.fork(self.length), OpenedText(0, 0, ()))
        child.miss, child.read_slot, child._last_checkpoint = self.miss, self.read_slot, self._last_checkpoint
        if child.read_slot is not None:
            self._slots.share(child.read_slot)
        child._copy_fields()
        return child

    def close(self) -> None:
        self.drop_kept()
        self.drop_promises()
        for slot in self.list_slots():
            self._slots.release(slot)
        self._cache.sequences.remove(self)
        names = [*self.names.list_names(self.length)]
        begun_at = self._slots.clock()
        try:
            if self.spoiled:
                for _, name in names:
                    self._slots.unpublish(name)
                self.keys.spoiled = True
        finally:
            self.keys.close()
        # A checkpoint is as old as the keys before it, of which the last become idle first
        took = self._slots.clock() - begun_at
        for num_tokens, name in names:
            self._slots.touch(name, begun_at + took * (1 - num_tokens / self.length))


def check_new(keys: object, others: Collection[StateSequence]) -> None:
    """Raise TypeError or ValueError unless a strategy has returned a new sequence."""
    if not isinstance(keys, KVSequence):
        raise TypeError(f"it returned a {type(keys).__name__}, not a KVSequence")
    if any(each.keys is keys for each in others):
        raise ValueError("it returned a sequence that is open already")


class PairedStrategy(NamedTuple):
    """The strategy beside which states are kept, and where checkpoints of them are made."""

    cls: type[KVCache]
    options: Any
    checkpoints: CheckpointOptions


class StateCache(KVCache[StateSequence]):
    """The keys of a strategy, and the states beside them."""

    def __init__(self, setup: CacheSetup, options: PairedStrategy) -> None:
        super().__init__(setup, options)
        self.strategy = options.cls(replace(setup, memory=setup.memory.make_part()), options.options)
        self.stores = self.strategy.stores
        # Asked once, as isinstance() of a protocol takes as long as evicting some blocks
        self._aging = self.strategy if isinstance(self.strategy, Aging) else None
        # A text goes back to a checkpoint only before its first commit
        self.contract = self.strategy.contract._replace(rewind=0)
        layers = setup.geometry.states
        region = setup.memory.region(compute_slot_bytes(layers), "recurrent states")
        self._share = options.checkpoints.share
        size = self.contract.granularity
        if size is None or not self.contract.replayable:  # no other text would get the same states
            self._hasher, interval = None, options.checkpoints.interval
        else:
            size = LEAST_BLOCK if size == 1 else size
            formats = "; ".join(store.describe_formats() for store in self.stores)
            self._hasher = BlockHasher(size, f"{setup.name}\0states\0{[*map(list, layers)]}\0{formats}\0{setup.model}")
            interval = -(-options.checkpoints.interval // size) * size
        self.policy = options.checkpoints.policy(interval)
        keys = options.cls.sizes(options.options, setup.geometry)
        token_bytes = keys.count_bytes(setup.geometry.max_seq_len, lambda size: size) / setup.geometry.max_seq_len
        num_displaced = int(region.size / token_bytes) if token_bytes else 0
        self.slots, self.store = StateSlots(region, self.policy, num_displaced, setup.clock), StateStore(region, layers)
        self.sequences: set[StateSequence] = set()
        self.promises: dict[BlockHash, StateSequence] = {}  # by checkpoint: the sequence that is to make it
        self.counter = count()
        self._begun_at = setup.clock()
        self._located: Rows[StateSequence] = Rows([], [])
        self._located_keys: Rows[Any] = Rows([], [])  # the same rows, of the strategy's sequences

    @classmethod
    def sizes(cls, options: PairedStrategy, geometry: Geometry) -> Sizes:
        keys = options.cls.sizes(options.options, geometry)
        return Sizes(
            [*keys.block_bytes, compute_slot_bytes(geometry.states)],
            lambda num_tokens: [*keys.count_blocks(num_tokens), SLOTS_PER_SEQUENCE],
        )

    # ---------------------------------------------------------------- sequences
    def open(self, text: Text) -> StateSequence | None:
        if (slot := self.slots.allocate()) is None:
            return None
        keys = None
        try:
            keys = self.strategy.open(text)
            if keys is not None:
                check_new(keys, self.sequences)
                opened = self._pair(text, keys, slot)
        except BaseException:
            self.slots.release(slot)
            if isinstance(keys, KVSequence) and all(each.keys is not keys for each in self.sequences):
                keys.close()
            raise
        if keys is None:
            self.slots.release(slot)
            return None
        try:
            opened.restore_checkpoint()
        except BaseException:
            opened.close()
            raise
        return opened

    def _pair(self, text: Text, keys: KVSequence, slot: int) -> StateSequence:
        size = 1 if self._hasher is None else self._hasher.block_size
        ends = [i for i, token in enumerate(text.ids, 1) if token in self.setup.geometry.end_ids]
        num_reusable, num_shared, *ends = (each // size * size for each in (text.num_reusable, keys.length, *ends))
        opened = OpenedText(num_reusable, num_shared, [*dict.fromkeys(ends)])
        return StateSequence(self, keys, PrefixNames(self._hasher, text.ids, text.salt), opened, slot)

    # ---------------------------------------------------------------- a step
    def locate(self, rows: Rows[StateSequence]) -> Locations:
        for sequence in self._located.sequences:
            sequence.drop_kept()
        self._located = rows
        self._located_keys = Rows([each.keys for each in rows.sequences], rows.counts, rows.drafts)
        located = Locations(*self.strategy.locate(self._located_keys))
        drafts = rows.drafts or [0] * len(rows)
        each_row = enumerate(zip(rows.sequences, rows.counts, drafts, strict=True))
        kept = [
            (row, count, slot)
            for row, (sequence, num_tokens, num_drafts) in each_row
            for count, slot in sequence.locate(num_tokens, num_drafts).items()
        ]
        read = [NO_SLOT if each.read_slot is None else each.read_slot for each in rows.sequences]
        write = [each.write_slot for each in rows.sequences]
        starts = [0, *accumulate(rows.counts)]
        device = self.store.memory.device
        tensors = (torch.tensor(each, dtype=torch.int32, device=device) for each in (starts, read, write, kept))
        q_start, reads, writes, keep = tensors
        return located._replace(states=States(self.store, q_start, reads, writes, keep.view(-1, 3)))

    def attend(self, layer: int, rows: Rows[Any], q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        self.strategy.attend(layer, self._located_keys, q, k, v, out)

    def poll(self) -> None:
        self.strategy.poll()

    # ---------------------------------------------------------------- memory
    @property
    def keeps_checkpoints(self) -> bool:
        """Whether their share of the memory has room for a checkpoint."""
        return share_to_bytes(self._share, self.setup.memory.limit_bytes) >= self.slots.region.size

    def make_room(self) -> bool:
        """Drop idle checkpoints until one more is within their share of the memory; return whether it is."""
        most = share_to_bytes(self._share, self.setup.memory.limit_bytes)
        while (self.slots.num_checkpoints + 1) * self.slots.region.size > most:
            if not self.slots.evict_one():
                return False
        return True

    @property
    def idle_bytes(self) -> int:
        return self.strategy.idle_bytes + self.slots.idle_bytes

    def evict(self, num_bytes: int) -> int:
        memory = self.setup.memory
        before = memory.held_bytes

        def is_missing() -> bool:
            return before - memory.held_bytes < num_bytes

        # Of checkpoints and blocks of keys the one goes that was used before the other; keys are younger than the last
        # block that was evicted
        while is_missing() and self.strategy.idle_bytes:
            used_at = None if self._aging is None else self._aging.evicted_used_at
            if self.slots.evict_older(self._begun_at if used_at is None else used_at):
                continue
            held = memory.held_bytes
            self.strategy.evict(num_bytes - (before - held) if self._aging is None else 1)
            if memory.held_bytes == held:
                break
        while is_missing() and self.slots.idle_bytes:
            self.slots.evict_one()
        return before - memory.held_bytes

    def clear(self, scope: SaltScope = EVERYTHING) -> int:
        """Remove the checkpoints of the salts in a scope, and what the strategy removes (features.Clearing)."""
        before = self.setup.memory.held_bytes
        self.slots.clear(scope)
        for sequence in self.sequences:
            if scope.includes(sequence.names.salt):
                sequence.names.disable()
                sequence.drop_promises()
        if isinstance(self.strategy, Clearing):
            self.strategy.clear(scope)
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
        check_data(data, self.store.slot_bytes)
        if self._hasher is None or self.slots.find(block_hash) is not None or not self.make_room():
            return False
        if (slot := self.slots.allocate()) is None:
            return False
        self.store.slots[slot].copy_(data)
        self.slots.publish(block_hash, slot, 0, 0)
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
