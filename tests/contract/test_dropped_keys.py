"""Strategies that drop keys, with any options, rows and dtypes: what they keep, share, and get of queries.

What is kept is defined by lengths and boundaries (`list_kept`); attention is computed from the text's own keys and
values.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from config.settings import StrategySettings
from plugin_kit.driver.reference import TOLERANCE, attention
from plugin_kit.driver.steps import Reading, StepOutputs, attend, step
from plugin_kit.driver.texts import MODEL, RandomText, random_text, spliced
from plugin_kit.driver.visible import check_keys
from server.engine.batch import Batch
from tests.contract.harness import World
from tests.contract.kinds.random_drop import RandomDropCache, list_kept
from tests.contract.visible_tokens import visible_in_row
from tests.kernels.rounded_vectors import round_to_int8

DROPPING = ("random_drop", "random_drop_by_head")
kinds = pytest.mark.parametrize("kind", DROPPING)


def check_rows(rows: list[tuple[Reading, int]], result: StepOutputs) -> None:
    """Compare what each row's strategy kept, and the outputs of all its queries, with the definition."""
    for i, ((reading, n), start) in enumerate(zip(rows, result.starts, strict=True)):
        text, end = reading.text, start + n
        for layer, spec in enumerate(MODEL):
            mask = visible_in_row(reading.cache, reading.cache.name, text.ids, layer, start, n)
            assert mask is not None
            q, k, v = text.q[layer][start:end], text.k[layer][:end], text.v[layer][:end]
            if getattr(reading.cache.options, "k_dtype", "model") == "int8":
                k, v = round_to_int8(k), round_to_int8(v)
            assert torch.equal(check_keys(k, v, result.keys[i][layer]), mask[:, -1])
            out = result.outs[i][layer]
            assert (out.double() - attention(q, k, v, spec, mask)).abs().max() < TOLERANCE[q.dtype]


def draw_world(rng: random.Random, kind: str, **sizes: Any) -> tuple[World, torch.dtype]:
    """Return a world of one instance with random options, named as its kind."""
    dtype = rng.choice(list(TOLERANCE))
    options: dict[str, Any] = {
        "every": rng.choice([1, 2, 5, 16, 40, 130]),
        "block_size": rng.choice([1, 3, 8, 32, 150]),
    }
    options["k_dtype"] = options["v_dtype"] = rng.choice(["model", "model", "int8"])
    print(kind, options, dtype)
    return World({kind: StrategySettings(kind=kind, **options)}, dtype=dtype, **sizes), dtype


# ---------------------------------------------------------------- what is kept
@pytest.mark.parametrize("_", range(3))
@kinds
def test_any_options_keep_and_show_what_the_definition_says(kind: str, _: int, rng: random.Random) -> None:
    world, dtype = draw_world(rng, kind, max_seats=2)
    readings = [world.open(kind, random_text(rng.randrange(99), rng.randint(30, 155), MODEL, dtype)) for _ in range(2)]
    while unread := [reading for reading in readings if reading.left]:
        most = rng.choice([1, 1, 4, 60, 160])
        rows = [(reading, reading.chunk(rng.randint(1, most))) for reading in unread]
        check_rows(rows, step(rows, keys=True))
        world.check_integrity()


@kinds
def test_what_a_sequence_keeps_does_not_depend_on_its_rows(kind: str, rng: random.Random) -> None:
    text = random_text(1, 90, MODEL)
    for every in (7, 30):
        world = World({kind: StrategySettings(kind=kind, every=every)}, max_seats=2)
        kept = []
        for sizes in ([1, 3, 7, 90], [90]):
            reading = world.open(kind, text)
            while reading.left:
                step([(reading, reading.chunk(rng.choice(sizes)))])
            kept.append([part.positions for part in reading.sequence.parts])  # type: ignore[attr-defined]
        assert kept[0] == kept[1]
        heads = [range(spec.num_kv_heads if kind.endswith("by_head") else 1) for spec in MODEL]
        assert kept[0] == [list_kept(90, every, i, head) for i, each in enumerate(heads) for head in each]


