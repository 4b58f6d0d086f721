"""A random Qwen2 that transformers saved, served by us: greedy text over HTTP is what transformers.generate says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from tests.models.random_models import save_random
from tests.server.running import serving

STRATEGIES = ("contiguous", "paged", "sliding_window")


@pytest.mark.parametrize("name", ["qwen2"])
def test_greedy_text_is_the_same(name: str, tmp_path: Path) -> None:
    model = save_random(name, tmp_path)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    prompt = "A text of a few words, "
    ids = torch.tensor([tokenizer.encode(prompt)])
    whole = model.generate(ids, max_new_tokens=40, do_sample=False, pad_token_id=0, eos_token_id=1)
    expected = tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True)
    with serving("--model", str(tmp_path), "--dtype", "float32", "--threads", "1", "--kv-memory", "32MiB") as server:
        for strategy in STRATEGIES:
            answer = server.complete(prompt=prompt, max_tokens=40, temperature=0, kv_cache=strategy).json()
            assert answer["choices"][0]["text"] == expected
            assert answer["usage"]["prompt_tokens"] == ids.shape[1]
