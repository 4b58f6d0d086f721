"""A choice's text, its count of tokens and the reason why it ended."""

from __future__ import annotations

import pytest

from server.text.detokenizer import Detokenizer
from server.text.output import OutputText
from server.text.tokenizer import Tokenizer
from tests.text.tiny import EOS, byte_level

BACKEND = byte_level()
TOKENIZER = Tokenizer(byte_level())


def output(*stop: str) -> OutputText:
    return OutputText(Detokenizer(TOKENIZER, [0]), stop)


def ids(text: str) -> list[int]:
    return list(BACKEND.encode(text, add_special_tokens=False).ids)


def test_ends_as_the_engine_says() -> None:
    choice = output()
    assert choice.push(ids("hello")) == "hello"
    assert choice.push([*ids(" world"), EOS], "stop") == " world"
    assert (choice.finish_reason, choice.num_tokens) == ("stop", len(ids("hello")) + len(ids(" world")) + 1)


def test_tokens_after_the_stop_string_do_not_count() -> None:
    choice = output("ell")
    assert choice.push([*ids("hello"), *ids(" world"), EOS], "length") == "h"
    assert choice.finish_reason == "stop"
    assert choice.num_tokens == next(n for n in range(10) if "ell" in BACKEND.decode(ids("hello")[:n]))


def test_what_was_held_back_comes_with_the_end() -> None:
    choice = output("world peace")
    assert choice.push(ids("hello world")) == "hello "
    assert choice.push([EOS], "stop") == "world"


def test_a_character_that_never_came_ends_no_stop_string() -> None:
    choice = output("\ufffd")
    assert choice.push(ids("\u2603")[:1]) == ""
    assert choice.push([], "length") == ""
    assert choice.finish_reason == "stop"  # the text that would be shown is the stop string


def test_nothing_may_follow() -> None:
    choice = output()
    choice.push([], "length")
    with pytest.raises(AssertionError):
        choice.push(ids("more"))
