"""An exception in a strategy's code repeats the step and, the second time, ends only that strategy's requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cache_strategies.base import KVCache, Locations, Rows
from kernels.ops import Attention
from server.engine.instance_reports import read_usage
from server.engine.results import StepResult
from tests.engine.engine_driver import Driver, compute_by_hooks, strategies
from tests.engine.expected_tokens import Reference, random_prompt

INSTANCES = ["paged", "contiguous", "sliding_window", "mirrored"]
SETTINGS: dict[str, Any] = {
    "strategies": strategies(paged={"kind": "paged", "block_size": 8}, mirrored={"kind": "mirrored"}),
    "max_seq_len": 96,
    "max_num_batched_tokens": 80,
}
COUNT = 8
LAST_LAYER = 1

Break = Callable[[Driver, str, int], None]


def break_locate(driver: Driver, instance: str, times: int) -> None:
    """Make the next `times` calls of locate() raise."""
    cache = driver.core.instances[instance].strategy
    right, left = cache.locate, [times]

    def broken(rows: Rows) -> Locations:
        _raise_while(left)
        return right(rows)

    cache.locate = broken  # type: ignore[method-assign]


def break_attend(layer: int) -> Break:
    """Make the next `times` calls of attend() at `layer` raise, after the keys of the layers before were written."""

    def break_it(driver: Driver, instance: str, times: int) -> None:
        left = [times]

        def attend(number: int, run: Callable[[], None], out: Tensor) -> None:
            run()
            if number == layer:
                out.fill_(float("nan"))  # nothing of it may be used
                _raise_while(left, or_else=run)

        compute_by_hooks(driver.core.instances[instance].strategy, attend)

    return break_it


def _raise_while(left: list[int], or_else: Callable[[], None] = lambda: None) -> None:
    if left[0] > 0:
        left[0] -= 1
        raise ValueError("broken on purpose")
    or_else()


ways = pytest.mark.parametrize(
    "break_it", [break_locate, break_attend(0), break_attend(LAST_LAYER)], ids=["locate", "attend_first", "attend_last"]
)
ALWAYS = 10**9


def started(tiny: Path, *, steps: int) -> Driver:
    """Submit two requests under each strategy and run some steps: some are in prefill, some decode."""
    driver = Driver(tiny, **SETTINGS)
    for i, instance in enumerate(INSTANCES * 2):
        driver.submit(f"{instance} {i}", random_prompt(25, seed=i), COUNT, kv_cache=instance)
    for _ in range(steps):
        driver.step()
    return driver


def assert_right(driver: Driver, reference: Reference, without: str | None = None) -> None:
    for name, heard in driver.heard.items():
        instance, i = name.split()
        if instance != without:
            assert heard.failed is None
            assert heard.tokens == reference.greedy(random_prompt(25, seed=int(i)), COUNT), name
    driver.assert_nothing_leaked()


def failures(steps: Sequence[StepResult]) -> dict[str, int]:
    return {name: sum(step.report.failures.get(name, 0) for step in steps) for name in INSTANCES}


@ways
@pytest.mark.parametrize("instance", INSTANCES)
def test_a_failure_that_does_not_come_back_is_not_noticed(
    tiny: Path, reference: Reference, break_it: Break, instance: str
) -> None:
    driver = started(tiny, steps=0)
    for steps in (2, 3, 2):  # fails at the start, half-way through prompts, and decoding
        break_it(driver, instance, 1)
        for _ in range(steps):
            driver.step()
    driver.run()
    assert_right(driver, reference)
    assert failures(driver.steps) == {name: 3 * (name == instance) for name in INSTANCES}


@ways
@pytest.mark.parametrize("instance", INSTANCES)
def test_one_that_comes_back_ends_that_strategys_rows_and_no_others(
    tiny: Path, reference: Reference, break_it: Break, instance: str
) -> None:
    driver = started(tiny, steps=5)
    break_it(driver, instance, 2)
    result = driver.step()
    assert result.report.failures == {instance: 2}
    assert instance not in result.report.parts
    assert {name.split()[0] for name, heard in driver.heard.items() if heard.failed} == {instance}
    for heard in driver.heard.values():
        if heard.failed:
            assert (heard.failed.status, heard.failed.code) == (500, "strategy_failed")
            assert heard.failed.message.startswith(f"cache strategy '{instance}' failed in ")
            assert "(): ValueError: broken on purpose" in heard.failed.message
    assert [record.outcome for record in result.finished] == ["error", "error"]
    assert read_usage(driver.core.instances[instance]).used == 0
    driver.run()
    assert_right(driver, reference, without=instance)


def test_texts_of_others_are_the_same_as_without_the_failure(tiny: Path) -> None:
    calm, struck = started(tiny, steps=7), started(tiny, steps=7)
    break_locate(struck, "paged", ALWAYS)
    for driver in (calm, struck):
        driver.run()
    for name, heard in struck.heard.items():
        assert bool(heard.failed) == name.startswith("paged")
        assert heard.failed or heard == calm.heard[name], "told other things, or at another time"


def test_a_strategy_that_always_fails_fails_whoever_comes_and_stalls_nobody(tiny: Path, reference: Reference) -> None:
    driver = started(tiny, steps=0)
    break_attend(1)(driver, "contiguous", ALWAYS)
    driver.run(at_most=40)
    late = driver.submit("contiguous 9", random_prompt(5), 3, kv_cache="contiguous")
    driver.run(at_most=2)
    assert late.failed is not None
    assert late.admitted is None
    assert_right(driver, reference, without="contiguous")


def test_a_strategy_that_is_well_again_serves_again(tiny: Path, reference: Reference) -> None:
    driver = started(tiny, steps=3)
    break_locate(driver, "paged", 2)
    driver.run()
    again = driver.submit("paged 0", random_prompt(25, seed=0), COUNT, kv_cache="paged")
    driver.run()
    assert again.tokens == reference.greedy(random_prompt(25, seed=0), COUNT)


def test_all_may_fail_in_one_step(tiny: Path) -> None:
    driver = started(tiny, steps=5)
    for instance in INSTANCES:
        break_attend(0)(driver, instance, 2)
    result = driver.step()
    assert (result.report.rows, result.report.failures) == (0, dict.fromkeys(INSTANCES, 2))
    assert all(heard.failed for heard in driver.heard.values())
    driver.assert_nothing_leaked()


def test_two_that_fail_once_each_in_one_step_are_both_repeated(tiny: Path, reference: Reference) -> None:
    driver = started(tiny, steps=7)
    break_locate(driver, "paged", 1)
    break_attend(LAST_LAYER)(driver, "sliding_window", 1)
    assert driver.step().report.failures == {"paged": 1, "sliding_window": 1}
    driver.run()
    assert_right(driver, reference)


def test_what_a_failed_step_found_in_the_cache_is_found_again(tiny: Path, reference: Reference) -> None:
    driver = Driver(tiny, **SETTINGS)
    for name in ("first", "second"):
        driver.submit(name, random_prompt(33), COUNT, kv_cache="paged")
        if name == "second":
            break_attend(LAST_LAYER)(driver, "paged", 1)
        driver.run()
        assert driver.heard[name].tokens == reference.greedy(random_prompt(33), COUNT)
    admitted = driver.heard["second"].admitted
    assert admitted is not None
    assert admitted.cached_tokens == 32


def test_a_bug_outside_the_strategies_is_not_blamed_on_one(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = started(tiny, steps=1)

    def forward(*_: Any) -> Any:
        raise RuntimeError("the model's own")

    monkeypatch.setattr(driver.core.model, "forward", forward)
    with pytest.raises(RuntimeError, match="the model's own"):
        driver.core.step()


def test_the_seam_is_patched_where_the_engine_looks(tiny: Path) -> None:
    """A check of the tests above: the engine calls the patched locate()."""
    driver = started(tiny, steps=0)
    caches: list[KVCache] = list(driver.core.instances.values())
    for cache in caches:
        break_locate(driver, cache.name, ALWAYS)
    driver.run(at_most=10)
    assert all(heard.failed for heard in driver.heard.values())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_end_their_request_alone(
    tiny: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    driver = Driver(tiny, **SETTINGS)
    prompt, forward = random_prompt(20), driver.core.model.forward

    def broken(ids: Tensor, attention: Attention) -> Tensor:
        logits = forward(ids, attention)
        if len(logits) > 1:
            logits[-1] = torch.nan
        return logits

    monkeypatch.setattr(driver.core.model, "forward", broken)
    good, bad = (
        driver.submit("good", prompt, COUNT),
        driver.submit("bad", random_prompt(7), COUNT, temperature=temperature),
    )
    driver.run()
    assert good.tokens == reference.greedy(prompt, COUNT)
    assert bad.failed is not None
    assert (bad.failed.status, bad.failed.code) == (500, "not_a_number")
    assert [record.outcome for step in driver.steps for record in step.finished] == ["error", "length"]


def test_what_was_computed_of_no_numbers_is_found_by_nobody(
    tiny: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even by an equal prompt: the cause may be memory, or a later token of the same chunk."""
    driver = Driver(tiny, **SETTINGS)
    prompt, forward = random_prompt(80), driver.core.model.forward
    memory = driver.core.memory
    whole = [region.memory.view(torch.float32) for name in memory.instances for region in memory.list_regions(name)]

    def spoilt(ids: Tensor, attention: Attention) -> Tensor:
        logits = forward(ids, attention)
        for each in whole:
            each.fill_(torch.nan)
        return logits.fill_(torch.nan)

    with monkeypatch.context() as broken:
        broken.setattr(driver.core.model, "forward", spoilt)
        bad = {name: driver.submit(f"bad {name}", prompt, COUNT, kv_cache=name) for name in driver.core.instances}
        driver.run()
    assert {heard.failed and heard.failed.code for heard in bad.values()} == {"not_a_number"}
    good = {name: driver.submit(name, prompt, COUNT, kv_cache=name) for name in driver.core.instances}
    driver.run()
    for name, heard in good.items():
        assert heard.tokens == reference.greedy(prompt, COUNT), name
    driver.assert_nothing_leaked()
