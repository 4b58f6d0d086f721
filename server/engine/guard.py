"""The guards of an instance: parts of the engine's work in which whatever its strategy raises becomes a StrategyError.

A guard is a `with` around plain calls: one for scheduling a row, locating a step's rows, committing them, a report. It
costs no check of what single calls return. The error names the instance and the method. While a guard is entered, its
number can be read by another process, which sees calls that never return. Knows no strategy.
"""

from __future__ import annotations

from itertools import count
from traceback import walk_tb
from types import TracebackType
from typing import Protocol

from cache_strategies.errors import StrategyError
from cache_strategies.types import PinError
from server.engine.calls import NUM_CODES, CallObserver
from server.engine.isolation.checks import describe_error


class MakeFault(Protocol):
    """Reports a fault of a method, and returns it as an error to raise."""

    def __call__(
        self, method: str, problem: str, cause: BaseException | None = None, *, is_report: bool = False
    ) -> StrategyError: ...


# Guards under which nothing that a request needs is computed: a fault there is counted, and ends nothing
REPORTS = {
    "blocks",
    "budget",
    "collect_block_events",
    "count_visible",
    "describe_block",
    "estimate_bytes",
    "list_prefixes",
    "mark_blocks",
    "usage",
}
# The method or field that is at fault under the guard "schedule", by the innermost of these functions
SCHEDULING = {
    "ready": "ready",
    "reserve": "reserve",
    "update_length": "ready",
    "limit_row": "stop",
    "has_room": "reserve",
}
PINNING = frozenset({"pin", "pin_prefix"})
OUTSIDE = -1


class Guard:
    """A part of the engine's work on an instance. What is raised in it becomes a StrategyError of the instance."""

    __slots__ = ("_code", "_make_fault", "_name", "_numbers", "_outer", "_running")

    def __init__(
        self, name: str, code: int, make_fault: MakeFault, observer: CallObserver, numbers: count[int]
    ) -> None:
        self._name, self._code, self._numbers = name, code, numbers
        self._running = observer.running
        self._make_fault = make_fault
        self._outer = OUTSIDE

    def __enter__(self) -> None:
        assert self._outer == OUTSIDE, "a guard is entered once at a time"
        running = self._running
        self._outer, running[0] = running[0], next(self._numbers) + self._code

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._running[0], self._outer = self._outer, OUTSIDE
        if error is not None and not self._is_answer(error):
            method, is_report = find_method(error, self._name), self._name in REPORTS
            raise self._make_fault(method, describe_error(error), error, is_report=is_report) from error

    def _is_answer(self, error: BaseException) -> bool:
        """Return whether an error is no fault, or one that was reported already."""
        match error:
            case StrategyError():
                return error.is_counted
            case PinError():  # the answer to an operator
                return self._name in PINNING
        return isinstance(error, KeyboardInterrupt)  # of the user of an engine without a server


class Guards(dict[str, Guard]):
    """The guards of an instance by name, each made when it is first used."""

    def __init__(self, instance: str, make_fault: MakeFault, observer: CallObserver) -> None:
        super().__init__()
        self._make_fault, self._observer = make_fault, observer
        self._codes = observer.encode_methods(instance)
        self._numbers = count(NUM_CODES, NUM_CODES)

    def __missing__(self, name: str) -> Guard:
        self[name] = guard = Guard(name, self._codes.get(name, 0), self._make_fault, self._observer, self._numbers)
        return guard


def find_method(error: BaseException, name: str) -> str:
    """Return the name of the method from which an error came, as far as the traceback tells; else that of its guard.

    All guards but one are around the call of one method, of which they have the name.
    """
    if name != "schedule":
        return name
    names = [frame.f_code.co_name for frame, _ in walk_tb(error.__traceback__)]
    return next((SCHEDULING[each] for each in reversed(names) if each in SCHEDULING), name)
