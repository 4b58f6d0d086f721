"""A text that is computed again gets the same keys: `replayable`, and in other rows, `chunk_invariant`."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from config.settings import StrategySettings
from tests.contract.harness import MODEL, Keys, Reading, World, every_instance, random_text, step

LENGTH = 100
NOT_REPLAYABLE = ("random_drop", "random_drop_by_head")  # kinds: what they drop depends on the rows of the first time
STRATEGIES = {name: settings for name, settings in every_instance().items() if settings.kind not in NOT_REPLAYABLE} | {
    "int8": StrategySettings(kind="paged", kv_dtype="int8", block_size=16),
    "ring-int8": StrategySettings(kind="sliding_window", kv_dtype="int8", window=12, max_row=9),
}


def draw_rows(longest: int) -> list[int]:
    """Return random lengths of rows for all tokens but the last, which enters in a row of its own."""
    rows: list[int] = []
    while sum(rows) < LENGTH - 1:
        rows.append(min(random.choice([1, 5, 16, 60]), longest, LENGTH - 1 - sum(rows)))
    return [*rows, 1]


def read(reading: Reading, rows: Sequence[int]) -> tuple[list[Tensor], list[Keys]]:
    """Read a text in these rows, or shorter ones where the strategy ends them; return attention's output and the keys
    of its last token, by layer.
    """
    for size in rows[:-1]:
        end = reading.seat.length + size
        while reading.seat.length < end:
            step([(reading, reading.chunk(end - reading.seat.length))])
    last = step([(reading, rows[-1])], keys=True)
    return last.outs[0], last.keys[0]


@pytest.mark.parametrize("kind", NOT_REPLAYABLE)
def test_strategies_that_depend_on_the_rows_do_not_promise_the_same_keys(kind: str) -> None:
    world = World({"it": StrategySettings(kind=kind)}, max_seats=1)
    assert not world.caches["it"].contract.replayable


@pytest.mark.fuzz
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_closed_sequence_that_is_computed_again_has_the_same_keys(name: str) -> None:
    world = World({name: STRATEGIES[name]}, max_seats=2)
    text, contract = random_text(1, LENGTH, MODEL), world.caches[name].contract
    assert contract.replayable
    longest = contract.max_row or LENGTH
    rows = draw_rows(longest)
    first = world.open(name, text, max_cached=0)
    outs, keys = read(first, rows)
    world.caches[name].close(first.seat)
    other = world.open(name, random_text(2, LENGTH, MODEL))  # takes memory, perhaps that of the first
    read(other, draw_rows(longest))
    other_rows = draw_rows(longest) if contract.chunk_invariant else rows
    again, found = read(world.open(name, text, max_cached=0), other_rows)
    for (k, v, positions), expected in zip(found, keys, strict=True):
        for part, wanted in zip((k, v, positions), expected, strict=True):
            assert torch.equal(part, wanted)
    for out, wanted in zip(again, outs, strict=True):
        assert torch.equal(out, wanted)
