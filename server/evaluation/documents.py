"""The documents of an evaluation, as tokens: running text, and records with answers to recall from far back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle
from pathlib import Path
from random import Random
from typing import NamedTuple

from tokenizers import Tokenizer

from config.errors import SettingsError
from server.evaluation.pieces import (
    EncodedText,
    MarkedAnswer,
    PieceKind,
    SpecialTokens,
    TextPiece,
    begin_document,
    encode_pieces,
)
from server.evaluation.texts import Text, TextKind, read_texts

MIN_QUESTION_DISTANCE = 64  # tokens; a nearer fact would be among the latest tokens, which most strategies keep
MAX_TOKEN_LENGTH = 16  # characters to read from a file for each token needed: more than most tokens have


class Document(NamedTuple):
    """A text as token ids; the last one is only predicted. `answers` are spans whose text also occurs earlier."""

    ids: Sequence[int]
    answers: Sequence[MarkedAnswer] = ()


def make_stories(
    tokenizer: Tokenizer, marks: SpecialTokens, length: int, count: int, seed: str | None = None
) -> list[Document]:
    """Return up to `count` documents of `length` tokens of stories that the embedded model was not trained on.

    `seed` draws an order of the texts; None: that of the file. Raises SettingsError if there are too few for one.
    """
    stories = (encode_pieces(tokenizer, text, marks) for text in _order_texts(TextKind.STORY, seed))
    return _fill_documents(stories, marks, length, count)


def make_records(
    tokenizer: Tokenizer,
    marks: SpecialTokens,
    length: int,
    count: int,
    seed: str | None = None,
    *,
    new_phrasings: bool = False,
) -> list[Document]:
    """Return up to `count` documents that state facts and later ask for them ("who keeps what where").

    The names of people and things do not occur in the embedded model's training; with `new_phrasings`, neither do the
    sentences. In documents that are longer than the records, stories stand between a record's paragraphs. `seed` draws
    an order of the records, as in `make_stories`.
    """
    texts = _order_records(seed, new_phrasings)
    return _fill_documents((_encode_record(tokenizer, text, marks, length) for text in texts), marks, length, count)


def make_questions(
    tokenizer: Tokenizer,
    marks: SpecialTokens,
    position: int,
    count: int,
    seed: str | None = None,
    *,
    new_phrasings: bool = False,
) -> list[Document]:
    """Return up to `count` records that end with a question and its answer; its last token is at `position`.

    They are parts of longer records, and some state the fact again instead of asking for it. The fact is stated within
    the document, more than MIN_QUESTION_DISTANCE tokens before the answer.
    """
    begin, at = list(marks.begin_ids), position + 1  # where the answer begins
    found: list[Document] = []
    for text in _order_records(seed, new_phrasings):
        record = _encode_record(tokenizer, text, marks, 2 * position)
        for start, stop, distance in record.answers:
            first = start - at + len(begin)
            if first < 0 or not MIN_QUESTION_DISTANCE < distance <= start - first:
                continue
            answer = MarkedAnswer(at, at + stop - start, distance)
            found.append(Document([*begin, *record.ids[first:stop]], [answer]))
            if len(found) == count:
                return found
    if not found:
        raise SettingsError(f"--question-at: no record has a question after {position:,} tokens; ask for a nearer one")
    return found


def _order_records(seed: str | None, new_phrasings: bool) -> Sequence[Text]:
    return _order_texts(TextKind.NEW_PHRASINGS if new_phrasings else TextKind.RECORD, seed)


def _order_texts(kind: TextKind, seed: str | None) -> Sequence[Text]:
    texts = read_texts(kind)
    return texts if seed is None else Random(seed).sample(texts, len(texts))


def _encode_record(tokenizer: Tokenizer, record: Text, marks: SpecialTokens, length: int) -> EncodedText:
    """Encode a record; if it has fewer than `length` tokens, insert stories, so that facts are asked from afar."""
    encoded = encode_pieces(tokenizer, record, marks)
    missing = length + 1 - len(marks.begin_ids) - len(encoded.ids)
    if missing <= 0:
        return encoded
    characters = sum(len(piece.text) for piece in record)
    lengthened = _insert_stories(record, missing * characters // len(encoded.ids))
    return encode_pieces(tokenizer, lengthened, marks)


def _insert_stories(record: Text, characters: int) -> Text:
    """Insert stories of so many characters altogether, distributed over the ends of the record's paragraphs."""
    ends = [place for place, piece in enumerate(record) if piece.kind is PieceKind.END or piece.text.endswith("\n\n")]
    inserted: dict[int, list[TextPiece]] = {end: [] for end in ends}
    for end, story in zip(cycle(ends), read_texts(TextKind.STORY)):
        if characters <= 0:
            break
        text = "".join(piece.text for piece in story) + "\n\n"
        inserted[end].append(TextPiece(text))
        characters -= len(text)
    return [each for place, piece in enumerate(record) for each in (piece, *inserted.get(place, ()))]


def _fill_documents(texts: Iterable[EncodedText], marks: SpecialTokens, length: int, count: int) -> list[Document]:
    """Return up to `count` documents of `length` tokens and a last target, each beginning with a new text.

    Raises SettingsError if the texts do not fill one.
    """
    documents: list[Document] = []
    document = begin_document(marks)
    for text in texts:
        document.extend(text)
        if len(document.ids) > length:
            answers = [answer for answer in document.answers if answer.stop <= length + 1]
            documents.append(Document(document.ids[: length + 1], answers))
            document = begin_document(marks)
        if len(documents) == count:
            break
    if not documents:
        raise SettingsError(f"--length: the texts that come with kvmux do not fill {length:,} tokens; ask for fewer")
    return documents


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
