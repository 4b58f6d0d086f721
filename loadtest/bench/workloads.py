"""Workloads: prompts and answers of given lengths, random or recorded.

A workload makes the same requests for the same salt, and others for another.
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
from loadtest.bench.types import BenchRequest
from loadtest.bench.vocabulary import PromptVocabulary

MIN_CONTEXT = 16  # tokens; a smaller context is not worth measuring


class WorkloadError(Exception):
    """A workload cannot be run; the message says what to change."""


@dataclass(frozen=True)
class Drawn:
    """Random prompts: `shared_tokens` tokens that all begin with, then `prompt_tokens` tokens of their own."""

    name: str
    arrivals: Arrivals
    requests: int  # in a round, and in each of its phases
    prompt_tokens: int
    max_tokens: int
    shared_tokens: int = 0
    phases: Sequence[str] = ("",)  # of a round; their prompts begin alike, and the first phase has to compute that

    def make_requests(self, vocabulary: PromptVocabulary, salt: str, phase: str) -> list[BenchRequest]:
        shared = vocabulary.draw(Random(salt), self.shared_tokens)
        own_random = Random(f"{salt}/{phase}")
        prompts = [shared + vocabulary.draw(own_random, self.prompt_tokens) for _ in range(self.requests)]
        return [BenchRequest(vocabulary.make_prompt(each), self.max_tokens) for each in prompts]

    def fit_to_context(self, context: int | None) -> Drawn:
        """Return the workload with prompts and answers short enough for the context."""
        if context is None or self.prompt_tokens + self.shared_tokens + self.max_tokens <= context:
            return self
        max_tokens = min(self.max_tokens, context // 2)
        room, wanted = context - max_tokens, self.prompt_tokens + self.shared_tokens
        shared = self.shared_tokens * room // wanted if wanted > room else self.shared_tokens
        return replace(
            self, max_tokens=max_tokens, shared_tokens=shared, prompt_tokens=min(self.prompt_tokens, room - shared)
        )

    def __str__(self) -> str:
        shared = f"{self.shared_tokens:,} shared + " if self.shared_tokens else ""
        return f"{self.arrivals}, {shared}{self.prompt_tokens:,} tokens in, {self.max_tokens:,} out"


class TraceTurn(NamedTuple):
    """A request of a trace; its ids belong to no vocabulary, but equal ids stand for equal tokens."""

    prompt: Sequence[int]
    max_tokens: int


@dataclass(frozen=True)
class Replayed:
    """A trace, as `python -m loadtest.traces` writes it.

    A later turn repeats the trace's answers, not those of the model.
    """

    arrivals: Arrivals
    turns: Sequence[TraceTurn]
    num_truncated: int = 0  # prompts that were cut to fit into the context
    name: str = "trace"
    phases: Sequence[str] = ("",)

    @property
    def requests(self) -> int:
        return len(self.turns)

    def make_requests(self, vocabulary: PromptVocabulary, salt: str, phase: str) -> list[BenchRequest]:
        """Return the requests, with equal ids as equal pieces; which pieces depends on the salt."""
        pieces = vocabulary.shuffled(Random(salt))
        prompts = ([pieces[each % len(pieces)] for each in turn.prompt] for turn in self.turns)
        return [
            BenchRequest(vocabulary.make_prompt(each), turn.max_tokens)
            for each, turn in zip(prompts, self.turns, strict=True)
        ]

    def fit_to_context(self, context: int | None) -> Replayed:
        """Return the trace with long prompts cut at their ends, so that they still begin as others do."""
        if context is None:
            return self
        turns = [TraceTurn(t.prompt, min(t.max_tokens, context // 2)) for t in self.turns]
        turns = [TraceTurn(t.prompt[: context - t.max_tokens], t.max_tokens) for t in turns]
        num_truncated = sum(len(old.prompt) > len(new.prompt) for old, new in zip(self.turns, turns, strict=True))
        return replace(self, turns=turns, num_truncated=num_truncated)

    def __str__(self) -> str:
        return f"{self.requests} requests {self.arrivals}"


Workload = Drawn | Replayed

NAMED_WORKLOADS = {
    each.name: each
    for each in (
        Drawn("a", Closed(1), requests=2, prompt_tokens=128, max_tokens=128),
        Drawn("b", Closed(1), requests=2, prompt_tokens=2048, max_tokens=64),
        Drawn("c8", Closed(8), requests=8, prompt_tokens=256, max_tokens=128),
        Drawn("c16", Closed(16), requests=16, prompt_tokens=256, max_tokens=128),
        Drawn("d", Closed(8), requests=8, shared_tokens=1024, prompt_tokens=64, max_tokens=64, phases=("cold", "warm")),
    )
}
DEFAULT_WORKLOADS = ("a", "b", "c8", "d")


def fit_workload(workload: Workload, context: int | None) -> tuple[Workload, str]:
    """Return the workload as it fits into the context, and a note on the change, or "". Raises WorkloadError."""
    if context is not None and context < MIN_CONTEXT:
        raise WorkloadError(f"the model's context of {context} tokens is too short to be measured")
    fitted = workload.fit_to_context(context)
    if fitted == workload:
        return workload, ""
    note = f"does not fit into the model's {context:,} tokens, and became: {fitted}"
    if isinstance(fitted, Replayed):
        note = f"{fitted.num_truncated} prompts are cut to fit into the model's {context:,} tokens"
    return fitted, f"{workload.name}: {note}"


class Line(Struct):
    """The fields of a trace's line that are read."""

    time: float
    prompt: list[int]
    answer: list[int]


def read_trace(file: Path, max_requests: int | None, speed_up: float) -> Replayed:
    """Read the first `max_requests` requests of a file of JSON lines. Raises WorkloadError."""
    try:
        with file.open() as lines:
            entries = [decode(line, type=Line) for line in islice(_skip_blank_lines(lines), max_requests)]
    except OSError as error:
        raise WorkloadError(f"--trace: cannot read {file}: {error.strerror}") from None
    except ValueError:
        raise WorkloadError(f"--trace: {file} is not a trace; `python -m loadtest.traces` writes one") from None
    if not entries or not all(line.prompt and line.answer for line in entries):
        raise WorkloadError(f"--trace: {file} holds no request, or an empty one")
    turns = [TraceTurn(line.prompt, len(line.answer)) for line in entries]
    return Replayed(Recorded([line.time for line in entries], speed_up), turns)


def _skip_blank_lines(lines: Iterable[str]) -> Iterable[str]:
    return (line for line in lines if line.strip())
