"""Remembers the checks of grammars, so that equal ones are checked once: many requests have the same schema.

That holds for refusals, too. Else a client that repeats a schema whose check takes all the time it may take would keep
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

MAX_KNOWN = 64  # most grammars whose checks are remembered, beside those that run
# Seconds for which it is remembered that a check exceeded its limits: on a busy machine it might not have
LIMIT_SECONDS = 20.0


class GrammarChecks:
    """The checks of one tokenizer. For one event loop only."""

    def __init__(self, run: Callable[[CheckGrammar], Awaitable[Encoded]]) -> None:
        """Remember the results of `run`, which checks a grammar."""
        self._run = run
        self._checks: OrderedDict[CheckGrammar, asyncio.Task[Encoded]] = OrderedDict()  # the latest at the end
        self._forgotten_at: dict[CheckGrammar, float] = {}  # of those that exceeded limits, by the monotonic clock

    async def answer(self, call: CheckGrammar) -> Encoded:
        """Return the answer to a call, also if an equal call has got it. Raises what `run` raises.

        A check goes on if the request for which it began is cancelled.
        """
        if self._forgotten_at.get(call, math.inf) < monotonic():
            self._forget(call)
        if call not in self._checks:
            task = self._checks[call] = asyncio.create_task(self._check(call))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # nothing may wait for it
        task = self._checks[call]
        self._checks.move_to_end(call)
        return await asyncio.shield(task)

    async def _check(self, call: CheckGrammar) -> Encoded:
        try:
            return await self._run(call)
        except TextLimitError:
            self._forgotten_at[call] = monotonic() + LIMIT_SECONDS
            raise
        except TextRefused:
            raise
        except BaseException:  # a later attempt may succeed
            self._forget(call)
            raise
        finally:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        done = [call for call, task in self._checks.items() if task.done()]
        for call in done[: max(0, len(done) - MAX_KNOWN)]:
            self._forget(call)

    def _forget(self, call: CheckGrammar) -> None:
        self._checks.pop(call, None)
        self._forgotten_at.pop(call, None)
