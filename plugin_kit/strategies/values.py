"""The promise that a strategy returns what the interface says: types and bounds of all values, call by call.

The server checks few of them, as a wrong one harms the strategy's own requests only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from cache_strategies.base import KVCache, KVSequence
from cache_strategies.features import BlockCounting, BlockDescribing, Budgeted, Pinning, PrefixListing, Reporting
from cache_strategies.types import (
    BlockEvents,
    BlockInfo,
    Blocks,
    CachedPrefix,
    CacheUsage,
    Text,
    count_reusable_tokens,
)
from cache_strategies.visible import count_dropped_tokens
from plugin_kit.driver.history import LONGEST
from plugin_kit.driver.steps import Reading, attend
from plugin_kit.driver.texts import random_text
from plugin_kit.driver.world import World
from plugin_kit.promise import promise
from plugin_kit.strategies.trial import NAME, StrategyTrial, get_cache
from server.engine.batch import Batch
from server.engine.instance import MISSES, LocatedRows
from server.engine.isolation.checks import check_locations, check_owner, check_tap

# What `out` of a hook is filled with before the call: a NaN that no computation gives, by the size of its numbers
UNWRITTEN = {2: (torch.int16, 0x7FDE), 4: (torch.int32, 0x7FC0DEAD), 8: (torch.int64, 0x7FF80000DEADBEEF)}


@promise(
    "returns what the interface says",
    "types and bounds of everything that the server calls, and nothing of a hook's output is left unwritten",
)
def check_values(trial: StrategyTrial) -> None:
    """Call everything that the server calls, and check what is returned."""
    world, rng = trial.make_world(max_seats=4), trial.rng
    cache = get_cache(world)
    assert hasattr(cache, "contract"), f"{type(cache).__name__}.__init__ must set self.contract"
    readings: list[Reading] = []
    for seed in range(3):
        text, most = random_text(seed, 90, trial.layers), rng.choice([None, 0, 5])
        readings.append(Reading(cache, text, open_sequence(cache, text.ids, most)))
    while any(reading.left for reading in readings):
        cache.poll()
        rows = [
            (r, n) for r in readings if is_ready(cache, r.sequence) and (n := choose_row(r, rng.choice([1, 6, 25])))
        ]
        assert rows, "all sequences wait for each other: see ready()"
        run_step(world, rows)
        check_reports(world, [reading.sequence for reading in readings])
    check_changes(cache, readings[0])
    for reading in readings:
        reading.sequence.spoiled = True
        reading.sequence.close()
    held = world.memory.held_bytes
    freed = check_int("evict()", cache.evict(world.memory.total_bytes))
    fell = held - world.memory.held_bytes
    assert freed == fell, f"evict() returned {freed}, and freed {fell} bytes"


# ---------------------------------------------------------------- sequences
def open_sequence(cache: KVCache, ids: Sequence[int], max_cached: int | None) -> KVSequence:
    """Open a sequence, and check it."""
    sequence: Any = cache.open(Text(ids, max_cached=max_cached, priority=1))
    assert sequence is not None, "open() returned None although there is memory"
    assert isinstance(sequence, KVSequence), f"open() returned {sequence!r}, not a KVSequence"
    found = check_int("the length of a new sequence", sequence.length)
    most = count_reusable_tokens(ids, max_cached)
    assert found <= most, f"open() found {found} tokens of a prompt of which it may find {most}"
    check_found(sequence)
    return sequence


def check_found(sequence: KVSequence) -> None:
    """Check what a sequence says of the tokens that were found in the cache."""
    found = check_int("the number of found tokens of a sequence", sequence.found)
    assert found <= sequence.length, f"a sequence of {sequence.length} tokens has found {found}"
    assert sequence.miss in MISSES, f"a sequence has the unknown miss {sequence.miss!r}"


def is_ready(cache: KVCache, sequence: KVSequence) -> bool:
    """Return ready(), which does not change the sequence's length."""
    length, ready = sequence.length, check_bool("ready()", sequence.ready())
    assert sequence.length == length, f"ready() has changed a sequence's length from {length} to {sequence.length}"
    return ready


def choose_row(reading: Reading, wanted: int) -> int:
    """Return the number of tokens of a reading's next row, for which there is room."""
    sequence, length = reading.sequence, reading.sequence.length
    stop: Any = sequence.stop
    assert stop is None or (type(stop) is int and stop > length), f"`stop` is {stop!r} after {length} tokens"
    num_tokens = reading.chunk(wanted)
    is_reserved = not num_tokens or check_bool("reserve()", sequence.reserve(num_tokens))
    assert is_reserved, "reserve() found no room in free memory"
    assert type(sequence.length) is int, f"reserve() has made a sequence's length {sequence.length!r}"
    assert sequence.length == length, f"reserve() has changed a sequence's length from {length} to {sequence.length}"
    return num_tokens


class MarkedBatch(Batch):
    """A batch of one strategy that finds parts of a layer's output which were not written."""

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ((instance, located),) = self.parts
        if located.locations[layer_idx] is not None:
            return super().attend(layer_idx, q, k, v)
        out = q.new_empty((q.shape[0], q.shape[1], v.shape[2]))
        dtype, mark = UNWRITTEN[out.itemsize]
        out.view(dtype).fill_(mark)
        instance.strategy.attend(layer_idx, located.rows, q, k, v, out)
        assert not (out.view(dtype) == mark).any(), f"attend() left parts of `out` unwritten in layer {layer_idx}"
        return out


