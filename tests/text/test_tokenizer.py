"""A model directory's tokenizer is read as transformers reads it."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from transformers import AutoTokenizer

from config.errors import SettingsError
from server.text.tokenizer import Tokenizer, truncate_prompt
from tests.text.tiny_tokenizers import BOS, EOS, KINDS, byte_level


def directory(path: Path, kind: str, **config: Any) -> Path:
    KINDS[kind]().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | config))
    return path


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"bos_token": "<s>", "eos_token": "</s>"},
        {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True},
        {"bos_token": {"__type": "AddedToken", "content": "<s>"}, "add_eos_token": True},
        {"bos_token": None, "add_bos_token": False},
        {"eos_token": "he"},
    ],
    ids=str,
)
def test_ids_and_text_as_in_transformers(tmp_path: Path, kind: str, config: dict[str, Any]) -> None:
    theirs = AutoTokenizer.from_pretrained(directory(tmp_path, kind, **config))
    ours = Tokenizer.from_directory(tmp_path)
    for text in ("hello world", "", " caf\u00e9 \u2603", "<s>hello</s>"):
        ids = asyncio.run(ours.encode(text))
        assert ids == theirs(text)["input_ids"]
        plain = asyncio.run(ours.encode(text, add_special_tokens=False))
        assert plain == theirs(text, add_special_tokens=False)["input_ids"]
        for skip in (True, False):
            decoded = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special_tokens=skip) == decoded
        assert [ours.piece(token) for token in ids] == theirs.convert_ids_to_tokens(ids)
    assert ours.vocab_size == len(theirs)


def draw_added_tokens(rng: random.Random, directory: Path, backend: tokenizers.Tokenizer) -> None:
    """Write files beside tokenizer.json that add tokens to it, as fine-tunes and old models have them."""
    words = rng.sample(["<|im_end|>", "<tool>", "hello", "[X]", "o w", "<\u2603>", "\u00e9\u00e9"], rng.randint(1, 5))
    unknown = itertools.count(backend.get_vocab_size())
    ids = {word: next(unknown) if (id := backend.token_to_id(word)) is None else id for word in words}
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if rng.random() < 0.3:
        (directory / "added_tokens.json").write_text(json.dumps(ids))
    else:
        flags = ("lstrip", "rstrip", "single_word", "normalized", "special")
        config["added_tokens_decoder"] = {
            str(id): {"content": word} | {flag: rng.random() < 0.3 for flag in flags} for word, id in ids.items()
        }
    if rng.random() < 0.5:
        config["eos_token"] = rng.choice(words)
    if rng.random() < 0.5:
        config["additional_special_tokens"] = rng.sample(words, rng.randint(1, len(words)))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("kind", KINDS)
def test_drawn_added_tokens_are_read_as_in_transformers(tmp_path: Path, kind: str, rng: random.Random) -> None:
    for number in range(20):
        (path := tmp_path / str(number)).mkdir()
        first = KINDS[kind]()
        first.save(str(path / "tokenizer.json"))
        draw_added_tokens(rng, path, first)
        theirs, ours = AutoTokenizer.from_pretrained(path), Tokenizer.from_directory(path)
        pieces = ["hello", " ", "<|im_end|>", "<tool>", "[X]", "o w", "<\u2603>", "\u00e9\u00e9", "</s>", "lazy", "  "]
        for _ in range(10):
            text = "".join(rng.choices(pieces, k=rng.randrange(8)))
            expected = theirs(text, add_special_tokens=False)["input_ids"]
            assert asyncio.run(ours.encode(text, add_special_tokens=False)) == expected, (
                text,
                (path / "tokenizer_config.json").read_text(),
            )


def test_thousands_of_added_tokens_are_read(tmp_path: Path) -> None:
    """As Gemma's are; if they were added one by one, this would take minutes."""
    backend = byte_level()
    backend.add_tokens([f"<unused{number}>" for number in range(6400)])
    backend.save(str(tmp_path / "tokenizer.json"))
    first = backend.token_to_id("<unused0>")
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
    decoder = {str(first + number): {"content": f"<unused{number}>"} | flags for number in range(6400)}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    tokenizer = Tokenizer.from_directory(tmp_path)
    letter = backend.encode("a", add_special_tokens=False).ids
    assert asyncio.run(tokenizer.encode("a<unused9>a")) == [BOS, *letter, first + 9, *letter]
    assert tokenizer.decode([first, *letter]) == "a"


def test_truncation_and_padding_of_the_file_do_not_apply(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.decode(asyncio.run(tokenizer.encode("hello world hello world"))) == "hello world hello world"


def test_special_tokens_have_no_text() -> None:
    tokenizer = Tokenizer(byte_level())
    assert [tokenizer.has_text(token) for token in (BOS, EOS, 5, 100_000)] == [False, False, True, False]


def test_a_long_text_is_encoded_in_the_same_way() -> None:
    tokenizer = Tokenizer(byte_level())
    for text in ("hello world", "hello world " * 1000):
        with_bos, plain = (asyncio.run(tokenizer.encode(text, add_special_tokens=add)) for add in (True, False))
        assert with_bos == [BOS, *plain]


def test_the_last_tokens_of_a_prompt_are_kept() -> None:
    assert [truncate_prompt([1, 2, 3], limit) for limit in (None, 1, 2, 3, 9)] == [
        [1, 2, 3],
        [3],
        [2, 3],
        [1, 2, 3],
        [1, 2, 3],
    ]


def test_long_texts_do_not_hold_up_the_event_loop() -> None:
    tokenizer = Tokenizer(byte_level())
    text = "the quick brown fox " * 20_000

    async def steps_meanwhile() -> int:
        encoding = asyncio.ensure_future(tokenizer.encode(text))
        steps = 0
        while not encoding.done():
            await asyncio.sleep(0.001)
            steps += 1
        return steps

    assert asyncio.run(steps_meanwhile()) > 5  # of hundreds; two if it holds the interpreter's lock


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"no tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(SettingsError, match="is not a tokenizer this server can read"):
        Tokenizer.from_directory(tmp_path)


def test_a_panic_of_the_library_is_reported_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyO3's exception for it derives from BaseException, and cannot be imported."""

    class PanicException(BaseException):
        pass

    class Panicking:
        @staticmethod
        def from_file(file: str) -> None:
            raise PanicException("index out of bounds:\n  the len is 1")

    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setattr("server.text.tokenizer.tokenizers.Tokenizer", Panicking)
    message = r"tokenizer\.json is not a tokenizer .*: index out of bounds: the len is 1$"
    with pytest.raises(SettingsError, match=message):
        Tokenizer.from_directory(tmp_path)


def test_an_id_far_beyond_the_vocabulary_takes_no_memory(tmp_path: Path) -> None:
    words = {"type": "BPE", "vocab": {"a": 0, "b": 2**32 - 1}, "merges": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": words, "added_tokens": []}))
    with pytest.raises(SettingsError, match="its tokenizer has the token id 4294967295"):
        Tokenizer.from_directory(tmp_path)
