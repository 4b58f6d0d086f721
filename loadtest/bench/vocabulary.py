"""What prompts are drawn from: ids of a model's ordinary tokens, or words where the server has no route for ids.

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
    def has_token_ids(self) -> bool:
        """Whether a piece is a token."""
        return isinstance(self.pieces[0], int)

    def draw(self, random: Random, length: int) -> list[Piece]:
        return random.choices(self.pieces, k=length)

    def shuffled(self, random: Random) -> list[Piece]:
        return random.sample(self.pieces, len(self.pieces))

    def make_prompt(self, pieces: Sequence[Piece]) -> Prompt:
        """Return the prompt as it is sent."""
        return list(pieces) if self.has_token_ids else " ".join(map(str, pieces))


def make_vocabulary(token_ids: Sequence[int]) -> PromptVocabulary:
    """Make a vocabulary from the ids of some ordinary text; of words, if no ids are known."""
    return PromptVocabulary(range(min(token_ids), max(token_ids) + 1) if token_ids else WORDS)
