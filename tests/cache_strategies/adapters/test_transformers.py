"""Exact strategies as the cache of generate: they must generate the same texts as transformers' DynamicCache.

`make test` takes every strategy with a model that is drawn anew in each run; `make test-slow` takes all pairs.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from allpairspy import AllPairs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache

from cache_strategies.adapters.transformers import StrategyCacheError
from config.settings import StrategySettings
from tests.cache_strategies.adapters.generated_texts import (
    MAX_SEQ_LEN,
    PAGED,
    generate,
    generate_with_dynamic_cache,
    left_padding_mask,
    make_cache,
    random_model_of,
    random_prompts,
    sliding_window,
)
from tests.contract.harness import exact_instances

EXACT = exact_instances()  # by name
exact_ones = pytest.mark.parametrize("strategy", EXACT)
MODELS = ["llama", "qwen2", "qwen2_windows", "mistral", "gemma2", "gemma3"]


DRAWN = "drawn"  # stands for one of the models, another one in each run


def draw(name: str, rng: random.Random) -> Any:
    """Return a model by its name."""
    name = rng.choice(MODELS) if name == DRAWN else name
    print(name)
    return random_model_of(name)


def unless(quick: bool) -> list[pytest.MarkDecorator]:
    return [] if quick else [pytest.mark.slow]


models_and_strategies = pytest.mark.parametrize(
    ("name", "strategy"),
    [
        *(pytest.param(DRAWN, strategy) for strategy in EXACT),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in product(MODELS, EXACT)),
    ],
)


# ---------------------------------------------------------------- exact strategies
@models_and_strategies
def test_exact_strategies_write_what_transformers_own_cache_does(name: str, strategy: str, rng: random.Random) -> None:
    model, ids = draw(name, rng), random_prompts()
    cache = make_cache(model, EXACT[strategy])
    assert cache._cache.contract.exact
    assert generate(model, ids, cache).equal(generate_with_dynamic_cache(model, ids))
    cache._cache.check_integrity()


PADDED = (MODELS, ["contiguous", "paged_7", "ring_with_sinks"], [0, 1, 8])  # 0: in one piece
PAIRS = {tuple(values) for values in AllPairs([list(values) for values in PADDED])}


@pytest.mark.parametrize(
    ("name", "strategy", "piece"),
    [pytest.param(*values, marks=unless(values in PAIRS)) for values in product(*PADDED)],
)
def test_padding_and_pieces_change_nothing(name: str, strategy: str, piece: int) -> None:
    model, ids = random_model_of(name), random_prompts()
    mask = left_padding_mask(ids)
    how = {"prefill_chunk_size": piece} if piece else {}
    assert generate(model, ids, make_cache(model, EXACT[strategy]), 6, mask, **how).equal(
        generate_with_dynamic_cache(model, ids, 6, mask)
    )


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_padded_batch_writes_what_each_prompt_alone_does(name: str, attention: str) -> None:
    model, ids = random_model_of(name), random_prompts()
    mask = left_padding_mask(ids)
    model.set_attn_implementation(attention)
    try:
        together = generate(model, ids, make_cache(model, PAGED), 8, mask)
        for row, seen in enumerate(mask.bool()):
            alone = generate(model, ids[row, seen][None], make_cache(model, PAGED), 8)
            assert alone[0].equal(torch.cat((ids[row, seen], together[row, ids.shape[1] :])))
    finally:
        model.set_attn_implementation("sdpa")


@settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.too_slow])
@given(
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=10),
    name=st.sampled_from(MODELS),
    strategy=st.sampled_from(sorted(EXACT)),
)
@torch.inference_mode()
def test_masks_and_keys_are_those_of_transformers_own_cache(sizes: list[int], name: str, strategy: str) -> None:
    """In pieces of any size, mask sizes and returned keys equal DynamicCache's bit for bit, and so do the logits."""
    model, ids = random_model_of(name), random_prompts(2, MAX_SEQ_LEN)
    ours, theirs = make_cache(model, EXACT[strategy], rows=2), DynamicCache(config=model.config)
    assert ours.is_sliding == theirs.is_sliding
    start = 0
    for n in sizes:
        piece = ids[:, start : start + n]
        if piece.shape[1] == 0:
            break
        sizes_of = [[c.get_mask_sizes(piece.shape[1], i) for i in range(len(c))] for c in (ours, theirs)]
        assert sizes_of[0] == sizes_of[1]
        logits = [model(piece, cache=c).logits for c in (ours, theirs)]
        assert torch.equal(*logits)
        start += piece.shape[1]
        assert ours.get_seq_length() == theirs.get_seq_length() == start


def conversation(model: Any, cache: Any) -> Iterator[Tensor]:
    """Generate several answers in one cache; return the whole text after each."""
    text = random_prompts()
    for turn in range(3):
        asked = random_prompts(length=5, seed=turn + 2)
        text = generate(model, torch.cat((text, asked), 1), cache, 6)
        yield text


