"""The pieces of a completion are its text, whatever the tokenizer and wherever the prompt ends."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.text.output import MAX_PARTIAL_BYTES, Detokenizer
from server.text.tokenizer import Tokenizer
from tests.text.tiny_tokenizers import BOS, EOS, KINDS, byte_fallback

TOKENIZERS = {name: Tokenizer(make()) for name, make in KINDS.items()}
BACKENDS = {name: make() for name, make in KINDS.items()}
BYTE_LEVEL, BYTE_FALLBACK = TOKENIZERS["byte_level"], TOKENIZERS["byte_fallback"]

TEXTS = st.text(st.sampled_from("abchelo wz\u00e9\u00df\u2603\U0001f600\U0001f469\u200d\ufffd"), max_size=60)


def pieces(tokenizer: Tokenizer, prompt: list[int], completion: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt)
    return [detokenizer.push(token) for token in completion] + [detokenizer.flush()]


def expected(tokenizer: Tokenizer, prompt: list[int], completion: list[int]) -> str:
    """The whole text without the prompt's, where a character that the prompt only began is none of the prompt's."""
    whole = tokenizer.decode(prompt + completion)
    prompt = [token for token in prompt if tokenizer.has_text(token)]
    for begun in range(MAX_PARTIAL_BYTES + 1):
        before = tokenizer.decode(prompt[: len(prompt) - begun])
        if whole.startswith(before):
            return whole[len(before) :]
    raise AssertionError("no reading of the prompt begins the whole")


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS, cut=st.integers(0, 200))
@settings(deadline=None)
def test_pieces_are_the_text(kind: str, text: str, cut: int) -> None:
    ids = BACKENDS[kind].encode(text).ids
    prompt, completion = ids[:cut], ids[cut:]
    assert "".join(pieces(TOKENIZERS[kind], prompt, completion)) == expected(TOKENIZERS[kind], prompt, completion)


@pytest.mark.parametrize("cut", range(9))
def test_a_prompt_that_ends_within_a_character_that_looks_like_none(cut: int) -> None:
    """U+FFFD has bytes of its own, and is what a part of them looks like."""
    ids = BACKENDS["byte_fallback"].encode("\ufffdßß").ids
    prompt, completion = ids[:cut], ids[cut:]
    assert "".join(pieces(BYTE_FALLBACK, prompt, completion)) == expected(BYTE_FALLBACK, prompt, completion)


@given(ids=st.lists(st.integers(0, 330), max_size=80), cut=st.integers(0, 80))
@settings(deadline=None)
def test_any_byte_level_tokens(ids: list[int], cut: int) -> None:
    prompt, completion = ids[:cut], ids[cut:]
    assert "".join(pieces(BYTE_LEVEL, prompt, completion)) == expected(BYTE_LEVEL, prompt, completion)


@given(ids=st.lists(st.integers(0, 280), max_size=150), cut=st.integers(0, 150))
@settings(deadline=None)
def test_any_byte_fallback_tokens_give_some_text(ids: list[int], cut: int) -> None:
    """Bytes that are not UTF-8 change characters that were already returned: only such bytes may differ."""
    prompt, completion = ids[:cut], ids[cut:]
    text = "".join(pieces(BYTE_FALLBACK, prompt, completion))
    letters = set("".join(BACKENDS["byte_fallback"].id_to_token(i) for i in completion if i > 258))
    assert letters - {"\u2581"} <= set(text)


@given(text=TEXTS)
@settings(max_examples=30, deadline=None)
def test_a_character_is_never_torn(text: str) -> None:
    ids = BACKENDS["byte_level"].encode(text.replace("\ufffd", "")).ids
    assert not any("\ufffd" in piece for piece in pieces(BYTE_LEVEL, [BOS], ids))


def test_the_space_before_a_word_stays() -> None:
    prompt, completion = (BACKENDS["byte_fallback"].encode(text).ids for text in ("hello", "hello"))
    assert pieces(BYTE_FALLBACK, prompt, completion) == [" hello", ""]
    assert pieces(BYTE_FALLBACK, [BOS], completion) == ["hello", ""]  # nothing before it
    assert pieces(BYTE_FALLBACK, [*prompt, *[EOS] * 100], completion) == [" hello", ""]


def test_a_prompt_that_ends_within_a_character() -> None:
    ids = BACKENDS["byte_fallback"].encode("hello \U0001f600\U0001f600").ids
    assert pieces(BYTE_FALLBACK, ids[:-2], ids[-2:]) == ["", "\U0001f600", ""]
    assert pieces(BYTE_FALLBACK, ids[:-2], []) == [""]


def test_a_prompt_that_ends_with_a_replacement_character_keeps_it() -> None:
    ids = BACKENDS["byte_level"].encode("hello \ufffd").ids
    assert "".join(pieces(BYTE_LEVEL, ids, BACKENDS["byte_level"].encode("wow").ids)) == "wow"


def test_special_tokens_and_unknown_ids_have_no_text() -> None:
    hello = BACKENDS["byte_level"].encode("hello").ids
    assert "".join(pieces(BYTE_LEVEL, [BOS], [*hello, EOS, 100_000, *hello, EOS])) == "hellohello"


def test_incomplete_bytes_come_out_at_the_end() -> None:
    snowman = BACKENDS["byte_fallback"].encode("\u2603").ids
    assert pieces(BYTE_FALLBACK, [], snowman[1:3]) == ["", "", "\ufffd\ufffd"]


def test_a_byte_that_undoes_a_character_is_shown_alone() -> None:
    snowman, bad = BACKENDS["byte_fallback"].encode("\u2603").ids, BACKENDS["byte_fallback"].token_to_id("<0xFF>")
    h = BACKENDS["byte_fallback"].token_to_id("h")
    assert "".join(pieces(BYTE_FALLBACK, [], [*snowman, bad, h])) == "\u2603\ufffdh"


class Counting(Tokenizer):
    """Remembers how many tokens it had to decode at once, at most."""

    longest = 0

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self.longest = max(self.longest, len(ids))
        return super().decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize(("token", "text"), [("<0xFF>", "\ufffd"), ("</s>", ""), ("hello", "hello")])
def test_work_for_a_token_does_not_grow_with_the_text(token: str, text: str) -> None:
    tokenizer = Counting(byte_fallback())
    token_id = BACKENDS["byte_fallback"].token_to_id(token)
    hello = BACKENDS["byte_fallback"].encode("hello").ids
    assert "".join(pieces(tokenizer, hello * 500, [token_id] * 1000)) == text * 1000
    assert tokenizer.longest < 100
