"""One instance of a strategy that is checked, and how texts are read with it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cache_strategies.base import KVCache
from cache_strategies.types import Contract
from config.settings import StrategySettings
from kernels.ops import Ops
from kernels.types import LayerSpec
from plugin_kit.driver.steps import Keys, Reading, step
from plugin_kit.driver.texts import MODEL, random_text
from plugin_kit.driver.visible import Definition, define_exact
from plugin_kit.driver.world import World

NAME = "checked"  # of the instance
LENGTH = 150  # tokens of a text: more than a tile of the reference, and many times the model's window
WHOLE = 1000  # more tokens than a text has: rows are as long as they may be


@dataclass(frozen=True)
class StrategyTrial:
    """An instance to be checked: its kind and options, the operations it computes with, and random numbers."""

    settings: StrategySettings
    ops: Ops
    rng: random.Random
    layers: Sequence[LayerSpec] = MODEL
    definition: Definition = define_exact

    def make_world(self, *, ops: Ops | None = None, **sizes: Any) -> World:
        """Return a world with this instance alone, and by default with one sequence."""
        sizes = {"max_seats": 1, "layers": self.layers, **sizes}
        return World({NAME: self.settings}, ops or self.ops, **sizes)

    @property
    def contract(self) -> Contract:
        """The contract of the instance in these worlds."""
        return self.make_world().caches[NAME].contract

    def open(self, world: World, length: int = LENGTH, seed: int = 1) -> Reading:
        """Open a sequence for a random text."""
        return world.open(NAME, random_text(seed, length, self.layers, world.dtype), max_cached=0)

    def draw_rows(self, length: int, sizes: Sequence[int] = (1, 5, 16, 60)) -> list[int]:
        """Return random lengths of rows for all tokens but the last, which enters in a row of its own."""
        rows: list[int] = []
        while sum(rows) < length - 1:
            rows.append(min(self.rng.choice(sizes), length - 1 - sum(rows)))
        return [*rows, 1]


def get_cache(world: World) -> KVCache:
    """Return the cache that is checked."""
    return world.caches[NAME]


def read_rows(reading: Reading, rows: Sequence[int]) -> list[tuple[int, list[Tensor]]]:
    """Read a text in these rows, or shorter ones where the strategy ends them.

    Return the size and the outputs by layer of each row.
    """
    done: list[tuple[int, list[Tensor]]] = []
    for size in rows:
        end = reading.sequence.length + size
        while reading.sequence.length < end:
            n = reading.chunk(end - reading.sequence.length)
            done.append((n, step([(reading, n)]).outs[0]))
    return done


def read_all(reading: Reading, rows: Sequence[int]) -> tuple[list[Tensor], list[Keys]]:
    """Read a text in these rows; return attention's output of all tokens and the keys of the last row, by layer."""
    before = [outs for _, outs in read_rows(reading, rows[:-1])]
    last = step([(reading, rows[-1])], keys=True)
    return [torch.cat(parts) for parts in zip(*before, last.outs[0], strict=True)], last.keys[0]


def assert_same(found: Sequence[Tensor], wanted: Sequence[Tensor], what: str, *, tolerance: float = 0.0) -> None:
    """Assert that tensors are equal: bit for bit, if there is no tolerance."""
    for layer, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert a.shape == b.shape, f"{what}: attention of layer {layer} has shape {list(a.shape)}, not {list(b.shape)}"
        error = float((a.double() - b.double()).abs().max())
        is_same = error < tolerance if tolerance else torch.equal(a, b)
        assert is_same, f"{what}: attention of layer {layer} differs by {error:.2g}"


def assert_same_keys(found: Sequence[Keys], wanted: Sequence[Keys], what: str) -> None:
    """Assert that the same keys are listed, with the same bits."""
    for layer, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        ours_at, theirs_at = ours[2].tolist(), theirs[2].tolist()
        assert ours_at == theirs_at, f"{what}: layer {layer} keeps other positions: {ours_at}, not {theirs_at}"
        for name, a, b in zip(("keys", "values"), ours, theirs, strict=False):
            assert torch.equal(a, b), f"{what}: layer {layer} has other {name}"
