"""Tests of keys and values stored as int8: attention over the rounded values, in half the memory of bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cache_strategies.registry import load_kind, resolve_instances
from config.errors import SettingsError
from config.settings import StrategySettings
from kernels.types import LayerSpec
from plugin_kit.driver.reference import attention, visible_keys
from plugin_kit.driver.steps import step
from plugin_kit.driver.texts import random_text
from tests.contract.harness import World
from tests.kernels.brute_force import KEEPS

pytestmark = pytest.mark.every_backend

LAYERS = (LayerSpec(2, 6, 16, 16, scale=0.25), LayerSpec(1, 2, 8, 24, scale=0.35, window=20))
OPTIONS = {"contiguous": {}, "paged": {"block_size": 8}, "sliding_window": {"window": 24, "sinks": 2}}

kinds = pytest.mark.parametrize("kind", OPTIONS)
dtypes = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)], ids=str)

MIXED = "tests.contract.kinds.mixed_formats:MixedFormatsCache"


def int8(kind: str) -> StrategySettings:
    return StrategySettings(kind=kind, kv_dtype="int8", **OPTIONS[kind])


def what_is_left(x: Tensor) -> Tensor:
    """Round x [..., D] to int8 and back, in numpy."""
    wide = x.float().numpy()
    scale = np.abs(wide).max(-1, keepdims=True) / np.float32(127)
    return torch.from_numpy(np.rint(wide / scale) * scale)


@dtypes
@kinds
def test_attention_is_over_what_is_left_of_keys_and_values(kind: str, dtype: torch.dtype, tolerance: float) -> None:
    check_attention(int8(kind), KEEPS[kind], dtype, tolerance, (what_is_left, what_is_left))


@dtypes
def test_keys_may_be_rounded_while_values_are_not(dtype: torch.dtype, tolerance: float) -> None:
    settings = StrategySettings(kind=MIXED, block_size=8)
    check_attention(settings, KEEPS["paged"], dtype, tolerance, (what_is_left, Tensor.float))


def check_attention(
    settings: StrategySettings,
    keeps: Callable[[Any], Any],
    dtype: torch.dtype,
    tolerance: float,
    rounded: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]],
) -> None:
    """Compare attention with that to `rounded` keys and values."""
    world = World({"it": settings}, layers=LAYERS, dtype=dtype)
    text = random_text(1, 70, LAYERS, dtype)
    reading = world.open("it", text)
    outs: list[list[Tensor]] = []
    while reading.left:
        outs += step([(reading, reading.chunk(13 if len(outs) % 2 else 1))]).outs
    for layer, spec in enumerate(LAYERS):
        k, v = rounded[0](text.k[layer]), rounded[1](text.v[layer])
        mask = visible_keys(spec, len(text), keeps(world.caches["it"].options))
        want = attention(text.q[layer], k, v, spec, mask)
        got = torch.cat([out[layer] for out in outs])
        assert (got.double() - want).abs().max() < tolerance


@kinds
def test_it_takes_the_memory_it_says_and_is_not_called_exact(kind: str) -> None:
    settings = {"int8": int8(kind), "as_computed": StrategySettings(kind=kind, **OPTIONS[kind])}
    world = World(settings, layers=[LayerSpec(2, 6, 64, 64)], dtype=torch.bfloat16)
    assert not world.caches["int8"].contract.exact
    (small,), (large,) = (world.get_sizes(name).block_bytes for name in ("int8", "as_computed"))
    assert small / large == pytest.approx((64 + 4) / 128, rel=0.03)


@kinds
def test_heads_whose_scales_would_not_be_aligned_are_refused(kind: str) -> None:
    with pytest.raises(SettingsError, match="kv_dtype=int8 needs head dimensions that are multiples of 4"):
        World({"it": int8(kind)}, layers=[LayerSpec(1, 1, 6, 8)])


def test_another_word_is_told() -> None:
    with pytest.raises(SettingsError, match=r"strategies\.it\.kv_dtype: should be 'model' or 'int8'"):
        resolve_instances({"it": StrategySettings(kind="paged", kv_dtype="int4")})
    assert load_kind("paged").options_type().kv_dtype == "model"  # type: ignore[attr-defined]
