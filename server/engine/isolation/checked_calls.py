"""Runs a strategy's code: whatever it raises becomes a StrategyError that names the instance and the method.

Knows neither caches nor what their methods return.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from itertools import count
from typing import Any, TypeVar

from cache_strategies.errors import StrategyError
from cache_strategies.types import PinError
from server.engine.isolation import results
from server.engine.isolation.calls import NUM_CODES, CallObserver, NoObserver

log = logging.getLogger(__name__)

T = TypeVar("T")

LOG_INTERVAL = 60.0  # seconds between two log messages about faults of the same method


class CheckedCalls:
    """Calls the code of one instance, and reports its faults."""

    def __init__(self, instance: str, on_fault: Callable[[StrategyError], None], calls: CallObserver | None) -> None:
        """`on_fault` is called with each fault, once; `calls` sees which method is running."""
        calls = calls or NoObserver()
        self._instance, self._on_fault = instance, on_fault
        self._running, self._codes = calls.running, calls.encode_methods(instance)
        self._call_numbers = count(NUM_CODES, NUM_CODES)
        self._log_again_at: dict[str, float] = {}  # by method: when a fault of it is logged again

    def _run(self, method: str, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a strategy's code as a call of `method`. Raises StrategyError for any exception of it.

        SystemExit is one of them. KeyboardInterrupt comes from the user, if the engine runs without a server.
        """
        running = self._running
        outer, running[0] = running[0], next(self._call_numbers) + self._codes.get(method, 0)
        try:
            return function(*args, **kwargs)
        except (PinError, StrategyError, KeyboardInterrupt):
            raise  # PinError is the answer to an operator; a StrategyError has been reported
        except BaseException as error:
            raise self.make_fault(method, results.describe_error(error), error) from error
        finally:
            running[0] = outer

    def make_fault(self, method: str, problem: str, cause: BaseException | None = None) -> StrategyError:
        """Report and log a fault, and return it as an error to raise.

        Another fault of the same method is logged after LOG_INTERVAL at the earliest.
        """
        fault, now = StrategyError(self._instance, method, problem), time.monotonic()
        if now >= self._log_again_at.get(method, 0.0):
            self._log_again_at[method] = now + LOG_INTERVAL
            log.error("%s", fault, exc_info=cause)
        self._on_fault(fault)
        return fault

    def _check_type(self, method: str, kind: type[T], found: Any) -> T:
        """Return what a call returned. Raises StrategyError unless it has exactly the type `kind`."""
        if type(found) is not kind:
            raise self.make_fault(method, f"it returned {results.describe(found)}, not a {kind.__name__}")
        return found
