"""The decoder computes what transformers computes, for every architecture it claims to know."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from server.models.full_context import FullContext, debug_generate_full_context
from tests.models.random_models import CONFIGS, load, save_random


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = save_random(name, tmp_path)
    ours = load(tmp_path)
    ids = torch.randint(2, 300, (70,))
    attention = FullContext(ours.specs, len(ids), ours.device)
    attention.logit_index = attention.positions  # all rows
    with torch.inference_mode():
        expected = theirs(ids[None]).logits[0]
        torch.testing.assert_close(ours.forward(ids, attention), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_greedy_text_equals_that_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = save_random(name, tmp_path)
    prompt = torch.randint(2, 300, (9,))
    expected = theirs.generate(prompt[None], max_new_tokens=30, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert debug_generate_full_context(load(tmp_path), prompt.tolist(), 30) == expected[0, 9:].tolist()


def test_sharded_weights_are_found(tmp_path: Path) -> None:
    theirs = save_random("llama", tmp_path, shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ids = torch.randint(2, 300, (20,))
    ours = load(tmp_path)
    with torch.inference_mode():
        logits = ours.forward(ids, FullContext(ours.specs, len(ids), ours.device))
        torch.testing.assert_close(logits[0], theirs(ids[None]).logits[0, -1], rtol=0, atol=1e-4)