@pytest.fixture(scope="module")
def their_conversation() -> list[Tensor]:
    model = random_model_of("gemma3")
    return list(conversation(model, DynamicCache(config=model.config)))


@exact_ones
def test_a_conversation_goes_on_with_the_same_object(their_conversation: list[Tensor], strategy: str) -> None:
    model = random_model_of("gemma3")
    cache = make_cache(model, EXACT[strategy])
    for text, expected in zip(conversation(model, cache), their_conversation, strict=True):
        assert text.equal(expected)
        assert cache.length == text.shape[1] - 1  # the last token was chosen and did not go in


def test_a_window_as_wide_as_the_models_own_is_exact_and_smaller() -> None:
    model, ids = random_model_of("mistral"), random_prompts(length=60)
    narrow, wide = make_cache(model, sliding_window(16, max_row=7)), make_cache(model, EXACT["contiguous"])
    assert narrow._cache.contract.exact
    assert narrow._cache.setup.memory.shared.total_bytes < wide._cache.setup.memory.shared.total_bytes / 3
    for mask in (None, left_padding_mask(ids)):
        narrow.reset()
        assert generate(model, ids, narrow, 30, mask, prefill_chunk_size=7).equal(
            generate_with_dynamic_cache(model, ids, 30, mask)
        )


# ---------------------------------------------------------------- beams and rows
@models_and_strategies
def test_beams_part_and_meet_as_under_transformers_own_cache(name: str, strategy: str, rng: random.Random) -> None:
    model, ids = draw(name, rng), random_prompts(2)
    mask = left_padding_mask(ids)[:2]
    cache = make_cache(model, EXACT[strategy], rows=6)
    how = {"num_beams": 3, "num_return_sequences": 2}
    assert generate(model, ids, cache, 12, mask, **how).equal(generate_with_dynamic_cache(model, ids, 12, mask, **how))
    cache._cache.check_integrity()


def test_forked_rows_share_their_blocks() -> None:
    model = random_model_of("llama")
    cache = make_cache(model, PAGED, rows=8)
    model(random_prompts(1, 40), cache=cache)
    before = cache.usage()
    cache.batch_repeat_interleave(8)
    assert cache.usage().reserved == before.reserved
    assert cache.batch_size == 8


@pytest.mark.parametrize("length", [MAX_SEQ_LEN - 2, MAX_SEQ_LEN - 3])
@pytest.mark.parametrize("strategy", [*EXACT, "one_block"])
def test_rows_that_part_at_the_brim_find_room(strategy: str, length: int) -> None:
    """In full memory, every row copies the block that it shared, while the source is still referenced."""
    model, ids = random_model_of("llama"), random_prompts(1, length)
    one_block = StrategySettings(kind="paged", block_size=MAX_SEQ_LEN)
    ours, theirs = make_cache(model, EXACT.get(strategy, one_block), rows=5), DynamicCache(config=model.config)
    for token in range(2):
        logits = []
        for cache in (ours, theirs):
            if token == 0:
                model(ids, cache=cache)
                cache.batch_repeat_interleave(5)
            logits.append(model(torch.arange(5)[:, None] + 10 * token, cache=cache).logits)
        assert torch.equal(*logits)


@exact_ones
def test_rows_are_chosen_doubled_and_dropped(strategy: str) -> None:
    model = random_model_of("gemma2")
    ours, theirs = make_cache(model, EXACT[strategy], rows=4), DynamicCache(config=model.config)
    changes: list[Any] = [
        lambda c: c.batch_select_indices(torch.tensor([2, 0])),
        lambda c: c.batch_repeat_interleave(2),
        lambda c: c.reorder_cache(torch.tensor([3, 3, 0, 1])),
        lambda c: c.batch_select_indices(torch.tensor([False, True, True, True])),
    ]
    for cache in (ours, theirs):
        model(random_prompts(3), cache=cache)
    for i, change in enumerate(changes):
        change(ours), change(theirs)
        ids = random_prompts(ours.batch_size, 3, seed=i)
        assert torch.equal(*(model(ids, cache=c).logits for c in (ours, theirs)))
        ours._cache.check_integrity()


@pytest.mark.parametrize("how", [{}, {"num_beams": 3}], ids=str)
def test_a_window_of_ours_is_that_of_a_model_with_such_a_window(how: dict[str, int]) -> None:
    """A strategy's window equals the model's, with beam search, too: wrapped rings are forked and closed."""
    model, ids = random_model_of("mistral_sees_all"), random_prompts(1, 9)
    narrow = copy.deepcopy(model)
    narrow.config.sliding_window = 10
    cache = make_cache(model, sliding_window(10), equal_lengths=True)
    assert not cache._cache.contract.exact
    assert generate(model, ids, cache, 30, **how).equal(generate_with_dynamic_cache(narrow, ids, 30, **how))
    assert not generate_with_dynamic_cache(narrow, ids, 30, **how).equal(
        generate_with_dynamic_cache(model, ids, 30, **how)
    )
    cache._cache.check_integrity()


