"""Workloads: requests with random prompts of a given length, or those of a recorded trace.

A workload makes its requests from a salt (a text): the same requests for the same salt, other ones for another salt.
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

MIN_CONTEXT = 16  # minimum context of a model, in tokens; a model with less is not measured


class WorkloadError(Exception):
    """A workload cannot be run; the message says what to change."""


@dataclass(frozen=True)
class Drawn:
    """A workload of random prompts: `shared_tokens` tokens that begin all of them, then `prompt_tokens` own tokens."""

    name: str
    arrivals: Arrivals
    requests: int  # number of requests in each phase of a round
    prompt_tokens: int
    max_tokens: int
    shared_tokens: int = 0
    # names of a round's phases, such as cold and warm; the prompts of all phases begin with the same tokens
    phases: Sequence[str] = ("",)

    def make_requests(self, vocabulary: PromptVocabulary, salt: str, phase: str) -> list[BenchRequest]:
        shared = vocabulary.draw(Random(salt), self.shared_tokens)
        own_random = Random(f"{salt}/{phase}")
        prompts = [shared + vocabulary.draw(own_random, self.prompt_tokens) for _ in range(self.requests)]
        return [BenchRequest(vocabulary.make_prompt(each), self.max_tokens) for each in prompts]

    def fit_to_context(self, context: int | None) -> Drawn:
        """Return the workload with prompts and answers shortened to fit into `context` tokens; None: no limit."""
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
    """A request of a trace. The ids of its prompt belong to no vocabulary; equal ids stand for equal tokens."""

    prompt: Sequence[int]
    max_tokens: int


@dataclass(frozen=True)
class Replayed:
    """A workload that sends the requests of a trace, as `python -m loadtest.traces` writes it.

    A prompt with earlier turns of a conversation has the answers of the trace, not those of the measured model.
    """

    arrivals: Arrivals
    turns: Sequence[TraceTurn]
    num_truncated: int = 0  # number of prompts that were cut to fit into the model's context
    name: str = "trace"
    phases: Sequence[str] = ("",)

    @property
    def requests(self) -> int:
        return len(self.turns)

    def make_requests(self, vocabulary: PromptVocabulary, salt: str, phase: str) -> list[BenchRequest]:
        """Return the trace's requests with each token id replaced by a piece of the vocabulary, chosen by `salt`."""
        pieces = vocabulary.shuffled(Random(salt))
        prompts = ([pieces[each % len(pieces)] for each in turn.prompt] for turn in self.turns)
        return [
            BenchRequest(vocabulary.make_prompt(each), turn.max_tokens)
            for each, turn in zip(prompts, self.turns, strict=True)
        ]

    def fit_to_context(self, context: int | None) -> Replayed:
        """Return the trace with prompts and answers cut to fit into `context` tokens; None: no limit.

        Prompts are cut at their ends, so that they still begin with the same tokens as other prompts.
        """
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
        Drawn("e1", Closed(1), requests=1, prompt_tokens=16_384, max_tokens=64),
        Drawn("e8", Closed(8), requests=8, prompt_tokens=4096, max_tokens=64),
        # Prompts are computed one after the other, in steps of 512 tokens, beside which earlier streams decode: with
        # shorter answers the first stream would end before the last one begins.
        Drawn("e16", Closed(16), requests=16, prompt_tokens=4096, max_tokens=160),
        Drawn("f", Closed(1), requests=1, shared_tokens=8192, prompt_tokens=256, max_tokens=8, phases=("cold", "warm")),
        Drawn("g", Closed(128), requests=128, prompt_tokens=512, max_tokens=64),
    )
}
DEFAULT_WORKLOADS = ("a", "b", "c8", "d")


def fit_workload(workload: Workload, context: int | None) -> tuple[Workload, str]:
    """Return (the workload, shortened to fit into `context` tokens; a note on the change, "" if there is none).

    Raises WorkloadError if the context has fewer than MIN_CONTEXT tokens.
    """
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
    """The fields that are read from a line (a JSON object) of a trace."""

    time: float
    prompt: list[int]
    answer: list[int]


def read_trace(file: Path, max_requests: int | None, speed_up: float) -> Replayed:
    """Read the first `max_requests` requests (None: all) of a trace, a file of JSON lines.

    Raises WorkloadError if the file cannot be read, is not a trace, or has no request or an empty one.
    """
    try:
        with file.open() as lines:
            entries = [decode(line, type=Line) for line in islice(_skip_blank_lines(lines), max_requests)]
    except OSError as error:
        raise WorkloadError(f"--trace: cannot read {file}: {error.strerror}") from None
    except ValueError:
        raise WorkloadError(f"--trace: {file} is not a trace; `python -m loadtest.traces` writes one") from None
    if not entries or not all(line.prompt and line.answer for line in entries):
        raise WorkloadError(f"--trace: {file} has no request, or one with an empty prompt or answer")
    turns = [TraceTurn(line.prompt, len(line.answer)) for line in entries]
    return Replayed(Recorded([line.time for line in entries], speed_up), turns)


def _skip_blank_lines(lines: Iterable[str]) -> Iterable[str]:
    return (line for line in lines if line.strip())