def run_step(world: World, rows: Sequence[tuple[Reading, int]]) -> None:
    """Run a step, and check its addresses, what its hooks write, and the sequences after its commit."""
    cache, lengths = get_cache(world), [reading.sequence.length for reading, _ in rows]
    batch = MarkedBatch([reading.work(n) for reading, n in rows])
    ((_, located),) = batch.parts
    check_located(world, located)
    attend(batch, rows)
    failed = batch.commit()
    assert not failed, f"commit() or compact() failed: {next(iter(failed.values()))}"
    is_exact = cache.contract.exact
    assert not (is_exact and batch.compactions), "compact() has dropped tokens, and contract.exact is True"
    for (reading, n), length in zip(rows, lengths, strict=True):
        found: Any = reading.sequence.length
        assert type(found) is int, f"after commit() a sequence's length is {found!r}"
        assert found == length + n, f"after commit() of {n} tokens a sequence of {length} has {found}"
        check_found(reading.sequence)


def check_located(world: World, located: LocatedRows) -> None:
    """Check what locate() returned: positions, addresses and the tap."""
    cache = get_cache(world)
    geometry = cache.setup.geometry
    for num_tokens, position in zip(located.rows.counts, located.positions, strict=True):
        most = geometry.max_seq_len - num_tokens
        assert type(position) is int, f"a sequence has the position {position!r}"
        assert 0 <= position <= most, f"a sequence has the position {position}, which must be from 0 to {most}"
    assert len(located.locations) == len(geometry.layers), "locate() has not located each layer"
    check_locations(located.locations)
    cache.setup.check_slots(located.locations, located.rows.num_tokens)
    check_owner(located.locations, world.memory, NAME)
    if located.tap is not None:
        check_tap(located.tap, located.rows.num_tokens, geometry)


def check_changes(cache: KVCache, reading: Reading) -> None:
    """Check fork() and truncate() of a sequence."""
    length = reading.sequence.length
    if type(reading.sequence).fork is not KVSequence.fork:
        child: Any = reading.sequence.fork()
        assert child is not None, "fork() returned None although there is memory"
        assert isinstance(child, KVSequence), f"fork() returned {child!r}, not a KVSequence"
        assert child is not reading.sequence, "fork() returned the sequence itself"
        assert child.length == length, f"a fork of {length} tokens has {child.length}"
        child.close()
    if cache.contract.rewind != 0:
        reading.sequence.truncate(length - 1)
        found = check_int("the length of a sequence after truncate()", reading.sequence.length)
        assert found < length, f"a sequence has {found} tokens after truncate() to {length - 1}"


# ---------------------------------------------------------------- reports
def check_reports(world: World, sequences: Sequence[KVSequence]) -> None:
    """Call what only reports."""
    cache = get_cache(world)
    if isinstance(cache, Reporting):
        check_plain("usage()", cache.usage(), CacheUsage)
        check_plain("blocks()", cache.blocks(), Blocks)
    if isinstance(cache, BlockCounting):
        check_plain("collect_block_events()", cache.collect_block_events(), BlockEvents | None)
    check_int(f"what sizes() says of {LONGEST} tokens", world.count_bytes(NAME, LONGEST))
    check_int("idle_bytes", cache.idle_bytes)
    for region, blocks in cache.pinned_blocks().items() if isinstance(cache, Pinning) else ():
        assert region in cache.setup.memory.regions, "pinned_blocks() named a region of others"
        for block in blocks:
            check_int("a block of pinned_blocks()", block)
    if isinstance(cache, PrefixListing):
        check_plain("list_prefixes()", cache.list_prefixes(LONGEST), tuple[list[CachedPrefix], int])
    if isinstance(cache, BlockDescribing):
        for region in cache.setup.memory.regions:
            check_plain("describe_block()", cache.describe_block(region, 0), BlockInfo | None)
    for sequence in sequences:
        most = 0 if cache.contract.exact else sequence.length
        for layer in range(len(world.layers)):
            if (visible := cache.count_visible(layer, sequence.length)) is not None:
                visible = check_int("count_visible()", visible)
                assert visible <= sequence.length, f"count_visible() returned {visible} of {sequence.length} tokens"
        dropped = check_int("what count_visible() leaves out", count_dropped_tokens(cache, sequence.length))
        assert dropped <= most, (
            f"by count_visible() {dropped} tokens are dropped of a sequence, and at most {most} may be"
        )
        if isinstance(cache, Budgeted):
            budget: Any = cache.budget(sequence.length)
            least = sequence.length if cache.contract.exact else 0
            fits = budget is None or (type(budget) is int and least <= budget <= sequence.length)
            assert fits, (
                f"budget({sequence.length}) returned {budget!r}, which must be from {least} to {sequence.length}"
            )


def check_int(what: str, found: Any) -> int:
    assert type(found) is int, f"{what} is {found!r}, not an int"
    assert found >= 0, f"{what} is {found}"
    return found


def check_bool(what: str, found: Any) -> bool:
    assert type(found) is bool, f"{what} returned {found!r}, not a bool"
    return found


def check_plain(what: str, found: Any, kind: Any) -> None:
    """Assert that a report has plain values of the right types, as it is sent to clients in JSON."""
    try:
        msgspec.json.decode(msgspec.json.encode(found), type=kind)
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        raise AssertionError(f"{what} returned {found!r}: {error}") from error
