"""What is read from a streamed completion."""

from __future__ import annotations

from itertools import count
from random import Random

import pytest

from loadtest.prompts import prompt
from loadtest.stream import StreamError, read_reply

TOKEN = b'data: {"choices": [{"text": "a", "finish_reason": null}], "usage": null}\n'
EMPTY = b'data: {"choices": [{"text": "", "finish_reason": null}]}\n'  # part of a character: a token all the same
LAST = b'data: {"choices": [{"text": "", "finish_reason": "stop"}]}\n'
LAST_WITH_TEXT = b'data: {"choices": [{"text": "b", "finish_reason": "stop"}]}\n'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 9}}\n'
DONE = b"data: [DONE]\n"


@pytest.mark.parametrize(
    ("lines", "pieces", "tokens"),
    [
        ([TOKEN, DONE], 1, 1),
        ([TOKEN, b"\n", b": ping\n", EMPTY, LAST, DONE], 2, 2),
        ([TOKEN, LAST_WITH_TEXT, DONE], 2, 2),
        ([TOKEN, TOKEN, LAST, USAGE, DONE], 2, 9),
        ([b"data:" + TOKEN[6:], DONE, TOKEN], 1, 1),
    ],
)
def test_pieces_and_tokens(lines: list[bytes], pieces: int, tokens: int) -> None:
    clock = count(10.0, 0.5)
    reply = read_reply(lines, clock=lambda: next(clock))
    assert reply.arrivals == [10.0 + 0.5 * i for i in range(pieces)]
    assert reply.gaps() == [0.5] * (pieces - 1)
    assert reply.completion_tokens == tokens


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], r"ended without \[DONE\]"),
        ([TOKEN], r"ended without \[DONE\]"),
        ([b"data: {\n", DONE], "no JSON"),
        ([b"data: []\n", DONE], "no object"),
        ([TOKEN, b'data: {"error": {"message": "out of memory"}}\n', DONE], "error in the stream: out of memory"),
        ([b'data: {"error": "gone"}\n', DONE], "error in the stream: gone"),
    ],
)
def test_what_is_no_answer(lines: list[bytes], message: str) -> None:
    with pytest.raises(StreamError, match=message):
        read_reply(lines)


def test_a_text_may_end_with_its_first_token() -> None:
    assert read_reply([LAST, DONE]).arrivals == []


def test_prompts_share_their_beginning_only() -> None:
    one, other = (prompt(Random(seed), 20, shared_words=10).split() for seed in (1, 2))
    assert len(one) == len(other) == 30
    assert one[:10] == other[:10]
    assert one[10:] != other[10:]
