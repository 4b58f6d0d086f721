"""English words for generated texts: those of the stories that come with kvmux, which may be names in Python."""

from __future__ import annotations

import keyword
import re
from collections.abc import Sequence
from functools import cache
from random import Random

from server.evaluation.texts import TextKind, read_texts


@cache
def list_words() -> Sequence[str]:
    """Return some hundred different words of four to nine letters; a few are made up."""
    texts = ("".join(piece.text for piece in text) for text in read_texts(TextKind.STORY))
    words = {word for text in texts for word in re.findall(r"\b[a-z]{4,9}\b", text)}
    return sorted(word for word in words if not keyword.iskeyword(word))


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
