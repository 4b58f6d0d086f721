"""Means of keys: computed at start if an instance stores quantized keys, and those of the model's keys."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.store import KVStore
from server.engine.key_means import SAMPLE_TOKENS, add_key_means
from server.models.no_cache import NoCacheAttention
from server.models.transformers_backend.model import TransformersModel
from tests.engine.engine_driver import Driver, strategies
from tests.engine.expected_tokens import random_prompt
from tests.models.random_models import load_decoder, save_random_model

INT4: Mapping[str, Any] = {"kind": "paged", "k_dtype": "int4", "v_dtype": "int4"}
LENGTH = 300  # max_seq_len


def start(directory: Path, caplog: pytest.LogCaptureFixture, **settings: Any) -> tuple[Driver, int]:
    """Return a started engine, and how often it has computed means."""
    caplog.clear()
    with caplog.at_level(logging.INFO):
        driver = Driver(directory, max_seq_len=LENGTH, **settings)
    return driver, caplog.text.count("the means of keys")


def find_centers(driver: Driver, instance: str) -> list[Tensor | None]:
    store: KVStore = driver.core.instances[instance].cache.stores[0]
    return [store.k_center(layer) for layer in store.layers]


class KeyRecorder(NoCacheAttention):
    """Attention without a cache that keeps the keys of each layer."""

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.keys = [*getattr(self, "keys", []), k]
        return super().attend(layer_idx, q, k, v)


# -------------------------------------------------------------------- when
def test_they_are_computed_once_and_only_for_quantized_keys(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    values = {"kind": "paged", "v_dtype": "int4"}
    driver, count = start(tiny, caplog, strategies=strategies(small=INT4, ring={**INT4, "kind": "sliding_window"}))
    assert count == 1
    assert all(center is not None for name in ("small", "ring") for center in find_centers(driver, name))
    assert find_centers(driver, "paged") == [None, None]
    for other in ({}, {"values": values}, {"off": {**INT4, "center": False}}):
        driver, count = start(tiny, caplog, strategies=strategies(**other))
        assert count == 0
        assert all(find_centers(driver, name) == [None, None] for name in other)


def test_every_start_computes_the_same(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    """So that blocks have the same names."""
    drivers = [start(tiny, caplog, strategies=strategies(small=INT4))[0] for _ in range(2)]
    first, second = (find_centers(driver, "small") for driver in drivers)
    assert all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("center", [True, False])
def test_a_prefix_is_found_again(tiny: Path, center: bool, caplog: pytest.LogCaptureFixture) -> None:
    driver, _ = start(tiny, caplog, strategies=strategies(small={**INT4, "center": center}))
    prompt = random_prompt(150)
    for name in ("first", "second"):
        assert driver.submit(name, prompt, 5, kv_cache="small").failed is None
        driver.run()
    assert driver.heard["first"].tokens == driver.heard["second"].tokens
    driver.assert_nothing_leaked()


# -------------------------------------------------------------------- what
@pytest.mark.parametrize("load", ["lean", "transformers"])
@pytest.mark.parametrize("max_positions", [100, 500])
def test_they_are_the_means_of_the_models_keys(load: str, max_positions: int, tmp_path: Path) -> None:
    """Of texts that are longer than the sample, its tokens are at evenly spread positions."""
    save_random_model("qwen2", tmp_path)
    lean = load == "lean"
    model = load_decoder(tmp_path) if lean else TransformersModel(tmp_path, torch.float32, torch.device("cpu"))
    found = add_key_means(model, max_positions)
    length = min(SAMPLE_TOKENS, max_positions)
    recorder = KeyRecorder(model.layer_specs, length, model.device)
    recorder.positions = torch.tensor([i * max_positions // length for i in range(length)])
    with torch.inference_mode():
        model.forward(torch.arange(length) * 7919 % model.info.vocab_size, recorder)
    for spec, keys in zip(found, recorder.keys, strict=True):
        assert spec.k_mean is not None
        torch.testing.assert_close(spec.k_mean, keys.mean(0), rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_layers_whose_result_a_shift_would_change_have_none(family: str, tmp_path: Path) -> None:
    """Those with a softcap, and with sink logits."""
    save_random_model(family, tmp_path)
    model = TransformersModel(tmp_path, torch.float32, torch.device("cpu"))
    assert [spec.k_mean for spec in add_key_means(model, LENGTH)] == [None] * len(model.layer_specs)
