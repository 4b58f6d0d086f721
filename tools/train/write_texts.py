"""Writes the texts of `kvmux evaluate`: what the generator makes for rows of the embedded model's whole context.

python -m tools.train.write_texts
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator

from tokenizers import Tokenizer

from server.evaluation.pieces import END, PieceKind, TextPiece, encode_pieces
from server.evaluation.texts import FILE, Text, TextKind, format_piece
from server.models.files.directory import EMBEDDED
from tools.train.corpus.generator import DocumentGenerator
from tools.train.corpus.packing import RECORDS, SPECIAL_TOKENS, STORIES, Mix, iter_row
from tools.train.corpus.words import HELD_OUT, HELD_OUT_NAMES, TRAIN, Lexicon

SEED = "figures"  # that of docs/laboratory/embedded_model.md; training uses others
CONTEXT = 2048  # tokens
# For each kind: how many rows of CONTEXT tokens to write, what they consist of, and whose words they use.
CONTENTS: dict[TextKind, tuple[int, Mix, Lexicon]] = {
    TextKind.STORY: (24, STORIES, TRAIN),
    TextKind.RECORD: (56, RECORDS, HELD_OUT_NAMES),
    TextKind.NEW_PHRASINGS: (24, RECORDS, HELD_OUT),
}


def main() -> None:
    with FILE.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as packed:
        packed.writelines(line.encode("ascii") for line in make_lines())


def make_lines() -> Iterator[str]:
    """Yield the lines of the file."""
    for kind, contents in CONTENTS.items():
        for text in make_texts(*contents):
            entries = [format_piece(piece) for piece in merge_pieces(text)]
            yield json.dumps([kind, *entries], separators=(",", ":")) + "\n"


def make_texts(rows: int, mix: Mix, lexicon: Lexicon) -> Iterator[Text]:
    """Yield the documents of `rows` rows, as `pack` puts them into rows of the embedded model's tokens."""
    tokenizer = Tokenizer.from_file(str(EMBEDDED["tiny"] / "tokenizer.json"))
    generator = DocumentGenerator(SEED, lexicon)
    for _ in range(rows):
        length = len(SPECIAL_TOKENS.begin_ids)
        for document in iter_row(generator, CONTEXT, mix):
            yield document
            length += len(encode_pieces(tokenizer, document, SPECIAL_TOKENS).ids)
            if length > CONTEXT:
                break


def merge_pieces(text: Text) -> Text:
    """Join pieces of plain text to one, up to the end of a paragraph."""
    merged: list[TextPiece] = []
    for piece in text:
        last = merged[-1] if merged else END
        if piece.kind is last.kind is PieceKind.TEXT and not last.text.endswith("\n\n"):
            merged[-1] = TextPiece(last.text + piece.text)
        else:
            merged.append(piece)
    return merged


if __name__ == "__main__":
    main()
