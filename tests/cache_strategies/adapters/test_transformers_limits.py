"""Tests of strategies that drop keys under transformers' masks, and of the error messages for everything else."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Llama4TextConfig, MambaConfig

from cache_strategies import registry
from cache_strategies.adapters.transformers import StrategyCache, StrategyCacheError
from config.errors import SettingsError
from config.settings import StrategySettings
from tests.cache_strategies.adapters.generated_texts import (
    MAX_SEQ_LEN,
    NEW_TOKENS,
    PAGED,
    generate,
    generate_with_dynamic_cache,
    left_padding_mask,
    make_cache,
    random_model_of,
    random_prompts,
    sliding_window,
)
from tests.models.random_models import CONFIGS, random_model

DOC = Path(__file__).parents[3] / "docs" / "guide" / "transformers.md"


# ---------------------------------------------------------------- strategies that forget
@torch.inference_mode()
def masked_greedy(model: Any, ids: Tensor, more: int, window: int, sinks: int) -> Tensor:
    """Generate without a cache: the whole text for each token, with a mask made from the strategy's definition."""
    own_window = getattr(model.config, "sliding_window", None) or MAX_SEQ_LEN
    for _ in range(more):
        at = torch.arange(ids.shape[1])
        distance = at[:, None] - at
        seen = (distance >= 0) & ((distance < window) | (at < sinks)) & (distance < own_window)
        ids = torch.cat((ids, model(ids, attention_mask=seen[None, None]).logits[:, -1:].argmax(-1)), 1)
    return ids


@pytest.mark.parametrize("name", ["llama", "qwen2", "mistral"])
@pytest.mark.parametrize(("wide", "sinks"), [(8, 0), (6, 4), (1, 1), (20, 2)])
def test_a_window_sees_its_sinks_and_its_latest_tokens(name: str, wide: int, sinks: int) -> None:
    model, ids = random_model_of(name), random_prompts()
    cache = make_cache(model, sliding_window(wide, sinks), equal_lengths=True)
    text = generate(model, ids, cache, prefill_chunk_size=1)
    assert text.equal(masked_greedy(model, ids, NEW_TOKENS, wide, sinks))
    assert not text.equal(generate_with_dynamic_cache(model, ids)) or wide == 20  # forgetting shows


def test_a_prompt_that_fits_enters_at_once() -> None:
    model, ids = random_model_of("llama"), random_prompts()
    for wide, sinks in ((21, 0), (18, 3)):
        cache = make_cache(model, sliding_window(wide, sinks, max_row=MAX_SEQ_LEN), equal_lengths=True)
        assert generate(model, ids, cache).equal(masked_greedy(model, ids, NEW_TOKENS, wide, sinks))


def test_without_sinks_a_window_may_be_padded() -> None:
    model, ids = random_model_of("llama"), random_prompts()
    mask = left_padding_mask(ids)
    text = generate(model, ids, make_cache(model, sliding_window(8)), mask=mask, prefill_chunk_size=1)
    for row, seen in enumerate(mask.bool()):
        alone = masked_greedy(model, ids[row, seen][None], NEW_TOKENS, 8, 0)
        assert alone[0].equal(torch.cat((ids[row, seen], text[row, ids.shape[1] :])))


# ---------------------------------------------------------------- refusals
def _at_once(model: Any) -> None:
    generate(model, random_prompts(), make_cache(model, sliding_window(8, max_row=MAX_SEQ_LEN)))


def _second_piece(model: Any) -> None:
    generate(model, random_prompts(), make_cache(model, sliding_window(15, max_row=MAX_SEQ_LEN)), prefill_chunk_size=12)


def _sinks_in_a_batch(model: Any) -> None:
    generate(model, random_prompts(), make_cache(model, sliding_window(8, 2)), prefill_chunk_size=1)


def _long_row(model: Any) -> None:
    generate(model, random_prompts(), make_cache(model, sliding_window(20)))


def _crop_a_ring(model: Any) -> None:
    cache = make_cache(model, sliding_window(8))
    generate(model, random_prompts(), cache, prefill_chunk_size=1)
    cache.crop(-1)


def _copy(model: Any) -> None:
    copy.deepcopy(make_cache(model, PAGED))


def _too_many_rows(model: Any) -> None:
    generate(model, random_prompts(2), make_cache(model, PAGED), num_beams=2)


def _too_many_forks(model: Any) -> None:
    cache = make_cache(model, PAGED)
    model(random_prompts(2), cache=cache)
    cache.batch_repeat_interleave(2)


def _another_batch(model: Any) -> None:
    cache = make_cache(model, PAGED)
    model(random_prompts(2), cache=cache)
    model(random_prompts(3), cache=cache)


def _too_long(model: Any) -> None:
    generate(model, random_prompts(1, 90), make_cache(model, PAGED))


def _another_model(model: Any) -> None:
    model(random_prompts(), cache=make_cache(random_model_of("llama_wide_heads"), PAGED))


def _another_device(model: Any) -> None:
    make_cache(model, PAGED, device="meta").update(torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1, 16), 0)


def _unknown_kind(model: Any) -> None:
    make_cache(model, StrategySettings(kind="pagde"))


def _unknown_option(model: Any) -> None:
    make_cache(model, StrategySettings(kind="paged", blocksize=4))


def _no_room_at_all(model: Any) -> None:
    make_cache(model, PAGED, rows=0)


