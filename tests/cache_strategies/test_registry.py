"""Tests of the registry: kinds are found by name, options are checked, the minimum memory suffices and is minimal."""

from __future__ import annotations

import random
from collections.abc import Mapping
from importlib.metadata import EntryPoint

import pytest
import torch

from cache_strategies import plugins, registry
from cache_strategies.base import KVCache
from cache_strategies.contiguous import ContiguousCache
from cache_strategies.memory import make_memory
from cache_strategies.registry import (
    build_caches,
    compute_least_bytes,
    compute_sequence_bytes,
    compute_share,
    load_kind,
    resolve_instances,
)
from cache_strategies.spaces import find_space
from cache_strategies.types import Geometry, Text
from config.errors import SettingsError
from config.settings import StrategySettings, default_strategies
from kernels.reference.backend import ReferenceOps
from kernels.types import LayerSpec

LAYERS = [LayerSpec(1, 2, 8, 8)]
TOKENS = 24  # of the longest text


def geometry(max_seats: int = 4) -> Geometry:
    return Geometry(LAYERS, torch.float32, max_seats, TOKENS, 16)


# ---------------------------------------------------------------- kinds
def test_every_built_in_kind_can_be_loaded_and_those_that_need_no_choice_have_an_instance() -> None:
    for kind in registry.BUILTIN:
        assert issubclass(load_kind(kind), KVCache)
    assert {settings.kind for settings in default_strategies().values()} == set(registry.BUILTIN) - {
        "compressed",
        "mirrored",
        "quest",
        "residual",
        "streaming",
    }


class OfVersion1(ContiguousCache):
    """A class that does not state its version, as those written for version 1."""


class OfVersion4(ContiguousCache):
    """A class for a version that does not exist yet."""

    interface_version = 4


class OfThisVersion(ContiguousCache):
    """A class for the version of this server."""

    interface_version = 3


@pytest.mark.parametrize(("cls", "version"), [(OfVersion1, 1), (OfVersion4, 4), (OfThisVersion, None)])
def test_a_plug_in_for_another_version_is_refused_with_what_to_change(
    cls: type[KVCache], version: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = EntryPoint("mine", f"{__name__}:{cls.__name__}", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [point])
    if version is None:
        assert load_kind("mine") is cls
        return
    words = rf"{cls.__name__} is written for version {version} of the interface, and this server has version 3: change"
    with pytest.raises(SettingsError, match=rf"{words} the class as docs/guide/writing_a_strategy.md says"):
        load_kind("mine")


def test_a_plug_in_that_cannot_be_imported_may_be_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("mine", "cache_strategies.no_such_module:Cache", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [point])
    with pytest.raises(SettingsError, match=r"cannot load .*; if it is written for an earlier version"):
        load_kind("mine")


def test_a_module_that_is_missing_is_no_matter_of_versions() -> None:
    with pytest.raises(SettingsError, match=r"No module named 'no_such_module'; run the command in .* its package$"):
        load_kind("no_such_module:Cache")


def test_an_unknown_kind_is_refused_with_the_kinds_there_are() -> None:
    with pytest.raises(
        SettingsError,
        match=r"no cache strategy kind 'pagd'; kinds are compressed, contiguous, mirrored, paged, quest, residual, ",
    ):
        load_kind("pagd")


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("cache_strategies.memory:Memory", "cache_strategies.memory:Memory is not a subclass of KVCache"),
        ("cache_strategies.memory:Nothing", "cannot load cache_strategies.memory:Nothing"),
        ("no.such.module:Cache", "cannot load no.such.module:Cache"),
    ],
)
def test_a_plug_in_that_cannot_be_used_is_named(where: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "list_kinds", lambda: {"odd": where})
    with pytest.raises(SettingsError, match=message):
        load_kind("odd")


