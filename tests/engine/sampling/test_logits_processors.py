"""Penalties and biases follow their definitions, and change no other request's tokens."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from server.engine.ipc.messages import SamplingParams
from server.engine.sampling.draw import Draw, draw_tokens
from server.engine.sampling.logits_processors import TokenHistory, process_logits
from tests.engine.engine_driver import Driver, strategies
from tests.engine.expected_tokens import Reference, random_prompt

VOCABULARY = 12
IDS = st.lists(st.integers(0, VOCABULARY - 1), max_size=20)
many = settings(max_examples=80)
PROMPT, COUNT = random_prompt(20), 12


def logits_of(seed: int = 0) -> torch.Tensor:
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("how", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}, {"temperature": 0.0}])
@pytest.mark.parametrize("penalty", [1e-45, 1e-39, 1e-30, 10.0])
def test_a_penalty_that_leaves_the_range_of_floats(how: dict[str, Any], penalty: float) -> None:
    """A token of the prompt becomes the likeliest by far; the draw does not fail."""
    logits = logits_of() + 5
    text = TokenHistory([2, 7], [])
    (token,) = draw_tokens(logits[None], [Draw(SamplingParams(1, repetition_penalty=penalty, seed=3, **how), 0, text)])
    assert (token in text.prompt) is (penalty < 1)


@many
@given(IDS, IDS, st.floats(-2, 2), st.floats(-2, 2), st.floats(0.1, 3), st.dictionaries(st.integers(0, 11), st.just(9)))
def test_penalties_and_bias_by_their_definitions(
    prompt: list[int], output: list[int], frequency: float, presence: float, repetition: float, bias: dict[int, float]
) -> None:
    logits = logits_of()
    sampling = SamplingParams(
        1,
        frequency_penalty=frequency,
        presence_penalty=presence,
        repetition_penalty=repetition,
        logit_bias=tuple(bias.items()),
    )
    counts, seen = Counter(output), {*prompt, *output}
    want = []
    for token, logit in enumerate(logits.tolist()):
        if token in seen:
            logit = logit / repetition if logit > 0 else logit * repetition
        logit -= frequency * counts[token] + presence * (counts[token] > 0)
        want.append(logit + bias.get(token, 0))
    got = process_logits(logits, sampling, TokenHistory(prompt, output), banned={3})
    assert got[3] == -torch.inf
    want[3] = 0.0
    torch.testing.assert_close(got.where(torch.arange(VOCABULARY) != 3, 0.0), torch.tensor(want))
    assert torch.equal(logits, logits_of()), "the model's logits stay as they are"


@many
@given(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=20), st.floats(0.1, 3))
def test_repetition_is_transformers_own(tokens: list[int], penalty: float) -> None:
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([tokens]), logits_of()[None].clone())[0]
    ours = process_logits(
        logits_of(), SamplingParams(1, repetition_penalty=penalty), TokenHistory(tokens[:3], tokens[3:])
    )
    assert torch.equal(ours, theirs)


def test_greedy_and_drawn_tokens_come_from_the_adjusted_logits() -> None:
    logits = torch.stack([logits_of(), logits_of()])
    best = int(logits[0].argmax())
    biased = SamplingParams(1, temperature=0.0, logit_bias=((best, -100.0),))
    tokens = draw_tokens(logits, [Draw(biased, 0), Draw(SamplingParams(1, temperature=0.0), 0)])
    assert tokens == [int(logits[0].topk(2).indices[1]), best]
    sure = SamplingParams(1, temperature=1.0, logit_bias=((5, 100.0),))
    assert draw_tokens(logits[:1], [Draw(sure, 0)]) == [5]


def allowing(tokens: Iterable[int], **how: Any) -> SamplingParams:
    return SamplingParams(1, allowed_token_ids=array("q", tokens).tobytes(), **how)


@many
@given(st.sets(st.integers(0, VOCABULARY - 1), min_size=1), st.sets(st.integers(0, VOCABULARY - 1)))
def test_allowed_tokens_keep_their_logits_and_others_lose_them(allowed: set[int], banned: set[int]) -> None:
    how = {"logit_bias": ((2, 3.0),)}
    before, after = (
        process_logits(logits_of(), sampling, TokenHistory([], []), banned)
        for sampling in (SamplingParams(1, **how), allowing(allowed, **how))
    )
    for token in range(VOCABULARY):
        assert after[token] == (before[token] if token in allowed else -torch.inf)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 100.0])
def test_only_allowed_tokens_are_drawn(temperature: float) -> None:
    logits = torch.stack([logits_of(seed) for seed in range(40)])
    draws = [Draw(allowing([3, 7], temperature=temperature, seed=seed), seed) for seed in range(40)]
    tokens = draw_tokens(logits, draws)
    assert set(tokens) == {3, 7}
    if temperature == 0:
        assert tokens == [3 if row[3] > row[7] else 7 for row in logits]


# ---------------------------------------------------------------- in the engine
def driver_of(tiny: Path, **settings: Any) -> Driver:
    return Driver(tiny, **({"strategies": strategies(paged={"kind": "paged", "block_size": 4})} | settings))


def test_the_allowed_tokens_alone_are_written(tiny: Path, reference: Reference) -> None:
    driver = driver_of(tiny)
    allowed = array("q", [7, 8, 9, 7]).tobytes()
    for name, temperature in (("greedy", 0.0), ("drawn", 1.5)):
        driver.submit(name, PROMPT, COUNT, allowed_token_ids=allowed, temperature=temperature, logprobs=0)
    other = driver.submit("other", PROMPT, COUNT)
    driver.run()
    assert other.tokens == reference.greedy(PROMPT, COUNT)
    for name in ("greedy", "drawn"):
        assert set(driver.heard[name].tokens) <= {7, 8, 9}
        assert len(driver.heard[name].tokens) == COUNT, "none of them ends the text"


def test_allowed_tokens_of_which_none_may_come_first_are_refused(tiny: Path) -> None:
    driver = driver_of(tiny)
    only_end = {"allowed_token_ids": array("q", [4]).tobytes(), "stop_token_ids": (4,), "ignore_eos": True}
    refused = driver.submit("refused", PROMPT, COUNT, min_tokens=1, **only_end)
    taken = driver.submit("taken", PROMPT, COUNT, **only_end)
    driver.run()
    assert refused.failed is not None
    assert (refused.failed.status, refused.failed.param) == (400, "allowed_token_ids")
    assert taken.tokens == [4]


def test_who_is_penalised_says_nothing_twice_and_others_what_they_would_have(tiny: Path, reference: Reference) -> None:
    driver = driver_of(tiny, max_num_batched_tokens=9)
    penalised = driver.submit("penalised", PROMPT, COUNT, presence_penalty=2.0, frequency_penalty=2.0)
    other = driver.submit("other", PROMPT, COUNT)
    driver.run()
    assert other.tokens == reference.greedy(PROMPT, COUNT)
    assert len(set(penalised.tokens)) > len(set(other.tokens))


def test_penalties_survive_preemption(tiny: Path) -> None:
    plain, preempted = driver_of(tiny), driver_of(tiny)
    for driver in (plain, preempted):
        driver.submit("it", PROMPT, COUNT, repetition_penalty=1.5, frequency_penalty=0.7, temperature=0.8, seed=3)
    plain.run()
    for _ in range(6):
        preempted.step()
    preempted.preempt("it")
    preempted.run()
    assert preempted.heard["it"].tokens == plain.heard["it"].tokens


@pytest.mark.parametrize("min_tokens", [0, 5])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_stop_tokens_end_a_text_but_not_too_soon(
    tiny: Path, reference: Reference, min_tokens: int, ignore_eos: bool
) -> None:
    free = reference.greedy(PROMPT, COUNT)
    stop = free[2]
    driver = driver_of(tiny)
    heard = driver.submit(
        "it", PROMPT, COUNT, stop_token_ids=(stop,), min_tokens=min_tokens, ignore_eos=ignore_eos, temperature=0.0
    )
    driver.run()
    if min_tokens:
        assert stop not in heard.tokens[:min_tokens]
        assert len(heard.tokens) >= min_tokens
    else:
        assert (heard.tokens, heard.finish_reason) == (free[: free.index(stop) + 1], "stop")


def test_who_wants_no_token_gets_none(tiny: Path) -> None:
    driver = driver_of(tiny, max_num_batched_tokens=9)
    for i in range(3):
        driver.submit(str(i), PROMPT, 0, sibling_of="0" if i else None)
    driver.run()
    assert all((heard.tokens, heard.finish_reason) == ([], "length") for heard in driver.heard.values())
    assert sum(step.report.tokens for step in driver.steps) == len(PROMPT)
    assert not any(step.report.generated_tokens for step in driver.steps)
    driver.assert_nothing_leaked()
