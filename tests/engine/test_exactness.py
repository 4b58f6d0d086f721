"""Exactness of a whole model: equal bit for bit in equal steps, and within rounding in different steps."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.ops import Attention
from server.engine.ipc.messages import Tokens
from tests.engine.engine_driver import Driver, strategies
from tests.engine.expected_tokens import random_prompt

STRATEGIES = strategies(
    blocks_of_1={"kind": "paged", "block_size": 1, "prefix_cache": False},
    blocks_of_7={"kind": "paged", "block_size": 7, "prefix_cache": False},
    blocks_of_32={"kind": "paged", "block_size": 32, "prefix_cache": False},
    blocks_of_200={"kind": "paged", "block_size": 200, "prefix_cache": False},
    ring={"kind": "sliding_window", "window": 300, "sinks": 0},
    ring_with_sinks={"kind": "sliding_window", "window": 280, "sinks": 5},
    just_long_enough={"kind": "sliding_window", "window": 144, "sinks": 0},
)
LENGTHS = (1, 140, 3, 65, 16, 33, 1)  # 140 and the completion cross a tile of attention
COUNT = 5
ROUNDED = strategies(mirrored={"kind": "mirrored"})  # sums in another order than the others
SETTINGS: dict[str, Any] = {"strategies": STRATEGIES | ROUNDED, "max_seq_len": 300}


class Run:
    """The logits of the same requests under one strategy with one schedule, by step and by request."""

    def __init__(self, driver: Driver, instance: str, *, every: int) -> None:
        """Run the requests; a new one arrives every `every` steps. None finds tokens of an earlier run."""
        driver.heard.clear()
        self.by_step: list[Tensor] = []
        self.by_request: dict[str, list[Tensor]] = defaultdict(list)
        self._driver = driver
        forward = driver.core.model.forward

        def kept(ids: Tensor, attention: Attention) -> Tensor:
            logits = forward(ids, attention)
            self.by_step.append(logits.clone())
            return logits

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(driver.core.model, "forward", kept)
            for i, length in enumerate(LENGTHS):
                driver.submit(
                    str(i), random_prompt(length, seed=i), COUNT, kv_cache=instance, cache_salt=f"run {every}"
                )
                for _ in range(every):
                    self._step()
            while driver.core.busy:
                self._step()
        self.tokens = {name: heard.tokens for name, heard in driver.heard.items()}

    def _step(self) -> None:
        """Run a step; its rows of logits belong to its tokens, in order."""
        events = [event.message for event in self._driver.step().events]
        names = [message.request_id for message in events if isinstance(message, Tokens)]
        for name, logits in zip(names, self.by_step[-1], strict=True):
            self.by_request[name].append(logits)


@cache
def make_driver(tiny: Path, dtype: str, max_num_batched_tokens: int, device: str) -> Driver:
    driver = Driver(tiny, **SETTINGS, dtype=dtype, max_num_batched_tokens=max_num_batched_tokens, device=device)
    assert driver.engine.kernels.faulty_ops == []
    return driver


@cache
def run(
    tiny: Path, instance: str, dtype: str, max_num_batched_tokens: int = 30, every: int = 1, *, device: str = "cpu"
) -> Run:
    return Run(make_driver(tiny, dtype, max_num_batched_tokens, device), instance, every=every)


@pytest.mark.parametrize(
    ("device", "dtype"),
    [("cpu", "float32"), ("cpu", "bfloat16"), ("metal-emulated", "float32"), ("metal-emulated", "float16")],
)
@pytest.mark.parametrize("instance", ["paged", *STRATEGIES])
def test_equal_steps_under_another_exact_strategy_give_equal_bits(
    tiny: Path, instance: str, device: str, dtype: str
) -> None:
    expected, got = (run(tiny, each, dtype, device=device) for each in ("contiguous", instance))
    assert len(got.by_step) == len(expected.by_step)
    for step, (ours, theirs) in enumerate(zip(got.by_step, expected.by_step, strict=True)):
        assert torch.equal(ours, theirs), f"step {step}"
    assert got.tokens == expected.tokens


SCHEDULES = [(512, 0), (30, 3), (7, 2), (3, 0)]  # tokens a step, steps between two arrivals
INSTANCES = ["contiguous", "paged", "ring", "blocks_of_7"]


@pytest.mark.parametrize(
    ("instance", "max_num_batched_tokens", "every"),
    [
        ("contiguous", 30, 3),
        *((instance, *by) for instance, by in zip(INSTANCES, SCHEDULES, strict=True)),
        ("paged", 7, 2),
        ("mirrored", 30, 1),
        ("mirrored", 7, 2),
    ],
)
def test_any_schedule_gives_equal_tokens_and_logits_within_rounding(
    tiny: Path, instance: str, max_num_batched_tokens: int, every: int
) -> None:
    expected, got = run(tiny, "contiguous", "float32"), run(tiny, instance, "float32", max_num_batched_tokens, every)
    assert got.tokens == expected.tokens
    for name, logits in expected.by_request.items():
        torch.testing.assert_close(got.by_request[name], logits, rtol=0, atol=2e-5)


@pytest.mark.parametrize(("max_num_batched_tokens", "every"), SCHEDULES[:3])
def test_in_bfloat16_the_first_logits_are_within_its_rounding(
    tiny: Path, max_num_batched_tokens: int, every: int
) -> None:
    """Only the first logits: a token that differs by rounding changes all later ones."""
    expected, got = run(tiny, "contiguous", "bfloat16"), run(tiny, "paged", "bfloat16", max_num_batched_tokens, every)
    for name, logits in expected.by_request.items():
        scale = float(logits[0].abs().max())
        torch.testing.assert_close(got.by_request[name][0], logits[0], rtol=0, atol=0.05 * scale)
