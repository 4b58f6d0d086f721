"""Reasoning that its budget ends: the text before is the model's own, and so is what follows the closing tokens."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from server.engine.ipc.messages import Speculation, ThinkingBudget
from server.engine.sampling.thinking import ThinkingLimiter
from tests.engine.engine_driver import Driver
from tests.engine.expected_tokens import Reference, random_prompt
from tests.engine.fake_proposer import FakeProposer

PROMPT, COUNT = random_prompt(21), 24
UNUSED = 1  # a token that ends texts, and so comes in none of them
CLOSING = (7, 250, 9)


def budget(num_tokens: int, **changes: Any) -> ThinkingBudget:
    given: dict[str, Any] = {"is_open": True, "openings": ((UNUSED,),), "ends": ((UNUSED,),), "closing": CLOSING}
    return ThinkingBudget(num_tokens, **given | changes)


def close_after(reference: Reference, num_tokens: int) -> list[int]:
    """Return the greedy text whose reasoning ends after so many tokens, each computed without a cache."""
    text = reference.greedy(PROMPT, num_tokens)
    text = [*text, *CLOSING]
    return [*text, *reference.greedy([*PROMPT, *text], max(0, COUNT - len(text)))][:COUNT]


@pytest.mark.parametrize("num_tokens", [0, 1, 6, COUNT - 2, COUNT])
@pytest.mark.parametrize("right", [None, 0.5, 1.0])
def test_the_budget_ends_the_reasoning(tiny: Path, reference: Reference, num_tokens: int, right: float | None) -> None:
    """With drafts, too, some of which are wrong."""
    driver = Driver(tiny, max_seq_len=96)
    expected = close_after(reference, num_tokens)
    speculation = {} if right is None else {"speculation": Speculation(4)}
    heard = driver.submit("it", PROMPT, COUNT, thinking=budget(num_tokens), **speculation)
    if right is not None:
        proposer = FakeProposer([*PROMPT, *expected], count=4, right=right, seed=0)
        driver.request("it").proposer = proposer  # type: ignore[assignment]
    others = driver.submit("other", PROMPT, COUNT)
    driver.run()
    assert heard.tokens == expected
    assert others.tokens == reference.greedy(PROMPT, COUNT)


def test_reasoning_that_has_ended_or_not_begun_is_not_limited(tiny: Path, reference: Reference) -> None:
    driver = Driver(tiny, max_seq_len=96)
    text = reference.greedy(PROMPT, COUNT)
    driver.submit("ends", PROMPT, COUNT, thinking=budget(6, ends=((UNUSED,), tuple(text[3:5]))))
    driver.submit("never begins", PROMPT, COUNT, thinking=budget(2, is_open=False))
    driver.run()
    assert [heard.tokens for heard in driver.heard.values()] == [text, text]


def test_reasoning_that_the_text_begins(tiny: Path, reference: Reference) -> None:
    driver = Driver(tiny, max_seq_len=96)
    text = reference.greedy(PROMPT, COUNT)
    opening = tuple(text[1:3])
    heard = driver.submit("it", PROMPT, COUNT, thinking=budget(4, is_open=False, openings=(opening,)))
    driver.run()
    assert heard.tokens == close_after(reference, 3 + 4)


def test_a_closing_token_that_may_not_be_drawn_yet_is_forced_all_the_same(tiny: Path, reference: Reference) -> None:
    driver = Driver(tiny, max_seq_len=96)
    expected = close_after(reference, 2)
    limits = {"min_tokens": COUNT, "stop_token_ids": (CLOSING[1],), "ignore_eos": True}
    heard = driver.submit("it", PROMPT, COUNT, thinking=budget(2), **limits)
    driver.run()
    assert (heard.failed, heard.finish_reason) == (None, "stop")
    assert heard.tokens == expected[:4]


def test_random_texts_are_read_as_token_by_token(rng: random.Random) -> None:
    """Whether it is asked after each token, for drafts, or once: no state but the output's counts."""
    for _ in range(200):
        markers = [tuple(rng.choices(range(3), k=rng.randint(1, 2))) for _ in range(3)]
        limit = ThinkingBudget(rng.randint(0, 5), rng.random() < 0.5, (markers[0],), (markers[1],), markers[2])
        output = rng.choices(range(3), k=rng.randint(0, 20))
        each = ThinkingLimiter(limit)
        forced = [each.find_forced_tokens(output[:count], 0, [])[0] for count in range(len(output) + 1)]
        once = ThinkingLimiter(limit)
        half = rng.randint(0, len(output))
        assert once.find_forced_tokens([5, *output[:half]], 1, output[half:]) == forced[half:]
        assert once.find_forced_tokens([5, *output], 1, []) == forced[-1:]
        assert {*forced} <= {None, *markers[2]}
