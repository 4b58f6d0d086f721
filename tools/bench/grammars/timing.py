"""Times grammars: compiling, and the work for each token of texts drawn at random.

Runs in the environment of each library, so it needs numpy only. Knows neither a library nor the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

NUM_TOKENS, MAX_TOKENS = 2000, 200  # tokens of all texts at least, and of one text at most


class Matcher(Protocol):
    """The state of a text by a grammar."""

    def fill_mask(self) -> None:
        """Compute which tokens may follow."""
        ...

    def list_allowed(self) -> NDArray[np.intp]:
        """Return the tokens that the latest mask allows, without the end."""
        ...

    def accept(self, token: int) -> bool:
        """Append a token to the text; return whether it is complete."""
        ...


class GrammarTimes(NamedTuple):
    """The times of one grammar."""

    compile_ms: float
    mean_us: float  # of mask and step for a token
    p99_us: float
    tokens: int


def time_grammar(compile: Callable[[], Callable[[], Matcher]], draw: np.random.Generator) -> GrammarTimes:
    """Return the times of a grammar; `compile` returns a function that begins a text by it.

    The first mask is a part of compiling, as a library may leave a part of the work to that.
    """
    began = time.perf_counter()
    begin = compile()
    begin().fill_mask()
    return time_texts(begin, draw, time.perf_counter() - began)


def time_texts(begin: Callable[[], Matcher], draw: np.random.Generator, compile_seconds: float) -> GrammarTimes:
    """Return the times of a compiled grammar; `begin` begins a text by it."""
    seconds: list[float] = []
    while len(seconds) < NUM_TOKENS:
        seconds += time_text(begin(), draw)
    mean, p99 = float(np.mean(seconds)), float(np.percentile(seconds, 99))
    return GrammarTimes(1e3 * compile_seconds, 1e6 * mean, 1e6 * p99, len(seconds))


def time_text(matcher: Matcher, draw: np.random.Generator) -> list[float]:
    """Return the seconds of the work for each token of a text, drawn from the allowed ones."""
    works: list[float] = []
    complete = False
    while not complete and len(works) < MAX_TOKENS:
        began = time.perf_counter()
        matcher.fill_mask()
        work = time.perf_counter() - began
        allowed = matcher.list_allowed()
        if not len(allowed):
            break
        token = int(draw.choice(allowed))
        began = time.perf_counter()
        complete = matcher.accept(token)
        works.append(work + time.perf_counter() - began)
    return works


def list_tokens(mask: NDArray[np.uint8], end_id: int) -> NDArray[np.intp]:
    """Return the ids below `end_id` whose bits are set in a mask, of which the lowest bit comes first."""
    return np.flatnonzero(np.unpackbits(mask, bitorder="little")[:end_id])


def format_rows(by_library: Mapping[str, Mapping[str, GrammarTimes | str]]) -> list[str]:
    """Return a table in Markdown of times by library and grammar; a text says why there are none."""
    lines = ["| grammar | library | compile and first mask | mask and step, mean | p99 |", "|---|---|---:|---:|---:|"]
    for name in next(iter(by_library.values())):
        for library, rows in by_library.items():
            row = rows[name]
            if isinstance(row, str):
                lines.append(f"| {name} | {library} | {row} | | |")
            else:
                times = f"{row.compile_ms:.1f} ms | {row.mean_us:.1f} us | {row.p99_us:.1f} us"
                lines.append(f"| {name} | {library} | {times} |")
    return lines
