"""quest refuses budgets that leave nothing to choose, and promises what its options allow."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cache_strategies.quest.options import QuestOptions
from cache_strategies.registry import resolve_instances
from config.errors import SettingsError
from config.settings import StrategySettings
from kernels.types import LayerSpec
from plugin_kit.driver.reference import attention
from plugin_kit.driver.steps import step
from plugin_kit.driver.texts import random_text
from tests.cache_strategies.cache_driver import get_token_bytes
from tests.cache_strategies.quest.brute_force import LAYERS, make_world, read_prompt
from tests.contract.harness import World
from tests.kernels.rounded_vectors import round_to_int8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 127}, "budget=127 leaves nothing to choose: every query reads 3 blocks of block_size=32 tokens"),
        ({"budget": 127}, "raise budget to 128 or more, or lower block_size"),
        ({"budget": 0.5, "min_tokens": 100}, "min_tokens=100 leaves nothing to choose"),
        ({"budget": 1.0}, "a share must be above 0 and below 1, not 1.0; a number of tokens has no point"),
        ({"budget": 0.0}, "a share must be above 0 and below 1, not 0.0"),
        ({"budget": 0}, "a number of tokens must be at least 1, not 0"),
        ({"budget": -5}, "a number of tokens must be at least 1, not -5"),
        ({"budget": 1}, "budget=1 leaves nothing to choose"),
        ({"min_tokens": 0}, "min_tokens: should be 1 or more"),
        ({"block_size": 0}, "block_size: should be 1 or more"),
        ({"eviction": "none"}, "eviction"),
    ],
    ids=str,
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        resolve_instances({"it": StrategySettings(kind="quest", **options)})


@pytest.mark.parametrize(
    ("options", "num_blocks", "num_read"),
    [
        ({}, 256, 32),
        ({}, 257, 33),
        ({}, 16, 16),
        ({}, 17, 16),
        ({"budget": 1000}, 256, 31),
        ({"budget": 0.5, "min_tokens": 128}, 9, 5),
        ({"budget": 0.01, "min_tokens": 128}, 9, 4),
        ({"budget": 0.01, "min_tokens": 128}, 3, 3),
    ],
    ids=str,
)
def test_the_budget_in_blocks(options: dict[str, Any], num_blocks: int, num_read: int) -> None:
    assert QuestOptions(**options).count_read(num_blocks, 32) == num_read


@pytest.mark.parametrize(
    ("options", "layers", "exact"),
    [
        ({"budget": 160}, LAYERS, True),  # max_seq_len
        ({"budget": 159}, LAYERS, False),
        ({"budget": 0.99, "min_tokens": 160}, LAYERS, True),
        ({"budget": 0.9, "min_tokens": 16}, LAYERS, False),
        ({"budget": 160, "k_dtype": "int8", "v_dtype": "int8"}, LAYERS, False),
        ({}, [LayerSpec(1, 1, 4, 4, window=9)], True),
    ],
    ids=str,
)
def test_it_is_exact_if_nothing_is_left_out(options: dict[str, Any], layers: list[LayerSpec], exact: bool) -> None:
    contract = make_world(layers=layers, **options).caches["quest"].contract
    assert contract.exact == exact
    if exact:
        assert contract.replayable
        assert contract.chunk_invariant


def test_attention_over_int8_is_over_what_is_left_of_the_keys_that_are_read() -> None:
    world, text = make_world(k_dtype="int8", v_dtype="int8"), random_text(1, 90, LAYERS)
    reading = read_prompt(world, text, 70)
    for _ in range(6):
        result = step([(reading, 1)], keys=True)
        end = reading.sequence.length
        for layer, spec in enumerate(LAYERS):
            _, _, positions = result.keys[0][layer]
            listed = torch.zeros(spec.num_kv_heads, end, dtype=torch.bool)
            for head in range(spec.num_kv_heads):
                listed[head, positions[:, head]] = True
            assert listed.sum(1).tolist() == [4 * 4 + (end - 1) % 4 + 1] * spec.num_kv_heads
            k, v = round_to_int8(text.k[layer][:end]), round_to_int8(text.v[layer][:end])
            want = attention(text.q[layer][end - 1 : end], k, v, spec, listed[:, None])
            assert (result.outs[0][layer].double() - want).abs().max() < 2e-6


def test_int8_takes_summaries_in_float32() -> None:
    sizes = {}
    for format in ("model", "int8"):
        settings = StrategySettings.model_validate({"kind": "quest", "k_dtype": format, "v_dtype": format})
        world = World({"it": settings}, layers=[LayerSpec(2, 6, 64, 64)], dtype=torch.bfloat16)
        sizes[format] = get_token_bytes(world.caches["it"])
    assert sizes == {"model": 2 * (2 * 128 + 2 * 128 / 32), "int8": 2 * (2 * 68 + 2 * 256 / 32)}
