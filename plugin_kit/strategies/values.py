"""The promise that a strategy returns what the interface says: types and bounds of all values, call by call.

The server checks few of them, as a wrong one harms the strategy's own requests only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import msgspec
import torch
from torch import Tensor

from cache_strategies.base import KVCache, Plan, Row, Seat
from cache_strategies.features import BlockDescribing, PrefixListing
from cache_strategies.types import BlockEvents, BlockInfo, Blocks, CachedPrefix, CacheUsage, Miss, count_reusable_tokens
from plugin_kit.driver.history import LONGEST
from plugin_kit.driver.steps import Reading, attend
from plugin_kit.driver.texts import random_text
from plugin_kit.driver.world import World
from plugin_kit.promise import Promise
from plugin_kit.strategies.trial import NAME, StrategyTrial, get_cache
from server.engine.batch import Batch
from server.engine.isolation.checks import check_locations, check_owner, check_tap

MISSES = {*get_args(Miss), None}
# What `out` of a hook is filled with before the call: a NaN that no computation gives, by the size of its numbers
UNWRITTEN = {2: (torch.int16, 0x7FDE), 4: (torch.int32, 0x7FC0DEAD), 8: (torch.int64, 0x7FF80000DEADBEEF)}


def check_values(trial: StrategyTrial) -> None:
    """Call everything that the server calls, and check what is returned."""
    world, rng = trial.make_world(max_seats=4), trial.rng
    cache = get_cache(world)
    assert hasattr(cache, "contract"), f"{type(cache).__name__}.__init__ must set self.contract"
    readings: list[Reading] = []
    for seed in range(3):
        text, most = random_text(seed, 90, trial.layers), rng.choice([None, 0, 5])
        seat = open_seat(cache, text.ids, most)
        cache.retain(seat, priority=1, ttl=None)
        readings.append(Reading(cache, text, seat))
    while any(reading.left for reading in readings):
        cache.poll()
        rows = [(r, n) for r in readings if is_ready(cache, r.seat) and (n := choose_row(r, rng.choice([1, 6, 25])))]
        assert rows, "all seats wait for each other: see ready()"
        run_step(world, rows)
        check_reports(world, [reading.seat for reading in readings])
    check_changes(cache, readings[0])
    for reading in readings:
        cache.discard(reading.seat)
        cache.close(reading.seat)
    held = world.memory.held_bytes
    freed = check_int("evict()", cache.evict(world.memory.total_bytes))
    fell = held - world.memory.held_bytes
    assert freed == fell, f"evict() returned {freed}, and freed {fell} bytes"


# ---------------------------------------------------------------- sequences
def open_seat(cache: KVCache, ids: Sequence[int], max_cached: int | None) -> Seat:
    """Open a seat, and check it."""
    seat: Any = cache.open(ids, max_cached=max_cached)
    assert seat is not None, "open() returned None although there is memory"
    assert isinstance(seat, Seat), f"open() returned {seat!r}, not a Seat"
    found = check_int("the length of a new seat", seat.length)
    most = count_reusable_tokens(ids, max_cached)
    assert found <= most, f"open() found {found} tokens of a prompt of which it may find {most}"
    check_found(seat)
    return seat


def check_found(seat: Seat) -> None:
    """Check what a seat says of the tokens that were found in the cache."""
    cached = check_int("the number of cached tokens of a seat", seat.cached)
    assert cached <= seat.length, f"a seat of {seat.length} tokens has {cached} cached ones"
    assert seat.miss in MISSES, f"a seat has the unknown miss {seat.miss!r}"


def is_ready(cache: KVCache, seat: Seat) -> bool:
    """Return ready(), which does not change the seat's length."""
    length, ready = seat.length, check_bool("ready()", cache.ready(seat))
    assert seat.length == length, f"ready() has changed a seat's length from {length} to {seat.length}"
    return ready


def choose_row(reading: Reading, wanted: int) -> int:
    """Return the number of tokens of a reading's next row, for which there is room."""
    cache, seat = reading.cache, reading.seat
    limit: Any = cache.row_limit(seat)
    assert limit is None or (type(limit) is int and limit > 0), (
        f"row_limit() returned {limit!r}, not a number of tokens"
    )
    num_tokens, length = min(wanted, reading.left, limit or wanted), seat.length
    assert not num_tokens or check_bool("grow()", cache.grow(seat, num_tokens)), "grow() found no room in free memory"
    assert type(seat.length) is int, f"grow() has made a seat's length {seat.length!r}"
    assert seat.length == length, f"grow() has changed a seat's length from {length} to {seat.length}"
    return num_tokens


class MarkedBatch(Batch):
    """A batch of one strategy that finds parts of a layer's output which were not written."""

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ((instance, _, planned),) = self.parts
        out = q.new_empty((q.shape[0], q.shape[1], v.shape[2]))
        dtype, mark = UNWRITTEN[out.itemsize]
        out.view(dtype).fill_(mark)
        instance.strategy.attend(planned.plan, layer_idx, q, k, v, out)
        assert not (out.view(dtype) == mark).any(), f"attend() left parts of `out` unwritten in layer {layer_idx}"
        return out


