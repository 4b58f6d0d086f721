"""`generate` returns what the engine and transformers generate, under every strategy, and leaks nothing."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cache_strategies import plugins, registry
from cache_strategies.base import KVCache
from cache_strategies.errors import StrategyError
from server.engine.ipc.messages import SamplingParams
from server.generate import NonFiniteLogitsError, generate
from tests.engine.engine_driver import Driver, strategies
from tests.engine.expected_tokens import Reference, random_prompt
from tests.models.random_models import save_random_model
from tools.bench.caching import generate_cached

STRATEGIES = strategies(
    contiguous={"kind": "contiguous"},
    paged={"kind": "paged", "block_size": 4},
    unshared={"kind": "paged", "block_size": 32, "prefix_cache": False},
    int8={"kind": "paged", "block_size": 16, "kv_dtype": "int8"},
    wide={"kind": "sliding_window", "window": 128, "sinks": 4},
    narrow={"kind": "sliding_window", "window": 16, "sinks": 2},
    plug_in={"kind": "sieve"},
)
EXACT = ("contiguous", "paged", "unshared", "wide")
SETTINGS: dict[str, Any] = {
    "strategies": STRATEGIES,
    "max_seq_len": 128,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 4,
}
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def driver(tiny: Path) -> Driver:
    with pytest.MonkeyPatch.context() as patch:
        point = EntryPoint("sieve", "tests.contract.third_party_strategy:SieveCache", registry.ENTRY_POINT_GROUP)
        patch.setattr(plugins, "entry_points", lambda group: [point] if group == point.group else [])
        return Driver(tiny, **SETTINGS)


def written(driver: Driver, instance: str, prompt: Sequence[int], count: int = 12, **sampling: Any) -> list[int]:
    """Return the tokens that generate() yields."""
    cache, how = driver.core.instances[instance], SamplingParams(count, **(GREEDY | sampling))
    return [token for token, _ in generate(driver.core.model, cache, prompt, how)]


def nothing_is_left(cache: KVCache) -> None:
    usage = cache.usage()
    assert (usage.seats, usage.tokens, usage.used) == (0, 0, 0)
    cache.check_integrity()


# ---------------------------------------------------------------- the same text
@pytest.mark.parametrize("instance", STRATEGIES)
@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.9, "seed": 5, "top_p": 0.9, "top_k": 50},
        {"temperature": 1.5, "seed": 6, "min_p": 0.01, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
        {"temperature": 1.0, "seed": 7, "logit_bias": ((9, 5.0), (11, -50.0)), "presence_penalty": 1.0},
        {
            "temperature": 1.0,
            "seed": 8,
            "stop_token_ids": tuple(range(0, 300, 4)),
            "min_tokens": 6,
            "ignore_eos": False,
        },
    ],
    ids=["greedy", "filters", "penalties", "bias", "stops"],
)
def test_it_writes_what_the_engine_writes(driver: Driver, instance: str, sampling: dict[str, Any]) -> None:
    for length in (1, 16, 45):
        prompt = random_prompt(length, seed=length)
        heard = driver.submit("it", prompt, 12, kv_cache=instance, **sampling)
        driver.run()
        cache, how = driver.core.instances[instance], SamplingParams(12, **(GREEDY | sampling))
        found = list(generate(driver.core.model, cache, prompt, how))
        assert [token for token, _ in found] == heard.tokens
        assert [reason for _, reason in found] == [None] * (len(found) - 1) + [heard.finish_reason]
        nothing_is_left(cache)


@pytest.mark.parametrize("name", ["llama", "qwen2_windows", "gemma2", "gpt2"])  # the last by transformers' code
def test_it_writes_what_transformers_generates(name: str, tmp_path: Path) -> None:
    theirs: Any = save_random_model(name, tmp_path)
    driver = Driver(tmp_path, **SETTINGS | {"strategies": {n: STRATEGIES[n] for n in EXACT}})
    for length in (1, 37):
        prompt = random_prompt(length, seed=length)
        whole = theirs.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, pad_token_id=0)
        expected = whole[0, length:].tolist()
        for instance in EXACT:
            assert written(driver, instance, prompt, 20, ignore_eos=False) == expected, instance
    driver.assert_nothing_leaked()


def test_a_window_forgets_what_it_should(driver: Driver, reference: Reference) -> None:
    prompt = random_prompt(40)
    assert written(driver, "narrow", prompt) == reference.windowed(prompt, 12, window=16, sinks=2)


def test_the_benchmark_generates_with_it(driver: Driver) -> None:
    assert generate_cached(driver.engine, "paged", 6) == written(driver, "contiguous", [0], 6)


# ---------------------------------------------------------------- what is computed
def test_each_token_is_one_step_and_a_known_beginning_none(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    embed = driver.core.model.embed

    def counted(ids: Tensor) -> Tensor:
        rows.append(len(ids))
        return embed(ids)

    monkeypatch.setattr(driver.core.model, "embed", counted)
    prompt = random_prompt(42, seed=3)
    first = written(driver, "paged", prompt, 4)
    assert rows == [16, 16, 10, 1, 1, 1], "the last token never enters"
    rows.clear()
    assert written(driver, "paged", prompt, 4) == first
    assert rows == [2, 1, 1, 1], "10 blocks of 4 tokens were known"
    rows.clear()
    assert written(driver, "narrow", prompt, 2)
    assert max(rows) <= 16


# ---------------------------------------------------------------- nothing left behind
@pytest.mark.parametrize("instance", STRATEGIES)
def test_streams_run_beside_each_other_and_free_their_memory(driver: Driver, instance: str) -> None:
    model, cache = driver.core.model, driver.core.instances[instance]
    prompts = [random_prompt(30, seed=4), random_prompt(30, seed=4), random_prompt(9, seed=5)]
    expected = [written(driver, instance, prompt) for prompt in prompts]
    streams = [generate(model, cache, prompt, SamplingParams(12, **GREEDY)) for prompt in prompts]
    nothing_is_left(cache)
    taken = [[next(stream).token for stream in streams] for _ in range(12)]
    assert [list(tokens) for tokens in zip(*taken, strict=True)] == expected
    assert [list(stream) for stream in streams] == [[], [], []]
    nothing_is_left(cache)


def test_a_stream_that_is_closed_or_dropped_frees_its_memory(driver: Driver) -> None:
    model, cache = driver.core.model, driver.core.instances["paged"]
    for prompt in (random_prompt(20, seed=6), random_prompt(20, seed=7)):
        stream = generate(model, cache, prompt, SamplingParams(50, **GREEDY))
        next(stream)
        assert cache.usage().seats == 1
        if prompt[0] % 2:
            stream.close()
        del stream
        gc.collect()
        nothing_is_left(cache)


def test_one_stream_too_many_is_told_so_and_the_others_go_on(driver: Driver) -> None:
    model, cache = driver.core.model, driver.core.instances["contiguous"]
    streams = [generate(model, cache, random_prompt(5, seed=i), SamplingParams(9, **GREEDY)) for i in range(5)]
    for stream in streams[:4]:
        next(stream)
    with pytest.raises(MemoryError, match="no room in 'contiguous'"):
        next(streams[4])
    assert [len(list(stream)) for stream in streams[:4]] == [8] * 4
    nothing_is_left(cache)


@pytest.mark.parametrize("instance", ["paged", "contiguous"])
@pytest.mark.parametrize("after", [0, 3])
def test_a_failure_frees_the_memory(driver: Driver, instance: str, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, prompt = driver.core.instances[instance], random_prompt(8, seed=8)
    stream = generate(driver.core.model, cache, prompt, SamplingParams(9, **GREEDY))
    for _ in range(after):
        next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(type(driver.core.instances[instance].strategy), "locate", _failing)
        with pytest.raises(StrategyError, match="injected"):
            next(stream)
    nothing_is_left(cache)
    assert written(driver, instance, prompt) == written(driver, "unshared", prompt)


def _failing(*_: object, **__: object) -> None:
    raise RuntimeError("injected")


@pytest.mark.parametrize("after", [0, 5])
def test_logits_that_are_no_numbers_are_told_and_shared_with_nobody(
    driver: Driver, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, cache, prompt = driver.core.model, driver.core.instances["paged"], random_prompt(15, seed=9 + after)
    forward_embedded = model.forward_embedded  # type: ignore[attr-defined]
    stream = generate(model, cache, prompt, SamplingParams(9, **GREEDY))
    for _ in range(after):
        next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(model, "forward_embedded", lambda x, attention: forward_embedded(x * torch.nan, attention))
        with pytest.raises(NonFiniteLogitsError, match="logits are NaN or infinite"):
            next(stream)
    nothing_is_left(cache)
    assert written(driver, "paged", prompt) == written(driver, "unshared", prompt)


# ---------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("prompt", "sampling", "says"),
    [
        ([], {}, "the prompt is empty"),
        ([5] * 120, {"max_tokens": 9}, r"prompt \(120 tokens\) and max_tokens \(9\) come to 129 tokens.*shorten"),
        ([5, 300], {}, "prompt: token ids should be from 0 to 299"),
        ([-1], {}, "prompt: token ids"),
        ([5], {"stop_token_ids": (300,)}, "stop_token_ids: token ids"),
        ([5], {"logit_bias": ((300, 1.0),)}, "logit_bias: token ids"),
        ([5], {"max_tokens": 0}, "max_tokens is 0: ask for at least one"),
        ([5], {"max_tokens": 3, "min_tokens": 4}, r"min_tokens is 4, more than max_tokens \(3\): lower it"),
    ],
)
def test_what_cannot_be_computed_is_refused_at_once(
    driver: Driver, prompt: list[int], sampling: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        generate(
            driver.core.model, driver.core.instances["paged"], prompt, SamplingParams(**{"max_tokens": 4} | sampling)
        )
