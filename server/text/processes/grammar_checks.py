"""Caches the checks of grammars, so that equal ones are checked once: many requests have the same schema.

Refusals are cached, too. Otherwise a client that repeats a schema whose check takes all the time it may take would keep
the grammars of all others waiting. Knows neither processes nor what a grammar is.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from server.text.errors import TextLimitError, TextRefused
from server.text.processes.messages import CheckGrammar, Encoded

MAX_CACHED = 64  # most checks in the cache
# Seconds for which it is cached that a check exceeded its limits; the CPU time of equal checks differs a little
LIMIT_SECONDS = 20.0


class GrammarCheckCache:
    """The checks of grammars with one tokenizer. For one event loop only."""

    def __init__(self, run: Callable[[CheckGrammar], Awaitable[Encoded]]) -> None:
        """Cache the results of `run`, which checks a grammar."""
        self._run = run
        self._checks: OrderedDict[CheckGrammar, asyncio.Future[Encoded]] = OrderedDict()  # the last used at the end

    async def check(self, call: CheckGrammar) -> Encoded:
        """Return the result of `run` for a call; equal calls share one. Raises what `run` raises.

        A check goes on if the request for which it began is cancelled.
        """
        if call not in self._checks:
            check = self._checks[call] = asyncio.ensure_future(self._run(call))
            check.add_done_callback(lambda done: self._on_done(call, done))
            if len(self._checks) > MAX_CACHED:
                self._checks.popitem(last=False)
        self._checks.move_to_end(call)
        return await asyncio.shield(self._checks[call])

    def _on_done(self, call: CheckGrammar, done: asyncio.Future[Encoded]) -> None:
        """Forget a check that may succeed later; at once, or after a while if it exceeded its limits."""
        error = None if done.cancelled() else done.exception()  # also marks the exception as retrieved
        if isinstance(error, TextLimitError):
            done.get_loop().call_later(LIMIT_SECONDS, self._checks.pop, call, None)
        elif done.cancelled() or not isinstance(error, TextRefused | None):
            self._checks.pop(call, None)
