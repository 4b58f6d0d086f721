"""The interface of an observer of what the engine calls of strategies: the supervisor's means to find what hangs.

What runs is one number, so that recording it costs little: a number of the call, times NUM_CODES, and a code of what is
called (`Guard` of guard.py). It is 0 if no strategy runs.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableSequence
from typing import Protocol

NUM_CODES = 1 << 16  # codes of methods are below this


class CallObserver(Protocol):
    """Sees which call of a strategy's method is running, so that one that never returns can be named."""

    running: MutableSequence[int]  # its only element is the running call, which the caller sets

    def encode_methods(self, instance: str) -> Mapping[str, int]:
        """Return a code for each method of an instance; 0 stands for others."""
        ...


class NoObserver:
    """Implements CallObserver by looking at nothing."""

    def __init__(self) -> None:
        self.running: MutableSequence[int] = [0]

    def encode_methods(self, instance: str) -> Mapping[str, int]:
        return {}
