"""Divides time among those who spend it: whoever is called pauses who called it. Knows no engine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from kernels.ops import Ops
from kernels.tracing import TimingHook


class Spans:
    """Seconds by name, of all time between `begin` and `end`; what nobody claims goes to `rest`."""

    def __init__(self, rest: str) -> None:
        self._rest = rest
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._stack: list[str] = []
        self._since = 0.0

    def begin(self) -> None:
        self._seconds.clear()
        self._stack, self._since = [self._rest], perf_counter()

    def end(self) -> dict[str, float]:
        """Return the seconds of each name since `begin`."""
        self._add_elapsed()
        return dict(self._seconds)

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Count the time within the block for `name`, except what others claim within it."""
        self._add_elapsed()
        self._stack.append(name)
        try:
            yield
        finally:
            self._add_elapsed()
            self._stack.pop()

    def claim(self, name: str, seconds: float) -> None:
        """So many of the seconds since the last claim were this one's."""
        self._add_elapsed()
        self._seconds[name] += seconds
        self._seconds[self._stack[-1]] -= seconds

    def _add_elapsed(self) -> None:
        now = perf_counter()
        if self._stack:
            self._seconds[self._stack[-1]] += now - self._since
        self._since = now

    @contextmanager
    def trace_calls(self, owner: Any, attribute: str, name: str) -> Iterator[None]:
        """Within the block every call of owner.attribute is `name`'s."""
        run, own = getattr(owner, attribute), attribute in vars(owner)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.measure(name):
                return run(*args, **kwargs)

        setattr(owner, attribute, timed)
        try:
            yield
        finally:
            setattr(owner, attribute, run) if own else delattr(owner, attribute)


class SpansOfOps(TimingHook):
    """`with` it, every operation claims its time under its own name."""

    def __init__(self, ops: Ops, device: str, spans: Spans) -> None:
        super().__init__(ops, device)
        self._spans = spans

    def on_seconds(self, name: str, seconds: float) -> None:
        self._spans.claim(name, seconds)
