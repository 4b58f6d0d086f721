"""Compactions are counted by request and by instance: as often as a text's length says, with the time they took."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import pytest

from cache_strategies.base import KVSequence
from server.engine.info import describe_caches, make_engine_info, read_engine_state
from server.metrics.registry import Metrics
from server.records import Compaction, RequestRecord
from tests.engine.engine_driver import Driver, least_memory, strategies
from tests.engine.expected_tokens import random_prompt
from tests.metrics.fake_metrics import sample_value, scrape

SINKS, RECENT = 2, 3
LONGEST = 160
OPTIONS: dict[str, dict[str, Any]] = {
    "tokens": {"budget": 20, "every": 16, "scorer": "knorm"},
    "share": {"budget": 0.4, "every": 10, "scorer": "keydiff"},
    "by_head": {"budget": 13, "every": 8, "by_head": True, "scorer": "tova"},
    "always scored": {"budget": 50, "every": 12, "scorer": "h2o"},
    "never full": {"budget": LONGEST, "every": 12, "scorer": "h2o"},
}


def make_driver(tiny: Path, **options: Any) -> Driver:
    """Return an engine with a compressed instance `small`, of a model whose layers have no window."""
    small = {"kind": "compressed", "sinks": SINKS, "recent": RECENT, "block_size": 8, **options}
    driver = Driver(tiny, strategies=strategies(small=small), max_seq_len=LONGEST, max_num_batched_tokens=64)
    assert all(spec.window is None for spec in driver.core.model.layer_specs)
    return driver


@dataclass
class Expected:
    """What happens to a text, counted from its length, the budget and the boundaries."""

    compactions: int = 0
    dropped: int = 0


def compute_budget(length: int, budget: float) -> int:
    wanted = budget if isinstance(budget, int) else ceil(budget * length)
    return min(length, max(SINKS + RECENT + 1, wanted))


def count_by_hand(length: int, options: dict[str, Any]) -> Expected:
    """Return the compactions of a text of which `length` tokens have entered the cache."""
    found, held = Expected(), 0
    for boundary in range(options["every"], length + 1, options["every"]):
        held += options["every"]
        most = compute_budget(boundary, options["budget"])
        if held > most:
            found.compactions += 1
            found.dropped += held - most
            held = most
    return found


def compactions_of(driver: Driver, instance: str = "small") -> list[Compaction]:
    return [each for step in driver.steps for each in step.report.compactions.get(instance, ())]


@pytest.mark.fuzz
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_compactions_are_those_that_lengths_and_boundaries_say(
    tiny: Path, options: dict[str, Any], rng: random.Random
) -> None:
    driver = make_driver(tiny, **options)
    metrics = Metrics(make_engine_info(driver.engine))
    expected: dict[str, tuple[int, Expected]] = {}
    began = time.perf_counter()
    for i in range(5):
        prompt, answer = rng.randint(1, 100), rng.randint(1, 50)
        driver.submit(str(i), random_prompt(prompt, seed=i), answer, kv_cache="small", explain=True)
        length = prompt + answer - 1  # the last token does not enter the cache
        expected[str(i)] = length, count_by_hand(length, options)
    driver.submit("exact", random_prompt(40), 20, kv_cache="paged", explain=True)
    driver.run()
    wall_seconds = time.perf_counter() - began
    for name, (length, counted) in expected.items():
        explained = driver.heard[name].explained
        assert explained is not None
        record = explained.record
        print(name, length, counted, record)
        assert record.compactions == counted.compactions
        assert (record.kept_tokens, record.dropped_tokens) == (length - counted.dropped, counted.dropped)
        assert record.budget_tokens == compute_budget(length, options["budget"])
        assert (record.compaction_seconds > 0) == (counted.compactions > 0)
    check_totals(driver, metrics, expected, wall_seconds)
    driver.assert_nothing_leaked()


def check_totals(
    driver: Driver, metrics: Metrics, expected: dict[str, tuple[int, Expected]], wall_seconds: float
) -> None:
    """Assert that reports of steps, /v1/kv_cache and /metrics have the sums of what was counted by hand."""
    count = sum(counted.compactions for _, counted in expected.values())
    dropped = sum(counted.dropped for _, counted in expected.values())
    compactions = compactions_of(driver)
    seconds = sum(each.seconds for each in compactions)
    assert (len(compactions), sum(each.dropped_tokens for each in compactions)) == (count, dropped)
    assert sum(record.compaction_seconds for record in driver.records) == pytest.approx(seconds)
    assert 0 <= seconds < wall_seconds
    for step in driver.steps:
        assert sum(each.seconds for each in step.report.compactions.get("small", ())) < step.report.seconds
        assert not step.report.compactions.keys() - {"small"}
        metrics.observe(step.report, step.finished)
    shown = {each["name"]: each for each in describe_caches(driver.engine)}
    told = {"count": count, "seconds": pytest.approx(seconds), "dropped_tokens": dropped}
    assert shown["small"]["compactions"] == told
    assert shown["paged"]["compactions"] == {"count": 0, "seconds": 0, "dropped_tokens": 0}
    samples = scrape(metrics, read_engine_state(driver.engine, {}))
    for name, value in (
        ("compactions_total", count),
        ("compacted_tokens_total", dropped),
        ("compaction_seconds_count", count),
        ("compaction_seconds_sum", pytest.approx(seconds)),
        ("dropped_tokens_total", dropped),
    ):
        assert sample_value(samples, f"kvmux_kv_cache_{name}", strategy="small") == value, name
        assert sample_value(samples, f"kvmux_kv_cache_{name}", strategy="paged") == 0, name


def test_the_budget_of_an_instance_is_that_of_the_longest_text(tiny: Path) -> None:
    options = {"kind": "compressed", "block_size": 8}
    driver = Driver(
        tiny,
        strategies=strategies(
            fixed={**options, "budget": 50},
            share={**options, "budget": 0.25},
            pyramid={**options, "budget": 50, "by_layer": "pyramid"},
            ring={"kind": "sliding_window", "window": 20, "sinks": 3},
            wide={"kind": "sliding_window", "window": 500, "sinks": 0},
        ),
        max_seq_len=LONGEST,
    )
    # Of a window of 20 tokens the next token sees 19; the layers of a pyramid keep 50 tokens in the mean
    budgets = {"fixed": 50, "share": 40, "pyramid": 50, "ring": 19 + 3, "wide": LONGEST}
    none = dict.fromkeys(("paged", "contiguous"))
    shown = {each["name"]: each["budget_tokens"] for each in describe_caches(driver.engine)}
    assert shown == budgets | none | {"sliding_window": LONGEST}
    state = read_engine_state(driver.engine, {})
    assert state.budget_tokens == shown | dict.fromkeys(none, LONGEST), "without a budget all tokens are kept"
    samples = scrape(Metrics(make_engine_info(driver.engine)), state)
    for name, budget in state.budget_tokens.items():
        assert sample_value(samples, "kvmux_kv_cache_budget_tokens", strategy=name) == budget


def test_a_sequence_that_is_computed_again_is_compacted_again(tiny: Path) -> None:
    """The request has dropped its tokens once; the work is counted as often as it was done."""
    options = OPTIONS["tokens"]
    driver = make_driver(tiny, **options)
    driver.submit("it", random_prompt(70), 20, kv_cache="small")
    while driver.request("it").num_output_tokens < 12:
        driver.step()
    first = count_by_hand(70 + 11, options)
    assert driver.request("it").num_compactions == first.compactions > 0
    driver.preempt("it")
    driver.run()
    (record,), whole = driver.records, count_by_hand(89, options)
    assert record.compactions == first.compactions + whole.compactions
    assert record.dropped_tokens == whole.dropped
    assert sum(each.dropped_tokens for each in compactions_of(driver)) == first.dropped + whole.dropped


def test_a_request_that_waits_for_memory_starts_when_a_compaction_has_freed_it(tiny: Path) -> None:
    """There is room for 64 tokens: 48 and 35 are too many; after a compaction 8 of the 48 are left."""
    small = {"kind": "compressed", "budget": 8, "every": 48, "sinks": 1, "recent": 1, "block_size": 8}
    settings = {
        "strategies": strategies(small=small, paged={"kind": "paged", "block_size": 8}),
        "max_seq_len": 64,
        "kv_overcommit": 4.0,
    }
    driver = Driver(tiny, **settings, kv_memory=str(least_memory(tiny, **settings)))
    driver.submit("first", random_prompt(45), 19, kv_cache="small")
    driver.step()
    driver.submit("second", random_prompt(30), 5, kv_cache="paged")
    driver.step()
    assert driver.waiting() == ["second"]
    while not driver.request("first").num_compactions:
        assert driver.waiting() == ["second"]
        driver.step()
    driver.step()
    assert driver.running() == ["first", "second"]
    driver.run()
    assert [record.preemptions for record in driver.records] == [0, 0]


# ---------------------------------------------------------------- strategies that fail, or say nothing
def replace_compact(driver: Driver, compact: Any) -> None:
    """Replace compact() of the strategy's sequences: compact(sequence, the right method)."""
    inner: Any = driver.core.instances["small"].strategy
    base = inner.sequence_type
    inner.sequence_type = type("Changed", (base,), {"compact": lambda self: compact(self, lambda: base.compact(self))})


