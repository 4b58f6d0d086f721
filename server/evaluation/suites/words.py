"""English words for generated texts: those of the stories that come with kvmux."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from random import Random

from server.evaluation.texts import TextKind, read_texts


@cache
def list_words() -> Sequence[str]:
    """Return some thousand different words of four to nine letters."""
    texts = ("".join(piece.text for piece in text) for kind in TextKind for text in read_texts(kind))
    return sorted({word for text in texts for word in re.findall(r"\b[a-z]{4,9}\b", text)})


def draw_words(rng: Random, count: int) -> list[str]:
    """Return different words; if more are wanted than there are, some are two words with a hyphen."""
    words = list_words()
    if count <= len(words):
        return rng.sample(words, count)
    drawn = {*words}
    while len(drawn) < count:
        drawn.add(draw_pair(rng))
    return rng.sample(sorted(drawn), count)


def draw_pair(rng: Random) -> str:
    """Return two words with a hyphen between them."""
    return "-".join(rng.sample(list_words(), 2))
