"""Whole models on the emulated Metal device: every strategy, alone and all in one batch, gives the right tokens.

Also checked are data races, out-of-bounds accesses, and the kernels that a step launches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kernels.metal.backend import MetalOps
from kernels.metal.library import Kernel
from server.models.files.directory import locate
from tests.engine.engine_driver import Driver, strategies
from tests.engine.expected_tokens import Reference, random_prompt

INT8 = {"k_dtype": "int8", "v_dtype": "int8"}
STRATEGIES = strategies(
    blocks_of_7={"kind": "paged", "block_size": 7},
    ring={"kind": "sliding_window", "window": 300, "sinks": 4},
)
MIRRORED = strategies(mirrored={"kind": "mirrored"})  # has no int8
INSTANCES = ("contiguous", "paged", "sliding_window", *STRATEGIES, *MIRRORED)
LENGTHS = (1, 270, 3, 40, 17, 90)  # 270 is more than a threadgroup sums


def _driver(directory: Path, device: str = "metal-emulated", **settings: Any) -> Driver:
    settings = {"strategies": STRATEGIES | MIRRORED, "max_seq_len": 300, "max_num_batched_tokens": 60} | settings
    driver = Driver(directory, device=device, **settings)
    assert driver.engine.kernels.faulty_ops == [], "plain torch computes it, and nothing is proven"
    return driver


def _told(driver: Driver) -> dict[str, list[int]]:
    """Return the tokens of six requests, one under each instance, all in the same steps."""
    for i, (name, length) in enumerate(zip(INSTANCES, LENGTHS, strict=True)):
        driver.submit(name, random_prompt(length, seed=i), 6, kv_cache=name)
    driver.run()
    return {name: heard.tokens for name, heard in driver.heard.items()}


@pytest.mark.parametrize("device", ["metal-emulated", "metal-checked"])
def test_all_strategies_in_one_batch_write_what_is_right(tiny: Path, reference: Reference, device: str) -> None:
    assert _told(_driver(tiny, device)) == {
        name: reference.greedy(random_prompt(length, seed=i), 6)
        for i, (name, length) in enumerate(zip(INSTANCES, LENGTHS, strict=True))
    }


@pytest.mark.parametrize("instance", INSTANCES)
def test_every_strategy_alone_writes_what_is_right(tiny: Path, reference: Reference, instance: str) -> None:
    driver = _driver(tiny, "metal-emulated")
    for i, length in enumerate(LENGTHS):
        driver.submit(str(i), random_prompt(length, seed=i), 6, kv_cache=instance)
        driver.step()
    driver.run()
    for i, length in enumerate(LENGTHS):
        assert driver.heard[str(i)].tokens == reference.greedy(random_prompt(length, seed=i), 6)


@pytest.mark.parametrize(
    "settings",
    [
        {"weights": "int4"},
        {"strategies": {name: INT8 | options for name, options in STRATEGIES.items()}},
    ],
    ids=["weights", "keys and values"],
)
def test_what_is_kept_in_fewer_bits_is_as_on_a_cpu(tiny: Path, settings: dict[str, Any]) -> None:
    assert _told(_driver(tiny, **settings)) == _told(_driver(tiny, "cpu", **settings))


def test_layers_that_see_a_window_are_as_on_a_cpu(tiny_windows: Path) -> None:
    assert _told(_driver(tiny_windows)) == _told(_driver(tiny_windows, "cpu"))


@pytest.mark.parametrize("requests", [1, 5])
def test_a_step_launches_as_much_whoever_is_in_it(tiny: Path, requests: int, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = _driver(tiny, max_num_batched_tokens=120)
    for i in range(requests):
        driver.submit(str(i), random_prompt(9, seed=i), 6, kv_cache="paged")
    driver.step()
    launched: list[int] = []
    launch = Kernel.__call__
    monkeypatch.setattr(Kernel, "__call__", lambda self, *args: launched.append(1) or launch(self, *args))
    driver.step()
    a_layer = 10  # launches: norm, QKV, rope, write, attend, output, norm, gate and up, SiLU, down
    assert len(launched) == a_layer * len(driver.core.model.layer_specs) + 2  # the last norm, and the head


def test_the_device_begins_when_a_quarter_of_the_layers_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = _driver(locate("tiny", None))
    driver.submit("it", random_prompt(9), 6, kv_cache="paged")
    driver.step()
    calls: list[str] = []
    launch = Kernel.__call__
    monkeypatch.setattr(Kernel, "__call__", lambda self, *args: calls.append("launch") or launch(self, *args))
    monkeypatch.setattr(MetalOps, "commit", lambda self: calls.append("commit"))
    driver.step()
    layers = len(driver.core.model.layer_specs)
    assert layers >= 4
    assert calls.count("commit") == 1
    assert 0 < calls.index("commit") <= len(calls) / 4