# ---------------------------------------------------------------- options
@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (
            "paged",
            {"block_sise": 8},
            r"strategies\.it\.block_sise is not an option.*are: block_size, center, eviction, hadamard, k_dtype, pre",
        ),
        ("paged", {"block_size": 0}, r"strategies\.it\.block_size: should be 1 or more"),
        ("paged", {"block_size": 5000}, r"strategies\.it\.block_size: should be 1,024 or less"),
        ("paged", {"block_size": "many"}, r"strategies\.it\.block_size: should be a whole number"),
        ("sliding_window", {"window": 0}, r"strategies\.it\.window: "),
        ("sliding_window", {"sinks": -1}, r"strategies\.it\.sinks: should be 0 or more"),
        (
            "contiguous",
            {"window": 4},
            r"strategies\.it\.window is not an option.*its options are: center, hadamard, k_dtype",
        ),
    ],
)
def test_a_bad_option_is_named(kind: str, options: Mapping[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        resolve_instances({"it": StrategySettings(kind=kind, **options)})


def test_options_reach_the_instance() -> None:
    (instance,) = resolve_instances({"it": StrategySettings(kind="paged", block_size=8, prefix_cache=False)})
    assert (instance.name, instance.kind) == ("it", "paged")
    assert (instance.options.block_size, instance.options.prefix_cache) == (8, False)


# ---------------------------------------------------------------- memory
def test_blocks_of_any_sizes_take_their_own_bytes_and_little_more() -> None:
    """Of 1,600 tokens in bfloat16, in int8 with scales, and with summaries of blocks."""
    layers = [LayerSpec(2, 4, 64, 64)] * 4
    sizes = Geometry(layers, torch.bfloat16, 4, 1600, 512)
    declared = {
        "paged": StrategySettings(kind="paged"),
        "int8": StrategySettings(kind="paged", k_dtype="int8", v_dtype="int8"),
        "quest": StrategySettings(kind="quest"),
    }
    memory = make_memory(1 << 24)
    build_caches(resolve_instances(declared), sizes, memory, ReferenceOps())
    needed = {  # 1,600 tokens of 2 KV heads of 64 dimensions in 4 layers, keys and values
        "paged": 1600 * 2 * 64 * 4 * 2 * 2,
        "int8": 1600 * 2 * (64 + 4) * 4 * 2,
        "quest": 1600 * 2 * 64 * 4 * 2 * 2 * 33 // 32,
    }
    for name, least in needed.items():
        assert least <= memory.count_sequence_bytes(name, 1600) <= 1.07 * least, name


def test_shares_are_bytes_of_the_memory() -> None:
    (instance,) = resolve_instances({"it": StrategySettings(kind="paged", floor="25%", limit="1000")})
    assert compute_share(instance, 640) == (160, 640)
    assert compute_share(instance, 6400) == (1600, 1000)


def test_instances_get_their_shares_of_the_memory() -> None:
    instances = resolve_instances(
        {
            "a": StrategySettings(kind="paged", block_size=4, floor="20%", limit="50%"),
            "b": StrategySettings(kind="paged", block_size=4),
        }
    )
    memory = make_memory(20_000)
    build_caches(instances, geometry(), memory, ReferenceOps())
    assert (memory.get_share("a"), memory.get_share("b")) == ((4000, 10_000), (0, 20_000))
    assert (memory.get_capacity("a"), memory.get_capacity("b")) == (10_000, 16_000)


def test_the_longest_sequence_of_the_largest_instance_is_known_before_there_is_memory() -> None:
    strategies = {"a": StrategySettings(kind="paged", block_size=4), "b": StrategySettings(kind="contiguous")}
    instances = resolve_instances(strategies)
    memory = make_memory(1 << 20)
    build_caches(instances, geometry(), memory, ReferenceOps())
    longest = [memory.count_sequence_bytes(name, TOKENS) for name in strategies]
    assert compute_sequence_bytes(instances, geometry(), ROUND) == max(longest)


def test_shares_that_leave_no_room_whatever_the_memory_are_refused() -> None:
    instances = resolve_instances(
        {"small": StrategySettings(kind="paged", limit="100"), "other": StrategySettings(kind="contiguous")}
    )
    with pytest.raises(SettingsError, match="raise the limits or lower the floors of small, other"):
        compute_least_bytes(instances, geometry(), ROUND)


ROUND = find_space("cpu").round_block
KINDS = (
    *({"kind": "paged", "block_size": n} for n in (1, 3, 4, 8, 32)),
    *({"kind": "sliding_window", "window": n, "sinks": 1, "max_row": 2} for n in (1, 5, 50)),
    {"kind": "contiguous"},
)
FLOORS, LIMITS = ("0%", "10%", "25%", "33%"), ("40%", "75%", "100%")


@pytest.mark.parametrize("_", range(4))
def test_the_least_memory_is_the_least(_: int, rng: random.Random) -> None:
    strategies = draw_instances(rng, rng.randint(1, 2))
    least = compute_least_bytes(resolve_instances(strategies), geometry(), ROUND)
    assert holds_one_of_each(strategies, least)
    fewer = {least - 1, *(least * part // 20 for part in range(20))}
    assert not any(holds_one_of_each(strategies, total) for total in fewer)


@pytest.mark.parametrize("_", range(5))
def test_the_least_memory_of_many_instances_is_enough_and_a_byte_less_is_not(_: int, rng: random.Random) -> None:
    strategies = draw_instances(rng, 3)
    least = compute_least_bytes(resolve_instances(strategies), geometry(), ROUND)
    assert holds_one_of_each(strategies, least)
    assert not holds_one_of_each(strategies, least - 1)


@pytest.mark.parametrize("amount", ["0", "3000", "20000"])
def test_the_least_memory_counts_floors_given_in_bytes(amount: str) -> None:
    strategies = {
        "a": StrategySettings(kind="paged", block_size=4, floor=amount),
        "b": StrategySettings(kind="contiguous", floor="10%"),
    }
    least = compute_least_bytes(resolve_instances(strategies), geometry(), ROUND)
    assert holds_one_of_each(strategies, least)
    fewer = {least - 1, *(least * part // 20 for part in range(20))}
    assert not any(holds_one_of_each(strategies, total) for total in fewer)


def draw_instances(rng: random.Random, number: int) -> dict[str, StrategySettings]:
    return {
        f"s{i}": StrategySettings.model_validate(
            rng.choice(KINDS) | {"floor": rng.choice(FLOORS), "limit": rng.choice(LIMITS)}
        )
        for i in range(number)
    }


def holds_one_of_each(strategies: Mapping[str, StrategySettings], total: int) -> bool:
    """Return whether each instance in turn can hold a sequence of max_seq_len with these shares."""
    if total == 0:
        return False
    instances = resolve_instances(strategies)
    if sum(compute_share(instance, total).floor for instance in instances) > total:
        return False
    for cache in build_caches(instances, geometry(), make_memory(total), ReferenceOps()).values():
        sequence = cache.open(Text(list(range(TOKENS))))
        if sequence is None:
            return False
        sequence.close()
        cache.evict(total)
    return True
