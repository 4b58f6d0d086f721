"""What is asked: prompts and answers of given lengths, drawn or recorded, and the workloads that have names.

A workload asks for the same in the same words when it gets the same salt, and for something else with another. Knows
neither HTTP nor tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import NamedTuple

from msgspec import Struct
from msgspec.json import decode

from loadtest.bench.arrivals import Arrivals, Closed, Recorded
from loadtest.bench.ask import Ask
from loadtest.bench.vocabulary import PromptVocabulary

LEAST_CONTEXT = 16  # tokens; with less there is nothing to measure


class WorkloadError(Exception):
    """A workload cannot be run; the message says what to change."""


@dataclass(frozen=True)
class Drawn:
    """Prompts by chance: `shared` tokens that begin all of them, then `own` ones."""

    name: str
    arrivals: Arrivals
    requests: int  # in a round, and in each of its phases
    own: int
    answer: int
    shared: int = 0
    phases: Sequence[str] = ("",)  # of a round: all have the same beginning, and the first of them has to compute it

    def asks(self, vocabulary: PromptVocabulary, salt: str, phase: str) -> list[Ask]:
        shared = vocabulary.draw(Random(salt), self.shared)
        own = Random(f"{salt}/{phase}")
        prompts = [shared + vocabulary.draw(own, self.own) for _ in range(self.requests)]
        return [Ask(vocabulary.prompt(each), self.answer) for each in prompts]

    def fitted(self, context: int | None) -> Drawn:
        """The same, with shorter prompts if need be, so that they and their answers fit into the context."""
        if context is None or self.own + self.shared + self.answer <= context:
            return self
        answer = min(self.answer, context // 2)
        room, wanted = context - answer, self.own + self.shared
        shared = self.shared * room // wanted if wanted > room else self.shared
        return replace(self, answer=answer, shared=shared, own=min(self.own, room - shared))

    def __str__(self) -> str:
        shared = f"{self.shared:,} shared + " if self.shared else ""
        return f"{self.arrivals}, {shared}{self.own:,} tokens in, {self.answer:,} out"


class TraceTurn(NamedTuple):
    """A request of a trace: ids of no vocabulary, equal where the texts are."""

    prompt: Sequence[int]
    answer: int


@dataclass(frozen=True)
class Replayed:
    """A trace, as `python -m loadtest.traces` writes it. What the model answers is not what the trace goes on with."""

    arrivals: Arrivals
    turns: Sequence[TraceTurn]
    cut: int = 0  # of the prompts, to fit
    name: str = "trace"
    phases: Sequence[str] = ("",)

    @property
    def requests(self) -> int:
        return len(self.turns)

    def asks(self, vocabulary: PromptVocabulary, salt: str, phase: str) -> list[Ask]:
        """Equal ids become equal pieces; another salt's have no text in common with these."""
        pieces = vocabulary.shuffled(Random(salt))
        prompts = ([pieces[each % len(pieces)] for each in turn.prompt] for turn in self.turns)
        return [Ask(vocabulary.prompt(each), turn.answer) for each, turn in zip(prompts, self.turns, strict=True)]

    def fitted(self, context: int | None) -> Replayed:
        """The same; a prompt that is too long loses its end, so that it still begins as others do."""
        if context is None:
            return self
        turns = [TraceTurn(t.prompt, min(t.answer, context // 2)) for t in self.turns]
        turns = [TraceTurn(t.prompt[: context - t.answer], t.answer) for t in turns]
        cut = sum(len(old.prompt) > len(new.prompt) for old, new in zip(self.turns, turns, strict=True))
        return replace(self, turns=turns, cut=cut)

    def __str__(self) -> str:
        return f"{self.requests} requests {self.arrivals}"


Workload = Drawn | Replayed

NAMED = {
    each.name: each
    for each in (
        Drawn("a", Closed(1), requests=2, own=128, answer=128),
        Drawn("b", Closed(1), requests=2, own=2048, answer=64),
        Drawn("c8", Closed(8), requests=8, own=256, answer=128),
        Drawn("c16", Closed(16), requests=16, own=256, answer=128),
        Drawn("d", Closed(8), requests=8, shared=1024, own=64, answer=64, phases=("cold", "warm")),
    )
}
QUICK = ("a", "b", "c8", "d")


def fit(workload: Workload, context: int | None) -> tuple[Workload, str]:
    """A workload that fits, and what had to be changed, in words. Raises WorkloadError."""
    if context is not None and context < LEAST_CONTEXT:
        raise WorkloadError(f"the model takes {context} tokens; there is nothing to measure")
    fitted = workload.fitted(context)
    if fitted == workload:
        return workload, ""
    note = f"does not fit into the model's {context:,} tokens; instead: {fitted}"
    if isinstance(fitted, Replayed):
        note = f"{fitted.cut} prompts end early, so as to fit into the model's {context:,} tokens"
    return fitted, f"{workload.name}: {note}"


class Line(Struct):
    """What we read of a trace's line."""

    time: float
    prompt: list[int]
    answer: list[int]


def read_trace(file: Path, most: int | None, speed_up: float) -> Replayed:
    """The first `most` requests of a file of JSON lines. Raises WorkloadError."""
    try:
        with file.open() as lines:
            read = [decode(line, type=Line) for line in islice(_full(lines), most)]
    except OSError as error:
        raise WorkloadError(f"--trace: cannot read {file}: {error.strerror}") from None
    except ValueError:
        raise WorkloadError(f"--trace: {file} is not a trace; `python -m loadtest.traces` writes one") from None
    if not read or not all(line.prompt and line.answer for line in read):
        raise WorkloadError(f"--trace: {file} holds no request, or an empty one")
    turns = [TraceTurn(line.prompt, len(line.answer)) for line in read]
    return Replayed(Recorded([line.time for line in read], speed_up), turns)


def _full(lines: Iterable[str]) -> Iterable[str]:
    return (line for line in lines if line.strip())
