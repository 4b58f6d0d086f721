"""A single token's bytes: together the tokens of a text are the text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from server.text.tokenizer import Tokenizer
from server.text.vocabulary import format_token_bytes
from tests.text.tiny_tokenizers import BOS, EOS, KINDS, byte_fallback, byte_level, metaspace

TINY = Path(__file__).parents[2] / "server" / "models" / "tiny"
TEXTS = ["hello world", "", " two  spaces ", "caf\u00e9 \u2603 \N{WAVING HAND SIGN}\n\t\0", "\u2581", "<0x41> <unk"]
WITH_ALL_TEXTS = {"byte_level": "", "byte_fallback": " "}  # and what the tokenizer puts before a text

BACKENDS = {kind: Tokenizer(KINDS[kind]()) for kind in KINDS}


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.backend.encode(text, add_special_tokens=False).ids)


def joined(tokenizer: Tokenizer, ids: list[int]) -> bytes:
    return b"".join(map(tokenizer.token_bytes, ids))


@pytest.mark.parametrize("kind", WITH_ALL_TEXTS)
@given(text=st.one_of(st.sampled_from(TEXTS), st.text()))
@settings(deadline=None, max_examples=40)
def test_the_tokens_of_a_text_are_the_text(kind: str, text: str) -> None:
    tokenizer, space = BACKENDS[kind], WITH_ALL_TEXTS[kind] if text else ""
    spelled = text.replace("\u2581", " ") if space else text  # SentencePiece knows no difference
    assert joined(tokenizer, ids_of(tokenizer, text)) == (space + spelled).encode()


@given(ids=st.lists(st.integers(3, 300), max_size=20))
@settings(deadline=None)
def test_any_tokens_of_bytes_are_what_is_decoded(ids: list[int]) -> None:
    tokenizer = BACKENDS["byte_level"]
    assert joined(tokenizer, ids).decode(errors="replace") == tokenizer.decode(ids)


def test_unigram() -> None:
    tokenizer = Tokenizer(metaspace())
    ids = ids_of(tokenizer, "hello hills, you")
    assert joined(tokenizer, ids) == b" hello hills, you"
    assert tokenizer.decode(ids) == "hello hills, you"


def test_the_embedded_model() -> None:
    tokenizer = Tokenizer.from_directory(TINY)
    for text in TEXTS:
        assert joined(tokenizer, ids_of(tokenizer, text)) == text.encode()
    assert [tokenizer.token_string(token) for token in (0, 1)] == ["<s>", "</s>"]


def test_every_token_of_the_embedded_model_is_decoded_to_its_bytes() -> None:
    tokenizer = Tokenizer.from_directory(TINY)
    for token in range(tokenizer.vocab_size):
        text = tokenizer.decode([token], skip_special_tokens=False)
        assert tokenizer.token_bytes(token).decode(errors="replace") == text


@pytest.mark.parametrize("kind", WITH_ALL_TEXTS)
def test_special_tokens_are_spelled_as_they_are(kind: str) -> None:
    made = KINDS[kind]()
    special = ["<|endoftext|>", "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<0x42>!"]
    made.add_special_tokens(special)
    made.add_tokens([AddedToken("<tool call>", normalized=False)])
    tokenizer = Tokenizer(made)
    for token in (*special, "<tool call>", "<s>", "</s>"):
        token_id = made.token_to_id(token)
        assert token_id is not None
        assert tokenizer.token_bytes(token_id) == token.encode()
        assert tokenizer.token_string(token_id) == token
        assert tokenizer.decode([token_id], skip_special_tokens=False) in (token, token.replace("\u2581", " "))
    assert [tokenizer.has_text(token) for token in (BOS, EOS)] == [False, False]


def test_bytes_that_are_no_text() -> None:
    tokenizer = Tokenizer(byte_level())
    strings = [tokenizer.token_string(token) for token in ids_of(tokenizer, "\N{WAVING HAND SIGN}")]
    assert strings == [r"bytes:\xf0", r"bytes:\x9f", r"bytes:\x91", r"bytes:\x8b"]
    assert format_token_bytes(b" \xe2\x80") == r"bytes: \xe2\x80"  # as OpenAI writes it
    fallback = Tokenizer(byte_fallback())
    assert fallback.token_string(fallback.backend.token_to_id("<0xE2>")) == r"bytes:\xe2"
    assert fallback.token_string(fallback.backend.token_to_id("<0x0A>")) == "\n"
    assert fallback.token_string(fallback.backend.token_to_id("\u2581hello")) == " hello"


def test_ids_that_are_no_tokens_have_no_text() -> None:
    tokenizer = Tokenizer(byte_level())
    first = tokenizer.vocab_size
    assert tokenizer.piece(first - 1)
    assert [tokenizer.token_bytes(token) for token in (first, 10**6)] == [b"", b""]
    assert tokenizer.token_string(first) == tokenizer.piece(first) == ""


def test_other_decoders() -> None:
    plain = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b</w>": 1}, unk_token="a"))
    assert Tokenizer(plain).token_bytes(1) == b"b</w>"
    plain.decoder = decoders.BPEDecoder()
    assert Tokenizer(plain).token_bytes(1) == b"b "
    plain.decoder = decoders.Sequence([decoders.Sequence([decoders.Replace("b", "c")]), decoders.Fuse()])
    assert Tokenizer(plain).token_bytes(1) == b"c</w>"


def test_the_alphabet_of_bytes_is_the_librarys() -> None:
    backend = tokenizers.Tokenizer(
        models.BPE({char: i for i, char in enumerate(pre_tokenizers.ByteLevel.alphabet())}, [])
    )
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(backend)
    assert sorted(tokenizer.token_bytes(token) for token in range(256)) == [bytes([byte]) for byte in range(256)]


def test_the_pieces_are_those_of_the_file() -> None:
    vocabulary = json.loads((TINY / "tokenizer.json").read_text())["model"]["vocab"]
    tokenizer = Tokenizer.from_directory(TINY)
    assert {tokenizer.piece(token): token for token in range(len(vocabulary))} == vocabulary
