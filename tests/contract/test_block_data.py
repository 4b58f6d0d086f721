"""Blocks that were read as bytes are found in another cache: a text goes on there with the same bits."""

from __future__ import annotations

import random

import pytest
import torch

from cache_strategies.base import KVCache
from cache_strategies.block_hashes import BlockHash
from cache_strategies.features import BlockData, PrefixListing
from config.settings import StrategySettings
from kernels.types import LayerSpec
from plugin_kit.driver.steps import step
from plugin_kit.driver.texts import MODEL, random_text
from plugin_kit.strategies.trial import read_rows
from tests.contract.harness import World, every_instance

NAME = "checked"
WINDOWED = [spec._replace(window=10) for spec in MODEL]
LENGTH = 130
INT8 = StrategySettings(kind="paged", block_size=16, k_dtype="int8", v_dtype="int8")
MIXED = StrategySettings(kind="paged", block_size=16, k_dtype="int8", v_dtype="int4")
INSTANCES = every_instance() | {"int8": INT8, "int8-int4": MIXED}


def make(name: str, layers: list[LayerSpec]) -> tuple[World, KVCache]:
    world = World({NAME: INSTANCES[name]}, layers=layers)
    return world, world.caches[NAME]


@pytest.mark.fuzz
@pytest.mark.parametrize("layers", [list(MODEL), WINDOWED], ids=["model", "windowed"])
@pytest.mark.parametrize("name", INSTANCES)
def test_a_text_goes_on_in_another_cache_as_in_its_own(name: str, layers: list[LayerSpec], rng: random.Random) -> None:
    (world, first), (other, second) = make(name, layers), make(name, layers)
    if not isinstance(first, BlockData):
        return
    assert isinstance(second, BlockData)
    text = random_text(1, LENGTH, layers)
    reading = world.open(NAME, text)
    read_rows(reading, [rng.choice([1, 7, 30]) for _ in range(4)])
    reading.sequence.close()
    hashes = list(first.list_data())
    rng.shuffle(hashes)
    for block_hash in hashes:
        data = first.read_data(block_hash)
        assert data is not None
        assert data.dtype is torch.uint8
        assert second.write_data(block_hash, data)
        assert not second.write_data(block_hash, data), "it is there already"
    other.check_integrity()
    assert {*second.list_data()} == {*hashes}
    outs = []
    for each in (world, other):
        again = each.open(NAME, text)
        assert again.sequence.ready()
        found = again.sequence.length
        outs.append((found, step([(again, again.chunk(9))]).outs[0]))
        again.sequence.close()
        each.check_integrity()
    assert outs[0][0] == outs[1][0]
    assert all(torch.equal(*layer) for layer in zip(outs[0][1], outs[1][1], strict=True))
    assert outs[0][0] > 0 or not hashes
    second.evict(other.memory.total_bytes)
    assert other.memory.held_bytes == 0


@pytest.mark.parametrize("name", INSTANCES)
def test_data_that_does_not_fit_changes_nothing(name: str) -> None:
    world, cache = make(name, list(MODEL))
    if not isinstance(cache, BlockData):
        return
    text = random_text(1, LENGTH, MODEL)
    read_rows(world.open(NAME, text), [50, 39])
    cache.evict(world.memory.total_bytes)
    for block_hash in cache.list_data():
        data = cache.read_data(block_hash)
        assert data is not None
        unknown = block_hash._replace(content=b"other")
        assert cache.read_data(unknown) is None
        for wrong in (data[:-1], torch.cat([data, data]), data[:0], data.view(1, -1), data.view(torch.int8)):
            with pytest.raises(ValueError, match="bytes of data"):
                cache.write_data(unknown, wrong)
        for wrong_hash in (unknown._replace(group=99), unknown._replace(group=-1), unknown._replace(depth=-1)):
            assert cache.read_data(wrong_hash) is None
            with pytest.raises(ValueError, match="there are no blocks of group"):
                cache.write_data(wrong_hash, data)
        held = world.memory.held_bytes
        world.memory.set_share(NAME, floor=0, limit=held)
        assert not cache.write_data(unknown, data), "there is no memory for it"
        assert world.memory.held_bytes == held
    world.check_integrity()


def test_which_kinds_can_be_read() -> None:
    found = {settings.kind for name, settings in INSTANCES.items() if isinstance(make(name, list(MODEL))[1], BlockData)}
    assert found == {"paged", "quest", "residual"}


def test_a_block_that_is_being_computed_cannot_be_read() -> None:
    world, cache = make("paged", list(MODEL))
    assert isinstance(cache, BlockData)
    reading = world.open(NAME, random_text(1, LENGTH, MODEL))
    assert cache.list_data() == []
    read_rows(reading, [40])
    hashes: list[BlockHash] = list(cache.list_data())
    assert {each.depth for each in hashes} == {0}  # of two blocks of 32 tokens


def test_a_hash_that_is_its_own_parent_ends_in_no_circle() -> None:
    world, cache = make("paged", list(MODEL))
    assert isinstance(cache, BlockData)
    assert isinstance(cache, PrefixListing)
    reading = world.open(NAME, random_text(1, LENGTH, MODEL))
    read_rows(reading, [100])
    known = next(each for each in cache.list_data() if each.group == 0)
    data = cache.read_data(known)
    assert data is not None
    circle = [b"a" * 32, b"b" * 32]
    hashes = [known._replace(content=circle[i], parent=circle[1 - i], depth=1 + i) for i in range(2)]
    hashes.append(known._replace(content=b"c" * 32, parent=b"c" * 32))
    for each in hashes:
        assert cache.write_data(each, data)
    listed, _ = cache.list_prefixes(100)
    for each in hashes:
        cache.drop_prefix(each.prefix_id)
    assert len(listed) >= 2
    world.check_integrity()
