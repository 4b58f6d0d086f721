"""Defines what a comparison measures: strategies, loads and rounds.

A load is a prompt length and a batch size. A cell is one measurement: a load under a strategy in a round. Prompts of a
cell begin alike by half of their tokens, as with a common system prompt, so that caches have something to find.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from loadtest.bench.types import BenchRequest
from loadtest.bench.vocabulary import PromptVocabulary

SHARED = 0.5  # share of a prompt's tokens with which all prompts of a cell begin


class Load(NamedTuple):
    """A prompt length and a number of requests at a time."""

    prompt_tokens: int
    batch: int

    def __str__(self) -> str:
        return f"{self.batch} at once, {self.prompt_tokens:,} tokens"


class Cell(NamedTuple):
    """One measurement: a load under a strategy, in a round."""

    round: int
    load: Load
    strategy: str


@dataclass(frozen=True)
class Plan:
    """All cells of a comparison, in the order in which they are measured."""

    strategies: Sequence[str]
    prompt_lengths: Sequence[int]
    batches: Sequence[int]
    max_tokens: int
    seconds: float  # for which the clients of a cell send requests
    rounds: int
    seed: int

    @property
    def loads(self) -> list[Load]:
        return [Load(length, batch) for length in self.prompt_lengths for batch in self.batches]

    @property
    def context(self) -> int:
        """The number of tokens of the longest prompt and its answer."""
        return max(self.prompt_lengths) + self.max_tokens

    def cells(self) -> Iterator[Cell]:
        """Yield all cells; each strategy has a turn with all loads, and each round begins with another one."""
        # The machine drifts from turn to turn, so a strategy's turns should come early, midway and late in the rounds
        step = max(1, len(self.strategies) // self.rounds)
        for number in range(self.rounds):
            first = number * step % len(self.strategies)
            turns = [*self.strategies[first:], *self.strategies[:first]]
            yield from (Cell(number, load, strategy) for strategy in turns for load in self.loads)

    def make_requests(self, vocabulary: PromptVocabulary, load: Load, salt: str) -> Iterator[BenchRequest]:
        """Yield the requests of a load, without end; they are the same ones for the same salt."""
        num_shared = int(load.prompt_tokens * SHARED)
        shared = vocabulary.draw(Random(salt), num_shared)
        for number in itertools.count():
            own = vocabulary.draw(Random(f"{salt}/{number}"), load.prompt_tokens - num_shared)
            yield BenchRequest(vocabulary.make_prompt(shared + own), self.max_tokens)

    def make_salt(self, cell: Cell) -> str:
        """Return the text from which a cell's prompts are drawn: equal for the strategies of a round and load."""
        return f"{self.seed}/{cell.round}/{cell.load}"
