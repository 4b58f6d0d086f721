"""Texts with known answers, as pieces that state or answer a fact, and their form as tokens with marked answers.

A token belongs to the piece in which it ends. Any byte-level tokenizer will do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer


class PieceKind(Enum):
    BEGIN = auto()  # the special tokens before a text, without characters
    TEXT = auto()
    VALUE = auto()  # a fact's value where it is first stated, which cannot be predicted
    ANSWER = auto()  # a fact's value as an answer, which can be found earlier in the text
    END = auto()  # the end token of a text, without characters


class TextPiece(NamedTuple):
    text: str
    kind: PieceKind = PieceKind.TEXT
    fact: int = -1  # for a VALUE or ANSWER, the index of its fact among those of the text; else -1


END = TextPiece("", PieceKind.END)


class MarkedAnswer(NamedTuple):
    """An answer, tokens [start, stop) of a text; its latest earlier mention begins `distance` tokens before `start`."""

    start: int
    stop: int
    distance: int


class SpecialTokens(NamedTuple):
    """The special tokens that begin a document, and the token that ends a text."""

    begin_ids: tuple[int, ...]
    end_id: int


@dataclass
class EncodedText:
    """A text as token ids, with the kind of the piece that each token belongs to, and the spans of its answers."""

    ids: list[int] = field(default_factory=list)
    kinds: list[PieceKind] = field(default_factory=list)
    answers: list[MarkedAnswer] = field(default_factory=list)

    def extend(self, other: EncodedText) -> None:
        shift = len(self.ids)
        self.ids += other.ids
        self.kinds += other.kinds
        self.answers += [MarkedAnswer(a.start + shift, a.stop + shift, a.distance) for a in other.answers]


def begin_document(marks: SpecialTokens) -> EncodedText:
    return EncodedText(list(marks.begin_ids), [PieceKind.BEGIN] * len(marks.begin_ids))


def encode_pieces(tokenizer: Tokenizer, pieces: Sequence[TextPiece], marks: SpecialTokens) -> EncodedText:
    encoded = EncodedText()
    seen: dict[int, int] = {}  # fact -> index of the token at which its value was last mentioned
    segment: list[TextPiece] = []
    for piece in pieces:
        if piece.kind is not PieceKind.END:
            segment.append(piece)
            continue
        _encode_segment(tokenizer, segment, encoded, seen)
        encoded.ids.append(marks.end_id)
        encoded.kinds.append(PieceKind.END)
        segment = []
    _encode_segment(tokenizer, segment, encoded, seen)
    return encoded


def _encode_segment(
    tokenizer: Tokenizer, segment: Sequence[TextPiece], into: EncodedText, seen: dict[int, int]
) -> None:
    encoding = tokenizer.encode("".join(piece.text for piece in segment), add_special_tokens=False)
    if not encoding.ids:
        return
    piece_ends = np.cumsum([len(piece.text) for piece in segment])
    token_ends = [end for _, end in encoding.offsets]
    owners = np.searchsorted(piece_ends, token_ends)  # shape (tokens,): the index of the piece in which each token ends
    shift = len(into.ids)
    into.ids += encoding.ids
    into.kinds += [segment[owner].kind for owner in owners]
    for index, piece in enumerate(segment):
        if piece.fact < 0:
            continue
        start, stop = (int(np.searchsorted(owners, index, side)) + shift for side in ("left", "right"))
        # If start == stop, no token ends within the answer: a longer one contains it. Such an answer is not marked.
        if piece.kind is PieceKind.ANSWER and start < stop:
            into.answers.append(MarkedAnswer(start, stop, start - seen[piece.fact]))
        seen[piece.fact] = start
