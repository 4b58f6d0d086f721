"""A third-party kind joins the contract tests by being registered, and one that breaks its contract fails them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from unittest.mock import patch

import pytest
import torch

from cache_strategies import plugins, registry
from cache_strategies.base import Rows
from config.settings import StrategySettings
from tests.contract.harness import World, every_instance
from tests.contract.test_attention import read_alone, read_mixed
from tests.contract.third_party_strategy import Keys, SieveCache, SieveSequence


class LyingCache(SieveCache):
    """A cache that attends to fewer keys than it claims: gather() says that all tokens are visible."""

    def gather(self, layer: int, rows: Rows[SieveSequence], row: int) -> Keys:
        k, v = rows.sequences[row].layers[layer]
        return k, v, torch.arange(rows.end(row))


@pytest.fixture(autouse=True)
def _installed() -> Iterator[None]:
    """Register plug-ins. Undone before the kinds of conftest.py are, which `monkeypatch` would not be."""
    points = [
        EntryPoint("sieve", "tests.contract.third_party_strategy:SieveCache", registry.ENTRY_POINT_GROUP),
        EntryPoint("liar", "tests.contract.test_third_party:LyingCache", registry.ENTRY_POINT_GROUP),
    ]
    with patch.object(plugins, "entry_points", lambda group: [p for p in points if p.group == group]):
        yield


def test_a_kind_with_an_entry_point_joins_the_matrix_with_its_default_options() -> None:
    assert every_instance()["sieve"] == StrategySettings(kind="sieve")
    assert registry.resolve_instances({"mine": StrategySettings(kind="sieve")})[0].options.keep == 2


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_unknown_kind_is_held_to_what_its_keys_say(chunk: int, dtype: torch.dtype, rng: random.Random) -> None:
    world = World({"mine": StrategySettings(kind="sieve")}, dtype=dtype, max_seats=1)
    read_alone(world, "mine", "sieve", chunk, dtype, rng)


def test_an_unknown_kind_shares_batches_with_the_built_in_ones(rng: random.Random) -> None:
    names = ("contiguous", "paged", "sliding_window", "sieve")
    read_mixed({name: StrategySettings(kind=name) for name in names}, torch.float32, rng)


def test_a_kind_that_attends_to_other_keys_than_it_says_is_caught(rng: random.Random) -> None:
    world = World({"mine": StrategySettings(kind="liar")}, max_seats=1)
    with pytest.raises(AssertionError):
        read_alone(world, "mine", "liar", 64, torch.float32, rng)  # of rows of this size each is checked


def test_a_third_party_cannot_take_the_name_of_a_built_in_kind() -> None:
    point = EntryPoint("paged", "tests.contract.third_party_strategy:SieveCache", registry.ENTRY_POINT_GROUP)
    with patch.object(plugins, "entry_points", lambda group: [point]):
        assert registry.list_kinds()["paged"] == registry.BUILTIN["paged"]
