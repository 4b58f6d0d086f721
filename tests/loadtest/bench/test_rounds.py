"""Strategies are treated alike, and none finds prompts of an earlier round in its cache."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from loadtest.bench.arrivals import Closed
from loadtest.bench.figures import Figures, Key
from loadtest.bench.rounds import MAX_WARM_UP_TOKENS, Rounds
from loadtest.bench.types import BenchRequest, Outcome
from loadtest.bench.vocabulary import make_vocabulary
from loadtest.bench.workloads import NAMED_WORKLOADS, Drawn
from loadtest.stream import Reply

STRATEGIES = {"paged": ["tiny:paged"], "contiguous": ["tiny:contiguous"], "window": ["tiny:window"]}
MODELS = [model for models in STRATEGIES.values() for model in models]
ROUNDS = 4
Sent = list[tuple[str, BenchRequest, bool]]


def measured(
    workload: Drawn, *, warms_up: bool = True, **more: list[str]
) -> tuple[dict[Key, Figures], Sent, list[str]]:
    """Return the figures, the requests by model, and the status messages."""
    sent: Sent = []
    told: list[str] = []

    async def send(model: str, request: BenchRequest, counts: bool) -> Outcome:
        sent.append((model, request, counts))
        await asyncio.sleep(0)
        return Outcome(request.max_tokens, float(len(sent)), Reply([len(sent) + 1.0], len(sent) + 2.0))

    rounds = Rounds(STRATEGIES | more, make_vocabulary([300, 9999]), 7, ROUNDS, send, told.append, warms_up)
    return asyncio.run(rounds.measure(workload)), sent, told


def test_strategies_get_the_same_and_take_turns() -> None:
    figures, sent, told = measured(NAMED_WORKLOADS["c8"])
    assert list(figures) == [("c8", "", name) for name in STRATEGIES]
    assert {len(each.outcomes) for each in figures.values()} == {ROUNDS * NAMED_WORKLOADS["c8"].requests}
    asked = {model: [ask for to, ask, counts in sent if to == model and counts] for model in MODELS}
    one, *others = asked.values()
    assert all(other == one for other in others)
    names = list(STRATEGIES)
    assert told == [f"c8 {names[(turn + first) % 3]}" for first in range(ROUNDS) for turn in range(3)]


def test_no_round_asks_what_another_has_asked() -> None:
    _, sent, _ = measured(NAMED_WORKLOADS["c8"])
    begun = [tuple(ask.prompt[:4]) for model, ask, _ in sent if model == "tiny:paged"]
    assert len(set(begun)) == len(begun) > ROUNDS * NAMED_WORKLOADS["c8"].requests  # those of the warm-up, too


def test_warming_up_is_short_and_not_counted() -> None:
    _, sent, _ = measured(replace(NAMED_WORKLOADS["c16"], requests=20))
    warm_up = [(model, ask) for model, ask, counts in sent if not counts]
    assert len(warm_up) == 8 * len(STRATEGIES)
    assert {ask.max_tokens for _, ask in warm_up} == {MAX_WARM_UP_TOKENS}
    assert [counts for _, _, counts in sent].index(True) == len(warm_up)


def test_without_warming_up_every_request_is_measured() -> None:
    _, sent, _ = measured(NAMED_WORKLOADS["c8"], warms_up=False)
    assert all(counts for _, _, counts in sent)
    assert len(sent) == ROUNDS * NAMED_WORKLOADS["c8"].requests * len(STRATEGIES)


@pytest.mark.parametrize(("tokens", "count"), [(512, 8), (4096, 4), (16_384, 1), (100_000, 1)])
def test_warming_up_with_long_prompts_takes_few_of_them(tokens: int, count: int) -> None:
    _, sent, _ = measured(Drawn("x", Closed(8), requests=8, prompt_tokens=tokens, max_tokens=2))
    assert sum(not counts for _, _, counts in sent) == count * len(STRATEGIES)


def test_each_round_is_cold_and_then_warm() -> None:
    _, sent, told = measured(NAMED_WORKLOADS["d"])
    assert told[:4] == ["d cold paged", "d warm paged", "d cold contiguous", "d warm contiguous"]
    asks = [ask for model, ask, counts in sent if model == "tiny:paged" and counts]
    shared = [tuple(ask.prompt[:1024]) for ask in asks]
    phase = NAMED_WORKLOADS["d"].requests
    for number in range(ROUNDS):
        cold, warm = shared[2 * number * phase :][:phase], shared[(2 * number + 1) * phase :][:phase]
        assert len({*cold, *warm}) == 1
    assert len(set(shared)) == ROUNDS
    assert len({tuple(ask.prompt[1024:]) for ask in asks}) == len(asks)


def test_mixed_requests_are_dealt_and_no_strategy_has_seen_them() -> None:
    _, sent, told = measured(NAMED_WORKLOADS["c8"], mixed=MODELS)
    assert told.count("c8 mixed") == ROUNDS
    alone, mixed = ROUNDS * NAMED_WORKLOADS["c8"].requests, [(ask, model) for model, ask, counts in sent if counts]
    by_model = {model: [ask for ask, to in mixed if to == model] for model in MODELS}
    assert sorted(len(asks) - alone for asks in by_model.values()) == sorted(ROUNDS * n for n in (2, 3, 3))
    for asks in by_model.values():
        assert len({tuple(ask.prompt) for ask in asks}) == len(asks), "a prompt that its cache knows already"


@pytest.mark.parametrize("streams", [1, 2, 50])
def test_few_requests_are_enough(streams: int) -> None:
    figures, _, _ = measured(Drawn("x", Closed(streams), requests=1, prompt_tokens=5, max_tokens=2))
    assert {len(each.outcomes) for each in figures.values()} == {ROUNDS}
