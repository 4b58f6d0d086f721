"""quest shares prefixes, forks and evicts as paged does; only exact keys are found by others."""

from __future__ import annotations

import random

import pytest
import torch

from cache_strategies.base import Rows
from cache_strategies.quest.cache import QuestCache
from config.settings import StrategySettings
from kernels.types import LayerSpec
from plugin_kit.driver.steps import Reading, step
from plugin_kit.driver.texts import random_text, spliced
from tests.cache_strategies.cache_driver import (
    count_bytes,
    count_held_blocks,
    find_cached,
    get_token_bytes,
)
from tests.cache_strategies.quest.brute_force import LAYERS, check, generate, make_world, open_prompt, read_prompt
from tests.contract.harness import World


def is_choosing(reading: Reading) -> bool:
    """Return whether the next token of a text chooses blocks."""
    assert reading.sequence.reserve(1)
    locations = reading.cache.locate(Rows([reading.sequence], [1])).by_layer
    return locations[0] is None


# ---------------------------------------------------------------- prefixes
def test_a_prompt_is_found_by_another_which_reads_the_same_blocks() -> None:
    world = make_world()
    text = random_text(1, 100, LAYERS)
    first = read_prompt(world, text, 61)
    generate(first, 5)
    held = count_held_blocks(first.cache)
    second = read_prompt(world, text, 61)
    assert second.sequence.found == 60
    assert count_held_blocks(first.cache) == held + 2  # of the heads in the block with the last token
    generate(second, 9)
    first.sequence.close()
    second.sequence.close()
    third = read_prompt(world, text, 61)
    assert third.sequence.found == 60
    generate(third, 9)
    world.check_integrity()


def test_tokens_of_short_texts_are_found_and_those_of_choosing_rows_are_not() -> None:
    world = make_world(budget=32)
    text = random_text(1, 100, LAYERS)
    first = read_prompt(world, text, 10)
    generate(first, 50)  # from position 32 on it chooses
    first.sequence.close()
    assert find_cached(first.cache, text.ids) == 32
    again = read_prompt(world, text, 60)
    assert again.sequence.found == 32
    again.sequence.close()
    assert find_cached(first.cache, text.ids) == 60
    world.check_integrity()


def test_blocks_of_a_prompt_are_withheld_from_its_first_choice_on() -> None:
    """A row of one token within a prompt chooses; what it fills and what follows is found by no other prompt."""
    world = make_world()
    text = random_text(1, 100, LAYERS)
    reading = open_prompt(world, text, 80)
    for size in (42, 1, 37):
        step([(reading, size)])
    assert find_cached(reading.cache, text.ids) == 40
    assert reading.cache.blocks().pending == 0
    world.check_integrity()
    other = read_prompt(world, text, 80)
    assert other.sequence.found == 40
    generate(other, 3)
    world.check_integrity()


def test_a_row_that_others_wait_for_reads_all_keys() -> None:
    world = make_world()
    text = random_text(1, 100, LAYERS)
    first = open_prompt(world, text, 80)
    step([(first, 42)])
    waiting = open_prompt(world, text, 80)
    assert not is_choosing(first)
    step([(first, 1)])
    step([(first, 37)])
    assert waiting.sequence.length == 76
    check(step([(waiting, 4)], keys=True), [waiting])
    assert is_choosing(first)
    world.check_integrity()


def test_a_row_that_depends_on_blocks_of_the_same_step_reads_all_keys() -> None:
    world = make_world()
    text = random_text(1, 100, LAYERS)
    first, second = open_prompt(world, text, 41), open_prompt(world, text, 41)
    assert second.sequence.length == 40
    result = step([(first, 41), (second, 1)], keys=True)
    assert all(len(positions) == 41 for _, _, positions in result.keys[1])
    world.check_integrity()


# ---------------------------------------------------------------- forks and crops
def test_forks_choose_for_themselves(rng: random.Random) -> None:
    world = make_world()
    common = random_text(0, 110, LAYERS)
    at = rng.randint(30, 60)
    parent = read_prompt(world, common, at)
    if rng.random() < 0.5:
        generate(parent, 1)
        at += 1
    readings = [parent]
    for seed in (1, 2):
        sequence = parent.sequence.fork()
        assert sequence is not None
        readings.append(Reading(parent.cache, spliced(common, random_text(seed, 110, LAYERS), at), sequence))
    for _ in range(20):
        check(step([(each, 1) for each in readings], keys=True), readings)
        world.check_integrity()


def test_what_is_written_again_has_new_summaries(rng: random.Random) -> None:
    world = make_world()
    text = random_text(1, 160, LAYERS)
    reading = read_prompt(world, text, 50)
    for seed in range(2, 5):
        generate(reading, rng.randint(1, 12))
        length = reading.sequence.length - rng.randint(0, 20)
        reading.sequence.truncate(length)
        reading.text = spliced(reading.text, random_text(seed, 160, LAYERS), length)
        if rng.random() < 0.5:
            step([(reading, rng.randint(2, 9))])
        generate(reading, 10)
        world.check_integrity()


def test_a_fork_that_goes_back_leaves_the_summaries_of_its_parent() -> None:
    world = make_world()
    common = random_text(0, 110, LAYERS)
    parent = read_prompt(world, common, 60)
    generate(parent, 1)
    sequence = parent.sequence.fork()
    assert sequence is not None
    child = Reading(parent.cache, spliced(common, random_text(1, 110, LAYERS), 38), sequence)
    child.sequence.truncate(38)
    for _ in range(12):
        check(step([(child, 1), (parent, 1)], keys=True), [child, parent])
    world.check_integrity()


# ---------------------------------------------------------------- memory
def test_blocks_that_were_evicted_are_summarized_anew(rng: random.Random) -> None:
    """In memory for two and a half texts, texts take over each other's blocks."""
    probe = make_world()
    reading = read_prompt(probe, random_text(1, 100, LAYERS), 100)
    least = probe.count_bytes("quest", 160)
    world = make_world(memory_bytes=max(5 * probe.memory.held_bytes // 2, least))
    for seed in range(12):
        reading = read_prompt(world, random_text(seed, 130, LAYERS), rng.randint(40, 90))
        generate(reading, 8)
        reading.sequence.close()
        world.check_integrity()
    assert reading.cache.idle_bytes > 0


def test_tokens_that_are_not_finite_are_found_by_nobody() -> None:
    world = make_world()
    text = random_text(1, 100, LAYERS)
    text.k[0][30] = torch.nan
    reading = read_prompt(world, text, 60)
    reading.sequence.spoiled = True
    reading.sequence.close()
    assert find_cached(reading.cache, text.ids) == 28


def test_a_block_takes_the_memory_of_its_keys_and_one_part_in_a_block_for_summaries() -> None:
    caches = {}
    layers = [LayerSpec(2, 14, 64, 64)] * 24
    for kind in ("paged", "quest"):
        world = World({kind: StrategySettings(kind=kind)}, layers=layers, dtype=torch.bfloat16, max_seats=1)
        caches[kind] = world.caches[kind]
    assert isinstance(caches["quest"], QuestCache)
    share = get_token_bytes(caches["quest"]) / get_token_bytes(caches["paged"])
    assert share == 1 + 1 / 32
    assert count_bytes(caches["quest"], 64) == pytest.approx(count_bytes(caches["paged"], 64) * share, rel=0.02)
