"""With `deterministic`, a request gets the same bits in any batch, chunking, preemption or prefix-cache hit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from config.errors import SettingsError
from config.settings import Settings
from kernels.backends import load_ops
from kernels.cpu.backend import CpuOps
from kernels.device import device_of
from server.engine.build import build_engine
from server.engine.ipc.messages import TokenLogprob
from server.models.files.directory import locate
from tests.engine.engine_driver import Driver, strategies
from tests.engine.expected_tokens import random_prompt
from tests.engine.fake_proposer import FakeProposer
from tests.models.random_models import save_random_model

COMPILED = isinstance(load_ops(device_of("cpu"), torch.float32).ops, CpuOps)
EMBEDDED = locate("tiny", None)
PROMPT, COUNT, TOP = random_prompt(150), 6, 5
INSTANCES = ["contiguous", "paged", "odd_blocks", "window", "int8", "int4", "compressed", "streaming"]
SETTINGS: dict[str, Any] = {
    "strategies": strategies(
        odd_blocks={"kind": "paged", "block_size": 7},
        window={"kind": "sliding_window", "window": 40, "sinks": 3},
        int8={"kind": "paged", "k_dtype": "int8", "v_dtype": "int8"},
        int4={"kind": "paged", "k_dtype": "int4", "v_dtype": "int4"},
        compressed={"kind": "compressed", "budget": 40, "every": 16, "recent": 4, "scorer": "tova"},
        streaming={"kind": "streaming", "window": 40, "every": 16},
    ),
    "max_seq_len": 320,
    "threads": 2,
    "kv_memory": "32MiB",
    "deterministic": True,
}


def asked(driver: Driver, instance: str, name: str = "it") -> None:
    """Submit a sampled request with the five likeliest tokens per position: equal ones mean nearly equal logits."""
    driver.submit(name, PROMPT, COUNT, kv_cache=instance, temperature=0.8, seed=3, logprobs=TOP)


def others(driver: Driver, instance: str, first: int = 0) -> None:
    for i in range(first, first + 5):
        driver.submit(f"other {i}", random_prompt(20 + 13 * i, seed=i), 12, kv_cache=instance)


# ---------------------------------------------------------------- ways to be served
def alone(driver: Driver, instance: str) -> None:
    asked(driver, instance)


def in_a_crowd(driver: Driver, instance: str) -> None:
    others(driver, "paged")
    driver.step(), driver.step()
    asked(driver, instance)
    driver.step()
    others(driver, instance, first=5)


def cut_small(driver: Driver, instance: str) -> None:
    driver.core.scheduler.limits = driver.limits._replace(max_num_batched_tokens=11)
    asked(driver, instance)


def after_itself(driver: Driver, instance: str) -> None:
    driver.submit("before", PROMPT[:97], 2, kv_cache=instance)
    driver.run()
    asked(driver, instance)


def preempted(driver: Driver, instance: str) -> None:
    others(driver, instance)
    asked(driver, instance)
    for _ in range(5):
        driver.step()
    if driver.request("it").sequence is not None:
        driver.preempt("it")


def with_drafts(driver: Driver, instance: str) -> None:
    """Run it with drafts from its known text, in which three of ten draft tokens are wrong."""
    driver.submit("before", PROMPT, COUNT, kv_cache=instance, temperature=0.8, seed=3)
    driver.run()
    asked(driver, instance)
    whole = [*PROMPT, *driver.heard["before"].tokens]
    driver.request("it").proposer = FakeProposer(whole, count=4, right=0.7)  # type: ignore[assignment]
    others(driver, instance)


WAYS: list[Callable[[Driver, str], None]] = [in_a_crowd, cut_small, after_itself, preempted, with_drafts]


def served(
    directory: Path, dtype: str, instance: str, way: Callable[[Driver, str], None], weights: str = "auto"
) -> list[TokenLogprob]:
    driver = Driver(directory, **SETTINGS, dtype=dtype, weights=weights)
    way(driver, instance)
    driver.run()
    assert len(driver.heard["it"].scores) == COUNT
    return driver.heard["it"].scores


# ---------------------------------------------------------------- what holds
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("instance", INSTANCES)
def test_the_same_bits_in_any_company(instance: str, dtype: str) -> None:
    if not COMPILED:
        with pytest.raises(SettingsError, match="deterministic"):
            build_engine(Settings(**SETTINGS, dtype=dtype))
        return
    expected = served(EMBEDDED, dtype, instance, alone)
    for way in WAYS:
        assert served(EMBEDDED, dtype, instance, way) == expected, way.__name__


@pytest.mark.parametrize("name", ["mixtral", "gemma3", "qwen3"])
def test_other_families_too(tmp_path: Path, name: str) -> None:
    save_random_model(name, tmp_path)
    if COMPILED:
        expected = served(tmp_path, "float32", "paged", alone)
        for way in WAYS:
            assert served(tmp_path, "float32", "paged", way) == expected, way.__name__


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quantized_weights_too(weights: str) -> None:
    if COMPILED:
        expected = served(EMBEDDED, "float32", "paged", alone, weights)
        for way in WAYS:
            assert served(EMBEDDED, "float32", "paged", way, weights) == expected, way.__name__


def test_a_strategy_whose_bits_depend_on_rows_is_refused(tiny: Path) -> None:
    if COMPILED:
        with pytest.raises(
            SettingsError, match="deterministic: a text under mirrored depends on how its prompt is cut"
        ):
            build_engine(
                Settings(model=str(tiny), **SETTINGS | {"strategies": strategies(mirrored={"kind": "mirrored"})})
            )


@pytest.mark.parametrize("change", [{"kernels": "reference"}, {"model_impl": "transformers"}])
def test_what_cannot_promise_it_is_refused(tiny: Path, change: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match="deterministic"):
        build_engine(Settings(model=str(tiny), **(SETTINGS | change)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 7, 16, 17, 33, 101])
def test_a_row_of_a_product_is_the_same_beside_any_others(rows: int, dtype: torch.dtype) -> None:
    ops = load_ops(device_of("cpu"), torch.float32).ops
    if isinstance(ops, CpuOps):
        x, weight = torch.randn(rows, 200), torch.randn(90, 200).to(dtype)
        together = ops.linear(x, weight)
        for i in range(rows):
            assert torch.equal(ops.linear(x[i : i + 1], weight)[0], together[i])
