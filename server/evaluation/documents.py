"""What an evaluation reads: running text, and records whose answers stand far back. Knows tokens; no model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from config.errors import SettingsError
from server.evaluation.corpus.packing import RECORDS, STORIES, MarkedAnswer, Marks, Mix, pack
from server.evaluation.corpus.words import HELD_OUT, HELD_OUT_NAMES, TRAIN, Lexicon

MAX_TOKEN_LENGTH = 16  # characters, generously: of a long file no more is read than is needed


class Document(NamedTuple):
    """Tokens to read, the last one only as a target; `answers` are spans of them that stood earlier in the text."""

    ids: Sequence[int]
    answers: Sequence[MarkedAnswer] = ()


def make_stories(tokenizer: Tokenizer, marks: Marks, length: int, count: int, seed: str) -> list[Document]:
    """Make stories that the embedded model has not read."""
    return _make_documents(tokenizer, marks, length, count, STORIES, TRAIN, seed)


def make_records(
    tokenizer: Tokenizer, marks: Marks, length: int, count: int, seed: str, *, new_phrasings: bool = False
) -> list[Document]:
    """Make texts that say and ask who keeps what where, of people and things that the embedded model never met.

    `new_phrasings`: and in sentences it never met.
    """
    return _make_documents(
        tokenizer, marks, length, count, RECORDS, HELD_OUT if new_phrasings else HELD_OUT_NAMES, seed
    )


def _make_documents(
    tokenizer: Tokenizer, marks: Marks, length: int, count: int, mix: Mix, lexicon: Lexicon, seed: str
) -> list[Document]:
    rows = pack(tokenizer, seed, length, count, mix, lexicon, marks)
    return [Document(ids.tolist(), answers) for ids, answers in zip(rows.ids, rows.answers, strict=True)]


def check_text_file(file: Path) -> None:
    """Raise SettingsError if read_text_file() could not read it."""
    _read_beginning(file, MAX_TOKEN_LENGTH)


def read_text_file(tokenizer: Tokenizer, marks: Marks, length: int, count: int, file: Path) -> list[Document]:
    """Return the first `count` stretches of `length` tokens of a file. Raises SettingsError."""
    text = _read_beginning(file, MAX_TOKEN_LENGTH * length * count)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if not ids or len(ids) + len(marks.begin_ids) < 2:
        raise SettingsError(f"--text: {file} holds no text to read")
    step = length - len(marks.begin_ids)
    if step < 1:
        raise SettingsError(
            f"--length: at least {len(marks.begin_ids) + 1}, for the tokens that begin a text and one more"
        )
    # A stretch reads `length` tokens and has one more, the last target, with which the next one begins.
    starts = range(0, max(1, len(ids) - 1), step)[:count]
    return [Document([*marks.begin_ids, *ids[start : start + step + 1]]) for start in starts]


def _read_beginning(file: Path, max_characters: int) -> str:
    try:
        with file.open(encoding="utf-8-sig", newline="") as opened:
            return opened.read(max_characters)
    except OSError as error:
        raise SettingsError(f"--text: cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SettingsError(f"--text: {file} is no UTF-8 text") from None


def find_marks(tokenizer: Tokenizer, eos_ids: frozenset[int], vocab_size: int) -> Marks:
    """Return what the tokenizer puts before a text, and what ends one: the model's end token, or a new line."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    marked = tokenizer.encode("a").ids
    begin = marked[: marked.index(plain[0])] if plain else marked
    ends = sorted(eos for eos in eos_ids if 0 <= eos < vocab_size)
    ends += tokenizer.encode("\n", add_special_tokens=False).ids[-1:] or plain
    return Marks(tuple(begin), ends[0] if ends else 0)


def check_vocabulary(documents: Sequence[Document], vocab_size: int) -> None:
    """Raise SettingsError if the tokenizer makes tokens that the model does not have."""
    largest_id = max(max(document.ids) for document in documents)
    if largest_id >= vocab_size:
        raise SettingsError(f"the tokenizer makes token {largest_id}, and the model has {vocab_size}: they do not fit")
