"""Packs documents into rows of tokens of equal length, with a loss weight for each token and the spans of answers.

Every row starts with the BOS token and a new document, as a prompt does. A token belongs to the piece in which it ends,
so weights and answers follow the pieces of generator.py. Any byte-level tokenizer will do.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from server.evaluation.corpus import words
from server.evaluation.corpus.generator import Document, DocumentGenerator, PieceKind
from server.evaluation.corpus.words import Lexicon

BOS_ID, EOS_ID = 0, 1  # ids of these special tokens in the embedded model's tokenizer
CHARACTERS_PER_TOKEN = 3.5
CHAT_SHARE = 0.4  # share of chats among the documents in rows of stories and chats; of the tokens, it is smaller

# Loss weights: answers count most, as they are rare and recall is the goal; unpredictable values count little.
WEIGHTS = {PieceKind.TEXT: 1.0, PieceKind.VALUE: 0.3, PieceKind.ANSWER: 3.0, PieceKind.END: 1.0}


class MarkedAnswer(NamedTuple):
    """An answer, tokens [start, stop) of a row; its latest earlier mention begins `distance` tokens before `start`."""

    start: int
    stop: int
    distance: int


class SpecialTokens(NamedTuple):
    """The special tokens that begin a row, and the token that ends a document."""

    begin_ids: tuple[int, ...] = (BOS_ID,)
    end_id: int = EOS_ID


TINY_SPECIAL_TOKENS = SpecialTokens()


class Mix(NamedTuple):
    """Relative shares of two kinds of rows: with stories and chats, and with records of facts and questions."""

    stories: float
    records: float


STORIES, RECORDS = Mix(stories=1, records=0), Mix(stories=0, records=1)
EVALUATION_SEED = "evaluation"  # training uses other seeds


@dataclass
class EncodedDocument:
    ids: list[int]
    weights: list[float]
    answers: list[MarkedAnswer]

    def extend(self, other: "EncodedDocument") -> None:
        shift = len(self.ids)
        self.ids += other.ids
        self.weights += other.weights
        self.answers += [MarkedAnswer(a.start + shift, a.stop + shift, a.distance) for a in other.answers]


@dataclass(frozen=True)
class PackedRows:
    ids: npt.NDArray[np.uint32]  # (rows, context + 1)
    weights: npt.NDArray[np.float32]  # (rows, context + 1)
    answers: tuple[tuple[MarkedAnswer, ...], ...]  # per row


def encode_document(tokenizer: Tokenizer, document: Document, marks: SpecialTokens) -> EncodedDocument:
    encoded = EncodedDocument([], [], [])
    seen: dict[int, int] = {}  # fact -> index of the token at which its value was last mentioned
    segment: Document = []
    for piece in document:
        if piece.kind is not PieceKind.END:
            segment.append(piece)
            continue
        _encode_segment(tokenizer, segment, encoded, seen)
        encoded.ids.append(marks.end_id)
        encoded.weights.append(WEIGHTS[PieceKind.END])
        segment = []
    _encode_segment(tokenizer, segment, encoded, seen)
    return encoded


def _encode_segment(tokenizer: Tokenizer, segment: Document, into: EncodedDocument, seen: dict[int, int]) -> None:
    encoding = tokenizer.encode("".join(piece.text for piece in segment), add_special_tokens=False)
    if not encoding.ids:
        return
    piece_ends = np.cumsum([len(piece.text) for piece in segment])
    token_ends = [end for _, end in encoding.offsets]
    owners = np.searchsorted(piece_ends, token_ends)  # shape (tokens,): the index of the piece in which each token ends
    shift = len(into.ids)
    into.ids += encoding.ids
    into.weights += [WEIGHTS[segment[owner].kind] for owner in owners]
    for index, piece in enumerate(segment):
        if piece.fact < 0:
            continue
        start, stop = (int(np.searchsorted(owners, index, side)) + shift for side in ("left", "right"))
        # If start == stop, no token ends within the answer: a longer one contains it. Such an answer is not marked.
        if piece.kind is PieceKind.ANSWER and start < stop:
            into.answers.append(MarkedAnswer(start, stop, start - seen[piece.fact]))
        seen[piece.fact] = start


def pack(
    tokenizer: Tokenizer,
    seed: int | str,
    context: int,
    rows: int,
    mix: Mix,
    lexicon: Lexicon = words.TRAIN,
    marks: SpecialTokens = TINY_SPECIAL_TOKENS,
) -> PackedRows:
    """Return `rows` rows of generated documents, each of `context` input tokens and one more as the last target."""
    generator = DocumentGenerator(seed, lexicon)
    ids = np.zeros((rows, context + 1), np.uint32)
    weights = np.zeros((rows, context + 1), np.float32)
    answers = []
    for row in range(rows):
        encoded = _make_row(tokenizer, generator, context, mix, marks)
        ids[row], weights[row] = encoded.ids[: context + 1], encoded.weights[: context + 1]
        answers.append(tuple(answer for answer in encoded.answers if answer.stop <= context + 1))
    return PackedRows(ids, weights, tuple(answers))


def _make_row(
    tokenizer: Tokenizer, generator: DocumentGenerator, context: int, mix: Mix, marks: SpecialTokens
) -> EncodedDocument:
    row = EncodedDocument(list(marks.begin_ids), [0.0] * len(marks.begin_ids), [])
    kind = generator.rng.choices(Mix._fields, mix)[0]
    while len(row.ids) < context + 1:
        row.extend(encode_document(tokenizer, _make_document(generator, kind, context), marks))
    return row


def _make_document(generator: DocumentGenerator, kind: str, context: int) -> Document:
    if kind == "records":
        return generator.make_record(int(context * CHARACTERS_PER_TOKEN))
    return generator.make_chat() if generator.rng.random() < CHAT_SHARE else generator.make_story()
