"""Promises about memory: what a strategy reads, writes, takes, says that it takes, and gives back."""

from __future__ import annotations

import torch

from cache_strategies.base import KVSequence
from cache_strategies.features import Reporting
from cache_strategies.types import NO_SALT, Salt, Text
from config.settings import StrategySettings
from plugin_kit.driver.features import check_evict
from plugin_kit.driver.steps import Reading, attend, find_instance, read_through, step
from plugin_kit.driver.texts import random_text, spliced
from plugin_kit.driver.visible import check_last_queries
from plugin_kit.driver.world import POISON, World
from plugin_kit.promise import promise
from plugin_kit.strategies.trial import LENGTH, NAME, StrategyTrial, get_cache, read_rows
from server.engine.batch import Batch
from server.engine.instance_reports import read_usage


# ---------------------------------------------------------------- what is read and written
@promise(
    "reads no unused memory", "neither memory that was never written nor what another sequence left there changes a bit"
)
def check_unused_memory(trial: StrategyTrial) -> None:
    """Compare the bits of texts in memory that was never written with those in memory full of NaN or other texts."""
    for dtype in (torch.float32, torch.bfloat16):
        worlds = [trial.make_world(dtype=dtype, fill=fill) for fill in (0, POISON)]
        outs = [read_through(trial.open(world, 100), 13) for world in worlds]
        for layer, (clean, poisoned) in enumerate(zip(*outs, strict=True)):
            assert not poisoned.isnan().any(), f"layer {layer} read memory that was never written"
            assert torch.equal(clean, poisoned), f"memory that was never written changes the output of layer {layer}"
    fresh = read_through(trial.open(trial.make_world(), 50, seed=2), 13)
    world = trial.make_world()
    used = trial.open(world, 120)
    read_through(used, 40)
    used.sequence.close()
    after = read_through(trial.open(world, 50, seed=2), 13)
    for layer, (a, b) in enumerate(zip(after, fresh, strict=True)):
        assert torch.equal(a, b), f"what an earlier sequence left behind changes the output of layer {layer}"


@promise(
    "writes only its own memory",
    "a step writes to blocks that the strategy has allocated, and to no key of another sequence",
)
def check_writes(trial: StrategyTrial) -> None:
    """Run steps beside another strategy, and look at which bytes of the memory have changed."""
    strategies = {NAME: trial.settings, "other": StrategySettings(kind="paged", block_size=7)}
    world = World(strategies, trial.ops, max_seats=3, layers=trial.layers)
    texts = [random_text(seed, LENGTH, trial.layers) for seed in range(4)]
    other = world.open("other", texts[0])
    readings = [world.open(NAME, text, max_cached=0) for text in texts[1:]]
    for _ in range(6):
        rows = [(r, r.chunk(trial.rng.choice([1, 6, 20]))) for r in trial.rng.sample(readings, 2)]
        batch = Batch([reading.work(n) for reading, n in rows])
        before = world.copy_memory()
        attend(batch, rows)
        for old, new in zip(before, world.list_tensors(), strict=True):
            changed = new != old
            for region in world.memory.list_regions(NAME):
                if region.memory.data_ptr() == new.data_ptr():
                    for block in region.placement.list_used():
                        changed[block * region.page_bytes :][: region.size] = False
            assert not changed.any(), "a step wrote to memory that the strategy has not allocated"
        batch.commit()
    everybody = [(reading, reading.chunk(5)) for reading in (other, *readings)]
    check_last_queries(step(everybody, keys=True), everybody, trial.layers)  # their keys are still their own
    world.check_integrity()


# ---------------------------------------------------------------- how much is taken
@promise(
    "sizes is an upper bound",
    "a sequence of n tokens never holds more blocks of any region than sizes() says, and never needs more",
)
def check_upper_bound(trial: StrategyTrial) -> None:
    """Read a text with no more memory than sizes() says, and watch what is held at each step."""
    world = trial.make_world()
    regions = get_cache(world).setup.memory.regions
    wanted, found = [*world.get_sizes(NAME).block_bytes], [region.block_bytes for region in regions]
    assert wanted == found, f"sizes() names blocks of {wanted} bytes, and the regions have blocks of {found}"
    sizes = [world.count_bytes(NAME, length) for length in range(1, LENGTH + 1)]
    assert sizes == sorted(sizes), "what sizes() says falls while the number of tokens rises"
    drawn = trial.rng.randint(2, LENGTH)
    # The second text is generated from its first token on, so that its lengths begin with the shortest.
    for length, prompt in ((drawn, trial.rng.randint(1, drawn)), (LENGTH, 1)):
        world = trial.make_world()
        cache = get_cache(world)
        text = random_text(1, length, trial.layers)
        prompted = _must(cache.open(Text(text.ids[:prompt], max_cached=0)))  # the rest is generated
        reading = Reading(cache, text, prompted)
        while reading.left:
            n = reading.chunk(trial.rng.choice([1, 7, 40]))
            end = max(prompt, reading.sequence.length + n)
            batch = Batch([reading.work(n)])
            attend(batch, [(reading, n)])
            _check_held(world, end)
            batch.commit()
            _check_held(world, end)
        reading.sequence.close()
        cache.evict(world.memory.total_bytes)
        world.memory.set_share(NAME, floor=0, limit=world.count_bytes(NAME, length))
        again = trial.open(world, length)
        read_rows(again, trial.draw_rows(length))


