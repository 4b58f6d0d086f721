"""Drafts, right and wrong ones, only change how many steps a text takes."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from config.settings import MAX_DRAFT_TOKENS
from kernels.ops import Attention
from server.engine.ipc.messages import SamplingParams, Speculation
from tests.engine.engine_driver import Driver, RequestEvents, least_memory, strategies
from tests.engine.expected_tokens import Reference, random_prompt
from tests.engine.fake_proposer import FakeProposer

PROMPT, COUNT = random_prompt(21), 24
WINDOW, SINKS = 8, 3
SETTINGS: dict[str, Any] = {
    "strategies": strategies(
        paged={"kind": "paged", "block_size": 8},
        small={"kind": "paged", "block_size": 4},
        private={"kind": "paged", "block_size": 4, "prefix_cache": False},
        ring={"kind": "sliding_window", "window": WINDOW, "sinks": SINKS, "max_row": 5},
        singles={"kind": "sliding_window", "window": WINDOW, "sinks": SINKS, "max_row": 1},
    ),
    "max_seq_len": 96,
    "max_num_batched_tokens": 32,
}
EXACT = ["paged", "small", "private", "contiguous"]
ASKED = Speculation(4)


def submit_with_drafts(
    driver: Driver, name: str, text: Sequence[int], prompt: Sequence[int] = PROMPT, **options: Any
) -> tuple[RequestEvents, FakeProposer]:
    """Submit a request with a known text, and drafts of that text that are sometimes wrong."""
    right = {key: options.pop(key) for key in ("right", "draft_seed") if key in options}
    heard = driver.submit(name, prompt, len(text), speculation=ASKED, **options)
    request = driver.request(name)
    proposer = FakeProposer([*prompt, *text], count=4, right=right.get("right", 0.7), seed=right.get("draft_seed", 0))
    request.proposer = proposer  # type: ignore[assignment]
    return heard, proposer


# -------------------------------------------------------------------- texts
@pytest.mark.parametrize("instance", EXACT)
@pytest.mark.parametrize("right", [0.0, 0.5, 0.9, 1.0])
def test_greedy_texts_are_those_of_the_whole_context(
    tiny: Path, reference: Reference, instance: str, right: float
) -> None:
    driver = Driver(tiny, **SETTINGS)
    text = reference.greedy(PROMPT, COUNT)
    heard, proposer = submit_with_drafts(driver, "it", text, kv_cache=instance, right=right)
    driver.run()
    assert (heard.tokens, heard.finish_reason) == (text, "length")
    steps = sum(bool(step.report.parts) for step in driver.steps)
    (record,) = driver.records
    assert record.accepted_tokens == sum(proposer.learned) == COUNT - steps
    if right == 1:
        assert (steps, record.drafted_tokens) == (6, 4 * 4 + 2), "the first token, four times 5, and 3"
    if right == 0:
        assert (steps, record.accepted_tokens) == (COUNT, 0)
    driver.assert_nothing_leaked()


@pytest.mark.parametrize("instance", ["ring", "singles"])
def test_a_ring_that_has_wrapped_says_what_a_masked_model_says(tiny: Path, reference: Reference, instance: str) -> None:
    driver = Driver(tiny, **SETTINGS)
    text = reference.windowed(PROMPT, COUNT, window=WINDOW, sinks=SINKS)
    for i in range(4):
        submit_with_drafts(driver, str(i), text, kv_cache=instance, draft_seed=i)
    driver.run()
    assert [heard.tokens for heard in driver.heard.values()] == [text] * 4
    drafted = sum(record.drafted_tokens for record in driver.records)
    assert drafted == 0 if instance == "singles" else drafted > COUNT, "a row of one token has no room for drafts"


DRAWN: dict[str, dict[str, Any]] = {
    "plain": {},
    "cut off": {"top_k": 12, "top_p": 0.9},
    "penalties": {"frequency_penalty": 1.5, "repetition_penalty": 1.2},
    "late end": {"min_tokens": 15, "logit_bias": ((5, 4.0),)},
    "few allowed": {"allowed_token_ids": array("q", range(5, 60)).tobytes()},
}


@pytest.mark.parametrize("how", DRAWN)
def test_drawn_texts_are_those_without_drafts(tiny: Path, how: str) -> None:
    options = {"temperature": 0.9, "seed": 11, "ignore_eos": False} | DRAWN[how]
    without, driver = Driver(tiny, **SETTINGS), Driver(tiny, **SETTINGS)
    text = without.submit("it", PROMPT, COUNT, **options)
    without.run()
    for i, instance in enumerate(EXACT):
        submit_with_drafts(driver, instance, text.tokens, kv_cache=instance, draft_seed=i, **options)
    driver.run()
    assert {name: heard.tokens for name, heard in driver.heard.items()} == dict.fromkeys(EXACT, text.tokens)
    assert sum(record.accepted_tokens for record in driver.records) > COUNT


def test_drafts_find_themselves_in_a_text_that_repeats(tiny: Path) -> None:
    """With the real proposer; a strong logit bias makes any model repeat three tokens."""
    bias = {"logit_bias": tuple((token, 60.0) for token in (7, 8, 9)), "repetition_penalty": 1.0}
    driver = Driver(tiny, **SETTINGS)
    plain = driver.submit("plain", PROMPT, 60, **bias)
    drafts = driver.submit("drafts", PROMPT, 60, speculation=Speculation(5), explain=True, **bias)
    driver.run()
    assert drafts.tokens == plain.tokens
    assert drafts.explained is not None
    record = drafts.explained.record
    assert record.drafted_tokens >= record.accepted_tokens > 30
    assert (drafts.last_step or 0) < (plain.last_step or 0) - 20


def test_drafts_never_go_beyond_max_tokens(tiny: Path, reference: Reference) -> None:
    driver = Driver(tiny, **SETTINGS)
    for count in range(1, 9):
        submit_with_drafts(driver, str(count), reference.greedy(PROMPT, COUNT)[:count], right=1.0)
    driver.run()
    for count in range(1, 9):
        assert driver.heard[str(count)].tokens == reference.greedy(PROMPT, COUNT)[:count]
    assert sum(step.report.tokens for step in driver.steps) <= len(PROMPT) * 8 + sum(range(9))


@pytest.mark.parametrize("at", [1, 5, 6, 7, 11])
def test_a_token_that_ends_the_text_ends_it_among_drafts_too(tiny: Path, reference: Reference, at: int) -> None:
    driver, text = Driver(tiny, **SETTINGS), reference.greedy(PROMPT, COUNT)
    end = text.index(text[at])
    for instance in ("paged", "contiguous"):
        heard, _ = submit_with_drafts(driver, instance, text, kv_cache=instance, right=1.0, stop_token_ids=(text[at],))
        driver.run()
        assert (heard.tokens, heard.finish_reason) == (text[: end + 1], "stop")
        again = driver.submit(f"{instance} again", [*PROMPT, *text], 1, kv_cache=instance)
        driver.run()
        assert again.admitted is not None
        assert again.admitted.cached_tokens <= len(PROMPT) + end, "what the draft had behind the end is not in the text"


def test_log_probabilities_are_those_without_drafts(tiny: Path, reference: Reference) -> None:
    driver, text = Driver(tiny, **SETTINGS), reference.greedy(PROMPT, COUNT)
    plain = driver.submit("plain", PROMPT, COUNT, logprobs=3, prompt_logprobs=2)
    other, _ = submit_with_drafts(driver, "drafts", text, logprobs=3, prompt_logprobs=2)
    driver.run()
    assert len(plain.scores) == len(other.scores) == COUNT
    for ours, theirs in zip([*plain.scores, *plain.prompt_scores], [*other.scores, *other.prompt_scores], strict=True):
        assert (ours.token, ours.rank) == (theirs.token, theirs.rank)
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [token for token, _ in ours.top_logprobs] == [token for token, _ in theirs.top_logprobs]


# -------------------------------------------------------------------- company
def test_choices_of_one_prompt(tiny: Path, reference: Reference) -> None:
    driver = Driver(tiny, **SETTINGS)
    texts = [reference.sampled(PROMPT, SamplingParams(9, 0.9, top_k=10, seed=i, ignore_eos=True)) for i in range(4)]
    for i, text in enumerate(texts):
        options: dict[str, Any] = {"temperature": 0.9, "top_k": 10, "seed": i, "sibling_of": "0" if i else None}
        submit_with_drafts(driver, str(i), text, kv_cache="small", draft_seed=i, **options)
    driver.run()
    assert [driver.heard[str(i)].tokens for i in range(4)] == texts
    assert sum(record.forked for record in driver.records) == 3
    assert sum(record.accepted_tokens for record in driver.records) > 9
    driver.assert_nothing_leaked()


@pytest.mark.parametrize("seed", range(3))
def test_in_tiny_memory_nobody_is_preempted_for_a_draft(tiny: Path, reference: Reference, seed: int) -> None:
    """Wrong drafts change nothing; with right ones all requests end earlier."""
    sized = SETTINGS | {"kv_overcommit": 20, "strategies": strategies(small={"kind": "paged", "block_size": 4})}
    memory = str(int(least_memory(tiny, **sized) * 1.1))
    prompts = [random_prompt(length, seed=seed) for length in (20, 5, 30, 11, 24, 28)]
    preempted, steps = [], []
    for right in (None, 0.0, 0.8):
        driver = Driver(tiny, **sized, kv_memory=memory)
        for i, prompt in enumerate(prompts):
            text = reference.greedy(prompt, 11)
            if right is None:
                driver.submit(str(i), prompt, 11, kv_cache="small")
            else:
                submit_with_drafts(driver, str(i), text, prompt, kv_cache="small", right=right, draft_seed=i)
        driver.run()
        for i, prompt in enumerate(prompts):
            assert driver.heard[str(i)].tokens == reference.greedy(prompt, 11), (right, i)
        driver.assert_nothing_leaked()
        preempted.append([record.preemptions for record in sorted(driver.records, key=lambda r: r.prompt_tokens)])
        steps.append(len(driver.steps))
    assert sum(preempted[0]) > 0
    assert (preempted[1], steps[1]) == (preempted[0], steps[0])
    assert steps[2] < steps[0]


def test_drafts_take_what_prompts_leave_of_a_step(tiny: Path, reference: Reference) -> None:
    driver = Driver(tiny, **(SETTINGS | {"max_num_batched_tokens": 10}))
    text = reference.greedy(PROMPT, COUNT)
    submit_with_drafts(driver, "it", text, kv_cache="paged", right=1.0)
    for _ in range(3):
        driver.step()  # the prompt, 10 tokens at a time
    driver.submit("prompt", random_prompt(38, seed=3), 1, kv_cache="paged")
    tokens = []
    for _ in range(5):
        before = len(driver.heard["it"].tokens)
        report = driver.step().report
        tokens.append((report.tokens, len(driver.heard["it"].tokens) - before))
    assert tokens == [(11, 1), (11, 1), (11, 1), (11, 3), (5, 5)]
    driver.run()
    assert driver.heard["it"].tokens == text


def test_a_step_with_drafts_is_one_of_decoding(tiny: Path, reference: Reference) -> None:
    driver = Driver(tiny, **SETTINGS)
    submit_with_drafts(driver, "it", reference.greedy(PROMPT, COUNT), kv_cache="paged", right=1.0)
    reports = [driver.step().report for _ in range(3)]
    assert [report.phase for report in reports] == ["prefill", "decode", "decode"]
    assert [report.tokens for report in reports] == [len(PROMPT), 5, 5]
    assert [list(report.drafts.get("paged", [])) for report in reports] == [[], [(4, 4)], [(4, 4)]]


# -------------------------------------------------------------------- whoever has none
def test_there_are_none_unless_they_are_asked_for(tiny: Path) -> None:
    driver = Driver(tiny, **SETTINGS)
    repeating = [5, 6, 7] * 8
    driver.submit("silent", repeating, 12)
    driver.submit("none", repeating, 12, speculation=Speculation(0))
    driver.run()
    assert [record.drafted_tokens for record in driver.records] == [0, 0]


def test_settings_are_for_those_who_do_not_say(tiny: Path) -> None:
    driver = Driver(tiny, **SETTINGS, num_speculative_tokens=2, max_speculative_tokens=3)
    repeating = [5, 6, 7] * 8
    driver.submit("silent", repeating, 12)
    driver.submit("none", repeating, 12, speculation=Speculation(0))
    driver.submit("too many", repeating, 12, speculation=Speculation(4))
    refused = driver.heard["too many"].failed
    assert refused is not None
    assert (refused.status, refused.param) == (400, "speculative_config.num_speculative_tokens")
    assert driver.request("silent").proposer is not None
    assert driver.request("none").proposer is None
    driver.run()


def test_a_strategy_in_which_the_cut_into_rows_shows_has_none(tiny: Path) -> None:
    driver = Driver(tiny, **SETTINGS, num_speculative_tokens=MAX_DRAFT_TOKENS)
    cache = driver.core.instances["paged"]
    cache.contract = cache.contract._replace(chunk_invariant=False)
    driver.submit("it", [5, 6, 7] * 8, 12, kv_cache="paged")
    driver.run()
    assert len(driver.heard["it"].tokens) == 12
    assert driver.records[0].drafted_tokens == 0


# -------------------------------------------------------------------- failures
def test_logits_that_are_no_numbers_end_a_text_where_it_gets_to_them(
    tiny: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third row of logits of a draft of 4 is NaN."""
    driver, text = Driver(tiny, **SETTINGS), reference.greedy(PROMPT, COUNT)
    heard, _ = submit_with_drafts(driver, "it", text, kv_cache="paged", right=1.0)
    driver.step()
    forward = driver.core.model.forward

    def broken(ids: torch.Tensor, attention: Attention) -> torch.Tensor:
        logits = forward(ids, attention)
        logits[2] = torch.nan
        return logits

    monkeypatch.setattr(driver.core.model, "forward", broken)
    driver.step()
    assert heard.tokens == text[:3]
    assert heard.failed is not None
    assert heard.failed.code == "not_a_number"
    driver.assert_nothing_leaked()
