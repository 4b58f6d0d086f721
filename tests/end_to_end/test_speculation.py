"""Guesses over HTTP: the texts of a running server are the same with and without, and what is told of them adds up."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.end_to_end.server_process import PATIENCE, Server, metric

PROMPT = "The red cup of Ann is in the barn. The red cup of Ann is in the barn. The red cup of"
DRAFTS = {"speculative_config": {"num_speculative_tokens": 4}}
STRATEGIES = ("contiguous", "paged", "sliding_window")
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 0.7, "seed": 4},
    "penalties": {"temperature": 0, "frequency_penalty": 0.4, "logprobs": 2},
    "stop": {"temperature": 0, "stop": "barn. The", "n": 2},
}


def asked(server: Server, **body: Any) -> dict[str, Any]:
    usual = {"prompt": PROMPT, "max_tokens": 60, "ignore_eos": True}
    answer = server.complete(**(usual | body))
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def told(answer: dict[str, Any]) -> list[Any]:
    return [(choice["text"], choice["finish_reason"], choice.get("stop_reason")) for choice in answer["choices"]]


def count_accepted(server: Server) -> dict[str, float]:
    """Return the number of accepted draft tokens of each strategy, now."""
    now = server.metrics()
    return {name: metric(now, "kvmux_spec_decode_num_accepted_tokens_total", strategy=name) for name in STRATEGIES}


@pytest.mark.parametrize("way", WAYS)
def test_texts_are_the_same_with_and_without(tiny: Server, way: str) -> None:
    before = count_accepted(tiny)
    without = {strategy: asked(tiny, kv_cache=strategy, **WAYS[way]) for strategy in STRATEGIES}
    assert count_accepted(tiny) == before
    with_guesses = {strategy: asked(tiny, kv_cache=strategy, **WAYS[way], **DRAFTS) for strategy in STRATEGIES}
    after = count_accepted(tiny)
    for strategy in STRATEGIES:
        guessed, plain = with_guesses[strategy], without[strategy]
        assert told(guessed) == told(plain)
        assert guessed["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
        assert after[strategy] > before[strategy], "the text repeats itself"


def test_many_at_once_some_with_guesses(tiny: Server) -> None:
    bodies = [
        {"kv_cache": strategy, "temperature": temperature, "seed": 8, "prompt": PROMPT[cut:]}
        for strategy in STRATEGIES
        for temperature in (0, 0.8)
        for cut in (0, 35)
    ]
    alone = [told(asked(tiny, **body)) for body in bodies]
    with ThreadPoolExecutor(2 * len(bodies)) as pool:
        mixed = [pool.submit(asked, tiny, **body, **extra) for body in bodies for extra in ({}, DRAFTS)]
        assert [told(answer.result()) for answer in mixed] == [text for text in alone for _ in range(2)]


def test_an_explanation_a_stream_and_the_metrics_agree(tiny: Server) -> None:
    def counted() -> list[float]:
        kinds = ("draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
        now = tiny.metrics()
        counts = [metric(now, f"kvmux_spec_decode_num_{kind}_total", strategy="paged") for kind in kinds]
        return [*counts, metric(now, "kvmux_steps_total")]

    before = counted()
    body = {"model": tiny.model, "prompt": PROMPT, "max_tokens": 50, "temperature": 0, "ignore_eos": True}
    body |= DRAFTS | {"stream": True, "explain": True}
    with httpx.stream("POST", f"{tiny.url}/v1/completions", json=body, timeout=PATIENCE) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {")]
    (last,) = json.loads(lines[-1])["choices"]
    record = last["kv_cache"]
    drafted, accepted, by_position, steps = (after - start for after, start in zip(counted(), before, strict=True))
    assert (record["drafted_tokens"], record["accepted_tokens"]) == (drafted, accepted)
    assert by_position == accepted > 20
    assert steps == 50 - accepted
    assert len(lines) <= 50 - accepted


def test_a_chat_may_have_them_too(tiny: Server) -> None:
    body = {"model": tiny.model, "messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "max_tokens": 30}
    url = f"{tiny.url}/v1/chat/completions"
    answers = [httpx.post(url, json=body | extra, timeout=PATIENCE).json() for extra in ({}, DRAFTS)]
    texts = [answer["choices"][0]["message"]["content"] for answer in answers]
    assert texts[0] == texts[1] != ""
