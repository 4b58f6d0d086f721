"""Tests of the textbook cache, and of the GPT of docs/guide/textbook.md with a cache against itself without one."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from cache_strategies.adapters.textbook import CausalAttentionWithCache, GPTWithCache, KVCache

DOC = Path(__file__).parents[3] / "docs" / "guide" / "textbook.md"
B, H, D, LONGEST = 3, 2, 4, 16


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    """Run the document's program; return the names that it defines."""
    (code,) = re.findall(r"```python\n(.*?)```", DOC.read_text(), re.DOTALL)
    found: dict[str, Any] = {"__name__": "textbook_example"}
    exec(compile(code, str(DOC), "exec"), found)
    return found


def entering(n: int, *, batch: int = B, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return random key and value [B, H, n, D] of n tokens."""
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, batch, H, n, D, generator=generator)
    return k, v


def a_cache() -> KVCache:
    return KVCache(B, LONGEST, H, D)


def uncached_logits(model: Any, ids: Tensor) -> Tensor:
    """Compute the GPT's logits again, with torch's causal attention over the whole text, in the weights' dtype."""
    x = model.tokens(ids) + model.positions(torch.arange(ids.shape[1]))
    for block in model.blocks:
        attention, y = block.attention, block.norm_1(x)
        q, k, v = (
            part.unflatten(-1, (model.num_heads, model.head_dim)).transpose(1, 2)
            for part in attention.qkv(y).chunk(3, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + attention.out(mixed.transpose(1, 2).flatten(2))
        x = x + block.mlp(block.norm_2(x))
    logits: Tensor = model.head(model.norm(x))
    return logits


# ---------------------------------------------------------------- the document
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@torch.inference_mode()
def test_cached_generation_equals_computing_the_whole_text_for_every_token(
    example: dict[str, Any], dtype: torch.dtype
) -> None:
    model, text = copy.deepcopy(example["model"]).to(dtype), example["prompt"]
    for _ in range(20):
        text = torch.cat((text, uncached_logits(model, text)[:, -1:].argmax(-1)), 1)
    assert example["text"].tolist() == text.tolist()


@torch.inference_mode()
def test_cached_logits_equal_uncached_ones(example: dict[str, Any]) -> None:
    model, text = example["model"], example["text"]
    cache = model.new_cache(2)
    parts = [model(text[:, i : i + 1], cache, i) for i in range(text.shape[1])]
    torch.testing.assert_close(torch.cat(parts, 1), uncached_logits(model, text), rtol=0, atol=1e-5)
    double = uncached_logits(copy.deepcopy(model).double(), text)
    torch.testing.assert_close(torch.cat(parts, 1).double(), double, rtol=0, atol=1e-5)


def test_the_document_counts_right(example: dict[str, Any]) -> None:
    cache, model = example["cache"], example["model"]
    assert len(cache) == 24
    assert cache.nbytes == KVCache.bytes_for(2, 2, model.max_seq_len, model.num_heads, model.head_dim)
    cache.clear()
    assert model.generate(example["prompt"], 20, cache).tolist() == example["text"].tolist()
    assert 2 * example["small"].nbytes == cache.nbytes


def test_what_the_document_proposes_to_try(example: dict[str, Any]) -> None:
    cache, model, prompt = example["cache"], example["model"], example["prompt"]
    cache.clear()
    whole = model(prompt, cache, 0)
    cache.clear()
    pieces = [model(prompt[:, :3], cache, 0), model(prompt[:, 3:], cache, 3)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole)


class NewMemory(TorchDispatchMode):
    """Collects the memory of the tensors that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor):
            self.seen.add(found.untyped_storage().data_ptr())
        return found


def test_memory_stays_flat_while_generating(example: dict[str, Any]) -> None:
    model, prompt = example["model"], example["prompt"]
    cache = model.new_cache(2)
    assert cache.nbytes == 0
    model.generate(prompt, 1, cache)
    taken, at = cache.nbytes, [cache.get(layer)[0].data_ptr() for layer in range(2)]
    for _ in range(3):
        model.generate(prompt[:, :1], 5, cache)
        assert (cache.nbytes, [cache.get(layer)[0].data_ptr() for layer in range(2)]) == (taken, at)
    cache.clear()
    assert cache.nbytes == taken


# ---------------------------------------------------------------- the cache
def test_an_update_after_a_layers_first_takes_no_memory_whatever() -> None:
    cache, (k, v) = a_cache(), entering(2)
    own = {x.untyped_storage().data_ptr() for x in cache.update(k, v, 0)} | {
        x.untyped_storage().data_ptr() for x in (k, v)
    }
    with NewMemory() as memory:
        for _ in range(5):
            cache.update(k, v, 0)
    assert memory.seen <= own


def test_layers_take_their_memory_when_they_are_first_used() -> None:
    cache, (k, v) = a_cache(), entering(1)
    for layers, layer_idx in enumerate((7, 0, 3), start=1):
        for _ in range(2):
            cache.update(k, v, layer_idx)
            assert cache.nbytes == KVCache.bytes_for(layers, B, LONGEST, H, D) == layers * 2 * B * H * LONGEST * D * 4


@given(st.lists(st.integers(0, 6), max_size=8), st.integers(1, B))
def test_what_was_put_in_comes_out(sizes: list[int], batch: int) -> None:
    cache, (k, v) = a_cache(), entering(LONGEST, batch=batch)
    cache.update(*entering(0, batch=batch), 1)
    end = 0
    for n in sizes:
        if (start := end) + n > LONGEST:
            break
        end += n
        found = cache.update(k[:, :, start:end], v[:, :, start:end], 1)
        for (keys, values), length in ((found, cache.length(1)), (cache.get(1), len(cache))):
            assert length == end
            assert torch.equal(keys, k[:, :, :end])
            assert torch.equal(values, v[:, :, :end])


def test_views_are_windows_onto_the_memory() -> None:
    cache = a_cache()
    early = cache.update(*entering(3), 0)
    later = cache.update(*entering(4, seed=1), 0)
    for old, new, got, put in zip(early, later, cache.get(0), entering(4, seed=1), strict=True):
        assert old.data_ptr() == new.data_ptr() == got.data_ptr()
        assert old.stride() == new.stride()
        assert torch.equal(old.as_strided(new.shape, new.stride())[:, :, 3:], put)  # tokens that came after `old`
    cache.clear()
    cache.update(*entering(3, seed=2), 0)
    assert torch.equal(early[0], entering(3, seed=2)[0])


def test_clearing_forgets_tokens_keeps_memory_and_takes_another_batch() -> None:
    cache = a_cache()
    before = cache.update(*entering(LONGEST), 0)[0].data_ptr()
    cache.clear()
    assert (len(cache), cache.length(0), cache.get(0)[0].shape[2]) == (0, 0, 0)
    k, _ = cache.update(*entering(5, batch=1), 0)
    assert k.shape == (1, H, 5, D)
    assert k.data_ptr() == before


def test_lengths_are_a_layers_own_and_the_whole_has_what_all_have() -> None:
    cache = a_cache()
    cache.update(*entering(3), 0)
    cache.update(*entering(2), 1)
    assert [cache.length(layer) for layer in (0, 1, 2)] == [3, 2, 0]
    assert len(cache) == 2


def test_it_keeps_no_graph_and_works_in_and_out_of_inference_mode() -> None:
    cache = a_cache()
    with torch.inference_mode():
        cache.update(*entering(1), 0)
    k, v = entering(1)
    k.requires_grad_()
    assert not any(x.requires_grad for x in cache.update(k, v, 0))
    assert k.requires_grad


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        (torch.zeros(B, H, 1, D + 1), torch.zeros(B, H, 1, D + 1), r"key has the shape \[3, 2, 1, 5\].*head_dim"),
        (torch.zeros(B, H, 1, D), torch.zeros(B, H + 1, 1, D), r"value has the shape .*num_heads"),
        (torch.zeros(H, 1, D), torch.zeros(H, 1, D), r"needs \[batch, 2, tokens, 4\]"),
        (torch.zeros(B, H, 2, D), torch.zeros(B, H, 1, D), "both the same shape"),
        (
            torch.zeros(B, H, 1, D).double(),
            torch.zeros(B, H, 1, D),
            r"key has dtype torch.float64.*with dtype=torch.float64",
        ),
        (torch.zeros(B, H, 1, D), torch.zeros(B, H, 1, D).half(), r"value has dtype torch.float16, this cache stores"),
        (torch.zeros(B + 1, H, 1, D), torch.zeros(B + 1, H, 1, D), "max_batch_size=3: raise it"),
        (torch.zeros(B - 1, H, 1, D), torch.zeros(B - 1, H, 1, D), "holds 3 sequences.*clear()"),
        (torch.zeros(B, H, 14, D), torch.zeros(B, H, 14, D), "holds 3 tokens and has no room for 14.*max_seq_len=16"),
        (torch.zeros(B, H, 1, D, device="meta"), torch.zeros(B, H, 1, D), "same shape and device"),
        (torch.zeros(B, H, 1, D, device="meta"), torch.zeros(B, H, 1, D, device="meta"), "is on cpu.*move"),
    ],
)
def test_what_does_not_fit_is_refused_and_leaves_no_trace(key: Tensor, value: Tensor, says: str) -> None:
    cache, (k, v) = a_cache(), entering(3)
    cache.update(k, v, 0)
    with pytest.raises(ValueError, match=says):
        cache.update(key, value, 0)
    assert cache.length(0) == 3
    assert torch.equal(cache.get(0)[0], k)
    assert torch.equal(cache.get(0)[1], v)


def test_a_layer_may_be_filled_to_the_brim() -> None:
    cache = a_cache()
    cache.update(*entering(LONGEST - 1), 0)
    assert cache.update(*entering(1), 0)[0].shape[2] == LONGEST
    with pytest.raises(ValueError, match="no room for 1 more"):
        cache.update(*entering(1), 0)


def test_a_refused_first_token_takes_no_memory() -> None:
    cache = a_cache()
    with pytest.raises(ValueError, match="no room"):
        cache.update(*entering(LONGEST + 1), 0)
    assert cache.nbytes == 0
    with pytest.raises(ValueError, match="layer 0 holds no tokens yet"):
        cache.get(0)


@pytest.mark.parametrize("sizes", [(0, 1, 1, 1), (1, 0, 1, 1), (1, 1, -1, 1), (1, 1, 1, 0)])
def test_sizes_are_at_least_one(sizes: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        KVCache(*sizes)


def test_an_integer_type_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dtype is torch.int8.*such as torch.bfloat16"):
        KVCache(1, 1, 1, 1, dtype=torch.int8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_kept_as_it_came_in_half_the_memory(dtype: torch.dtype) -> None:
    cache = KVCache(B, LONGEST, H, D, dtype)
    k, v = (x.to(dtype) for x in entering(5))
    keys, values = cache.update(k, v, 0)
    assert keys.dtype == values.dtype == dtype
    assert keys.equal(k)
    assert values.equal(v)
    assert cache.nbytes == KVCache.bytes_for(1, B, LONGEST, H, D, itemsize=2)


@given(st.integers(0, 12), st.integers(0, 14), st.integers(0, 4))
def test_cropped_tokens_are_forgotten_and_written_over(held: int, length: int, more: int) -> None:
    cache, (k, v) = a_cache(), entering(LONGEST)
    for layer in (0, 1):
        cache.update(k[:, :, :held], v[:, :, :held], layer)
    taken = cache.nbytes
    cache.crop(length)
    left = min(held, length)
    assert (len(cache), cache.length(0), cache.length(1)) == (left, left, left)
    new_k, new_v = entering(more, seed=1)
    keys, values = cache.update(new_k, new_v, 0)
    assert keys.equal(torch.cat((k[:, :, :left], new_k), 2))
    assert values.equal(torch.cat((v[:, :, :left], new_v), 2))
    assert cache.nbytes == taken


def test_cropping_keeps_the_batch_and_refuses_less_than_nothing() -> None:
    cache = a_cache()
    cache.update(*entering(3), 0)
    cache.update(*entering(1), 1)
    cache.crop(2)
    assert [cache.length(layer) for layer in (0, 1, 2)] == [2, 1, 0]
    with pytest.raises(ValueError, match="holds 3 sequences"):
        cache.update(*entering(1, batch=1), 0)
    with pytest.raises(ValueError, match=r"crop\(-1\): give the number of tokens to keep"):
        cache.crop(-1)


# ---------------------------------------------------------------- the attention
def an_attention() -> CausalAttentionWithCache:
    torch.manual_seed(5)
    return CausalAttentionWithCache(H * D, H, layer_idx=4).eval()


@settings(deadline=None)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=LONGEST), st.integers(1, B))
@torch.inference_mode()
def test_pieces_of_any_size_equal_one_whole_forward(sizes: list[int], batch: int) -> None:
    attention, cache = an_attention(), a_cache()
    x = torch.randn(batch, LONGEST, H * D, generator=torch.Generator().manual_seed(1))
    whole = attention(x, a_cache(), 0)
    start, parts = 0, []
    for n in [*sizes, LONGEST]:
        piece = x[:, start : start + n]
        parts.append(attention(piece, cache, start))
        start += piece.shape[1]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-6)


@torch.inference_mode()
def test_attention_is_torchs_own() -> None:
    attention = an_attention()
    x = torch.randn(B, LONGEST, H * D, generator=torch.Generator().manual_seed(2))
    reference = nn.MultiheadAttention(H * D, H, batch_first=True)
    reference.load_state_dict(
        {
            "in_proj_weight": attention.qkv.weight,
            "in_proj_bias": attention.qkv.bias,
            "out_proj.weight": attention.out.weight,
            "out_proj.bias": attention.out.bias,
        }
    )
    future = torch.ones(LONGEST, LONGEST, dtype=torch.bool).triu(1)
    expected, _ = reference(x, x, x, attn_mask=future, need_weights=False)
    torch.testing.assert_close(attention(x, a_cache(), 0), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("start_pos", [0, 2, 4])
def test_a_wrong_start_is_refused_and_nothing_enters(start_pos: int) -> None:
    attention, cache = an_attention(), a_cache()
    attention(torch.zeros(1, 3, H * D), cache, 0)
    with pytest.raises(ValueError, match=f"start_pos is {start_pos}, but the cache holds 3 .*pass start_pos=3"):
        attention(torch.zeros(1, 1, H * D), cache, start_pos)
    assert cache.length(4) == 3


@torch.inference_mode()
def test_the_cache_and_the_start_may_be_left_out() -> None:
    attention = an_attention()
    x = torch.randn(B, LONGEST, H * D, generator=torch.Generator().manual_seed(3))
    cache = a_cache()
    expected = attention(x, a_cache(), 0)
    assert cache.length(4) == 0
    for found in (attention(x), attention(x, None, 0), attention(x, cache=cache)):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert cache.length(4) == LONGEST


def test_without_a_cache_there_is_nothing_before_the_text() -> None:
    with pytest.raises(ValueError, match=r"start_pos is 3, but there is no cache: pass the whole text"):
        an_attention()(torch.zeros(1, 1, H * D), None, 3)


def test_a_start_left_out_is_that_of_a_new_text() -> None:
    attention, cache = an_attention(), a_cache()
    attention(torch.zeros(1, 2, H * D), cache)
    with pytest.raises(ValueError, match=r"start_pos is 0, but the cache holds 2 tokens.*pass start_pos=2"):
        attention(torch.zeros(1, 1, H * D), cache)


def test_it_can_be_trained_without_a_cache() -> None:
    """Gradients reach every key: the loss of the last token changes when an earlier token does."""
    x = torch.randn(1, 5, H * D, generator=torch.Generator().manual_seed(4), requires_grad=True)
    an_attention()(x)[:, -1].square().sum().backward()
    assert x.grad is not None
    assert (x.grad.abs().sum(-1) > 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.inference_mode()
def test_half_precision_with_the_cache_equals_it_without_within_its_rounding(dtype: torch.dtype) -> None:
    torch.manual_seed(6)
    model = GPTWithCache(64, 32, 4, 2, 48).eval()
    ids = torch.randint(0, 64, (2, 40))
    double, half = model.double()(ids), copy.deepcopy(model).to(dtype)
    cache = half.new_cache(2)
    assert cache.dtype == dtype
    cached = torch.cat([half(ids[:, i : i + 1], cache, i) for i in range(40)], 1)
    whole = half(ids)
    bound = 20 * torch.finfo(dtype).eps * double.abs().max().item()
    torch.testing.assert_close(cached.double(), double, rtol=0, atol=bound)
    torch.testing.assert_close(whole.double(), double, rtol=0, atol=bound)


@torch.inference_mode()
def test_large_scores_do_not_overflow_in_float16() -> None:
    attention = CausalAttentionWithCache(256, 1, 0)
    x = torch.full((1, 3, 256), 17.0).half()
    nn.init.eye_(attention.qkv.weight[:256])
    nn.init.eye_(attention.qkv.weight[256:512])
    assert torch.finfo(torch.float16).max < 17 * 17 * 256, "the score, before it is divided"
    assert attention.half()(x, KVCache(1, 3, 1, 256, torch.float16)).isfinite().all()


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ValueError, match="d_model=10 is not a multiple of num_heads=4"):
        CausalAttentionWithCache(10, 4, 0)


def test_a_cache_of_other_heads_says_so() -> None:
    with pytest.raises(ValueError, match="key has the shape"):
        an_attention()(torch.zeros(1, 1, H * D), KVCache(1, 8, H + 1, D), 0)


def test_llama_2_7b_keeps_two_gibibytes_at_4096_tokens() -> None:
    assert KVCache.bytes_for(32, 1, 4096, 32, 128, itemsize=2) == 2 * 2**30


# ---------------------------------------------------------------- the GPT
@settings(deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 3), st.integers(1, 30), st.integers(0, 18))
def test_generating_with_and_without_the_cache_is_the_same(seed: int, batch: int, prompt: int, count: int) -> None:
    torch.manual_seed(seed)
    model = GPTWithCache(64, 32, 4, 2, 48).double().eval()  # where no token wins by a hair
    ids = torch.randint(0, 64, (batch, prompt))
    text = model.generate(ids, count)
    assert text.shape == (batch, prompt + count)
    assert text.equal(model.generate(ids, count, model.new_cache(batch)))


def test_a_text_that_is_too_long_is_refused(example: dict[str, Any]) -> None:
    model, prompt = example["model"], example["prompt"]
    for cache in (None, model.new_cache(2)):
        assert model.generate(prompt, 44, cache).shape == (2, 49), "the last token never went in"
    for cache in (None, model.new_cache(2)):
        with pytest.raises(ValueError, match="a text of 49 tokens is longer than max_seq_len=48"):
            model.generate(prompt, 45, cache)


def test_nothing_follows_an_empty_prompt() -> None:
    model = GPTWithCache(64, 32, 4, 2, 48)
    for cache in (None, model.new_cache(1)):
        with pytest.raises(ValueError, match="the prompt is empty"):
            model.generate(torch.zeros(1, 0, dtype=torch.long), 3, cache)
