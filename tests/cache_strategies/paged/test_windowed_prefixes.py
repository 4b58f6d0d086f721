"""Which prefixes are found if layers have windows: without pressure the same as without windows, else by one rule.

Random texts that begin alike are opened, computed in rows, forked and closed in any order.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Sequence

import pytest

from cache_strategies.paged.cache import PagedCache, PagedSequence
from cache_strategies.types import NO_SALT, Text
from kernels.types import LayerSpec
from tests.cache_strategies.cache_driver import (
    BLOCK,
    LAYER,
    assert_nothing_leaked,
    enter,
    evict,
    find_cached,
    make_paged,
    visible_tokens,
)

WINDOW = LAYER._replace(window=6)
MODELS = {
    "hybrid": (WINDOW, LAYER),
    "two windows": (WINDOW, LAYER, LAYER._replace(window=11), WINDOW),
    "a window of one": (LAYER._replace(window=1), LAYER),
    "all windows": (WINDOW, WINDOW),
    "all windows, two": (WINDOW, LAYER._replace(window=10)),
}
LONGEST = 60
SEATS = 6

models = pytest.mark.parametrize("layers", MODELS.values(), ids=MODELS)


class MoreFound(Exception):
    """Raised if the second cache finds a longer prefix than the first one: behind a gap that the first one has."""


class Play:
    """Does the same with several caches, which must agree, and checks what the sequences' next tokens see."""

    def __init__(self, rng: random.Random, caches: Sequence[PagedCache]) -> None:
        self.rng = rng
        self.caches = caches
        self.sequences: list[tuple[list[int], list[PagedSequence]]] = []  # tokens, and the sequence in each cache
        self.texts: list[list[int]] = [[1] * LONGEST]

    def draw_text(self) -> list[int]:
        """Return a text that often begins like an earlier one."""
        known = self.rng.choice(self.texts[-8:])
        text = known[: self.rng.randrange(len(known))] + self.rng.choices([1, 2], k=self.rng.randint(1, 12))
        self.texts.append(text[: LONGEST - 10])
        return self.texts[-1]

    def agree(self, answers: Sequence[object]) -> None:
        assert all(answer == answers[0] for answer in answers), answers

    def compare_prefixes(self, text: Sequence[int], max_cached: int | None = None) -> None:
        """Check that all caches find the same prefix. Raises MoreFound as described there."""
        found = [find_cached(cache, text, max_cached=max_cached) for cache in self.caches]
        if found[-1] > found[0]:
            raise MoreFound
        self.agree(found)

    def open(self) -> None:
        text, limit = self.draw_text(), self.rng.choice([None, None, None, 9])
        self.compare_prefixes(text, limit)
        sequences = [cache.open(Text(text, max_cached=limit)) for cache in self.caches]
        self.agree([sequence and (sequence.length, sequence.miss) for sequence in sequences])
        if sequences[0] is not None:
            self.sequences.append((text, [sequence for sequence in sequences if sequence is not None]))

    def close(self) -> None:
        if self.sequences:
            _, sequences = self.sequences.pop(self.rng.randrange(len(self.sequences)))
            for sequence in sequences:
                sequence.close()

    def fork(self) -> None:
        if not self.sequences or len(self.sequences) == SEATS:
            return
        text, sequences = self.rng.choice(self.sequences)
        children = [sequence.fork() for cache, sequence in zip(self.caches, sequences, strict=True)]
        self.agree([child is None for child in children])
        if children[0] is not None:
            self.sequences.append((text[: sequences[0].length], [child for child in children if child is not None]))

    def step(self) -> None:
        if not self.sequences:
            return
        i = self.rng.randrange(len(self.sequences))
        text, sequences = self.sequences[i]
        ready = [sequence.ready() for cache, sequence in zip(self.caches, sequences, strict=True)]
        self.agree(ready)
        start, size = sequences[0].length, self.rng.choice([1, 3, 5, 20])
        row = text[start : start + size] or self.rng.choices([1, 2], k=size)[: LONGEST - start]
        if not ready[0] or not row:
            return
        for cache, sequence in zip(self.caches, sequences, strict=True):
            cache.poll()
            if not sequence.reserve(len(row)):
                return self.close()
            enter(cache, (sequence, row))
        if start + len(row) > len(text):
            self.sequences[i] = [*text[:start], *row], sequences
            self.texts.append(self.sequences[i][0])

    def run(self, steps: int, check: Callable[[], None]) -> None:
        for _ in range(steps):
            self.rng.choice([self.open, self.close, self.fork, self.step, self.step, self.step])()
            check()
            for text, sequences in self.sequences:
                self.agree([(sequence.length, sequence.found) for sequence in sequences])
                if sequences[0].length < LONGEST and self.rng.random() < 0.2:
                    for cache, sequence in zip(self.caches, sequences, strict=True):
                        assert_sees(cache, sequence, text)
        while self.sequences:
            self.close()
        for cache in self.caches:
            assert_nothing_leaked(cache)


