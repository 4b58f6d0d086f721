"""A choice's text, its count of tokens and the reason why it ended."""

from __future__ import annotations

import pytest

from server.text.output import Detokenizer, OutputText, OutputToken, locate_tokens
from server.text.tokenizer import Tokenizer
from tests.text.tiny_tokenizers import EOS, byte_level

BACKEND = byte_level()
TOKENIZER = Tokenizer(byte_level())


def output(*stop: str) -> OutputText:
    return OutputText(Detokenizer(TOKENIZER, [0]), stop)


def ids(text: str) -> list[int]:
    return list(BACKEND.encode(text, add_special_tokens=False).ids)


def test_ends_as_the_engine_says() -> None:
    choice = output()
    assert choice.push(ids("hello")).text == "hello"
    assert choice.push([*ids(" world"), EOS], "stop").text == " world"
    assert (choice.finish_reason, choice.num_tokens) == ("stop", len(ids("hello")) + len(ids(" world")) + 1)


def test_tokens_after_the_stop_string_do_not_count() -> None:
    choice = output("ell")
    assert choice.push([*ids("hello"), *ids(" world"), EOS], "length").text == "h"
    assert choice.finish_reason == "stop"
    assert choice.num_tokens == next(n for n in range(10) if "ell" in BACKEND.decode(ids("hello")[:n]))


def test_what_was_held_back_comes_with_the_end() -> None:
    choice = output("world peace")
    assert choice.push(ids("hello world")).text == "hello "
    assert choice.push([EOS], "stop").text == "world"


def test_a_character_that_never_came_ends_no_stop_string() -> None:
    choice = output("\ufffd")
    assert choice.push(ids("\u2603")[:1]).text == ""
    assert choice.push([], "length").text == ""
    assert choice.finish_reason == "stop"  # the text that would be shown is the stop string


def test_nothing_may_follow() -> None:
    choice = output()
    choice.push([], "length")
    with pytest.raises(AssertionError):
        choice.push(ids("more"))


# ---------------------------------------------------------------- tokens and where they stand
def test_tokens_come_out_with_their_text() -> None:
    choice, tokens = output("world peace"), ids("hello world")
    out = choice.push(tokens)
    assert out.text == "hello "
    rest = choice.push([EOS], "stop")
    all_tokens = out.tokens + rest.tokens
    assert [p.token for p in all_tokens] == [*tokens, EOS]
    assert all(p.shown for p in all_tokens)
    text = out.text + rest.text
    for p, following in zip(all_tokens, [*all_tokens[1:], None], strict=True):
        end = following.offset if following else len(text)
        assert TOKENIZER.decode([p.token]) == text[p.offset : end]


def test_a_token_begins_behind_bytes_that_became_no_character() -> None:
    broken, hello, snow = ids("\u2603")[:1], ids("hello"), ids("\u2603")
    text = "\ufffdhello\u2603"
    first = OutputToken(broken[0], 0), OutputToken(hello[0], 1)
    for tokens in ([*broken, *hello, *snow], [*broken, EOS, *hello, *snow]):
        choice = output()
        out = choice.push(tokens, "length")
        assert out.text == text
        assert [place for place in out.tokens if place.token != EOS][:2] == [*first]
        assert {place.offset for place in out.tokens[-len(snow) :]} == {len(text) - 1}, "a character is whole"
    assert locate_tokens(TOKENIZER, [*broken, *hello], text)[:2] == [*first]
    spelled = locate_tokens(TOKENIZER, [*broken, EOS, *hello], "\ufffd</s>hello")
    assert spelled[:3] == [first[0], OutputToken(EOS, 1), OutputToken(hello[0], 5)]
    behind_a_prompt = OutputText(Detokenizer(TOKENIZER, broken)).push(hello, "length")
    assert (behind_a_prompt.text, behind_a_prompt.tokens[0]) == ("hello", OutputToken(hello[0], 0))


def test_a_stop_string_takes_no_broken_bytes_before_it() -> None:
    choice = output("hello")
    out = choice.push([*ids("\u2603")[:1], *ids("hello")])
    assert out.text == "\ufffd"
    assert [place.shown for place in out.tokens] == [True, *[False] * (len(out.tokens) - 1)]


def test_what_a_stop_string_took_away_is_not_shown() -> None:
    choice = output(" wor")
    out = choice.push(ids("hello world"))
    assert out.text == "hello"
    assert len(out.tokens) == choice.num_tokens
    hidden = [p.token for p in out.tokens if not p.shown]
    assert TOKENIZER.decode(hidden).startswith(" wor"[:1])
    assert choice.stop_reason == " wor"


def test_the_stop_string_and_the_last_token_can_be_had() -> None:
    choice = OutputText(Detokenizer(TOKENIZER, [0]), [" wor"], include_stop=True)
    assert choice.push(ids("hello world")).text == "hello wor"
    (stop,) = ids("!")
    for include, text in ((False, "hello"), (True, "hello!")):
        choice = OutputText(Detokenizer(TOKENIZER, [0]), include_stop=include)
        assert choice.push([*ids("hello"), stop], "stop").text == text


def test_special_tokens_can_be_spelled() -> None:
    choice = OutputText(Detokenizer(TOKENIZER, [0], skip_special=False))
    assert choice.push([*ids("hello"), EOS, *ids("you")], "length").text == "hello</s>you"
