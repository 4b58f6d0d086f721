"""Log-probabilities are those of the model's own logits, with any sampling, chunking, caching or preemption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from server.engine.ipc.messages import TokenLogprob
from server.engine.sampling.logprobs import MIN_LOGPROB, compute_logprobs, compute_row_logprobs
from server.models.no_cache import NoCacheAttention
from tests.engine.engine_driver import Driver, strategies
from tests.engine.expected_tokens import Reference, random_prompt

PROMPT, COUNT, TOP = random_prompt(23), 6, 3
INSTANCES = ["paged", "contiguous"]
SETTINGS: dict[str, Any] = {
    "strategies": strategies(paged={"kind": "paged", "block_size": 4}),
    "max_seq_len": 64,
    "max_num_batched_tokens": 10,
}


@torch.inference_mode()
def by_the_whole_text(reference: Reference, ids: list[int]) -> torch.Tensor:
    """Return float64 log-probabilities [len(ids) - 1, V] after each token, computed without a cache."""
    attention = NoCacheAttention(reference.model.layer_specs, len(ids), reference.model.device)
    attention.logit_index = attention.positions[:-1]
    return reference.model.forward(torch.tensor(ids), attention).double().log_softmax(-1)


def assert_scores(told: list[TokenLogprob], tokens: list[int], expected: torch.Tensor, top: int) -> None:
    assert [score.token for score in told] == tokens
    for score, row in zip(told, expected, strict=True):
        assert score.logprob == pytest.approx(float(row[score.token]), abs=1e-4)
        assert score.rank == int((row > row[score.token] + 1e-9).sum()) + 1
        best = row.topk(top)
        assert [token for token, _ in score.top_logprobs] == best.indices.tolist()
        assert [logprob for _, logprob in score.top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert dict(score.top_logprobs).get(score.token, score.logprob) == score.logprob, "the very same number"


def asked(driver: Driver, name: str = "it", *, instance: str = "paged", **options: Any) -> None:
    wanted: dict[str, Any] = {"logprobs": TOP, "prompt_logprobs": TOP, "temperature": 0.9, "seed": 4}
    driver.submit(name, PROMPT, COUNT, kv_cache=instance, **(wanted | options))


def assert_right(driver: Driver, reference: Reference, name: str = "it") -> None:
    heard = driver.heard[name]
    expected = by_the_whole_text(reference, PROMPT + heard.tokens)
    assert_scores(heard.prompt_scores, PROMPT[1:], expected[: len(PROMPT) - 1], TOP)
    assert_scores(heard.scores, heard.tokens, expected[len(PROMPT) - 1 :], TOP)


@pytest.mark.parametrize("instance", INSTANCES)
@pytest.mark.parametrize("warm", [False, True])
def test_prompt_and_output_are_scored(tiny: Path, reference: Reference, instance: str, warm: bool) -> None:
    driver = Driver(tiny, **SETTINGS)
    if warm:
        driver.submit("before", PROMPT, 1, kv_cache=instance)
        driver.run()
    asked(driver, instance=instance)
    driver.submit("beside", PROMPT, COUNT, kv_cache=instance)
    driver.run()
    assert_right(driver, reference)
    admitted = driver.heard["it"].admitted
    assert admitted is not None
    assert admitted.cached_tokens == 0, "what is cached has no logits"
    assert driver.heard["beside"].tokens == reference.greedy(PROMPT, COUNT)


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_preempted_or_not_each_is_told_once(tiny: Path, reference: Reference, steps: int) -> None:
    driver = Driver(tiny, **SETTINGS)
    asked(driver)
    for _ in range(steps):
        driver.step()
    driver.preempt("it")
    driver.run()
    assert_right(driver, reference)


def test_penalties_change_no_score(tiny: Path, reference: Reference) -> None:
    driver = Driver(tiny, **SETTINGS)
    asked(driver, presence_penalty=2.0, logit_bias=((7, 50.0),), temperature=0.0)
    driver.run()
    assert 7 in driver.heard["it"].tokens
    assert_right(driver, reference)


def test_in_small_steps_several_are_scored_one_after_the_other(tiny: Path, reference: Reference) -> None:
    driver = Driver(tiny, **SETTINGS)
    driver.core.scheduler.limits = driver.limits._replace(max_logprob_tokens=4)
    for name in ("a", "b", "c"):
        asked(driver, name)
    driver.submit("plain", PROMPT, COUNT)
    driver.run()
    for name in ("a", "b", "c"):
        assert_right(driver, reference, name)
    assert driver.heard["plain"].tokens == reference.greedy(PROMPT, COUNT)


def test_a_prompt_can_be_scored_and_nothing_drawn(tiny: Path, reference: Reference) -> None:
    driver = Driver(tiny, **SETTINGS)
    driver.submit("it", PROMPT, 0, prompt_logprobs=TOP)
    driver.submit("one token", PROMPT[:1], 0, prompt_logprobs=TOP)
    driver.run()
    assert_right(driver, reference)
    assert driver.heard["one token"].prompt_scores == []
    assert driver.heard["one token"].finish_reason == "length"


def test_who_wants_no_scores_gets_none(tiny: Path) -> None:
    driver = Driver(tiny, **SETTINGS)
    driver.submit("plain", PROMPT, COUNT)
    asked(driver, "just its own", logprobs=0, prompt_logprobs=None)
    driver.run()
    assert driver.heard["plain"].scores == driver.heard["just its own"].prompt_scores == []
    assert [score.top_logprobs for score in driver.heard["just its own"].scores] == [[]] * COUNT


def test_json_has_no_infinity() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 1.0]])
    told = compute_logprobs(logits, [1], top=9)[0]
    assert (told.logprob, told.rank, told.top_logprobs[-1]) == (MIN_LOGPROB, 3, (1, MIN_LOGPROB))
    assert compute_row_logprobs(logits, [0], [1], [None]) == [None]
