"""Tests of keys and values in int8 and int4: attention over what is left of them, and the memory that they take."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from cache_strategies.block_table import TableOptions
from cache_strategies.registry import load_kind, resolve_instances
from config.errors import SettingsError
from config.settings import StrategySettings
from kernels.types import LayerSpec
from plugin_kit.driver.reference import attention, visible_keys
from plugin_kit.driver.steps import step
from plugin_kit.driver.texts import MODEL, RandomText, random_text
from plugin_kit.driver.visible import check_last_queries
from tests.contract.harness import World, every_instance
from tests.contract.kinds import installed
from tests.kernels.brute_force import KEEPS
from tests.kernels.rounded_vectors import hadamard_matrix, round_to_int8

pytestmark = pytest.mark.every_backend

LAYERS = (LayerSpec(2, 6, 16, 80, scale=0.25), LayerSpec(1, 2, 128, 24, scale=0.1, window=20))
OPTIONS: Mapping[str, Mapping[str, int]] = {
    "contiguous": {},
    "paged": {"block_size": 8},
    "sliding_window": {"window": 24, "sinks": 2},
}
QUANTIZED_KEYS = [("int8", "int8"), ("int4", "int4"), ("int8", "int4"), ("int4", "model")]
FORMATS = [*QUANTIZED_KEYS, ("model", "int8")]

kinds = pytest.mark.parametrize("kind", OPTIONS)
dtypes = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)], ids=str)


def quantized(kind: str, formats: tuple[str, str], **options: bool) -> StrategySettings:
    return StrategySettings.model_validate(
        {"kind": kind, "k_dtype": formats[0], "v_dtype": formats[1], **OPTIONS[kind], **options}
    )


# ---------------------------------------------------------------- what is left
def check_what_is_left(
    name: str, found: Tensor, computed: Tensor, *, hadamard: bool, center: Tensor | float = 0.0
) -> None:
    """Check that vectors found [..., H, D] are the computed ones, without their center rounded as the format says."""
    x, left = ((each.double() - center).numpy() for each in (computed, found))
    if name == "model":
        assert torch.equal(found, computed)
    elif name == "int8":
        assert torch.equal(found, round_to_int8(computed.float() - center) + center)
    else:
        turn = hadamard_matrix(x.shape[-1]) if hadamard else np.eye(x.shape[-1])
        x, left = x @ turn, left @ turn
        for first in range(0, x.shape[-1], 64):
            group = min(64, x.shape[-1] - first)
            for begin in (first, first + group // 2):
                half, kept = (each[..., begin : begin + group // 2] for each in (x, left))
                width = np.abs(half).max(-1, keepdims=True) / 8
                # Half a step, a whole one at the end that has no integer, and what bfloat16 takes of the scale
                error, steps = np.abs(kept - half) / width, np.abs(kept / width)
                assert (error <= 0.5 + 0.04 + 0.5 * (np.abs(half / width) > 7.46)).all()
                assert (np.abs(steps - np.rint(steps)) < 0.04).all(), "no multiple of a step"
                assert (steps.max(-1) > 7.95).all(), "the largest magnitude is kept"


@pytest.mark.parametrize("mean", [0.0, 3.0], ids=["", "centered"])
@pytest.mark.parametrize(
    ("formats", "hadamard"),
    [*((each, True) for each in FORMATS), *((each, False) for each in FORMATS if "int4" in each)],
    ids=str,
)
@dtypes
@kinds
def test_attention_is_over_what_is_left_of_keys_and_values(
    kind: str,
    formats: tuple[str, str],
    dtype: torch.dtype,
    tolerance: float,
    hadamard: bool,
    mean: float,
    rng: random.Random,
) -> None:
    means = [mean * torch.randn(spec.num_kv_heads, spec.head_dim) for spec in LAYERS]
    layers = [spec._replace(k_mean=each) for spec, each in zip(LAYERS, means, strict=True)] if mean else LAYERS
    world = World({"it": quantized(kind, formats, hadamard=hadamard)}, layers=layers, dtype=dtype)
    text = random_text(rng.randrange(99), 70, LAYERS, dtype)
    reading = world.open("it", text)
    stored = [(k.double(), v.double()) for k, v in zip(text.k, text.v, strict=True)]
    while reading.left:
        start, n = len(text) - reading.left, reading.chunk(rng.choice([1, 13]))
        result = step([(reading, n)], keys=True)
        end = start + n
        for layer, spec in enumerate(LAYERS):
            k, v, positions = result.keys[0][layer]
            own = positions.long()
            center = means[layer] if formats[0] != "model" else torch.zeros(())
            for name, found, computed, kept, minus in zip(
                formats, (k, v), (text.k[layer], text.v[layer]), stored[layer], (center, 0.0), strict=True
            ):
                check_what_is_left(name, found, computed[own], hadamard=hadamard, center=minus)
                kept[own] = found.double()
            mask = visible_keys(spec, end, KEEPS[kind](world.caches["it"].options))[start:end]
            want = attention(text.q[layer][start:end], stored[layer][0][:end], stored[layer][1][:end], spec, mask)
            assert (result.outs[0][layer].double() - want).abs().max() < tolerance


@pytest.mark.parametrize("formats", QUANTIZED_KEYS, ids="-".join)
@kinds
def test_what_all_keys_have_in_common_costs_nothing_if_it_is_known(
    kind: str, formats: tuple[str, str], rng: random.Random
) -> None:
    """The same bits come of keys as of keys with a large vector added; without a center, hardly anything is left."""
    means = [1000.0 * torch.randn(spec.num_kv_heads, spec.head_dim).sign() for spec in LAYERS]
    centered = [spec._replace(k_mean=each) for spec, each in zip(LAYERS, means, strict=True)]
    text = random_text(rng.randrange(99), 40, LAYERS)
    text = replace(text, k=[(64 * each).round() / 64 for each in text.k])  # sums with the mean are exact
    added = replace(text, k=[each + mean for each, mean in zip(text.k, means, strict=True)])

    def attend(added_to: RandomText, layers: Sequence[LayerSpec], **options: bool) -> list[Tensor]:
        world = World({"it": quantized(kind, formats, **options)}, layers=layers)
        reading = world.open("it", added_to)
        return step([(reading, reading.chunk(len(added_to)))]).outs[0]

    plain, shifted = attend(text, LAYERS), attend(added, centered)
    assert all(torch.equal(*pair) for pair in zip(plain, shifted, strict=True))
    off = attend(added, centered, center=False)
    assert all(torch.equal(*pair) for pair in zip(off, attend(added, LAYERS), strict=True))
    assert any((ours - theirs).abs().max() > 0.1 for ours, theirs in zip(plain, off, strict=True))


# ---------------------------------------------------------------- memory and options
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    ("formats", "share"), [(("int8", "int8"), 0.54), (("int4", "int4"), 0.30), (("int8", "int4"), 0.42)], ids=str
)
@kinds
def test_it_takes_the_memory_it_says_and_is_not_called_exact(
    kind: str, formats: tuple[str, str], share: float, dim: int
) -> None:
    settings = {"small": quantized(kind, formats), "as_computed": quantized(kind, ("model", "model"))}
    world = World(settings, layers=[LayerSpec(2, 6, dim, dim)], dtype=torch.bfloat16)
    assert not world.caches["small"].contract.exact
    (small,), (large,) = (world.get_sizes(name).block_bytes for name in ("small", "as_computed"))
    assert small / large <= share


@pytest.mark.parametrize(
    ("formats", "dims", "told"),
    [
        (("int8", "model"), (6, 8), "k_dtype=int8 needs head dimensions that are multiples of 4, this model has 6"),
        (("model", "int4"), (8, 12), "v_dtype=int4 needs head dimensions that are multiples of 8, this model has 12"),
    ],
)
@kinds
def test_heads_whose_scales_would_not_be_aligned_are_refused(
    kind: str, formats: tuple[str, str], dims: tuple[int, int], told: str
) -> None:
    with pytest.raises(SettingsError, match=told):
        World({"it": quantized(kind, formats)}, layers=[LayerSpec(1, 1, *dims)])


def test_another_word_is_told() -> None:
    with pytest.raises(SettingsError, match=r"strategies\.it\.k_dtype: should be 'model', 'int8' or 'int4'"):
        resolve_instances({"it": StrategySettings.model_validate({"kind": "paged", "k_dtype": "int2"})})
    assert load_kind("paged").options_type().k_dtype == "model"  # type: ignore[attr-defined]


def test_the_former_name_stands_for_both_and_warns(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        (found,) = resolve_instances({"it": StrategySettings.model_validate({"kind": "paged", "kv_dtype": "int8"})})
    assert (found.options.k_dtype, found.options.v_dtype) == ("int8", "int8")  # type: ignore[attr-defined]
    assert "kv_dtype is deprecated" in caplog.text
    with pytest.raises(SettingsError, match=r"strategies\.it\.k_dtype: should be"):
        resolve_instances({"it": StrategySettings.model_validate({"kind": "paged", "kv_dtype": "int2"})})


def test_the_same_text_has_other_names_in_another_format() -> None:
    settings = {"int8": quantized("paged", ("int8", "int8")), "int4": quantized("paged", ("int4", "int4"))}
    settings |= {"plain": quantized("paged", ("int4", "int4"), hadamard=False)}
    worlds = [World({"it": each}, layers=LAYERS) for each in settings.values()]
    names = {world.caches["it"].block_naming().root for world in worlds}  # type: ignore[attr-defined, union-attr]
    assert len(names) == len(settings)


def test_the_same_text_has_other_names_if_keys_are_stored_without_another_vector() -> None:
    drawn = [torch.randn(spec.num_kv_heads, spec.head_dim) for spec in LAYERS]
    means: list[list[Tensor | None]] = [
        [None, None],
        [drawn[0], None],
        [None, drawn[1]],
        [*drawn],
        [2 * drawn[0], None],
    ]

    def name(settings: StrategySettings, of_layers: Sequence[Tensor | None]) -> bytes:
        layers = [spec._replace(k_mean=each) for spec, each in zip(LAYERS, of_layers, strict=True)]
        cache = World({"it": settings}, layers=layers).caches["it"]
        root: bytes = cache.block_naming().root  # type: ignore[attr-defined]
        return root

    assert len({name(quantized("paged", ("int4", "int4")), each) for each in means}) == len(means)
    for same in (quantized("paged", ("int4", "int4"), center=False), quantized("paged", ("model", "int4"))):
        assert len({name(same, each) for each in means}) == 1


# ---------------------------------------------------------------- every kind, in every format
def list_quantized() -> dict[str, StrategySettings]:
    """Return instances of every registered kind that stores by token, in each of the formats."""
    with installed():
        by_token = {
            name: settings
            for name, settings in every_instance().items()
            if issubclass(load_kind(settings.kind).options_type, TableOptions)
        }
    return {
        f"{name}, {k}-{v}": StrategySettings(kind=settings.kind, **{**settings.options, "k_dtype": k, "v_dtype": v})
        for name, settings in by_token.items()
        for k, v in FORMATS
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_kind_in_every_format_in_one_batch(dtype: torch.dtype, rng: random.Random) -> None:
    """Draws some of the instances; keys may differ by what the format rounds, and attention is over what is left."""
    instances = list_quantized()
    drawn = rng.sample(sorted(instances), 24)
    known = [spec._replace(k_mean=0.2 * torch.randn(spec.num_kv_heads, spec.head_dim)) for spec in MODEL[:1]]
    world = World({name: instances[name] for name in drawn}, layers=[*known, *MODEL[1:]], dtype=dtype, max_seats=1)
    readings = [world.open(name, random_text(rng.randrange(99), 60, MODEL, dtype)) for name in drawn]
    while unread := [reading for reading in readings if reading.left]:
        rows = [(each, each.chunk(rng.choice([1, 1, 7, 40]))) for each in rng.sample(unread, min(len(unread), 9))]
        check_last_queries(step(rows, keys=True), rows, MODEL)
        world.check_integrity()
