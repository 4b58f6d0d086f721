"""Reading streamed completions and chats."""

from __future__ import annotations

from itertools import count
from random import Random

import pytest

from loadtest.prompts import make_prompt
from loadtest.stream import Reply, StreamError, format_http_error, read_reply

TOKEN = b'data: {"choices": [{"text": "a", "finish_reason": null}], "usage": null}\n'
EMPTY = b'data: {"choices": [{"text": "", "finish_reason": null}]}\n'  # part of a character: a token all the same
LAST = b'data: {"choices": [{"text": "", "finish_reason": "stop"}]}\n'
LAST_WITH_TEXT = b'data: {"choices": [{"text": "b", "finish_reason": "stop"}]}\n'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 9}}\n'
CACHED = (
    b'data: {"usage": {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}}\n'
)
CHAT = b'data: {"choices": [{"delta": {"content": "c"}, "finish_reason": null}]}\n'
ROLE = b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": null}]}\n'
ROLE_WITH_TEXT = b'data: {"choices": [{"delta": {"role": "assistant", "content": "d"}, "finish_reason": null}]}\n'
THOUGHT = b'data: {"choices": [{"delta": {"reasoning_content": "e"}, "finish_reason": null}]}\n'
CHAT_ENDS = b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n'
DONE = b"data: [DONE]\n"


@pytest.mark.parametrize(
    ("lines", "pieces", "tokens"),
    [
        ([TOKEN, DONE], 1, 1),
        ([TOKEN, b"\n", b": ping\n", EMPTY, LAST, DONE], 2, 2),
        ([TOKEN, LAST_WITH_TEXT, DONE], 2, 2),
        ([TOKEN, TOKEN, LAST, USAGE, DONE], 2, 9),
        ([b"data:" + TOKEN[6:], DONE, TOKEN], 1, 1),
        ([ROLE, CHAT, CHAT, CHAT_ENDS, DONE], 2, 2),
        ([ROLE_WITH_TEXT, CHAT, DONE], 2, 2),
        ([ROLE, THOUGHT, CHAT, CHAT_ENDS, CACHED, DONE], 2, 2),
        ([b'data: {"choices": null, "usage": null, "error": null}\n', TOKEN, DONE], 1, 1),
        ([TOKEN, b'data: {"usage": {"prompt_tokens": null, "completion_tokens": null}}\n', DONE], 1, 1),
        ([CHAT, b'data: {"usage": {"completion_tokens": 4, "prompt_tokens_details": null}}\n', DONE], 1, 4),
        ([b'data: {"choices": [{"text": null, "delta": null, "logprobs": [1]}]}\n', DONE], 1, 1),
    ],
)
def test_pieces_and_tokens(lines: list[bytes], pieces: int, tokens: int) -> None:
    clock = count(10.0, 0.5)
    reply = read_reply(lines, clock=lambda: next(clock))
    assert reply.arrival_times == [10.0 + 0.5 * i for i in range(pieces)]
    assert reply.gaps() == [0.5] * (pieces - 1)
    assert reply.completion_tokens == tokens


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], r"ended without \[DONE\]"),
        ([TOKEN], r"ended without \[DONE\]"),
        ([b"data: {\n", DONE], "a line of the stream is not a part of an answer: b'{'"),
        ([b"data: []\n", DONE], "not a part of an answer: .*Expected `object`"),
        ([TOKEN, b'data: {"error": {"message": "out of memory"}}\n', DONE], "error in the stream: out of memory"),
        ([b'data: {"error": "gone"}\n', DONE], "error in the stream: gone"),
    ],
)
def test_what_is_no_answer(lines: list[bytes], message: str) -> None:
    with pytest.raises(StreamError, match=message):
        read_reply(lines)


@pytest.mark.parametrize(
    "chunk",
    [
        '{"choices": ["x"]}',
        '{"choices": {"0": 1}}',
        '{"choices": [{"text": 1}]}',
        '{"choices": [{"text": ["a"]}]}',
        '{"choices": [{"delta": "a"}]}',
        '{"choices": [{"delta": {"content": [1]}}]}',
        '{"usage": [1]}',
        '{"usage": {"prompt_tokens": "3"}}',
        '{"usage": {"prompt_tokens": NaN}}',
        '{"usage": {"completion_tokens": 1e999}}',
        '{"usage": {"completion_tokens": -1}}',
        '{"usage": {"completion_tokens": 1%s}}' % ("0" * 400),
        '{"usage": {"prompt_tokens_details": [1]}}',
        '{"usage": {"prompt_tokens_details": {"cached_tokens": "1"}}}',
        '{"more": %s}' % ("[" * 5000),
        '{"error": "\xff"}',
    ],
)
def test_odd_chunks(chunk: str) -> None:
    with pytest.raises(StreamError, match="not a part of an answer"):
        read_reply([TOKEN, b"data: %s\n" % chunk.encode("latin-1"), DONE])


def test_a_text_may_end_with_its_first_token() -> None:
    assert read_reply([LAST, DONE]).arrival_times == []


def test_text_and_what_the_server_counted() -> None:
    reply = read_reply([ROLE_WITH_TEXT, CHAT, CHAT_ENDS, CACHED, DONE])
    assert reply.text == "dc"
    assert (reply.prompt_tokens, reply.cached_tokens, reply.completion_tokens) == (3, 1, 2)
    assert read_reply([TOKEN, USAGE, DONE]).cached_tokens is None


def test_tokens_a_second_after_the_first() -> None:
    clock = count(10.0, 0.5)
    assert (
        read_reply([TOKEN, TOKEN, TOKEN, USAGE, DONE], lambda: next(clock)).compute_tokens_per_second() == (9 - 1) / 1.0
    )
    assert read_reply([TOKEN, DONE]).compute_tokens_per_second() is None
    assert Reply().compute_tokens_per_second() is None


def test_who_has_enough_reads_no_more() -> None:
    lines = iter([TOKEN, b": ping\n", TOKEN, TOKEN, DONE])
    reply = read_reply(lines, max_pieces=2)
    assert (len(reply.arrival_times), reply.end_time) == (2, None)
    assert list(lines) == [TOKEN, DONE]


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ('{"error": {"message": "no room"}}', "HTTP 429: no room"),
        ('{"error": "no room"}', "HTTP 429: no room"),
        ("<html>", "HTTP 429"),
        ("[]", "HTTP 429"),
    ],
)
def test_refusals(answer: str, told: str) -> None:
    assert format_http_error(429, answer) == told


def test_prompts_share_their_beginning_only() -> None:
    one, other = (make_prompt(Random(seed), 20, shared_words=10).split() for seed in (1, 2))
    assert len(one) == len(other) == 30
    assert one[:10] == other[:10]
    assert one[10:] != other[10:]