def _state_spaces(model: Any) -> None:
    StrategyCache(MambaConfig(num_hidden_layers=2), max_seq_len=8)


def _chunks(model: Any) -> None:
    StrategyCache(Llama4TextConfig(num_hidden_layers=4), max_seq_len=8)


@pytest.mark.parametrize(
    ("do", "error", "says"),
    [
        (_at_once, StrategyCacheError, "drops keys while tokens 0 to 20 enter.*prefill_chunk_size=1"),
        (_second_piece, StrategyCacheError, "drops keys while tokens 12 to 20 enter"),
        (_sinks_in_a_batch, StrategyCacheError, "padding.*sinks=0.*equal_lengths=True"),
        (
            _long_row,
            StrategyCacheError,
            "accepts at most 20 tokens of a sequence at once, not 21.*prefill_chunk_size=20.*max_row",
        ),
        (_crop_a_ring, StrategyCacheError, "can drop 0 of its latest tokens, not 1.*use contiguous"),
        (_copy, StrategyCacheError, r"cannot be copied.*crop\(\)"),
        (_too_many_rows, ValueError, "4 rows exceed max_batch_size=3: raise it"),
        (_too_many_forks, ValueError, "4 rows exceed max_batch_size=3: raise it"),
        (_another_batch, ValueError, r"has 2 rows and the input has 3.*reset\(\)"),
        (_too_long, ValueError, "1 tokens do not fit after 96 cached ones: raise max_seq_len=96"),
        (_another_model, StrategyCacheError, "has keys or values of shape.*this model's own config"),
        (_another_device, ValueError, "keys are on cpu, the cache on meta: pass device='cpu'"),
        (_unknown_kind, SettingsError, "no cache strategy kind 'pagde'; kinds are"),
        (_unknown_option, SettingsError, "blocksize is not an option of this kind.*block_size"),
        (_no_room_at_all, ValueError, "must be at least 1"),
        (_state_spaces, StrategyCacheError, "use DynamicCache"),
        (_chunks, StrategyCacheError, "use DynamicCache"),
    ],
)
def test_what_cannot_be_done_is_refused_with_what_to_do_instead(do: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=f"(?s){says}"):
        do(random_model_of("llama"))


def test_a_refused_step_leaves_the_cache_as_it_was() -> None:
    model, ids = random_model_of("llama"), random_prompts()
    cache = make_cache(model, sliding_window(8))
    model(ids[:, :4], cache=cache)
    with pytest.raises(StrategyCacheError):
        model(ids[:, 4:], cache=cache)
    for i in range(4, 21):
        logits = model(ids[:, i : i + 1], cache=cache).logits
    assert logits[:, -1].argmax(-1).equal(masked_greedy(model, ids, 1, 8, 0)[:, -1])


# ---------------------------------------------------------------- strategies of other people
@pytest.fixture
def sieve(monkeypatch: pytest.MonkeyPatch) -> str:
    """Register a strategy that stores every n-th token in memory of its own and cannot fork; return its kind."""
    where = "tests.contract.third_party_strategy:SieveCache"
    monkeypatch.setattr(registry, "BUILTIN", registry.BUILTIN | {"sieve": where})
    return "sieve"


def test_a_model_that_was_saved(tmp_path: Path) -> None:
    """save_pretrained() writes the dtype into the config as a name."""
    model, ids = random_model(CONFIGS["llama"]), random_prompts()
    model.save_pretrained(tmp_path)
    assert generate(model, ids, make_cache(model, PAGED)).equal(generate_with_dynamic_cache(model, ids))


def test_a_strategy_known_by_its_seam_alone(sieve: str) -> None:
    model, ids = random_model_of("gemma3"), random_prompts()
    cache = StrategyCache(model.config, sieve, max_seq_len=MAX_SEQ_LEN, max_batch_size=3, keep=1)
    for how in ({}, {"prefill_chunk_size": 8}):
        assert generate(model, ids, cache, **how).equal(generate_with_dynamic_cache(model, ids))
        cache.reset()
    with pytest.raises(StrategyCacheError, match=r"cannot fork a sequence.*use paged"):
        generate(model, random_prompts(1), cache, num_beams=2)


def test_one_that_forgets_in_its_own_attention_is_refused(sieve: str) -> None:
    with pytest.raises(StrategyCacheError, match=r"reads only some, .* cannot mask the others.*contract is exact"):
        StrategyCache(random_model_of("llama").config, sieve, max_seq_len=MAX_SEQ_LEN)


@pytest.mark.parametrize("kind", sorted(registry.list_kinds()))
def test_every_registered_kind_can_be_used_or_says_why_not(kind: str) -> None:
    model, ids = random_model_of("llama"), random_prompts()
    try:
        cache = StrategyCache(model.config, kind, max_seq_len=MAX_SEQ_LEN, max_batch_size=3)
    except (SettingsError, StrategyCacheError):
        return
    text = generate(model, ids, cache)
    assert text.equal(generate_with_dynamic_cache(model, ids)) or not cache._cache.contract.exact


def test_the_documents_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", DOC.read_text(), re.DOTALL)
    found: dict[str, Any] = {}
    exec(compile(code, str(DOC), "exec"), found)
    assert "seats=2" in capsys.readouterr().out
    assert found["cache"].length == 3 + 10 + 2 + 10 - 1
    assert found["window"].length == 60 + 10 - 1
