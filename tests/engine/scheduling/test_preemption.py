"""With memory for little more than one sequence all requests are answered as if alone, and no token is sent twice."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from server.engine.ipc.messages import SamplingParams
from tests.engine.engine_driver import Driver, least_memory, strategies
from tests.engine.expected_tokens import Reference, random_prompt

SETTINGS: dict[str, Any] = {
    "strategies": strategies(
        paged={"kind": "paged", "block_size": 4},
        private={"kind": "paged", "block_size": 6, "prefix_cache": False},
        sliding_window={"kind": "sliding_window", "window": 64, "sinks": 0},
    ),
    "max_seq_len": 48,
    "max_num_batched_tokens": 16,
}
PROMPTS = [random_prompt(length, seed=9) for length in (20, 5, 30, 11, 24, 1, 17, 28)]
COUNT = 11


def cramped(tiny: Path, *, overcommit: float, more: float = 1.1) -> Driver:
    """Return an engine with a tenth more memory than the longest sequence needs."""
    least = least_memory(tiny, **SETTINGS)
    return Driver(tiny, **SETTINGS, kv_overcommit=overcommit, kv_memory=str(int(least * more)))


def sampling(i: int) -> SamplingParams:
    """Return the sampling of a request; every second one is not greedy."""
    return SamplingParams(COUNT, temperature=0.8 * (i % 2), top_k=20, top_p=0.9, seed=40 + i, ignore_eos=True)


def expected(reference: Reference, i: int) -> list[int]:
    return reference.sampled(PROMPTS[i], sampling(i)) if i % 2 else reference.greedy(PROMPTS[i], COUNT)


def submit_all(driver: Driver, instances: list[str], among: int | None = None) -> None:
    for i, prompt in enumerate(PROMPTS[:among]):
        drawn = {name: getattr(sampling(i), name) for name in ("temperature", "top_k", "top_p", "seed")}
        driver.submit(str(i), prompt, COUNT, kv_cache=instances[i % len(instances)], **drawn)


MIXES = [
    (1.5, ["paged"]),
    (20, ["paged"]),
    (20, ["private"]),
    (1.5, ["paged", "private"]),
    (20, ["paged", "contiguous", "private", "sliding_window"]),
]


@pytest.mark.parametrize(("overcommit", "instances"), MIXES)
def test_all_are_answered_as_if_alone(
    tiny: Path, reference: Reference, overcommit: float, instances: list[str]
) -> None:
    driver = cramped(tiny, overcommit=overcommit)
    submit_all(driver, instances)
    driver.run(at_most=sum(len(prompt) + COUNT for prompt in PROMPTS))  # steps of a token at a time, one after another
    for i in range(len(PROMPTS)):
        assert driver.heard[str(i)].tokens == expected(reference, i), i
        assert driver.heard[str(i)].finish_reason == "length"
    driver.assert_nothing_leaked()


@pytest.mark.parametrize("instances", [["paged"], ["paged", "private"]], ids="+".join)
def test_preemptions_are_counted_and_memory_is_used_to_the_full(tiny: Path, instances: list[str]) -> None:
    driver = cramped(tiny, overcommit=20)
    submit_all(driver, instances)
    least_free = driver.core.memory.total_bytes
    while driver.core.busy:
        driver.step()
        least_free = min(least_free, driver.core.memory.free_bytes)
    assert least_free < max(map(driver.block_bytes, instances)), "never at 100 %"
    by_instance: Counter[str] = Counter()
    for step in driver.steps:
        by_instance.update(step.report.preemptions)
    assert sum(by_instance.values()) > 0
    assert by_instance == sum((Counter({r.instance: r.preemptions}) for r in driver.records), Counter())
    assert by_instance.total() == sum(heard.preempted for heard in driver.heard.values())


def test_without_overcommit_nobody_is_preempted(tiny: Path) -> None:
    driver = cramped(tiny, overcommit=1)
    submit_all(driver, ["paged", "private"])
    driver.run()
    assert [record.preemptions for record in driver.records] == [0] * len(PROMPTS)


@pytest.mark.parametrize("instance", ["paged", "private"])
def test_within_an_instance_the_line_is_kept(tiny: Path, instance: str) -> None:
    """A preempted request runs again before all later ones."""
    driver = cramped(tiny, overcommit=20, more=1.5)
    submit_all(driver, [instance])
    preempted = 0
    while driver.core.busy:
        preempted += sum(driver.step().report.preemptions.values())
        running, waiting = driver.core.scheduler.running, driver.core.scheduler.waiting
        assert not running or not waiting or running[-1].queue_key < waiting[0].queue_key
    assert preempted
    ends = [driver.heard[str(i)].last_step for i in range(len(PROMPTS))]
    assert driver.heard["0"].last_step == min(end for end in ends if end is not None), "the first is never held up"


def test_state_of_sampling_and_of_the_text_survives(tiny: Path, reference: Reference) -> None:
    driver = cramped(tiny, overcommit=20, more=2)
    submit_all(driver, ["private"])
    names = [str(i) for i in range(len(PROMPTS))]
    seen: set[str] = set()
    while driver.core.busy:
        driver.step()
        for name in set(driver.waiting()):
            request = driver.request(name)
            if request.num_preemptions and request.num_output_tokens:
                seen.add(name)
                assert request.tokens == PROMPTS[int(name)] + driver.heard[name].tokens
                assert request.num_cached_tokens is not None, "admitted once, and remembered"
    assert seen & set(names[1::2]), "no drawn text was preempted half-way"
    for name in seen:
        assert driver.heard[name].tokens == expected(reference, int(name))


def test_one_token_a_step_suffices(tiny: Path, reference: Reference) -> None:
    driver = Driver(
        tiny,
        **(SETTINGS | {"max_num_batched_tokens": 1}),
        kv_overcommit=20,
        kv_memory=str(least_memory(tiny, **SETTINGS)),
    )
    submit_all(driver, ["paged", "contiguous"], among=4)
    driver.run()
    for i in range(4):
        assert driver.heard[str(i)].tokens == expected(reference, i)


def test_who_is_at_its_own_limit_asks_nobody_else_to_give_way(tiny: Path) -> None:
    driver = Driver(tiny, **(SETTINGS | {"strategies": strategies(paged={"kind": "paged", "block_size": 4})}))
    cache = driver.core.instances["paged"]
    for name, instance in (("a", "paged"), ("b", "paged"), ("stranger", "contiguous")):
        driver.submit(name, random_prompt(20, seed=ord(name[0])), 20, kv_cache=instance)
    driver.step(), driver.step(), driver.step(), driver.step()
    driver.core.memory.set_share("paged", floor=0, limit=cache.bytes_for(driver.engine.max_seq_len))
    driver.run()
    preempted = {record.instance: record.preemptions for record in driver.records}
    assert preempted["contiguous"] == 0
