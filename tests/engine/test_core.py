"""Requests under all strategies in one batch are answered as each would be alone, in any order of steps."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from torch import Tensor

from kernels.ops import Attention
from server.engine.info import read_engine_state
from server.engine.ipc.messages import Admitted, Tokens
from tests.engine.engine_driver import Driver, strategies
from tests.engine.expected_tokens import Reference, random_prompt
from tests.models.random_models import load_decoder

LENGTHS = (1, 2, 31, 32, 33, 129, 300)  # around a block, a tile and a step
COUNT = 8

EXACT = strategies(
    small_blocks={"kind": "paged", "block_size": 4},
    private={"kind": "paged", "block_size": 16, "prefix_cache": False},
    ring={"kind": "sliding_window", "window": 512, "sinks": 0},
    ring_with_sinks={"kind": "sliding_window", "window": 512, "sinks": 4, "max_row": 11},
    mirrored={"kind": "mirrored"},
)
NARROW = {"w1": (1, 1, 1), "w8": (8, 0, 8), "w8s3": (8, 3, 5), "w40": (40, 4, 64)}  # window, sinks, max_row
NARROW_SETTINGS = strategies(
    **{
        name: {"kind": "sliding_window", "window": window, "sinks": sinks, "max_row": max_row}
        for name, (window, sinks, max_row) in NARROW.items()
    }
)


def run_staggered(driver: Driver, jobs: Sequence[tuple[str, list[int]]], every: int, count: int = COUNT) -> None:
    """Submit requests (instance, prompt), one every `every` steps, and run them all; their ids are their indices."""
    for i, (instance, prompt) in enumerate(jobs):
        driver.submit(str(i), prompt, count, kv_cache=instance)
        for _ in range(every):
            driver.step()
    driver.run()


# -------------------------------------------------------------------- tokens
@pytest.mark.parametrize(
    ("max_num_batched_tokens", "every"),
    [(512, 0), (512, 1), (64, 3), (13, 0)],
    ids=["at_once", "staggered", "chunks", "bits"],
)
def test_all_exact_strategies_in_one_batch_say_what_full_context_says(
    tiny: Path, reference: Reference, max_num_batched_tokens: int, every: int
) -> None:
    driver = Driver(tiny, strategies=EXACT, max_num_batched_tokens=max_num_batched_tokens)
    instances = ["paged", "contiguous", *EXACT]
    jobs = [(name, random_prompt(n, seed)) for seed, name in enumerate(instances) for n in LENGTHS[seed % 2 :: 2]]
    run_staggered(driver, jobs, every)
    for i, (instance, prompt) in enumerate(jobs):
        assert driver.heard[str(i)].tokens == reference.greedy(prompt, COUNT), (instance, len(prompt))
    driver.assert_nothing_leaked()


@pytest.mark.parametrize("max_num_batched_tokens", [512, 13])
def test_a_narrow_window_says_what_a_masked_model_says(
    tiny: Path, reference: Reference, max_num_batched_tokens: int
) -> None:
    driver = Driver(tiny, strategies=NARROW_SETTINGS, max_num_batched_tokens=max_num_batched_tokens)
    jobs = [(name, random_prompt(n)) for name in [*NARROW, "paged"] for n in (1, 9, 61)]
    run_staggered(driver, jobs, every=1, count=12)
    for i, (name, prompt) in enumerate(jobs):
        if name == "paged":  # not affected by its neighbours
            assert driver.heard[str(i)].tokens == reference.greedy(prompt, 12)
        else:
            window, sinks, _ = NARROW[name]
            expected = reference.windowed(prompt, 12, window=window, sinks=sinks)
            assert driver.heard[str(i)].tokens == expected, (name, len(prompt))
    driver.assert_nothing_leaked()


def test_a_model_with_windows_of_its_own_is_served_exactly(tiny_windows: Path) -> None:
    reference = Reference(load_decoder(tiny_windows))
    driver = Driver(tiny_windows, strategies=EXACT | NARROW_SETTINGS, max_num_batched_tokens=40)
    jobs = [(name, random_prompt(n)) for name in ["paged", "contiguous", *EXACT, "w8s3", "w40"] for n in (5, 70)]
    run_staggered(driver, jobs, every=1, count=12)
    for i, (name, prompt) in enumerate(jobs):
        window, sinks, _ = NARROW.get(name, (512, 0, 0))
        expected = reference.windowed(prompt, 12, window=window, sinks=sinks)
        assert driver.heard[str(i)].tokens == expected, (name, len(prompt))


# -------------------------------------------------------------------- the batch
def test_the_weights_are_read_once_a_step_for_all_strategies(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(tiny, strategies=EXACT, max_num_batched_tokens=50)
    passes: list[int] = []
    forward = driver.core.model.forward

    def counted(ids: Tensor, attention: Attention) -> Tensor:
        passes.append(len(ids))
        return forward(ids, attention)

    monkeypatch.setattr(driver.core.model, "forward", counted)
    for instance in ["contiguous", *EXACT]:
        driver.submit(instance, random_prompt(40), 6, kv_cache=instance)
    driver.run()
    assert passes == [step.report.tokens for step in driver.steps]
    assert sum(passes) == 6 * (40 + 5)  # the last token enters no cache
    assert any(len(step.report.parts) == 6 for step in driver.steps), "never all together"


def test_every_cache_is_polled_when_a_step_begins(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, polled = Driver(tiny), []
    for name, cache in driver.core.instances.items():
        monkeypatch.setattr(cache, "poll", lambda name=name: polled.append((name, bool(driver.running()))))
    driver.submit("r", random_prompt(4), 2)
    driver.step()
    assert polled == [(name, False) for name in driver.core.instances], "before anybody has got a seat"


def test_an_idle_engine_computes_nothing(tiny: Path) -> None:
    driver = Driver(tiny)
    result = driver.step()
    assert result.events == []
    assert result.finished == []
    assert (result.report.rows, result.report.tokens, dict(result.report.parts)) == (0, 0, {})


def test_the_report_counts_rows_tokens_and_requests_by_instance(tiny: Path) -> None:
    driver = Driver(tiny, max_num_seqs=2)
    driver.submit("p", random_prompt(10), 3, kv_cache="paged")
    driver.submit("c", random_prompt(20), 3, kv_cache="contiguous")
    driver.submit("w", random_prompt(5), 3, kv_cache="contiguous")
    first, second = driver.step().report, driver.step().report
    paged, contiguous = first.parts["paged"], first.parts["contiguous"]
    assert (paged.prefill_rows, paged.decode_rows, paged.tokens, first.generated_tokens["paged"]) == (1, 0, 10, 1)
    assert (contiguous.prefill_rows, contiguous.decode_rows, contiguous.tokens) == (1, 0, 20)
    assert (second.parts["paged"].prefill_rows, second.parts["paged"].decode_rows) == (0, 1)
    state = read_engine_state(driver.engine, {})
    assert (state.running, state.waiting) == ({"paged": 1, "contiguous": 1}, {("contiguous", "seats"): 1})


def test_the_report_tells_prompts_from_decoding_and_parts_from_ends(tiny: Path) -> None:
    driver = Driver(tiny, max_num_batched_tokens=10)
    driver.submit("one", random_prompt(1), 3)
    driver.submit("long", random_prompt(21), 3)
    reports = [driver.step().report for _ in range(4)]
    parts = [(report.parts["paged"], report.generated_tokens["paged"]) for report in reports]
    assert [(part.prefill_rows, part.decode_rows, generated) for part, generated in parts] == [
        (2, 0, 1),
        (1, 1, 1),
        (1, 1, 2),
        (0, 1, 1),
    ]


def test_a_second_request_finds_the_first_ones_blocks(tiny: Path, reference: Reference) -> None:
    driver = Driver(tiny, strategies=EXACT)
    prompt = random_prompt(33)
    for name in ("first", "second"):
        driver.submit(name, prompt, COUNT, kv_cache="small_blocks")
        driver.run()
    first, second = driver.heard["first"], driver.heard["second"]
    assert first.tokens == second.tokens == reference.greedy(prompt, COUNT)
    for name, heard, cached, miss in (("first", first, 0, "cold"), ("second", second, 32, None)):
        assert heard.admitted == Admitted(name, "small_blocks", "request", cached, miss)
        assert 0 < heard.queued < 60
    assert [record.cached_tokens for record in driver.records] == [0, 32]


# -------------------------------------------------------------------- the end
@pytest.fixture
def ending(tiny: Path, tmp_path: Path, reference: Reference) -> tuple[Path, list[int], list[int]]:
    """Return a model directory whose end token is the fifth of a text, with the prompt and the text."""
    prompt = random_prompt(20)
    text = reference.greedy(prompt, COUNT)
    assert text[4] not in text[:4]
    directory = shutil.copytree(tiny, tmp_path / "ending")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [298, text[4]]}))
    return directory, prompt, text


def test_an_end_token_ends_the_text_and_is_sent(ending: tuple[Path, list[int], list[int]]) -> None:
    directory, prompt, text = ending
    driver = Driver(directory)
    stopped = driver.submit("stopped", prompt, COUNT, ignore_eos=False)
    ignoring = driver.submit("ignoring", prompt, COUNT, ignore_eos=True, kv_cache="contiguous")
    exact = driver.submit("exact", prompt, 5, ignore_eos=False, kv_cache="sliding_window")
    driver.run()
    assert (stopped.tokens, stopped.finish_reason) == (text[:5], "stop")
    assert (ignoring.tokens, ignoring.finish_reason) == (text, "length")
    assert (exact.tokens, exact.finish_reason) == (text[:5], "stop"), "both end it: the end token tells more"
    assert sorted(record.outcome for record in driver.records) == ["length", "stop", "stop"]
    driver.assert_nothing_leaked()


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_max_tokens_is_kept(tiny: Path, reference: Reference, max_tokens: int) -> None:
    driver = Driver(tiny)
    heard = driver.submit("r", random_prompt(31), max_tokens)
    driver.run()
    assert (heard.tokens, heard.finish_reason) == (reference.greedy(random_prompt(31), max_tokens), "length")
    assert driver.records[0].generated_tokens == max_tokens


def test_admission_comes_with_the_first_row_and_every_token_on_its_own(tiny: Path) -> None:
    driver = Driver(tiny, max_num_batched_tokens=10)
    driver.submit("r", random_prompt(25), 3)
    told = [[type(event.message) for event in driver.step().events] for _ in range(5)]
    assert told == [[Admitted], [], [Tokens], [Tokens], [Tokens]]


def test_a_record_tells_the_request_and_times_in_order(tiny: Path) -> None:
    driver = Driver(tiny)
    driver.submit("r", random_prompt(25), 3, kv_cache="contiguous", named_by="header")
    driver.run()
    (record,) = driver.records
    assert (record.instance, record.reason, record.outcome) == ("contiguous", "header", "length")
    assert (record.prompt_tokens, record.generated_tokens, record.preemptions) == (25, 3, 0)
    assert record.kv_bytes == driver.core.instances["contiguous"].bytes_for(28)
    assert record.queue_seconds is not None
    assert record.prefill_seconds is not None
    assert record.decode_seconds is not None
    assert record.first_token_seconds is not None
    assert record.first_token_seconds == pytest.approx(record.queue_seconds + record.prefill_seconds)
    assert record.first_token_seconds + record.decode_seconds <= record.total_seconds
