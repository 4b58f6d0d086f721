"""On an accelerator the engine's steps only wait for the sampled tokens, and compute what the CPU computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config

from cache_strategies.adapters.textbook import KVCache
from cache_strategies.adapters.transformers import StrategyCache
from metal_emulator import DEVICE
from server.evaluation.compare import compare
from server.evaluation.documents import Document
from tests.engine.emulated_mps import DeviceUse
from tests.engine.engine_driver import Driver
from tests.engine.expected_tokens import Reference, random_prompt

STRATEGIES = ["paged", "contiguous", "sliding_window"]


def on_mps(directory: Path, **settings: Any) -> Driver:
    return Driver(directory, **({"device": "mps", "max_num_batched_tokens": 64} | settings))


def decode_step(driver: Driver, mps: DeviceUse) -> None:
    """Run one more decode step, with the device's counters reset."""
    mps.reset()
    assert driver.step().report.phase == "decode"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_greedy_step_waits_for_the_tokens_alone(tiny: Path, mps: DeviceUse, strategy: str) -> None:
    driver = on_mps(tiny)
    for name in ("one", "other"):
        driver.submit(name, random_prompt(9, seed=len(name)), 20, kv_cache=strategy)
    driver.step()
    for _ in range(5):
        decode_step(driver, mps)
        assert mps.to_host == ["tolist"]
        assert len(mps.to_device) == 2, "tokens, positions and rows; seats and offsets"


def test_the_table_is_copied_when_it_has_changed(tiny: Path, mps: DeviceUse) -> None:
    driver = on_mps(tiny, strategies={"paged": {"kind": "paged", "block_size": 4}})
    driver.submit("it", random_prompt(9), 20)
    driver.step()
    copies = []
    for _ in range(8):
        decode_step(driver, mps)
        copies.append(len(mps.to_device))
    assert copies == [2, 2, 2, 3, 2, 2, 2, 3], "at positions 9 to 16, of which 12 and 16 begin a block"


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.8, "seed": 3},
        {"temperature": 0.8, "seed": 3, "top_k": 9, "top_p": 0.9, "min_p": 0.01},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "logit_bias": ((7, 2.0),)},
        {"temperature": 1.0, "presence_penalty": 0.5, "ignore_eos": False, "min_tokens": 9},
    ],
)
def test_a_step_that_draws_waits_for_the_logits_alone(tiny: Path, mps: DeviceUse, sampling: dict[str, Any]) -> None:
    """The tokens are drawn from them on the host, without a launch for each of a dozen operations a row."""
    driver = on_mps(tiny)
    for name in ("one", "other"):
        driver.submit(name, random_prompt(9), 20, **sampling)
    driver.step()
    for _ in range(3):
        decode_step(driver, mps)
        assert mps.to_host == ["aten._to_copy.default"]
        assert len(mps.to_device) == 2, "tokens, positions and rows; seats and offsets"


def test_log_probabilities_come_in_one_transfer_more(tiny: Path, mps: DeviceUse) -> None:
    driver = on_mps(tiny)
    for name in ("one", "other"):
        driver.submit(name, random_prompt(9), 20, logprobs=4)
    driver.step()
    decode_step(driver, mps)
    assert len(mps.to_host) == 2


def test_a_step_that_draws_nothing_waits_for_nothing(tiny: Path, mps: DeviceUse) -> None:
    driver = on_mps(tiny, max_num_batched_tokens=16)
    driver.submit("long", random_prompt(40), 4)
    mps.reset()
    assert driver.step().report.tokens == 16
    assert mps.to_host == []


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_what_the_device_writes_is_what_it_should(
    tiny: Path, reference: Reference, mps: DeviceUse, kernels: str
) -> None:
    """With kernels, and with plain torch, which must not mix in host tensors either."""
    driver = on_mps(tiny, kernels=kernels)
    heard = {name: driver.submit(name, random_prompt(40, seed=1), 6, kv_cache=name) for name in STRATEGIES}
    driver.run()
    for name, each in heard.items():
        assert each.tokens == reference.greedy(random_prompt(40, seed=1), 6), name
    driver.assert_nothing_leaked()


