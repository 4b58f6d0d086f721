"""Caches the checks of grammars, so that equal ones are checked once: many requests have the same schema.

Refusals are cached, too. Otherwise a client that repeats a schema whose check takes all the time it may take would keep
the grammars of all others waiting. Knows neither processes nor what a grammar is.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from time import monotonic

from server.text.errors import TextLimitError, TextRefused
from server.text.processes.messages import CheckGrammar, Encoded

MAX_CACHED = 64  # most checks in the cache, beside those that run
# Seconds for which it is cached that a check exceeded its limits; the CPU time of equal checks differs a little
LIMIT_SECONDS = 20.0


class GrammarCheckCache:
    """The checks of grammars with one tokenizer. For one event loop only."""

    def __init__(self, run: Callable[[CheckGrammar], Awaitable[Encoded]]) -> None:
        """Cache the results of `run`, which checks a grammar."""
        self._run = run
        self._checks: OrderedDict[CheckGrammar, asyncio.Task[Encoded]] = OrderedDict()  # the last used at the end
        self._expiry: dict[CheckGrammar, float] = {}  # of those that exceeded limits, by the monotonic clock

    async def check(self, call: CheckGrammar) -> Encoded:
        """Return the result of `run` for a call; equal calls share one. Raises what `run` raises.

        A check goes on if the request for which it began is cancelled.
        """
        if self._expiry.get(call, math.inf) < monotonic():
            self._remove(call)
        if call not in self._checks:
            task = self._checks[call] = asyncio.create_task(self._run_check(call))
            # Otherwise asyncio logs an exception that nothing awaits, as its request was cancelled
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        task = self._checks[call]
        self._checks.move_to_end(call)
        return await asyncio.shield(task)

    async def _run_check(self, call: CheckGrammar) -> Encoded:
        try:
            return await self._run(call)
        except TextLimitError:
            self._expiry[call] = monotonic() + LIMIT_SECONDS
            raise
        except TextRefused:
            raise
        except BaseException:  # a later attempt may succeed
            self._remove(call)
            raise
        finally:
            self._evict_oldest()

    def _evict_oldest(self) -> None:
        done = [call for call, task in self._checks.items() if task.done()]
        for call in done[: max(0, len(done) - MAX_CACHED)]:
            self._remove(call)

    def _remove(self, call: CheckGrammar) -> None:
        self._checks.pop(call, None)
        self._expiry.pop(call, None)