def _check_held(world: World, num_tokens: int) -> None:
    """Assert that the only sequence, of `num_tokens` tokens, holds no more blocks than sizes() says."""
    promised = world.get_sizes(NAME).count_blocks(num_tokens)
    for region, most in zip(get_cache(world).setup.memory.regions, promised, strict=True):
        assert region.num_held <= most, (
            f"a sequence of {num_tokens} tokens holds {region.num_held} blocks of {region.what}; sizes(): {most}"
        )


@promise("usage adds up", "usage() agrees with the memory and with the open sequences")
def check_usage(trial: StrategyTrial) -> None:
    """Compare usage() with the memory and with the open sequences, while sequences come and go."""
    world = trial.make_world(max_seats=4)
    readings: list[Reading] = []
    for i in range(12):
        if len(readings) == 4 or (readings and trial.rng.random() < 0.3):
            gone = readings.pop(trial.rng.randrange(len(readings)))
            gone.sequence.close()
        readings.append(trial.open(world, 60, seed=i))
        rows = [(reading, n) for reading in readings if (n := reading.chunk(trial.rng.choice([1, 7, 30])))]
        step(rows)
        usage = read_usage(find_instance(get_cache(world)))
        held = world.memory.held_bytes
        assert usage.reserved == held, f"usage(): reserved is {usage.reserved}, and {held} bytes of blocks are held"
        parts = usage.used + usage.idle + usage.wasted
        assert parts == usage.reserved, f"usage(): used + idle + wasted is {parts}, not reserved, {usage.reserved}"
        assert min(usage) >= 0, f"usage() has a negative number: {usage}"
        if isinstance(get_cache(world), Reporting):
            assert usage.seats == len(readings), f"usage(): seats is {usage.seats}, and {len(readings)} are open"
        assert usage.tokens <= sum(r.sequence.length for r in readings), f"usage(): {usage.tokens} tokens are too many"
        world.check_integrity()


# ---------------------------------------------------------------- what is given back
@promise("frees all memory", "close() frees a sequence's memory, or keeps it idle until evict()")
def check_frees(trial: StrategyTrial) -> None:
    """Open, fork, read and close more sequences than may be open at once, then look for blocks that are still held."""
    world, rng = trial.make_world(max_seats=3), trial.rng
    cache = get_cache(world)
    for round_ in range(3):
        readings = [trial.open(world, 100, seed=10 * round_ + i) for i in range(3)]
        for reading in readings[:2]:
            read_rows(reading, [rng.choice([1, 5, 30]) for _ in range(rng.randint(1, 3))])
        assert readings[2].sequence.reserve(readings[2].chunk(9))  # and never used, as if it was preempted
        still_open: list[KVSequence] = [reading.sequence for reading in readings]
        still_open.pop().close()
        child = still_open[0].fork()
        still_open += [] if child is None else [child]
        rng.shuffle(still_open)
        for sequence in still_open:
            if rng.random() < 0.3:
                sequence.spoiled = True
            sequence.close()
        world.check_integrity()
        if isinstance(cache, Reporting):
            usage = cache.usage()
            assert usage.seats == usage.tokens == usage.used == 0, f"all sequences are closed, and usage() says {usage}"
        idle, held = cache.idle_bytes, world.memory.held_bytes
        assert held == idle, f"all sequences are closed: {held} bytes are held, and {idle} of them could be freed"
        check_evict(cache, world.memory.total_bytes)
        left = world.memory.held_bytes
        assert not left, f"{left} bytes are still held when all sequences are closed and idle blocks are evicted"


# ---------------------------------------------------------------- shared prefixes
SALTS = (NO_SALT, Salt("tenant", ""), Salt("tenant", "salt"))


@promise(
    "shares prefixes by salt",
    "open() finds tokens of an equal salt only, never more than the common prefix, and their keys are right",
)
def check_sharing(trial: StrategyTrial) -> None:
    """Open texts that begin alike, with equal and other salts; what is found cached must be the text's own keys."""
    world, rng = trial.make_world(max_seats=4), trial.rng
    cache = get_cache(world)
    first = random_text(1, 120, trial.layers)
    reading = Reading(cache, first, _must(cache.open(Text(first.ids, salt=SALTS[1]))))
    assert reading.sequence.length == 0, f"{reading.sequence.length} tokens were found cached in an empty cache"
    read_rows(reading, trial.draw_rows(120))
    if rng.random() < 0.5:
        reading.sequence.close()
    for salt in SALTS:
        at = rng.randint(1, 119)
        text = spliced(first, random_text(2, 120, trial.layers), at)
        most = rng.choice([None, rng.randint(0, 119)])
        sequence = _must(cache.open(Text(text.ids, salt=salt, max_cached=most)))
        limit = min(at, 119 if most is None else most) if salt == SALTS[1] else 0
        assert sequence.length <= limit, (
            f"open() found {sequence.length} tokens cached of a text with {at} common tokens, max_cached={most} and "
            f"{'an equal' if salt == SALTS[1] else 'another'} salt: at most {limit} may be found"
        )
        size = cache.contract.granularity
        assert sequence.length % size == 0 if size else not sequence.length, (
            f"open() found {sequence.length} tokens, and the contract says granularity={size}"
        )
        assert sequence.found == sequence.length, (
            f"open() returned a sequence with found={sequence.found}, length={sequence.length}"
        )
        if sequence.ready():
            again = Reading(cache, text, sequence)
            rows = [(again, again.chunk(9))]
            check_last_queries(step(rows, keys=True), rows, trial.layers)
        sequence.close()
    world.check_integrity()


def _must(sequence: KVSequence | None) -> KVSequence:
    assert sequence is not None, "open() returned None although there is memory"
    return sequence
