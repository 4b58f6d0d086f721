"""Divides the time of a step among its parts and the operations in them. Independent of the engine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch

from kernels.tracing import Recorder, get_synchronize


class SpanTimer(Recorder):
    """Adds up seconds by name from `begin` to `end`; each moment counts for the innermost span or operation alone.

    Time outside of all spans and operations counts for the name `rest`.
    """

    def __init__(self, rest: str, device: torch.device | str = "cpu") -> None:
        self._rest = rest
        self._synchronize = get_synchronize(device)
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._stack: list[str] = []  # names of the spans around this moment, the innermost last
        self._since = 0.0

    def begin(self) -> None:
        """Set the seconds of all names to zero, and start to measure."""
        self._seconds.clear()
        self._stack, self._since = [self._rest], perf_counter()

    def end(self) -> dict[str, float]:
        """Return the seconds of each name since `begin`."""
        self._add_elapsed()
        return dict(self._seconds)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        self._add_elapsed()
        self._stack.append(name)
        try:
            yield
        finally:
            self._add_elapsed()
            self._stack.pop()

    @contextmanager
    def op(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
        """Measure a call of an operation of `Ops` as a span with its name; wait for the device before and after it."""
        self._synchronize()
        with self.span(name):
            yield
            self._synchronize()

    def add_seconds(self, name: str, seconds: float) -> None:
        """Count `seconds` of the time that has just passed for `name` instead of the innermost span."""
        self._add_elapsed()
        self._seconds[name] += seconds
        self._seconds[self._stack[-1]] -= seconds

    def _add_elapsed(self) -> None:
        now = perf_counter()
        if self._stack:
            self._seconds[self._stack[-1]] += now - self._since
        self._since = now
