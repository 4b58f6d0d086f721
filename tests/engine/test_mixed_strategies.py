"""Requests under all kinds of strategies in one engine: the C++ pass and the slow path give the same bits, also alone.

Some strategies have addresses, some count kept tokens, some split heads, and some compute layers themselves (hooks).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cache_strategies.base import Rows
from kernels.backends import load_ops
from kernels.composite import CompositeOps
from kernels.cpu.backend import CpuOps
from kernels.device import device_of
from kernels.ops import Attention
from server.engine.batch import Batch
from server.engine.instance import Instance
from server.engine.ipc.messages import Tokens
from tests.contract import kinds
from tests.engine.engine_driver import Driver, least_memory, strategies
from tests.engine.expected_tokens import random_prompt

COMPILED = isinstance(load_ops(device_of("cpu"), torch.float32).ops, CpuOps)
STRATEGIES = strategies(
    hooked={"kind": "hooked"},
    hooked_too={"kind": "hooked", "layers": "even"},
    mirrored={"kind": "mirrored"},
    quest={"kind": "quest", "block_size": 4, "budget": 16},
    random_drop={"kind": "random_drop"},
    random_drop_by_head={"kind": "random_drop_by_head", "every": 21},
    window={"kind": "sliding_window", "window": 20, "sinks": 3, "max_row": 24},
)
HOOKED_LAYERS = {"hooked": {1}, "hooked_too": {0, 2}, "mirrored": {0, 1, 2}, "quest": {0}}
INSTANCES = ["contiguous", "paged", *STRATEGIES]
REQUESTS = [  # (instance, tokens of the prompt, tokens of the answer), in the order in which they arrive
    (instance, 3 + (29 * i) % 61, 2 + (7 * i) % 11) for i, instance in enumerate(INSTANCES * 2)
]


@pytest.fixture(autouse=True)
def _kinds_are_installed() -> Iterator[None]:
    with kinds.installed():
        yield


class Recording:
    """The logits of requests, the calls of strategies' attention, and the queries that taps got, as steps run."""

    def __init__(self, driver: Driver, patch: pytest.MonkeyPatch) -> None:
        self.logits: dict[str, list[Tensor]] = defaultdict(list)
        self.called: set[tuple[str, int]] = set()  # (instance, layer)
        self.tapped: list[Tensor] = []
        self.driver = driver
        self._last = torch.empty(0)
        forward, attend = driver.core.model.forward, Instance.attend

        def recorded_forward(ids: Tensor, attention: Attention) -> Tensor:
            self._last = forward(ids, attention).clone()
            self.tapped += [query for query in self._queries(attention) if query is not None]
            return self._last

        def recorded_attend(instance: Instance, rows: Rows, layer_idx: int, *tensors: Tensor) -> None:
            self.called.add((instance.name, layer_idx))
            attend(instance, rows, layer_idx, *tensors)

        patch.setattr(driver.core.model, "forward", recorded_forward)
        patch.setattr(Instance, "attend", recorded_attend)

    @staticmethod
    def _queries(attention: Attention) -> Iterator[Tensor | None]:
        assert isinstance(attention, Batch)
        for each in attention.slices:
            yield from each.query_tap.queries if each.query_tap is not None else ()

    def step(self) -> None:
        """Run a step; its rows of logits belong to its tokens, in order."""
        events = [event.message for event in self.driver.step().events]
        names = [message.request_id for message in events if isinstance(message, Tokens)]
        for name, logits in zip(names, self._last, strict=True):
            self.logits[name].append(logits)


def run(directory: Path, dtype: str, *, together: bool) -> Recording:
    """Run all requests: one after the other, or so that they enter and leave beside others."""
    driver = Driver(
        directory,
        strategies=STRATEGIES,
        dtype=dtype,
        max_seq_len=120,
        kv_memory="24MiB",
        max_num_batched_tokens=1000,  # so that no prompt is cut otherwise than alone
    )
    with pytest.MonkeyPatch.context() as patch:
        recording = Recording(driver, patch)
        for number, (instance, prompt, answer) in enumerate(REQUESTS):
            # Each prompt is new, so that none finds another's prefix and enters in fewer rows.
            driver.submit(str(number), random_prompt(prompt, seed=number), answer, kv_cache=instance)
            while driver.core.busy and (not together or number % 2):
                recording.step()
                if together:
                    break
        while driver.core.busy:
            recording.step()
        assert all(heard.finish_reason == "length" for heard in driver.heard.values()), driver.heard
        driver.assert_nothing_leaked()
    return recording


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_call_of_cpp_gives_the_bits_of_the_slow_path_and_only_hooks_leave_it(
    tiny_windows: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not COMPILED:
        pytest.skip("the C++ kernels were not built")
    fast = run(tiny_windows, dtype, together=True)
    with monkeypatch.context() as patch:
        patch.setattr(CpuOps, "forward_layers", CompositeOps.forward_layers)
        slow = run(tiny_windows, dtype, together=True)
    assert fast.called == {(name, layer) for name, layers in HOOKED_LAYERS.items() for layer in layers}
    assert slow.called == fast.called
    for name, logits in slow.logits.items():
        assert all(map(torch.equal, fast.logits[name], logits)), f"{REQUESTS[int(name)]} differs"
    assert len(fast.tapped) == len(slow.tapped) > 0
    assert all(map(torch.equal, fast.tapped, slow.tapped))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_request_has_the_bits_that_it_has_alone(tiny_windows: Path, dtype: str) -> None:
    if not COMPILED:
        pytest.skip("only the C++ kernels promise it")
    together, alone = (run(tiny_windows, dtype, together=each) for each in (True, False))
    for number, request in enumerate(REQUESTS):
        ours, theirs = together.logits[str(number)], alone.logits[str(number)]
        assert len(ours) == len(theirs) == request[2]
        assert all(map(torch.equal, ours, theirs)), f"{request} differs"


@pytest.mark.parametrize("is_short", [False, True])
def test_choices_under_all_kinds_are_forks_and_end_when_memory_is_short(tiny_windows: Path, is_short: bool) -> None:
    settings: dict[str, Any] = {"strategies": STRATEGIES, "max_seq_len": 120, "max_num_batched_tokens": 64}
    least = least_memory(tiny_windows, **settings)
    driver = Driver(tiny_windows, **settings, kv_memory=str(3 * least // 2 if is_short else 50 * least))
    for number, instance in enumerate(INSTANCES):
        for choice in range(3):
            tokens, sibling = random_prompt(40, seed=number), f"{instance} 0" if choice else None
            name, sampling = f"{instance} {choice}", {"temperature": 0.9, "seed": choice}
            driver.submit(name, tokens, 30, kv_cache=instance, sibling_of=sibling, **sampling)
    driver.run()
    assert all(heard.finish_reason == "length" for heard in driver.heard.values()), driver.heard
    assert not any(step.report.failures for step in driver.steps)
    assert any(heard.preempted for heard in driver.heard.values()) == is_short
    if not is_short:
        assert {name for step in driver.steps for name, count in step.report.forks.items() if count} == {*INSTANCES}
    driver.assert_nothing_leaked()