def test_heads_keep_other_tokens_and_other_numbers_of_them() -> None:
    world = World({"it": StrategySettings(kind="random_drop_by_head", every=20)}, max_seats=1)
    reading = world.open("it", random_text(1, 100, MODEL))
    step([(reading, 100)])
    first, second, _ = (part.positions for part in reading.sequence.parts)  # type: ignore[attr-defined]
    assert len({*first, *second}) > max(len(first), len(second))
    assert len(first) != len(second)


@kinds
def test_dropped_keys_leave_their_memory_to_others(kind: str) -> None:
    world = World({kind: StrategySettings(kind=kind, every=40)}, max_seats=2)
    reading = world.open(kind, random_text(1, 160, MODEL))
    held = []
    for n in (39, 1, 79, 1, 39, 1):
        step([(reading, n)])
        held.append(world.memory.held_bytes)
    assert held[1] < held[0]
    assert held[3] < held[2]
    assert held[5] < held[4]
    reading.sequence.close()
    assert world.memory.held_bytes == 0


# ---------------------------------------------------------------- forks
@kinds
def test_forks_share_full_blocks_and_never_write_them(kind: str, rng: random.Random) -> None:
    world, dtype = draw_world(rng, kind, max_seats=3)
    cache, at = world.caches[kind], rng.randint(1, 80)
    assert isinstance(cache, RandomDropCache)
    common = random_text(0, 150, MODEL, dtype)
    parent = world.open(kind, common)
    step([(parent, at)])
    readings = [parent]
    for seed in (1, 2):
        sequence = parent.sequence.fork()
        assert sequence is not None
        readings.append(Reading(parent.cache, spliced(common, random_text(seed, 150, MODEL, dtype), at), sequence))
    full = sum(len(part.positions) // cache.block_size for part in parent.sequence.parts)  # type: ignore[attr-defined]
    assert cache.blocks().shared == full
    for sizes in ([1, 1, 1], [5, 1, 30], [1, 40, 2]):
        rows = list(zip(readings, sizes, strict=True))
        check_rows(rows, step(rows, keys=True))
        world.check_integrity()
    for reading in readings:
        reading.sequence.close()
    assert world.memory.held_bytes == 0


# ---------------------------------------------------------------- queries
def test_a_tap_gets_the_queries_of_its_tokens_in_layers_with_addresses(rng: random.Random) -> None:
    """A strategy without a tap is between those that have one; the hook's layers are left out."""
    names = ["hooked", "paged", *DROPPING]
    world = World({name: StrategySettings(kind=name) for name in names}, max_seats=2)
    texts = [random_text(seed, 90, MODEL) for seed in range(2 * len(names))]
    readings = [world.open(name, text) for name, text in zip(2 * names, texts, strict=True)]
    rows = [(reading, rng.choice([1, 1, 2, 30])) for reading in readings]
    batch = Batch([reading.work(n) for reading, n in rows])
    attend(batch, rows)
    for each, (instance, (located, *_)) in zip(batch.slices, batch.parts, strict=True):
        cache = instance.strategy
        if cache.name == "paged":
            assert each.query_tap is None
            continue
        assert each.query_tap is not None
        for layer, found in enumerate(each.query_tap.queries):
            if cache.name == "hooked" and layer == 1:
                assert found is None
            else:
                assert found is not None
                texts_of = {id(reading.sequence): reading.text for reading in readings}
                wanted = [
                    last_query(texts_of[id(sequence)], layer, located.end(row))
                    for row, sequence in enumerate(located.sequences)
                ]
                assert torch.equal(torch.stack(wanted), found)


def last_query(text: RandomText, layer: int, end: int) -> Tensor:
    return text.q[layer][end - 1]
