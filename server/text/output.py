"""The text of one choice: tokens in, text out that ends at a stop string. Knows neither requests nor HTTP."""

from __future__ import annotations

from collections.abc import Sequence

from server.text.detokenizer import Detokenizer
from server.text.stop import StopStrings


class OutputText:
    """Puts a choice's tokens through its detokenizer and its stop strings until one of them, or the engine, ends it."""

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str]) -> None:
        self.num_tokens = 0  # up to the one that completed a stop string
        self.finish_reason: str | None = None
        self._detokenizer = detokenizer
        self._stop = StopStrings(stop)

    def push(self, tokens: Sequence[int], finish_reason: str | None = None) -> str:
        """The text that is certain now; all of it, once `finish_reason` is set. Nothing may follow after that."""
        assert self.finish_reason is None, "the choice has ended"
        pieces = []
        for token in tokens:
            self.num_tokens += 1
            pieces.append(self._stop.push(self._detokenizer.push(token)))
            if self._stop.found:
                break
        else:
            if finish_reason is not None:
                pieces += [self._stop.push(self._detokenizer.flush()), self._stop.flush()]
        self.finish_reason = "stop" if self._stop.found else finish_reason
        return "".join(pieces)
