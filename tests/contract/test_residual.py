"""residual: each query reads the latest and first tokens in full, and all others as they are quantized."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from cache_strategies.residual.options import ResidualOptions
from config.errors import SettingsError
from config.settings import StrategySettings
from kernels.types import LayerSpec
from plugin_kit.driver.steps import Reading, attend, count_until_stop, step
from plugin_kit.driver.texts import random_text, spliced, with_poison
from plugin_kit.strategies.attention import check_nan_isolation
from plugin_kit.strategies.trial import StrategyTrial
from server.engine.batch import Batch
from tests.contract import harness
from tests.contract.harness import World
from tests.contract.residual_attention import (
    BLOCK,
    LAYERS,
    LENGTH,
    SINKS,
    Read,
    make_world,
    open_text,
    read_rows,
)

pytestmark = pytest.mark.every_backend

FORMATS = [("int8", "int4"), ("int4", "int4"), ("int8", "int8"), ("int4", "model"), ("model", "int8")]
RING = 2 * LENGTH - 1
WIDE = 150  # tokens of a window of which no block is dropped


def draw_row(read: Read, rng: random.Random) -> tuple[Read, int]:
    """Return a text and the size of its next row, of any size that it may have."""
    return read, read.reading.chunk(rng.choice([1, 1, 2, 3, LENGTH, 50]))


# ---------------------------------------------------------------- what queries read
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("formats", FORMATS, ids="-".join)
def test_queries_read_the_latest_and_the_first_tokens_in_full(
    formats: tuple[str, str], dtype: torch.dtype, rng: random.Random
) -> None:
    options = {"residual_length": rng.choice([1, 2, LENGTH, 30]), "sinks": rng.choice([0, 1, SINKS, 9])}
    options |= {"max_row": rng.choice([None, 4, 17]), "k_dtype": formats[0], "v_dtype": formats[1]}
    print(options)
    world = make_world(dtype=dtype, **options)
    reads = [open_text(world, random_text(seed, 70, LAYERS, dtype), max_cached=0) for seed in rng.sample(range(99), 3)]
    while unread := [read for read in reads if read.reading.left]:
        read_rows([draw_row(read, rng) for read in rng.sample(unread, rng.randint(1, len(unread)))])
        world.check_integrity()


def test_a_row_ends_where_quantized_keys_begin_and_is_no_longer_than_the_ring_allows() -> None:
    sequence = open_text(make_world(), random_text(1, 60, LAYERS)).reading.sequence
    assert count_until_stop(sequence, 99) == LENGTH
    world = make_world(max_row=25)
    read = open_text(world, random_text(1, 60, LAYERS))
    sizes = []
    while read.reading.left:
        sizes.append(read.reading.chunk(99))
        read_rows([(read, sizes[-1])])
    assert sizes == [SINKS + LENGTH, 25, 25, 1]


# ---------------------------------------------------------------- what was found, forked or dropped
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("formats", FORMATS, ids="-".join)
def test_found_tokens_are_known_as_they_are_quantized(
    formats: tuple[str, str], dtype: torch.dtype, rng: random.Random
) -> None:
    world = make_world(dtype=dtype, k_dtype=formats[0], v_dtype=formats[1])
    text = random_text(1, 70, LAYERS, dtype)
    first = open_text(world, text)
    while first.length < 50:
        read_rows([draw_row(first, rng)])
    if rng.random() < 0.5:
        first.reading.sequence.close()
    for number, common in enumerate((rng.randint(BLOCK, 45), rng.randint(0, 12)), start=2):
        other = open_text(world, spliced(text, random_text(number, 70, LAYERS, dtype), common))
        assert other.length == common // BLOCK * BLOCK
        while other.reading.left:
            read_rows([draw_row(other, rng)])
        world.check_integrity()


def test_sinks_of_a_prefix_can_be_evicted_and_come_back(rng: random.Random) -> None:
    world = make_world()
    cache, text = world.caches["residual"], random_text(1, 50, LAYERS)
    first = open_text(world, text)
    while first.reading.left:
        read_rows([draw_row(first, rng)])
    sinks = cache.setup.memory.regions[-1]
    assert sinks.num_held == 1
    assert cache.evict(cache.idle_bytes) >= sinks.size
    assert sinks.num_held == 0
    second = open_text(world, text, has_sinks=False)
    assert second.length == 50 - 50 % BLOCK
    read_rows([(second, 1)])
    first.reading.sequence.close()
    second.reading.sequence.close()
    third = open_text(world, text, max_cached=0)
    while third.reading.left:
        read_rows([draw_row(third, rng)])
    assert sinks.num_held == 1, "a sequence that has computed them"
    third.reading.sequence.close()
    assert cache.clear() > sinks.size  # type: ignore[attr-defined]
    assert not world.memory.held_bytes


def test_sinks_that_are_no_numbers_are_not_found() -> None:
    world = make_world()
    text = random_text(1, 30, LAYERS)
    bad = open_text(world, with_poison(text, [1], float("nan")))
    while bad.reading.left:
        step([(bad.reading, bad.reading.chunk(LENGTH))])
    bad.reading.sequence.spoiled = True
    bad.reading.sequence.close()
    read = open_text(world, text)
    assert not read.length
    while read.reading.left:
        read_rows([(read, read.reading.chunk(LENGTH))])
    again = open_text(world, text)
    assert again.length
    read_rows([(again, 1)])


def test_tokens_that_another_sequence_computes_are_waited_for() -> None:
    world = make_world()
    text = random_text(1, 40, LAYERS)
    first = open_text(world, text)
    second = open_text(world, text)
    assert second.length == 40 - BLOCK
    while first.length < 40 - BLOCK:
        assert not second.reading.sequence.ready()
        read_rows([(first, first.reading.chunk(99))])
    assert second.reading.sequence.ready()
    read_rows([(second, 1)])


def test_forks_know_what_their_parent_knows(rng: random.Random) -> None:
    world = make_world()
    text = random_text(1, 80, LAYERS)
    at = rng.randint(1, 40)
    parent = open_text(world, text.head(at))
    while parent.reading.left:
        read_rows([(parent, parent.reading.chunk(LENGTH))])
    parent.reading.text = text
    reads = [parent, *(parent.fork(spliced(text, random_text(seed, 80, LAYERS), at)) for seed in (2, 3))]
    for i in range(6):
        read_rows([draw_row(read, rng) for read in reads])
        world.check_integrity()
        if i == 2:
            reads.pop(0).reading.sequence.close()


def test_a_fork_needs_memory_for_its_latest_tokens() -> None:
    world = make_world(max_seats=1)
    read = open_text(world, random_text(1, 30, LAYERS))
    assert read.reading.sequence.fork() is None
    layers = [spec for spec in LAYERS if spec.window is None]
    most = make_world(layers=layers).count_bytes("residual", 160)
    small = make_world(layers=layers, memory_bytes=most)
    read = open_text(small, random_text(1, 160, layers))
    while read.reading.left:
        read_rows([(read, read.reading.chunk(LENGTH))])
    held = small.memory.held_bytes
    assert read.reading.sequence.fork() is None
    assert small.memory.held_bytes == held
    small.check_integrity()


@pytest.mark.parametrize("dropped", [(1, 2, 60), (LENGTH, 30), (RING, RING, 1), (30, 9)], ids=str)
@pytest.mark.parametrize("length", [LENGTH, 12], ids="residual_length={}".format)
def test_dropped_tokens_bring_back_older_ones_as_they_are_quantized(
    length: int, dropped: Sequence[int], rng: random.Random
) -> None:
    layers = [spec._replace(window=spec.window and WIDE) for spec in LAYERS]  # so that paged drops no blocks of them
    world = make_world(layers=layers, residual_length=length, max_row=LENGTH)
    read = open_text(world, random_text(1, 90, layers), max_cached=0)
    for seed, num_tokens in enumerate(dropped):
        while read.length < 44:
            read_rows([draw_row(read, rng)])
        while read.length < 60:  # so the ring has overwritten all but the latest
            read_rows([(read, 1)])
        kept = read.length - num_tokens
        text = spliced(read.reading.text, random_text(2 + seed, 90, layers), kept)
        read.truncate(text, kept, overwritten=read.length - length - LENGTH + 1)
        for _ in range(rng.randint(0, 6)):
            if read.reading.left:
                read_rows([draw_row(read, rng)])
                world.check_integrity()


def test_rejected_drafts_overwrite_nothing_that_is_read(rng: random.Random) -> None:
    world = make_world()
    read = open_text(world, random_text(1, 80, LAYERS))
    while read.reading.left > LENGTH:
        kept = read.length + rng.randint(0, 2)
        batch = step_without_commit(read.reading, count_until_stop(read.reading.sequence, LENGTH))
        read.reading.sequence.commit(read.reading.text.ids[read.length : min(kept, batch)])
        read_rows([(read, 1)])


def step_without_commit(reading: Reading, count: int) -> int:
    """Locate and compute a row of `count` tokens; return where it ends."""
    attend(Batch([reading.work(count)]), [(reading, count)])
    return reading.sequence.length + count


# ---------------------------------------------------------------- what is not finite
@pytest.mark.parametrize("formats", FORMATS, ids="-".join)
def test_what_is_not_finite_stays_in_its_sequence_and_with_queries_that_see_it(
    formats: tuple[str, str], rng: random.Random
) -> None:
    settings = StrategySettings.model_validate(
        {"kind": "residual", "residual_length": 8, "k_dtype": formats[0], "v_dtype": formats[1]}
    )
    check_nan_isolation(StrategyTrial(settings, harness.make_ops(), rng))


# ---------------------------------------------------------------- memory, options and contract
def test_a_sequence_takes_a_block_for_its_latest_tokens_beside_paged_ones() -> None:
    world = make_world()
    paged = World(
        {"residual": StrategySettings(kind="paged", k_dtype="int8", v_dtype="int4", block_size=BLOCK)}, layers=LAYERS
    )
    slots = SINKS + RING
    per_token = sum(4 * s.num_kv_heads * (s.head_dim + s.v_head_dim) for s in LAYERS)
    sizes, without = (each.get_sizes("residual") for each in (world, paged))
    assert sizes.block_bytes[:-2] == without.block_bytes
    for num_slots, size in zip((slots, SINKS), sizes.block_bytes[-2:], strict=True):
        assert num_slots * per_token <= size <= num_slots * per_token + 64 * 2 * len(LAYERS)
    for n in (1, 50, 160):
        assert sizes.count_blocks(n) == [*without.count_blocks(n), 1, int(n >= BLOCK)]
    read = open_text(world, random_text(1, 60, LAYERS))
    before = world.caches["residual"].usage().used  # type: ignore[attr-defined]
    step([(read.reading, 5)])
    after = world.caches["residual"].usage()  # type: ignore[attr-defined]
    assert after.used - before > 5 * per_token
    read.reading.sequence.close()
    world.caches["residual"].evict(1 << 40)
    assert not world.memory.held_bytes


def test_it_promises_neither_exact_keys_nor_the_same_bits_in_other_rows() -> None:
    contract = make_world().caches["residual"].contract
    assert not contract.exact
    assert not contract.chunk_invariant
    assert contract.replayable
    as_computed = make_world(k_dtype="model", v_dtype="model").caches["residual"].contract
    assert as_computed.exact


def test_defaults_are_those_of_small_blocks_with_128_tokens_in_full() -> None:
    options = ResidualOptions()
    assert (options.k_dtype, options.v_dtype, options.residual_length, options.sinks) == ("int8", "int4", 128, 4)
    with pytest.raises(SettingsError, match="v_dtype=int4 needs head dimensions that are multiples of 8"):
        make_world(layers=[LayerSpec(1, 1, 8, 4)])
