"""Prompts have the right lengths, share the right beginnings, and fit into the context."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from loadtest import traces
from loadtest.bench.arrivals import Closed
from loadtest.bench.flags import EPILOG, WORKLOAD_NAMES
from loadtest.bench.types import BenchRequest
from loadtest.bench.vocabulary import PromptVocabulary, make_vocabulary
from loadtest.bench.workloads import (
    DEFAULT_WORKLOADS,
    NAMED_WORKLOADS,
    Drawn,
    Replayed,
    WorkloadError,
    fit_workload,
    read_trace,
)
from loadtest.prompts import WORDS

IDS = make_vocabulary([300, 899, 512])


def prompts(asks: list[BenchRequest]) -> list[list[int]]:
    assert all(isinstance(ask.prompt, list) for ask in asks)
    return [[int(each) for each in ask.prompt] for ask in asks]


def common(one: list[int], other: list[int]) -> int:
    """Return the length of the common beginning of two prompts."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_names_are_those_of_the_flags() -> None:
    assert tuple(NAMED_WORKLOADS) == WORKLOAD_NAMES
    assert set(DEFAULT_WORKLOADS) <= set(WORKLOAD_NAMES)
    for workload in NAMED_WORKLOADS.values():
        assert f"  {workload.name:5} {workload}\n" in EPILOG


@pytest.mark.parametrize("name", WORKLOAD_NAMES)
def test_prompts_have_exact_lengths(name: str) -> None:
    workload = NAMED_WORKLOADS[name]
    asks = workload.make_requests(IDS, "salt", "")
    assert len(asks) == workload.requests
    assert {len(each) for each in prompts(asks)} == {workload.shared_tokens + workload.prompt_tokens}
    assert {ask.max_tokens for ask in asks} == {workload.max_tokens}
    assert all(300 <= token < 900 for each in prompts(asks) for token in each)


def test_a_salt_gives_the_same_prompts_and_another_others() -> None:
    workload = NAMED_WORKLOADS["c8"]
    assert workload.make_requests(IDS, "1", "") == workload.make_requests(IDS, "1", "")
    one, other = (prompts(workload.make_requests(IDS, salt, "")) for salt in "12")
    assert max(common(a, b) for a in one for b in other) < 4


def test_phases_share_their_beginning_and_nothing_else() -> None:
    cold, warm = (
        prompts(NAMED_WORKLOADS["d"].make_requests(IDS, "salt", phase)) for phase in NAMED_WORKLOADS["d"].phases
    )
    everything = cold + warm
    shared = [common(a, b) for i, a in enumerate(everything) for b in everything[:i]]
    assert 1024 <= min(shared) <= max(shared) < 1028


def test_words_where_ids_are_not_known() -> None:
    words = make_vocabulary([])
    assert not words.has_token_ids
    prompt = (
        Drawn("w", Closed(1), requests=1, prompt_tokens=20, max_tokens=4).make_requests(words, "salt", "")[0].prompt
    )
    assert isinstance(prompt, str)
    assert len(prompt.split()) == 20
    assert set(prompt.split()) <= set(WORDS)


@pytest.mark.parametrize("context", [16, 100, 200, 500, 1000, 2048, 4096, None])
@pytest.mark.parametrize("name", WORKLOAD_NAMES)
def test_what_is_fitted_fits(name: str, context: int | None) -> None:
    workload = NAMED_WORKLOADS[name]
    fitted, note = fit_workload(workload, context)
    assert isinstance(fitted, Drawn)
    fits = context is None or workload.prompt_tokens + workload.shared_tokens + workload.max_tokens <= context
    assert (fitted == workload) == (note == "") == fits
    if context is not None and not fits:
        assert fitted.prompt_tokens + fitted.shared_tokens + fitted.max_tokens == context
        assert f"{name}: does not fit into the model's {context:,} tokens" in note
        assert bool(fitted.shared_tokens) == bool(workload.shared_tokens)


def test_a_model_can_be_too_small() -> None:
    with pytest.raises(WorkloadError, match="context of 8 tokens"):
        fit_workload(NAMED_WORKLOADS["a"], 8)


@pytest.fixture(scope="module")
def recorded() -> list[traces.TracedRequest]:
    return list(traces.generate_trace(0, 20))


@pytest.fixture
def file(tmp_path: Path, recorded: list[traces.TracedRequest]) -> Path:
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(traces.format_line(request) + "\n" for request in recorded) + "\n")
    return file


def test_a_trace_keeps_times_lengths_and_what_is_equal(file: Path, recorded: list[traces.TracedRequest]) -> None:
    replayed = read_trace(file, None, 2.0)
    assert replayed.requests == len(recorded)
    times = list(replayed.arrivals.times(Random()))
    assert times == pytest.approx([(request.time - recorded[0].time) / 2 for request in recorded])
    asks = replayed.make_requests(IDS, "salt", "")
    assert [len(each) for each in prompts(asks)] == [len(request.prompt) for request in recorded]
    assert [ask.max_tokens for ask in asks] == [len(request.answer) for request in recorded]
    told = prompts(asks)
    for i, request in enumerate(recorded):
        for j, other in enumerate(recorded[:i]):
            assert common(told[i], told[j]) >= common(request.prompt, other.prompt)
    others = prompts(replayed.make_requests(IDS, "pepper", ""))
    assert max(common(one, other) for one, other in zip(told, others, strict=True)) < 8


def test_of_a_trace_the_beginning(file: Path) -> None:
    assert read_trace(file, 3, 1.0).requests == 3


def test_prompts_of_a_trace_lose_their_end(file: Path) -> None:
    whole = read_trace(file, None, 1.0)
    cut, note = fit_workload(whole, 400)
    assert isinstance(cut, Replayed)
    assert f"{cut.num_truncated} prompts are cut" in note
    assert cut.num_truncated > 0
    for before, after in zip(whole.turns, cut.turns, strict=True):
        assert before.prompt[: len(after.prompt)] == after.prompt
        assert len(after.prompt) + after.max_tokens <= 400
        assert after.prompt
        assert after.max_tokens
    assert fit_workload(whole, 100_000) == (whole, "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no request"),
        ("{", "is not a trace"),
        ("[]", "is not a trace"),
        ('{"time": 0, "prompt": [Infinity, 2], "answer": [1]}', "is not a trace"),
        ('{"time": 0, "prompt": [1e300, 2], "answer": [1]}', "is not a trace"),
        ('{"time": 0, "prompt": "12", "answer": [1]}', "is not a trace"),
        ('{"time": NaN, "prompt": [1], "answer": [1]}', "is not a trace"),
        ('{"time": 1e999, "prompt": [1], "answer": [1]}', "is not a trace"),
        ('{"prompt": [1], "answer": [1]}', "is not a trace"),
        (json.dumps({"time": 0, "prompt": [], "answer": [1]}), "an empty prompt"),
    ],
)
def test_what_is_no_trace(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(text)
    with pytest.raises(WorkloadError, match=message):
        read_trace(file, None, 1.0)


def test_no_trace(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"--trace: cannot read .*: No such file"):
        read_trace(tmp_path / "none", None, 1.0)


def test_ordinary_ids_are_between_those_of_a_text() -> None:
    assert make_vocabulary([7, 300, 12]) == PromptVocabulary(range(7, 301))
