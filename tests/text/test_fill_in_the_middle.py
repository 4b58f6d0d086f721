"""The prompt of fill in the middle, against how the models' papers and cards write it."""

from __future__ import annotations

import asyncio

import pytest
import tokenizers
from tokenizers import processors

from server.text.encoder import FIM_FORMATS, PREFIX, SUFFIX
from server.text.errors import InfillError
from server.text.tokenizer import Tokenizer
from tests.text.tiny_tokenizers import BOS, EOS, KINDS, byte_fallback, byte_level


def with_tokens(backend: tokenizers.Tokenizer, *tokens: str) -> Tokenizer:
    backend.add_special_tokens(list(tokens))
    return Tokenizer(backend)


def spelled(tokenizer: Tokenizer, prefix: str, suffix: str) -> bytes:
    return b"".join(map(tokenizer.token_bytes, asyncio.run(tokenizer.encode_infill(prefix, suffix))))


def test_qwen_coder() -> None:
    tokenizer = with_tokens(byte_level(), "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>")
    expected = b"<s><|fim_prefix|>def f(x):\n    <|fim_suffix|>\n    return x<|fim_middle|>"
    assert spelled(tokenizer, "def f(x):\n    ", "\n    return x") == expected


def test_codestral_wants_the_suffix_first() -> None:
    assert spelled(with_tokens(byte_level(), "[PREFIX]", "[SUFFIX]"), "a", "b") == b"<s>[SUFFIX]b[PREFIX]a"


def test_code_llama() -> None:
    """<PRE>, encode(prefix), <SUF>, encode(suffix) without SentencePiece's space, <MID>."""
    tokenizer = with_tokens(byte_fallback(), "\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>")
    pieces = [tokenizer.piece(token) for token in asyncio.run(tokenizer.encode_infill("hello", "hello hello"))]
    assert pieces == ["\u2581<PRE>", "\u2581hello", "\u2581<SUF>", "hello", "\u2581hello", "\u2581<MID>"]


@pytest.mark.parametrize("form", FIM_FORMATS, ids=str)
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize(("prefix", "suffix"), [("hello", " hello"), ("", ""), ("\n", "\n\n"), ("a ", "<s>")])
def test_every_form(form: tuple[str, ...], kind: str, prefix: str, suffix: str) -> None:
    marks = [part for part in form if part not in (PREFIX, SUFFIX)]
    tokenizer = with_tokens(KINDS[kind](), *marks)
    begins = b"<s>" if kind == "byte_level" else b""
    space = " " if kind == "byte_fallback" and prefix else ""
    whole = "".join(form).replace(PREFIX, space + prefix).replace(SUFFIX, suffix)
    assert spelled(tokenizer, prefix, suffix) == begins + whole.encode()


def test_no_end_of_text_before_the_text() -> None:
    backend = byte_level()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", BOS), ("</s>", EOS)]
    )
    tokenizer = with_tokens(backend, "<PRE>", "<SUF>", "<MID>")
    assert spelled(tokenizer, "a", "b") == b"<s><PRE>a<SUF>b<MID>"


@pytest.mark.parametrize("tokens", [[], ["<|fim_prefix|>", "<|fim_suffix|>"], ["<fim_prefix>", "<|fim_suffix|>"]])
def test_models_that_cannot(tokens: list[str]) -> None:
    tokenizer = with_tokens(byte_level(), *tokens)
    with pytest.raises(InfillError, match="leave suffix out"):
        asyncio.run(tokenizer.encode_infill("a", "b"))
