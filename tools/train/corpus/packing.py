"""Packs documents into rows of tokens of equal length, with a loss weight for each token and the spans of answers.

Every row starts with the BOS token and a new document, as a prompt does. A token belongs to the piece in which it ends,
so weights and answers follow the pieces of generator.py. Any byte-level tokenizer will do.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from server.evaluation.pieces import (
    EncodedText,
    MarkedAnswer,
    PieceKind,
    SpecialTokens,
    begin_document,
    encode_pieces,
)
from tools.train.corpus import words
from tools.train.corpus.generator import Document, DocumentGenerator
from tools.train.corpus.words import Lexicon

BOS_ID, EOS_ID = 0, 1  # ids of these special tokens in the embedded model's tokenizer
SPECIAL_TOKENS = SpecialTokens((BOS_ID,), EOS_ID)
CHARACTERS_PER_TOKEN = 3.5
CHAT_SHARE = 0.4  # share of chats among the documents in rows of stories and chats; of the tokens, it is smaller

# Loss weights: answers count most, as they are rare and recall is the goal; unpredictable values count little.
WEIGHTS = {
    PieceKind.BEGIN: 0.0,
    PieceKind.TEXT: 1.0,
    PieceKind.VALUE: 0.3,
    PieceKind.ANSWER: 3.0,
    PieceKind.END: 1.0,
}


class Mix(NamedTuple):
    """Relative shares of two kinds of rows: with stories and chats, and with records of facts and questions."""

    stories: float
    records: float


STORIES, RECORDS = Mix(stories=1, records=0), Mix(stories=0, records=1)
EVALUATION_SEED = "evaluation"  # training uses other seeds


@dataclass(frozen=True)
class PackedRows:
    ids: npt.NDArray[np.uint32]  # (rows, context + 1)
    weights: npt.NDArray[np.float32]  # (rows, context + 1)
    answers: tuple[tuple[MarkedAnswer, ...], ...]  # per row


def pack(
    tokenizer: Tokenizer, seed: int | str, context: int, rows: int, mix: Mix, lexicon: Lexicon = words.TRAIN
) -> PackedRows:
    """Return `rows` rows of generated documents, each of `context` input tokens and one more as the last target."""
    generator = DocumentGenerator(seed, lexicon)
    ids = np.zeros((rows, context + 1), np.uint32)
    weights = np.zeros((rows, context + 1), np.float32)
    answers = []
    for row in range(rows):
        encoded = _make_row(tokenizer, generator, context, mix)
        ids[row] = encoded.ids[: context + 1]
        weights[row] = [WEIGHTS[kind] for kind in encoded.kinds[: context + 1]]
        answers.append(tuple(answer for answer in encoded.answers if answer.stop <= context + 1))
    return PackedRows(ids, weights, tuple(answers))


def _make_row(tokenizer: Tokenizer, generator: DocumentGenerator, context: int, mix: Mix) -> EncodedText:
    row = begin_document(SPECIAL_TOKENS)
    for document in iter_row(generator, context, mix):
        row.extend(encode_pieces(tokenizer, document, SPECIAL_TOKENS))
        if len(row.ids) > context:
            break
    return row


def iter_row(generator: DocumentGenerator, context: int, mix: Mix) -> Iterator[Document]:
    """Draw the kind of a row's documents; yield them without end."""
    kind = generator.rng.choices(Mix._fields, mix)[0]
    while True:
        yield _make_document(generator, kind, context)


def _make_document(generator: DocumentGenerator, kind: str, context: int) -> Document:
    if kind == "records":
        return generator.make_record(int(context * CHARACTERS_PER_TOKEN))
    return generator.make_chat() if generator.rng.random() < CHAT_SHARE else generator.make_story()