def run_alone(driver: Driver) -> RequestRecord:
    driver.submit("it", random_prompt(70), 20, kv_cache="small")
    driver.run()
    return driver.records[-1]


def test_a_compaction_that_is_repeated_counts_once_with_the_time_of_both(tiny: Path) -> None:
    driver = make_driver(tiny, **OPTIONS["tokens"])
    failures: list[int] = []

    def compact(sequence: KVSequence, right: Any) -> Any:
        if sequence.length % 16 == 0 and sequence.length not in failures:
            failures.append(sequence.length)
            time.sleep(0.01)
            raise RuntimeError("planted")
        return right()

    replace_compact(driver, compact)
    record, counted = run_alone(driver), count_by_hand(89, OPTIONS["tokens"])
    assert (record.outcome, record.compactions) == ("length", counted.compactions)
    assert record.compaction_seconds >= 0.01 * counted.compactions
    assert sum(step.report.failures.get("small", 0) for step in driver.steps) == len(failures) == 89 // 16


def test_a_compaction_that_fails_twice_does_not_count(tiny: Path) -> None:
    driver = make_driver(tiny, **OPTIONS["tokens"])

    def compact(sequence: KVSequence, right: Any) -> Any:
        if sequence.length == 64:
            raise RuntimeError("planted")
        return right()

    replace_compact(driver, compact)
    record, counted = run_alone(driver), count_by_hand(63, OPTIONS["tokens"])
    assert (record.outcome, record.compactions, record.budget_tokens) == ("error", counted.compactions, None)
    assert len(compactions_of(driver)) == counted.compactions


def test_a_strategy_whose_compact_returns_nothing_is_served_and_not_counted(tiny: Path) -> None:
    telling, silent = (make_driver(tiny, **OPTIONS["tokens"]) for _ in range(2))

    def compact(sequence: KVSequence, right: Any) -> None:
        right()

    replace_compact(silent, compact)
    expected, record = run_alone(telling), run_alone(silent)
    assert silent.heard["it"].tokens == telling.heard["it"].tokens
    assert (record.compactions, record.compaction_seconds) == (0, 0)
    assert record.dropped_tokens == expected.dropped_tokens > 0
    assert not compactions_of(silent)
