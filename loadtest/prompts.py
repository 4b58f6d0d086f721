"""Makes prompts of wanted lengths. Knows no tokenizer: lengths are in words, of which most are one token."""

from __future__ import annotations

from random import Random

TEXT = (
    "once upon a time there was little girl who had big red ball and she liked to play with it in the park one day her "
    "friend came by they saw dog run after bird then said hello can we go home now mom smiled gave them cake happy sun"
)
WORDS = TEXT.split()

SHARED_SEED = 0  # the same beginning in every process that makes load


def make_prompt(random: Random, own_words: int, shared_words: int = 0) -> str:
    """Make a prompt of `shared_words` that begin every prompt, then words of its own."""
    shared = Random(SHARED_SEED).choices(WORDS, k=shared_words)
    return " ".join(shared + random.choices(WORDS, k=own_words)).capitalize()
