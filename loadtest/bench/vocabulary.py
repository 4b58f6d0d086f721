"""The vocabulary for random prompts: ids of ordinary tokens, or words if the server has no /tokenize.

The token ids are those between the smallest and the largest id in a text of common words. Special tokens have smaller
or larger ids.
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
    """The pieces that random prompts consist of: either token ids or words."""

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
        """Return the prompt of a request made of these pieces: a list of token ids, or words joined to a text."""
        return list(pieces) if self.has_token_ids else " ".join(map(str, pieces))


def make_vocabulary(token_ids: Sequence[int]) -> PromptVocabulary:
    """Return a vocabulary of all ids from the smallest to the largest of `token_ids`; one of words if that is empty."""
    return PromptVocabulary(range(min(token_ids), max(token_ids) + 1) if token_ids else WORDS)
