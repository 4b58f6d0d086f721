"""Random transformers models, and the texts that they generate with our caches and with DynamicCache."""

from __future__ import annotations

from functools import cache as remembered
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from cache_strategies.adapters.transformers import StrategyCache
from config.settings import StrategySettings
from plugin_kit.driver.world import POISON
from tests.models.random_models import CONFIGS, random_model

MAX_SEQ_LEN = 96
NEW_TOKENS = 13  # tokens written, unless told otherwise: beyond a window of the models, and a block of 32
PAGED = StrategySettings(kind="paged", block_size=4)


@remembered
@torch.inference_mode(False)  # whoever asks first
def random_model_of(name: str) -> Any:
    return random_model(CONFIGS[name])


def make_cache(model: Any, settings: StrategySettings, *, rows: int = 3, **how: Any) -> StrategyCache:
    """Return a StrategyCache whose memory is filled with NaN until it is written."""
    cache = StrategyCache(
        model.config, settings.kind, max_seq_len=MAX_SEQ_LEN, max_batch_size=rows, **settings.options, **how
    )
    for region in cache._cache.setup.memory.regions:
        region.memory.fill_(POISON)
    return cache


def sliding_window(window: int, sinks: int = 0, **options: int) -> StrategySettings:
    return StrategySettings(kind="sliding_window", window=window, sinks=sinks, **options)


def random_prompts(rows: int = 3, length: int = 21, seed: int = 1) -> Tensor:
    return torch.randint(2, 300, (rows, length), generator=torch.Generator().manual_seed(seed))


def generate(
    model: Any, ids: Tensor, cache: Any, more: int = NEW_TOKENS, mask: Tensor | None = None, **how: Any
) -> Tensor:
    """Return prompt and generated tokens [B, S]; greedy decoding unless `flags` say otherwise."""
    mask = torch.ones_like(ids) if mask is None else mask
    greedy = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None} | how
    found: Tensor = model.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=more, **greedy)
    return found


_own: dict[tuple[object, ...], Tensor] = {}


def generate_with_dynamic_cache(
    model: Any, ids: Tensor, more: int = NEW_TOKENS, mask: Tensor | None = None, **how: Any
) -> Tensor:
    """Return what `generate` gives with transformers' own cache; memoized, as all strategies are compared with it."""
    key = (model, str(ids.tolist()), more, None if mask is None else str(mask.tolist()), str(how))
    if key not in _own:
        _own[key] = generate(model, ids, DynamicCache(config=model.config), more, mask, **how)
    return _own[key]


def left_padding_mask(ids: Tensor) -> Tensor:
    """Return an attention mask under which the rows have different lengths."""
    mask = torch.ones_like(ids)
    for row, padding in zip(mask, (5, 0, 9), strict=False):
        row[:padding] = 0
    return mask