def test_scores_are_those_of_a_cpu(tiny: Path, mps: DeviceUse) -> None:
    wanted = {"logprobs": 4, "prompt_logprobs": 2, "temperature": 0.9, "seed": 5, "top_p": 0.9}
    heard = []
    for device in ("mps", "cpu"):
        driver = Driver(tiny, device=device, kernels="reference")
        heard.append(driver.submit("it", random_prompt(20), 5, **wanted))
        driver.run()
    assert heard[0] == heard[1]


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_end_their_request_alone(
    tiny: Path, mps: DeviceUse, monkeypatch: pytest.MonkeyPatch, number: float
) -> None:
    driver = on_mps(tiny)
    heard = [driver.submit(name, random_prompt(9), 4, temperature=t) for name, t in (("a", 0.0), ("b", 1.0), ("c", 0))]
    forward = driver.core.model.forward

    def spoilt(ids: Any, attention: Any) -> Any:
        logits = forward(ids, attention)
        logits[:2, 5] = number
        return logits

    monkeypatch.setattr(driver.core.model, "forward", spoilt)
    driver.step()
    assert [each.failed.code if each.failed else None for each in heard] == ["not_a_number", "not_a_number", None]
    assert len(heard[2].tokens) == 1


# -------------------------------------------------------------------- what else computes on a device
def test_strategies_are_compared_as_on_a_cpu(tiny: Path, mps: DeviceUse) -> None:
    found = []
    for device in ("mps", "cpu"):
        core = Driver(tiny, device=device, kernels="reference").core
        caches = [core.instances["contiguous"], core.instances["paged"]]
        found.append(compare(core.model, caches, [Document(random_prompt(60), [])], row_tokens=16))
    assert found[0] == found[1]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_caches_for_other_peoples_models_are_as_on_a_cpu(mps: DeviceUse, strategy: str) -> None:
    config = Qwen2Config(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1, dtype=torch.float32
    )
    generator = torch.Generator().manual_seed(0)
    ours: list[Any] = [
        [StrategyCache(config, strategy, max_seq_len=40, device=device), KVCache(1, 40, 2, 8)]
        for device in (DEVICE, torch.device("cpu"))
    ]
    for n in (7, 1, 1, 5):
        k, v = (torch.randn(1, 2, n, 8, generator=generator) for _ in "kv")
        for far, near in zip(*ours, strict=True):
            for there, here in zip(far.update(k.to(DEVICE), v.to(DEVICE), 0), near.update(k, v, 0), strict=True):
                assert there.device == DEVICE
                assert there.tolist() == here.tolist()


# -------------------------------------------------------------------- the stand-in catches what it is there for
WAITING: list[Callable[[Tensor], object]] = [
    lambda x: x.tolist(),
    lambda x: x[2].item(),
    lambda x: bool((x > 3).any()),
    lambda x: x.cpu(),
    lambda x: torch.zeros(6).copy_(x),
    lambda x: x[x > 3],
    lambda x: x.nonzero(),
    lambda x: torch.masked_select(x, x > 3),
]


def test_whatever_waits_is_counted(mps: DeviceUse) -> None:
    x = torch.arange(6, device=DEVICE).float()
    for wait in WAITING:
        mps.reset()
        wait(x)
        assert len(mps.to_host) == 1
        assert not mps.to_device


def test_whatever_is_copied_to_the_device_is_counted(mps: DeviceUse) -> None:
    x = torch.zeros(6, device=DEVICE)
    x.copy_(torch.ones(6))
    x[[1, 2]] = 3
    torch.tensor([1, 2], device=DEVICE)
    assert len(mps.to_device) == 3
    assert not mps.to_host
    assert x.tolist() == [1, 3, 3, 1, 1, 1]
