"""What prompts are drawn from: ids of a model's ordinary tokens, or words where the server cannot tell ids.

Between the least and the greatest id in a text of common words there are ordinary tokens only: those that mean
something (the end of a text, a speaker) stand before or behind. Knows no server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from loadtest.prompts import WORDS

Piece = int | str
Prompt = Sequence[Piece] | str


@dataclass(frozen=True)
class PromptVocabulary:
    """Pieces to draw from, all ids or all words."""

    pieces: Sequence[Piece]

    @property
    def exact(self) -> bool:
        """Is a piece a token?"""
        return isinstance(self.pieces[0], int)

    def draw(self, random: Random, length: int) -> list[Piece]:
        return random.choices(self.pieces, k=length)

    def shuffled(self, random: Random) -> list[Piece]:
        return random.sample(self.pieces, len(self.pieces))

    def prompt(self, pieces: Sequence[Piece]) -> Prompt:
        """As it is sent."""
        return list(pieces) if self.exact else " ".join(map(str, pieces))


def vocabulary(seen: Sequence[int]) -> PromptVocabulary:
    """`seen` are the ids of some ordinary text, none where they are not known."""
    return PromptVocabulary(range(min(seen), max(seen) + 1) if seen else WORDS)
