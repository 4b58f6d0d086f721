"""A compiled grammar, which many texts use at the same time or one after another, and the renewal of its lexer.

Copies of llguidance's matcher share one lexer, which makes its states as texts need them and never drops one. If it
reaches its limits, no copy can go on: neither the text that took it there nor any other. They continue with a matcher
that has a lexer of its own then. It is compiled on the spot if that is quick; otherwise a spare one is there before it
is needed, and another is ordered. Knows neither requests nor threads.
"""

from __future__ import annotations

from collections.abc import Callable

from llguidance import LLMatcher


class CompiledGrammar:
    """The matcher at the start of a grammar, of which texts make copies."""

    def __init__(
        self,
        start: LLMatcher,
        end_id: int,
        *,
        compile_now: Callable[[], LLMatcher] | None = None,
        order_spare: Callable[[CompiledGrammar], None] | None = None,
    ) -> None:
        """Begin texts with copies of `start`. `end_id`: llguidance's token for the end of the grammar.

        Further matchers are made by `compile_now`, or, where compiling takes long, ordered by `order_spare`, which
        leads to a call of `add_spare`. Without either, the lexer is not renewed.
        """
        self.start = start
        self.end_id = end_id
        self._compile_now = compile_now
        self._order_spare = order_spare
        self._spare: LLMatcher | None = None
        self._is_spare_ordered = False

    def prepare_spare(self) -> None:
        """Order a spare matcher if one is needed, and neither there nor ordered yet."""
        if self._order_spare is not None and self._spare is None and not self._is_spare_ordered:
            self._is_spare_ordered = True
            self._order_spare(self)

    def add_spare(self, spare: LLMatcher | None) -> None:
        """Keep the spare matcher that was ordered; None if it could not be compiled."""
        self._spare, self._is_spare_ordered = spare, False

    def renew(self) -> bool:
        """Set `start` to a matcher with a new lexer; return False if there is none."""
        if self._compile_now is not None:
            renewed: LLMatcher | None = self._compile_now()
        else:
            renewed, self._spare = self._spare, None
            self.prepare_spare()
        if renewed is None or renewed.is_error():
            return False
        self.start = renewed
        return True
