"""Every model family, lean or not, generates what transformers generates, under all strategies at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from server.models.decoder import Decoder
from server.models.transformers_backend.model import TransformersModel
from tests.engine.engine_driver import Driver, strategies
from tests.engine.expected_tokens import random_prompt
from tests.models.random_models import CONFIGS, FALLBACK, HYBRIDS, save_random_model

COUNT = 20  # beyond every window, past a block of 32, and past the 64 positions that llama3 was trained on
PROMPTS = {"short": random_prompt(5, seed=1), "long": random_prompt(47, seed=2)}
STRATEGIES = strategies(
    blocks_of_8={"kind": "paged", "block_size": 8},
    ring={"kind": "sliding_window", "window": 120, "sinks": 0},  # sees all of these texts
    mirrored={"kind": "mirrored"},
)
INSTANCES = ("contiguous", "paged", *STRATEGIES)


Saved = tuple[str, Path, PreTrainedModel]  # name of the config, directory, transformers' own


@pytest.fixture(scope="module", params=[*CONFIGS, *FALLBACK, *HYBRIDS])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    directory = tmp_path_factory.mktemp(request.param)
    return request.param, directory, save_random_model(request.param, directory)


@pytest.fixture(scope="module")
def expected(model: Saved) -> dict[str, list[int]]:
    theirs = model[2]
    return {
        name: theirs.generate(
            torch.tensor([prompt]), max_new_tokens=COUNT, do_sample=False, pad_token_id=0, eos_token_id=None
        )[0, len(prompt) :].tolist()
        for name, prompt in PROMPTS.items()
    }


@pytest.mark.parametrize("max_num_batched_tokens", [13, 512], ids=["chunked", "whole"])
def test_greedy_text_equals_that_of_transformers(
    model: Saved, expected: dict[str, list[int]], max_num_batched_tokens: int
) -> None:
    name, directory, _ = model
    driver = Driver(directory, strategies=STRATEGIES, max_seq_len=100, max_num_batched_tokens=max_num_batched_tokens)
    assert isinstance(driver.core.model, TransformersModel if name in FALLBACK | HYBRIDS else Decoder)
    for instance in INSTANCES:
        for text, prompt in PROMPTS.items():
            driver.submit(f"{instance} {text}", prompt, COUNT, kv_cache=instance)
    driver.run()
    for key, heard in driver.heard.items():
        assert heard.tokens == expected[key.split()[1]], key
    driver.assert_nothing_leaked()


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3"])
def test_transformers_can_compute_the_lean_families_too(name: str, tmp_path: Path) -> None:
    save_random_model(name, tmp_path)
    texts = []
    for impl in ("lean", "transformers"):
        driver = Driver(tmp_path, max_seq_len=100, model_impl=impl)
        assert isinstance(driver.core.model, TransformersModel if impl == "transformers" else Decoder)
        heard = driver.submit("it", PROMPTS["long"], 20)
        driver.run()
        texts.append(heard.tokens)
    assert texts[0] == texts[1]
