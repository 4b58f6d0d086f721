"""The vocabulary that prompts are drawn from: ids of ordinary tokens, or words if the server cannot tokenize.

Between the least and the greatest token id of a text of common words there are only ordinary tokens: special tokens
have smaller or greater ids.
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
    """Pieces to draw from: either token ids or words."""

    pieces: Sequence[Piece]

    @property
    def has_token_ids(self) -> bool:
        """Return whether the pieces are token ids."""
        return isinstance(self.pieces[0], int)

    def draw(self, random: Random, length: int) -> list[Piece]:
        return random.choices(self.pieces, k=length)

    def shuffled(self, random: Random) -> list[Piece]:
        return random.sample(self.pieces, len(self.pieces))

    def make_prompt(self, pieces: Sequence[Piece]) -> Prompt:
        """Return pieces as a prompt in a request: a list of ids, or a text."""
        return list(pieces) if self.has_token_ids else " ".join(map(str, pieces))


def make_vocabulary(token_ids: Sequence[int]) -> PromptVocabulary:
    """Return a vocabulary with the ids of an ordinary text and those between; one of words if there are no ids."""
    return PromptVocabulary(range(min(token_ids), max(token_ids) + 1) if token_ids else WORDS)
