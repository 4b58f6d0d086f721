"""The documents of an evaluation, as tokens: running text, and records with answers to recall from far back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from config.errors import SettingsError
from server.evaluation.corpus.packing import RECORDS, STORIES, MarkedAnswer, Mix, SpecialTokens, pack
from server.evaluation.corpus.words import HELD_OUT, HELD_OUT_NAMES, TRAIN, Lexicon

MIN_QUESTION_DISTANCE = 64  # tokens; a nearer fact would be among the latest tokens, which most strategies keep
MAX_TOKEN_LENGTH = 16  # characters to read from a file for each token needed: more than most tokens have


class Document(NamedTuple):
    """A text as token ids; the last one is only predicted. `answers` are spans whose text also occurs earlier."""

    ids: Sequence[int]
    answers: Sequence[MarkedAnswer] = ()


def make_stories(tokenizer: Tokenizer, marks: SpecialTokens, length: int, count: int, seed: str) -> list[Document]:
    """Return `count` documents of up to `length` tokens of stories that the embedded model was not trained on."""
    return _make_documents(tokenizer, marks, length, count, STORIES, TRAIN, seed)


def make_records(
    tokenizer: Tokenizer, marks: SpecialTokens, length: int, count: int, seed: str, *, new_phrasings: bool = False
) -> list[Document]:
    """Return `count` documents that state facts and later ask for them ("who keeps what where").

    The names of people and things do not occur in the embedded model's training; with `new_phrasings`, neither do the
    sentences.
    """
    return _make_documents(
        tokenizer, marks, length, count, RECORDS, HELD_OUT if new_phrasings else HELD_OUT_NAMES, seed
    )


def make_questions(
    tokenizer: Tokenizer, marks: SpecialTokens, position: int, count: int, seed: str, *, new_phrasings: bool = False
) -> list[Document]:
    """Return `count` records that end with one question and its answer; the question's last token is at `position`.

    They are parts of longer records, and some state the fact again instead of asking for it. The fact is stated within
    the document, more than MIN_QUESTION_DISTANCE tokens before the answer.
    """
    begin, at = list(marks.begin_ids), position + 1  # where the answer begins
    found: list[Document] = []
    for number in itertools.count():  # a record has some dozens of questions
        (record,) = make_records(tokenizer, marks, 2 * position, 1, f"{seed} {number}", new_phrasings=new_phrasings)
        for start, stop, distance in record.answers:
            first = start - at + len(begin)
            if first < len(begin) or not MIN_QUESTION_DISTANCE < distance <= start - first:
                continue
            answer = MarkedAnswer(at, at + stop - start, distance)
            found.append(Document([*begin, *record.ids[first:stop]], [answer]))
            if len(found) == count:
                return found
    raise AssertionError("the numbers have no end")


def _make_documents(
    tokenizer: Tokenizer, marks: SpecialTokens, length: int, count: int, mix: Mix, lexicon: Lexicon, seed: str
) -> list[Document]:
    rows = pack(tokenizer, seed, length, count, mix, lexicon, marks)
    return [Document(ids.tolist(), answers) for ids, answers in zip(rows.ids, rows.answers, strict=True)]


def check_text_file(file: Path) -> None:
    """Raise SettingsError if `read_text_file` could not read the file."""
    _read_beginning(file, MAX_TOKEN_LENGTH)


def read_text_file(tokenizer: Tokenizer, marks: SpecialTokens, length: int, count: int, file: Path) -> list[Document]:
    """Return the first `count` chunks of `length` tokens of a file. Raises SettingsError if it has no readable text."""
    text = _read_beginning(file, MAX_TOKEN_LENGTH * length * count)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if not ids or len(ids) + len(marks.begin_ids) < 2:
        raise SettingsError(f"--text: {file} has no text")
    step = length - len(marks.begin_ids)
    if step < 1:
        raise SettingsError(
            f"--length: should be at least {len(marks.begin_ids) + 1}: the special tokens before a text and one more"
        )
    # A chunk has `length` tokens and one more, the last target, which is also the first token of the next chunk.
    starts = range(0, max(1, len(ids) - 1), step)[:count]
    return [Document([*marks.begin_ids, *ids[start : start + step + 1]]) for start in starts]


def _read_beginning(file: Path, max_characters: int) -> str:
    try:
        with file.open(encoding="utf-8-sig", newline="") as opened:
            return opened.read(max_characters)
    except OSError as error:
        raise SettingsError(f"--text: cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SettingsError(f"--text: {file} is not UTF-8 text") from None


def find_special_tokens(tokenizer: Tokenizer, eos_ids: frozenset[int], vocab_size: int) -> SpecialTokens:
    """Return the special tokens that the tokenizer puts before a text, and the EOS token (if none, a newline)."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    marked = tokenizer.encode("a").ids
    begin = marked[: marked.index(plain[0])] if plain else marked
    ends = sorted(eos for eos in eos_ids if 0 <= eos < vocab_size)
    ends += tokenizer.encode("\n", add_special_tokens=False).ids[-1:] or plain
    return SpecialTokens(tuple(begin), ends[0] if ends else 0)


def check_vocabulary(documents: Sequence[Document], vocab_size: int) -> None:
    """Raise SettingsError if a document has a token id that is not in the model's vocabulary."""
    largest_id = max(max(document.ids) for document in documents)
    if largest_id >= vocab_size:
        raise SettingsError(
            f"the tokenizer gives token id {largest_id}, and the model has {vocab_size} tokens: they do not fit"
        )
