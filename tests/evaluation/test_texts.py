"""The packed texts of `kvmux evaluate` are those of the committed figures; facts are asked after they are stated."""

from __future__ import annotations

import hashlib
import re
from collections import Counter

import pytest

from server.evaluation.pieces import PieceKind
from server.evaluation.texts import FILE, TextKind, read_texts
from tests.evaluation.held_out_names import HELD_OUT_NAMES, TRAINING_NAMES

SHA256 = "dbba98e7f04b330ed10d513c10e5095f4b9bad6117e566e7f0777854a81bc7c4"
FACTS = (TextKind.RECORD, TextKind.NEW_PHRASINGS)


def test_texts_are_those_of_the_committed_figures() -> None:
    assert hashlib.sha256(FILE.read_bytes()).hexdigest() == SHA256, (
        f"{FILE.name} has changed, and with it every committed figure of quality and of loss: measure all of them "
        "again (docs/laboratory), then write the new sha256 here"
    )


def find_words(kind: TextKind) -> set[str]:
    return set(re.findall(r"\w+", " ".join(piece.text for text in read_texts(kind) for piece in text)))


def test_only_records_have_names_that_were_held_out_of_training() -> None:
    assert not find_words(TextKind.STORY) & HELD_OUT_NAMES
    assert find_words(TextKind.STORY) >= TRAINING_NAMES
    for kind in FACTS:
        assert len(find_words(kind) & HELD_OUT_NAMES) > 50  # of 60
        assert not find_words(kind) & TRAINING_NAMES


@pytest.mark.parametrize("kind", FACTS)
def test_facts_are_asked_after_they_are_stated_and_at_most_twice(kind: TextKind) -> None:
    for text in read_texts(kind):
        values = dict[int | None, str]()
        asked = Counter[int | None]()
        for piece in text:
            if piece.kind is PieceKind.VALUE:
                values[piece.fact] = piece.text
            elif piece.kind is PieceKind.ANSWER:
                assert piece.text == values[piece.fact]
                asked[piece.fact] += 1
        assert all(count <= 2 for count in asked.values())


@pytest.mark.parametrize("kind", TextKind)
def test_every_text_ends_with_the_end_of_a_text(kind: TextKind) -> None:
    assert all(PieceKind.END in [piece.kind for piece in text] for text in read_texts(kind))
