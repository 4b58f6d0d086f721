"""Reads the texts that come with `kvmux evaluate`: stories and chats, and records of facts that are asked for later.

texts.jsonl.gz has one text a line: a JSON array of its kind and its pieces. A string is plain text, [value, fact]
states a fact, [value, fact, true] answers with it, and null is the end of a text. The texts are this project's own
(docs/laboratory/embedded_model.md).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from server.evaluation.pieces import END, PieceKind, TextPiece

FILE = Path(__file__).with_name("texts.jsonl.gz")
Text = Sequence[TextPiece]


class TextKind(StrEnum):
    STORY = "story"  # a story or a chat such as the embedded model was trained on
    RECORD = "record"  # facts about people and things that the embedded model was not trained on
    NEW_PHRASINGS = "new phrasings"  # such facts in sentences that it was not trained on either


@cache
def read_texts(kind: TextKind) -> Sequence[Text]:
    """Return all texts of a kind, in the file's order."""
    with gzip.open(FILE, "rt", encoding="ascii") as lines:
        return [[parse_piece(piece) for piece in rest] for first, *rest in map(json.loads, lines) if first == kind]


def parse_piece(entry: Any) -> TextPiece:
    match entry:
        case None:
            return END
        case [value, fact]:
            return TextPiece(value, PieceKind.VALUE, fact)
        case [value, fact, True]:
            return TextPiece(value, PieceKind.ANSWER, fact)
        case text:
            return TextPiece(text)
