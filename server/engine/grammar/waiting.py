"""The requests that wait until their grammars are compiled; only then they join the engine's queue.

Knows messages and the compiler, but neither memory nor what becomes of a request.
"""

from __future__ import annotations

from collections.abc import Sequence

from server.engine.extension import StepExtension
from server.engine.grammar.compiler import GrammarCompiler
from server.engine.ipc.messages import Submit
from server.engine.results import Event
from server.engine.scheduling.request import RequestError
from server.records import RequestRecord, StepReport


class WaitingForGrammars(StepExtension):
    """The waiting messages, in order of arrival; each with the API worker that sent it."""

    def __init__(self, compiler: GrammarCompiler, max_waiting: int) -> None:
        self._compiler = compiler
        self._max_waiting = max_waiting
        self._messages: dict[tuple[int, str], Submit] = {}

    def is_busy(self) -> bool:
        return bool(self._messages)

    def hold(self, worker: int, message: Submit) -> bool:
        """Let a message wait if its grammar is not compiled yet; return whether it waits.

        It also waits if another choice (n > 1) of its prompt does, whose cached prompt it will share. Raises
        RequestError if too many wait.
        """
        if message.grammar is None:
            return False
        sibling_waits = message.sibling_of is not None and (worker, message.sibling_of) in self._messages
        if self._compiler.prepare(message.grammar) and not sibling_waits:
            return False
        if len(self._messages) >= self._max_waiting:
            text = f"{len(self._messages)} requests are already waiting for their grammars: try again later"
            raise RequestError(429, text, code="queue_full")
        self._messages[worker, message.request_id] = message
        return True

    def begin(self) -> list[tuple[int, Submit]]:
        """Remove and return the messages whose grammars are compiled, or have failed, in order of arrival."""
        self._compiler.collect()
        if not self._messages:
            return []
        ready = [key for key, each in self._messages.items() if self._compiler.prepare(each.grammar or "")]
        return [(key[0], self._messages.pop(key)) for key in ready]

    def withdraw(self, worker: int, request_id: str | None) -> bool:
        found = [key for key in self._messages if key[0] == worker and request_id in (key[1], None)]
        for key in found:
            del self._messages[key]
        return bool(found)

    def report(self, report: StepReport, finished: Sequence[RequestRecord]) -> Sequence[Event]:
        """Add what happened to grammars to the report."""
        report.grammars = self._compiler.meter.collect()
        return ()
