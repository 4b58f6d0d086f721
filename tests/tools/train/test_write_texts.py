"""The texts of `kvmux evaluate` are what the generator makes."""

from __future__ import annotations

import gzip

import pytest
from tokenizers import Tokenizer

from server.evaluation.documents import make_records, make_stories
from server.evaluation.pieces import TextPiece
from server.evaluation.texts import FILE, TextKind, read_texts
from server.models.files.directory import EMBEDDED
from tools.train.corpus.packing import RECORDS, SPECIAL_TOKENS, STORIES, pack
from tools.train.corpus.words import HELD_OUT_NAMES, TRAIN
from tools.train.write_texts import CONTENTS, CONTEXT, SEED, make_lines, make_texts, merge_pieces

TINY = Tokenizer.from_file(str(EMBEDDED["tiny"] / "tokenizer.json"))


def test_the_file_is_what_the_generator_makes() -> None:
    with gzip.open(FILE, "rt") as file:
        assert list(file) == list(make_lines()), "after a change: python -m tools.train.write_texts"


@pytest.mark.parametrize("kind", TextKind)
def test_texts_are_read_as_they_were_written(kind: TextKind) -> None:
    assert read_texts(kind) == [merge_pieces(text) for text in make_texts(*CONTENTS[kind])]


def test_merging_keeps_characters_and_paragraphs() -> None:
    pieces = [TextPiece("a "), TextPiece("b.\n\n"), TextPiece("c")]
    assert merge_pieces(pieces) == [TextPiece("a b.\n\n"), TextPiece("c")]


def test_documents_of_an_evaluation_are_the_rows_of_training() -> None:
    """So the figures of the embedded model stay comparable with those of its training."""
    for make, mix, lexicon in ((make_stories, STORIES, TRAIN), (make_records, RECORDS, HELD_OUT_NAMES)):
        rows = pack(TINY, SEED, CONTEXT, 5, mix, lexicon)
        documents = make(TINY, SPECIAL_TOKENS, CONTEXT, 5)
        assert [list(d.ids) for d in documents] == rows.ids.tolist()
        assert [tuple(d.answers) for d in documents] == list(rows.answers)