def run_step(world: World, rows: Sequence[tuple[Reading, int]]) -> None:
    """Run a step, and check its plan, what its hooks write, and the seats after its commit."""
    cache, lengths = get_cache(world), [reading.seat.length for reading, _ in rows]
    batch = MarkedBatch([reading.work(n) for reading, n in rows])
    ((_, planned_rows, planned),) = batch.parts
    check_plan(world, planned.plan, planned_rows)
    attend(batch, rows)
    failed = batch.commit()
    assert not failed, f"commit() or compact() failed: {next(iter(failed.values()))}"
    for compaction in batch.compactions.values():
        most = 0 if cache.contract.exact else max(reading.seat.length for reading, _ in rows)
        assert compaction.dropped_tokens <= most, f"compact() dropped {compaction.dropped_tokens} of {most} tokens"
    for (reading, n), length in zip(rows, lengths, strict=True):
        found: Any = reading.seat.length
        assert type(found) is int, f"after commit() a seat's length is {found!r}"
        assert found == length + n, f"after commit() of {n} tokens a seat of {length} has {found}"
        check_found(reading.seat)


def check_plan(world: World, plan: Plan, rows: Sequence[Row]) -> None:
    """Check a plan's rows, positions, addresses and tap."""
    assert isinstance(plan, Plan), f"plan() returned {plan!r}, not a Plan"
    assert [*plan.rows] == [*rows], "the plan has other rows than were passed in"
    cache = get_cache(world)
    longest = cache.setup.geometry.max_seq_len
    for row, position in zip(rows, plan.list_positions(), strict=True):
        most = longest - row.num_tokens
        assert type(position) is int, f"a seat has the position {position!r}"
        assert 0 <= position <= most, f"a seat has the position {position}, which must be from 0 to {most}"
    geometry = cache.setup.geometry
    locations = plan.list_kv_locations(len(geometry.layers))
    check_locations(locations)
    cache.check_plan(plan)
    check_owner(locations, world.memory, NAME)
    if plan.query_tap is not None:
        check_tap(plan.query_tap, sum(row.num_tokens for row in rows), geometry)


def check_changes(cache: KVCache, reading: Reading) -> None:
    """Check fork() and crop() of a seat."""
    length = reading.seat.length
    if cache.contract.forkable:
        child: Any = cache.fork(reading.seat)
        assert child is not None, "fork() returned None although there is memory, and contract.forkable is True"
        assert isinstance(child, Seat), f"fork() returned {child!r}, not a Seat"
        assert child is not reading.seat, "fork() returned the seat itself"
        assert child.length == length, f"a fork of {length} tokens has {child.length}"
        cache.close(child)
    if cache.contract.rewind != 0:
        cache.crop(reading.seat, length - 1)
        found = check_int("the length of a seat after crop()", reading.seat.length)
        assert found < length, f"a seat has {found} tokens after crop() to {length - 1}"


# ---------------------------------------------------------------- reports
def check_reports(world: World, seats: Sequence[Seat]) -> None:
    """Call what only reports."""
    cache = get_cache(world)
    check_plain("usage()", cache.usage(), CacheUsage)
    check_plain("blocks()", cache.blocks(), Blocks)
    check_plain("collect_block_events()", cache.collect_block_events(), BlockEvents | None)
    check_int(f"what sizes() says of {LONGEST} tokens", world.count_bytes(NAME, LONGEST))
    check_int("idle_bytes", cache.idle_bytes)
    for region, blocks in cache.pinned_blocks().items():
        assert region in cache.setup.memory.regions, "pinned_blocks() named a region of others"
        for block in blocks:
            check_int("a block of pinned_blocks()", block)
    if isinstance(cache, PrefixListing):
        check_plain("list_prefixes()", cache.list_prefixes(LONGEST), tuple[list[CachedPrefix], int])
    if isinstance(cache, BlockDescribing):
        for region in cache.setup.memory.regions:
            check_plain("describe_block()", cache.describe_block(region, 0), BlockInfo | None)
    for seat in seats:
        most = 0 if cache.contract.exact else seat.length
        dropped = check_int("count_dropped_tokens()", cache.count_dropped_tokens(seat))
        assert dropped <= most, f"count_dropped_tokens() returned {dropped} for a seat that may have dropped {most}"
        budget: Any = cache.token_budget(seat.length)
        least = seat.length if cache.contract.exact else 0
        fits = budget is None or (type(budget) is int and least <= budget <= seat.length)
        assert fits, f"token_budget({seat.length}) returned {budget!r}, which must be from {least} to {seat.length}"
        cache.visible_positions(seat.length + 1, world.layers[0])


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


PROMISES: Sequence[Promise[StrategyTrial]] = (
    Promise(
        "returns what the interface says",
        "types and bounds of everything that the server calls, and nothing of a hook's output is left unwritten",
        check_values,
    ),
)
