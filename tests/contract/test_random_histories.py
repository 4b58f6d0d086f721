"""Random sequences of open, reserve, fork, truncate, commit and close: keys and outputs stay right, nothing leaks."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from cache_strategies import registry
from cache_strategies.address_ranges import AddressRanges
from cache_strategies.block_table import TableOptions
from cache_strategies.eviction import list_policies
from cache_strategies.one_tensor import OneTensor
from cache_strategies.spaces import find_space
from config.settings import StrategySettings
from kernels.backends import REFERENCE
from kernels.types import LayerSpec
from plugin_kit.driver.history import LAYERS, geometry_of
from plugin_kit.strategies.histories import HYBRID
from tests.contract import kinds
from tests.contract.harness import list_kinds
from tests.contract.random_histories import WINDOWS, Histories

pytestmark = pytest.mark.every_backend

OPTIONS: Mapping[str, Mapping[str, object]] = {  # small enough for texts of 20 tokens; unknown kinds run with defaults
    "compressed": {"budget": 8, "every": 4, "sinks": 1, "recent": 2, "block_size": 4, "scorer": "h2o"},
    "paged": {"block_size": 4},
    "quest": {"block_size": 2, "budget": 8},
    "random_drop": {"every": 4, "block_size": 2},
    "random_drop_by_head": {"every": 5, "block_size": 2},
    "residual": {"residual_length": 3, "sinks": 1, "block_size": 4},
    "sliding_window": {"window": 5, "sinks": 2, "max_row": 4},
    "streaming": {"window": 4, "sinks": 1, "every": 3, "block_size": 2},
}


def instance(kind: str, **options: object) -> StrategySettings:
    return StrategySettings.model_validate({"kind": kind, **OPTIONS.get(kind, {}), **options})


RING = instance("sliding_window")

ALONE = (
    {kind: instance(kind) for kind in list_kinds()}
    | {
        "compressed by head": instance("compressed", by_head=True, block_size=8, scorer="tova"),
        "streaming, a window wider than the model's": instance("streaming", window=8, sinks=0, every=2),
        "paged, blocks of one": instance("paged", block_size=1),
        "quest, blocks of one": instance("quest", block_size=1, budget=4),
        "quest, nothing shared": instance("quest", budget=0.3, min_tokens=8, prefix_cache=False),
        "residual, as computed": instance("residual", k_dtype="model", v_dtype="model"),
        "residual, longer rows": instance("residual", residual_length=2, sinks=0, max_row=5, block_size=2),
        "paged, nothing shared": instance("paged", prefix_cache=False),
        "contiguous, nothing found again": instance("contiguous", prefix_cache=False),
    }
    | {f"paged, {policy}": instance("paged", eviction=policy) for policy in sorted(list_policies()) if policy != "lru"}
)
TOGETHER = {kind: instance(kind) for kind in list_kinds()} | {
    "other": instance("paged", block_size=3, eviction="s3fifo", ttl=1e-6)
}


HYBRIDS = {  # models in which paged keeps windows of some layers, and several ways to divide their layers into groups
    "hybrid": (HYBRID, {"it": instance("paged")}),
    "hybrid, small blocks": (HYBRID, {"it": instance("paged", block_size=2)}),
    "hybrid, nothing shared": (HYBRID, {"it": instance("paged", prefix_cache=False)}),
    "hybrid, s3fifo": (HYBRID, {"it": instance("paged", block_size=2, eviction="s3fifo", ttl=1e-6)}),
    "hybrid, residual": (HYBRID, {"it": instance("residual")}),
    "hybrid, quest": (HYBRID, {"it": instance("quest")}),
    "windows": (WINDOWS, {"it": instance("paged")}),
    "windows, residual": (WINDOWS, {"it": instance("residual", residual_length=2)}),
    "windows, quest": (WINDOWS, {"it": instance("quest")}),
    "windows, blocks of one": (WINDOWS, {"it": instance("paged", block_size=1)}),
    "several block sizes": (HYBRID, {"it": instance("paged"), "other": instance("paged", block_size=2), "ring": RING}),
}


def stores_by_token(kind: str) -> bool:
    """Return whether a kind has the options of those that keep keys and values by token."""
    with kinds.installed():
        return issubclass(registry.load_kind(kind).options_type, TableOptions)


Space = type[AddressRanges] | type[OneTensor]


def machine_of(
    strategies: Mapping[str, StrategySettings], layers: Sequence[LayerSpec], space: Space
) -> type[Histories]:
    """Return a state machine in a memory for two and a half of the longest texts, with five sequences."""
    instances = registry.resolve_instances(strategies)
    least = registry.compute_least_bytes(instances, geometry_of(layers), space.round_block)
    members = {"strategies": strategies, "layers": layers, "memory_bytes": max(1, 5 * least // 2), "space": space}
    return type("History", (Histories,), members)


def play(
    strategies: Mapping[str, StrategySettings],
    examples: int,
    layers: Sequence[LayerSpec] = LAYERS,
    space: Space | None = None,
) -> None:
    budget = settings(max_examples=examples, stateful_step_count=40)
    run_state_machine_as_test(machine_of(strategies, layers, space or find_space("cpu")), settings=budget)


def share(backend: str, examples: int) -> int:
    """Return the number of examples to run with a backend: fewer for others, as the bookkeeping is the same."""
    return examples if backend == REFERENCE else examples // 3


@pytest.mark.fuzz
@pytest.mark.parametrize("name", ALONE)
def test_any_history_of_one_strategy(backend: str, name: str) -> None:
    play({"it": ALONE[name]}, examples=share(backend, 8))


@pytest.mark.fuzz
@pytest.mark.parametrize("kind", [kind for kind in list_kinds() if stores_by_token(kind)])
def test_any_history_in_other_formats(backend: str, kind: str, rng: random.Random) -> None:
    k, v = rng.choice([("int8", "int8"), ("int4", "int4"), ("int8", "int4")])
    print(f"keys in {k}, values in {v}")
    play({"it": instance(kind, k_dtype=k, v_dtype=v)}, examples=share(backend, 8))


@pytest.mark.fuzz
@pytest.mark.parametrize("name", HYBRIDS)
def test_any_history_of_a_model_with_windows(backend: str, name: str) -> None:
    layers, strategies = HYBRIDS[name]
    play(strategies, share(backend, 8), layers)


@pytest.mark.fuzz
@pytest.mark.parametrize("space", [AddressRanges, OneTensor])
def test_any_history_of_all_strategies_in_one_memory(backend: str, space: Space) -> None:
    play(TOGETHER, examples=share(backend, 12), space=space)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
def test_more_histories_of_one_strategy(name: str) -> None:
    play({"it": ALONE[name]}, examples=100)


@pytest.mark.slow
@pytest.mark.parametrize("name", HYBRIDS)
def test_more_histories_of_a_model_with_windows(name: str) -> None:
    layers, strategies = HYBRIDS[name]
    play(strategies, 150, layers)


@pytest.mark.slow
@pytest.mark.timeout(3600)  # where every access is checked
def test_a_hundred_thousand_operations() -> None:
    play(TOGETHER, examples=2500)