def assert_sees(cache: PagedCache, sequence: PagedSequence, text: Sequence[int]) -> None:
    cache.poll()
    if not sequence.ready() or not sequence.reserve(1):
        return
    for layer, spec in enumerate(cache.setup.geometry.layers):
        first = max(0, sequence.length - (spec.window or LONGEST) + 1)
        assert visible_tokens(cache, sequence, layer) == list(text[first : sequence.length])


@models
def test_without_pressure_the_same_prefixes_are_found_as_without_windows(
    layers: Sequence[LayerSpec], rng: random.Random
) -> None:
    """Also by sequences that wait for others, that take over, and that were forked.

    A sequence that closes early can leave a gap before blocks that others have computed. If all layers have windows,
    the blocks behind a gap are found, too; then the comparison ends.
    """
    caches = [make_paged(layers=each, blocks=3000, seats=SEATS) for each in ((LAYER,), layers)]
    play = Play(rng, caches)

    def check() -> None:
        play.compare_prefixes([*play.rng.choice(play.texts), 1])
        for cache in caches:
            cache.check_integrity()

    with contextlib.nullcontext() if LAYER in layers else contextlib.suppress(MoreFound):
        play.run(150, check)


@models
def test_under_pressure_a_prefix_is_found_if_all_that_its_next_token_sees_is_there(
    layers: Sequence[LayerSpec], rng: random.Random
) -> None:
    cache = make_paged(layers=layers, blocks=60, seats=SEATS)
    play = Play(rng, [cache])

    def check() -> None:
        cache.check_integrity()
        text = [*play.rng.choice(play.texts), 1]
        assert find_cached(cache, text) == longest_prefix(cache, text)
        if play.rng.random() < 0.1:
            evict(cache, play.rng.randint(1, 20))

    play.run(150, check)


def longest_prefix(cache: PagedCache, text: Sequence[int]) -> int:
    """Return the longest prefix that a sequence can go on from, trying all lengths."""
    hashes = cache._hash_blocks(text, NO_SALT)
    first, *windowed = cache.layout.groups

    def is_pending(i: int) -> bool:
        block = cache.pool.find(hashes[i])
        return block is not None and block in cache.pending

    def is_there(i: int, group: int) -> bool:
        return cache.pool.find(hashes[i]._replace(group=group)) is not None or is_pending(i)

    def can_go_on_from(length: int) -> bool:
        if first.layers and not all(is_there(i, 0) for i in range(length)):
            return False
        return all(
            is_there(i, number)
            for number, group in enumerate(windowed, 1)
            for i in range(max(0, length - max(1, math.ceil(((group.window or 0) - 1) / BLOCK))), length)
        )

    return BLOCK * max(n for n in range((len(text) - 1) // BLOCK + 1) if can_go_on_from(n))