# ---------------------------------------------------------------- crop, reset, failures
@exact_ones
def test_after_a_crop_the_text_goes_another_way(strategy: str) -> None:
    model = random_model_of("llama")
    cache, ids = make_cache(model, EXACT[strategy]), random_prompts()
    text = generate(model, ids, cache)
    if cache._cache.contract.rewind is None:
        cache.crop(ids.shape[1] + 4 - cache.length)
        assert cache.length == ids.shape[1] + 4
        other = torch.cat((text[:, : ids.shape[1] + 4], random_prompts(length=3, seed=9)), 1)
        assert generate(model, other, cache).equal(generate_with_dynamic_cache(model, other))
    assert cache.is_croppable == (cache._cache.contract.rewind is None)


@pytest.mark.parametrize("tokens", [1, -22])
def test_crop_takes_a_negative_number_of_tokens_that_are_there(tokens: int) -> None:
    model = random_model_of("llama")
    cache = make_cache(model, PAGED)
    model(random_prompts(), cache=cache)
    with pytest.raises(ValueError, match=r"as a negative number, from -21 to 0"):
        cache.crop(tokens)
    cache.crop(-21)
    assert cache.length == 0


@exact_ones
def test_a_reset_cache_is_as_new_and_takes_no_memory(strategy: str) -> None:
    model, cache = random_model_of("qwen2"), make_cache(random_model_of("qwen2"), EXACT[strategy])
    at = [region.memory.data_ptr() for region in cache._cache.setup.memory.regions]
    for rows in (3, 2):
        assert generate(model, random_prompts(rows), cache).equal(
            generate_with_dynamic_cache(model, random_prompts(rows))
        )
        cache.reset()
        assert (cache.length, cache.batch_size, cache.usage().used) == (0, -1, 0)
        assert [region.memory.data_ptr() for region in cache._cache.setup.memory.regions] == at


@exact_ones
@torch.inference_mode()
def test_a_failed_forward_is_dropped_by_crop_zero_and_repeated(strategy: str) -> None:
    model = random_model_of("gemma3")
    cache, ids = make_cache(model, EXACT[strategy]), random_prompts(length=30)
    model(ids[:, :20], cache=cache)

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory, say")

    hook = model.model.layers[2].self_attn.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="say"):
        model(ids[:, 20:], cache=cache)
    hook.remove()
    assert cache.length == 20
    for do in (lambda: model(ids[:, 20:], cache=cache), lambda: cache.reorder_cache(torch.tensor([0, 0, 1]))):
        with pytest.raises(StrategyCacheError, match=r"updated 2 of 3 layers.*crop\(0\)"):
            do()
    cache.crop(0)
    theirs = DynamicCache(config=model.config)
    model(ids[:, :20], cache=theirs)
    assert torch.equal(*(model(ids[:, 20:], cache=c).logits for c in (cache, theirs)))


# ---------------------------------------------------------------- memory and types
def test_there_is_memory_for_the_longest_rows_and_no_more() -> None:
    model = random_model_of("llama")
    cache = make_cache(model, EXACT["contiguous"])
    config = model.config
    kv = 2 * config.num_hidden_layers * config.num_key_value_heads * 16 * MAX_SEQ_LEN * 3 * 4
    assert cache._cache.setup.memory.shared.total_bytes == pytest.approx(kv, rel=0.06)  # blocks are rounded up


def test_a_narrow_dtype_is_asked_for_and_rounds() -> None:
    model, ids = random_model_of("llama"), random_prompts()
    cache = make_cache(model, PAGED, dtype=torch.bfloat16)
    rounded = model(ids, cache=cache).logits
    exact = model(ids).logits
    assert rounded.dtype == torch.float32
    assert 0 < (rounded - exact).abs().max() < 0.05 * exact.abs().max()


def test_a_dtype_that_was_not_asked_for_is_refused() -> None:
    model = copy.deepcopy(random_model_of("llama"))
    cache = make_cache(model, PAGED)
    with pytest.raises(ValueError, match=r"keys are torch.bfloat16, but the config says torch.float32: pass the dtype"):
        model.bfloat16()(random_prompts(), cache=cache)


def test_gradients_are_not_kept_and_inference_mode_makes_no_difference() -> None:
    model, ids = random_model_of("llama"), random_prompts()
    with torch.inference_mode():
        cache = make_cache(model, PAGED)
        model(ids[:, :9], cache=cache)
    logits = model(ids[:, 9:], cache=cache).logits  # with gradients
    assert not any(region.memory.requires_grad for region in cache._cache.setup.memory.regions)
    torch.testing.assert_close(logits, model(ids).logits[:, 9:], rtol=0, atol=1e-4)
