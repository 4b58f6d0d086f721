"""A trace is the same for the same seed, ordered by time, and made of conversations."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from loadtest.traces import CHAT, TracedRequest, format_line, generate_trace, main


@pytest.fixture(scope="module")
def requests() -> list[TracedRequest]:
    return list(generate_trace(0, 200))


def by_conversation(requests: list[TracedRequest]) -> dict[int, list[TracedRequest]]:
    turns: dict[int, list[TracedRequest]] = {}
    for request in requests:
        turns.setdefault(request.conversation, []).append(request)
    return turns


def test_a_seed_gives_one_trace(requests: list[TracedRequest]) -> None:
    assert list(generate_trace(0, 200)) == requests
    assert list(generate_trace(1, 200)) != requests


def test_more_conversations_change_nothing_in_the_first(requests: list[TracedRequest]) -> None:
    assert [r for r in generate_trace(0, 300) if r.conversation < 200] == requests


def test_it_is_in_the_order_of_time(requests: list[TracedRequest]) -> None:
    assert requests[0].time > 0
    assert all(one.time <= other.time for one, other in pairwise(requests))


def test_a_prompt_is_all_that_was_said(requests: list[TracedRequest]) -> None:
    turns = by_conversation(requests)
    assert len(turns) == 200
    assert any(len(conversation) > 4 for conversation in turns.values())
    for conversation in turns.values():
        for before, after in pairwise(conversation):
            said = before.prompt + before.answer
            assert after.prompt[: len(said)] == said
            assert len(after.prompt) > len(said)
            assert after.time > before.time + len(before.answer) / CHAT.tokens_per_second
        assert len(conversation[-1].prompt) + len(conversation[-1].answer) <= CHAT.context
        assert all(turn.answer for turn in conversation)


def test_conversations_share_system_prompts_and_nothing_else(requests: list[TracedRequest]) -> None:
    begin = {tuple(r.prompt[: CHAT.system_tokens[0]]) for r in requests}
    assert 10 < len(begin) <= CHAT.system_prompts
    last = {
        tuple(conversation[0].prompt[-1:] + conversation[0].answer)
        for conversation in by_conversation(requests).values()
    }
    assert len(last) == 200


def test_half_of_the_conversations_are_one_shot(requests: list[TracedRequest]) -> None:
    lengths = [len(conversation) for conversation in by_conversation(requests).values()]
    assert 80 < lengths.count(1) < 120
    assert 2 < sum(lengths) / len(lengths) < 3


def test_the_command_prints_a_request_a_line(requests: list[TracedRequest], capsys: pytest.CaptureFixture[str]) -> None:
    main(["--seed", "0", "--conversations", "20"])
    told = capsys.readouterr().out.splitlines()
    assert told == [format_line(request) for request in generate_trace(0, 20)]
    assert json.loads(told[0]).keys() == {"time", "conversation", "prompt", "answer"}


def test_the_command_makes_as_many_one_shot_as_it_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--conversations", "20", "--one-shot", "1"])
    assert len(capsys.readouterr().out.splitlines()) == 20
