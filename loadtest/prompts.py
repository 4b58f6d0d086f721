"""Makes random prompts of a given number of words. With most tokenizers, most of the words are one token."""

from __future__ import annotations

from random import Random

TEXT = (
    "once upon a time there was little girl who had big red ball and she liked to play with it in the park one day her "
    "friend came by they saw dog run after bird then said hello can we go home now mom smiled gave them cake happy sun"
)
WORDS = TEXT.split()

SHARED_SEED = 0  # seed of the shared words: constant, so that they are the same in all load-generating processes


def make_prompt(random: Random, own_words: int, shared_words: int = 0) -> str:
    """Return a prompt: `shared_words` words, the same in every prompt, then `own_words` random words."""
    shared = Random(SHARED_SEED).choices(WORDS, k=shared_words)
    return " ".join(shared + random.choices(WORDS, k=own_words)).capitalize()
