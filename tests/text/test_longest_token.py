"""No token stands for more characters than `compute_max_chars_per_token` returns, for any text."""

from __future__ import annotations

import os
import random
import string
import unicodedata
from collections.abc import Callable

import pytest
import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from server.text.longest_token import compute_max_chars_per_token
from tests.text.tiny_tokenizers import KINDS, byte_fallback, byte_level

Change = Callable[[tokenizers.Tokenizer], None]
DECOMPOSED = [unicodedata.normalize("NFD", letter) for letter in "\u1f82\u1ed7\uac01\u00e9\u01d5"]
TEXTS = [*DECOMPOSED, "hello", " hello", "   ", "\n", "<s>", "\u2603", "\U0001f600", "\ufdfa", *string.printable]


def normalized(*by: normalizers.Normalizer) -> Change:
    def change(tokenizer: tokenizers.Tokenizer) -> None:
        given = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
        tokenizer.normalizer = normalizers.Sequence([*by, *given])

    return change


def cut(*by: pre_tokenizers.PreTokenizer) -> Change:
    def change(tokenizer: tokenizers.Tokenizer) -> None:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*by, tokenizer.pre_tokenizer or pre_tokenizers.Digits()])

    return change


def added(token: AddedToken) -> Change:
    return lambda tokenizer: tokenizer.add_tokens([token])


KNOWN: list[Change] = [
    lambda _: None,
    normalized(normalizers.NFC()),
    normalized(normalizers.NFKC(), normalizers.Lowercase()),
    normalized(normalizers.NFD(), normalizers.NFC()),
    normalized(normalizers.Replace("hello", "x")),
    cut(pre_tokenizers.Split(" ", "merged_with_next"), pre_tokenizers.Digits(individual_digits=True)),
    cut(pre_tokenizers.Punctuation(), pre_tokenizers.Split("l", "contiguous")),
    added(AddedToken("hello hello hello", normalized=False)),
]
UNKNOWN: list[Change] = [
    normalized(normalizers.Strip()),
    normalized(normalizers.StripAccents()),
    normalized(normalizers.BertNormalizer()),
    normalized(normalizers.Nmt()),
    normalized(normalizers.Replace(" ", "")),
    normalized(normalizers.Replace(tokenizers.Regex(" +"), " ")),
    cut(pre_tokenizers.WhitespaceSplit()),
    cut(pre_tokenizers.Whitespace()),
    cut(pre_tokenizers.Split(" ", "removed")),
    cut(pre_tokenizers.BertPreTokenizer()),
    cut(pre_tokenizers.UnicodeScripts()),  # of "   " nothing is left
    added(AddedToken("<mask>", lstrip=True)),
    added(AddedToken("<mask>", rstrip=True)),
]


@pytest.mark.parametrize("change", KNOWN)
@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_no_token_stands_for_more(make: Callable[[], tokenizers.Tokenizer], change: Change) -> None:
    seed = int.from_bytes(os.urandom(4), "big")
    print("seed", seed)
    dice = random.Random(seed)
    tokenizer = make()
    change(tokenizer)
    longest = compute_max_chars_per_token(tokenizer)
    assert longest is not None
    texts = [piece * count for piece in TEXTS for count in (1, 100)]
    texts += ["".join(dice.choices(TEXTS, k=dice.randrange(50))) for _ in range(500)]
    for text in texts:
        assert len(text) <= longest * len(tokenizer.encode(text, add_special_tokens=False).ids), text


@pytest.mark.parametrize("change", UNKNOWN)
def test_what_may_leave_out_any_number(change: Change) -> None:
    tokenizer = byte_level()
    change(tokenizer)
    assert compute_max_chars_per_token(tokenizer) is None


@pytest.mark.parametrize(
    "model",
    [
        models.BPE({"a": 0}, []),  # leaves out what it does not know
        models.BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>", fuse_unk=True),
        models.BPE({"a": 0, "<0x00>": 1}, [], byte_fallback=True),
        models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"),
        models.WordPiece({"a": 0, "<unk>": 1}, unk_token="<unk>"),
        models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0),
    ],
    ids=repr,
)
def test_a_vocabulary_that_does_not_know_every_character(model: models.Model) -> None:
    assert compute_max_chars_per_token(tokenizers.Tokenizer(model)) is None


def test_one_unknown_token_for_each_character() -> None:
    assert compute_max_chars_per_token(
        tokenizers.Tokenizer(models.BPE({"ab": 0, "<unk>": 1}, [], unk_token="<unk>"))
    ) == len("<unk>")


def test_the_kinds_that_models_use() -> None:
    assert {kind: compute_max_chars_per_token(make()) is not None for kind, make in KINDS.items()} == {
        kind: kind.startswith("byte") for kind in KINDS
    }
