"""Tests of what operators see of an engine: effective settings, memory, times of the operations."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from config.settings import Settings
from kernels.device import get_device
from server.engine import device
from server.engine.admin import run_command
from server.engine.build import build_engine
from server.engine.device import device_memory, free_memory
from server.engine.info import (
    PRIVATE_SETTINGS,
    ProcessMemory,
    describe_caches,
    make_engine_info,
    read_engine_state,
)
from server.engine.instance_reports import count_tokens
from server.engine.ipc.messages import Inspect
from server.metrics.registry import Metrics
from server.processes.cgroups import MemoryLimit
from server.records import KVTokens
from tests.engine.engine_driver import Driver, strategies
from tests.engine.expected_tokens import random_prompt
from tests.metrics.fake_metrics import sample_value, scrape

CPU = get_device("cpu")


def test_settings_are_those_that_hold(tiny: Path) -> None:
    driver = Driver(tiny, max_num_seqs=3, weights="bf16")
    settings = make_engine_info(driver.engine).settings
    assert settings["kv_memory_bytes"] == driver.core.memory.total_bytes
    assert settings["threads"] == torch.get_num_threads()
    assert (settings["max_num_seqs"], settings["max_num_batched_tokens"]) == (3, 512)
    assert (settings["device"], settings["dtype"], settings["weights"]) == ("cpu", "float32", "bfloat16")
    assert settings["kernels"] == driver.engine.kernels.backend
    assert settings["model_impl"] == "lean"
    automatic = {name for name, value in settings.items() if value == "auto"}
    assert automatic == {"tool_call_parser", "reasoning_parser"}, "API processes choose these by the chat template"
    assert settings.keys() | PRIVATE_SETTINGS >= Settings.model_fields.keys()


def test_settings_tell_nothing_private(tiny: Path) -> None:
    private = {
        "api_keys": ["sk-very-private"],
        "admin_token": "so-private",
        "otlp_traces_endpoint": "http://me:private@x",
    }
    settings = make_engine_info(Driver(tiny, **private).engine).settings
    assert "private" not in str(settings), "/metrics may be read by strangers"
    assert str(tiny.parent) not in str(settings)


def test_the_pool_is_held_or_free(tiny: Path) -> None:
    driver = Driver(tiny)
    driver.submit("it", random_prompt(50), 20)
    driver.step()
    state = read_engine_state(driver.engine, {})
    assert state.running == {"paged": 1}
    assert state.pool_held == sum(usage.reserved for usage in state.usage.values()) > 0
    assert state.pool_held + state.pool_warm + state.pool_cold == driver.core.memory.total_bytes
    assert state.blocks["paged"].in_use == 2


def test_tokens_of_open_sequences_are_kept_or_dropped(tiny: Path) -> None:
    """Two sequences share a prefix, which counts in both; a ring keeps 9 tokens of its window and 3 sinks."""
    instances = strategies(
        paged={"kind": "paged", "block_size": 4}, ring={"kind": "sliding_window", "window": 10, "sinks": 3}
    )
    driver = Driver(tiny, strategies=instances)
    prompt = random_prompt(50)
    driver.submit("first", prompt, 20, kv_cache="paged")
    driver.submit("ring", prompt, 20, kv_cache="ring")
    while len(driver.heard["ring"].tokens) < 2:
        driver.step()
    driver.submit("second", prompt, 20, kv_cache="paged")
    driver.step()
    lengths = {request.key[1]: request.sequence.length for request in driver.requests if request.sequence is not None}
    assert lengths.keys() == {"first", "second", "ring"}
    expected = {
        "paged": KVTokens(lengths["first"] + lengths["second"], 0),
        "ring": KVTokens(9 + 3, lengths["ring"] - 9 - 3),
    }
    state = read_engine_state(driver.engine, {})
    assert {name: state.tokens[name] for name in expected} == expected
    assert state.usage["paged"].tokens < expected["paged"].kept, "shared tokens count once there"
    shown = {
        each["name"]: KVTokens(each["kept_tokens"], each["dropped_tokens"]) for each in describe_caches(driver.engine)
    }
    assert {name: shown[name] for name in expected} == expected
    inspected = run_command(driver.engine, Inspect("ring"))["requests"]
    assert [(each["kept_tokens"], each["dropped_tokens"]) for each in inspected] == [expected["ring"]]


@pytest.mark.parametrize("count", [-1, 10_000, "many", 1.5], ids=str)
def test_a_wrong_number_of_dropped_tokens_is_one_fault_and_counts_as_none(
    tiny: Path, count: Any, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver(tiny, strategies=strategies(ring={"kind": "sliding_window", "window": 10}))
    for i in range(3):
        driver.submit(str(i), random_prompt(20), 30, kv_cache="ring")
    for _ in range(6):
        driver.step()
    driver.core.instances["ring"].strategy.count_visible = lambda layer, length: count  # type: ignore[method-assign]
    tokens = count_tokens(driver.core.instances["ring"])
    assert tokens == (sum(request.sequence.length for request in driver.requests if request.sequence is not None), 0)
    assert driver.step().report.failures == {"ring": 1}, "not one for each sequence"
    assert "cache strategy 'ring' failed in count_visible()" in caplog.text


def test_an_instance_that_hung_is_disabled_in_the_metrics(tiny: Path) -> None:
    settings = Settings(model=str(tiny), dtype="float32", kv_memory="12MiB", weights_cache="off", threads=1)
    engine = build_engine(settings, disabled={"sliding_window": "reserve() did not return"})
    metrics = Metrics(make_engine_info(engine, restarts=1))
    samples = scrape(metrics, read_engine_state(engine, {}))
    for name, disabled in {"paged": 0, "contiguous": 0, "sliding_window": 1}.items():
        assert sample_value(samples, "kvmux_strategy_disabled", strategy=name) == disabled
        assert sample_value(samples, "kvmux_strategy_failures_total", strategy=name) == disabled
        assert sample_value(samples, "kvmux_strategy_quarantined", strategy=name) == 0
        assert sample_value(samples, "kvmux_kv_cache_tokens", strategy=name, state="kept") == 0
    shown = {each["name"]: each for each in describe_caches(engine)}
    assert shown["sliding_window"] == {
        "name": "sliding_window",
        "kind": "sliding_window",
        "state": "disabled",
        "reason": "reserve() did not return",
    }


def test_memory_of_the_machine() -> None:
    used, free = device_memory(CPU)
    assert used > 0
    assert used + free == pytest.approx(psutil.virtual_memory().total, rel=0.2)


def test_memory_of_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "read_memory_limit", lambda: MemoryLimit(1000, 300))
    assert device_memory(CPU) == (300, 700)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=5000, available=10))
    assert device_memory(CPU) == (300, 10), "the machine has less than the container may have"
    assert free_memory(CPU) == 10


def test_memory_of_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (30, 100))
    assert device_memory(get_device("cuda")) == (70, 30)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 40)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 100)
    assert device_memory(get_device("mps")) == (40, 60)


def test_memory_of_processes() -> None:
    processes = ProcessMemory()
    for worker, memory in ((1, 60), (2, 20), (1, 100), (3, 7)):
        processes.set_worker_memory(worker, memory)
    processes.remove_worker(3)
    resident = processes.read_resident_bytes()
    assert resident["engine"] == pytest.approx(psutil.Process().memory_info().rss, rel=0.1)
    assert (resident["api"], resident["supervisor"]) == (120, 0)


def test_operations_are_timed_in_some_steps(tiny: Path) -> None:
    driver = Driver(tiny)
    driver.core.timing_interval = 3
    driver.submit("it", random_prompt(20), 8)
    driver.run()
    reports = [step.report for step in driver.steps]
    assert [report.op_seconds is not None for report in reports] == [(i + 1) % 3 == 0 for i in range(8)]
    for report in reports:
        if report.op_seconds is not None:
            assert report.phase == "decode"
            assert 0 < report.op_seconds["attend"] < sum(report.op_seconds.values()) < report.seconds
    assert not driver.core.tracer.recorders
    assert Counter(report.phase for report in reports) == {"prefill": 1, "decode": 7}
