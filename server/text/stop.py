"""Stop strings: the text of a completion ends where one begins. Knows characters only, no tokens.

Generation ends as soon as the text ends with a stop string. So the one completed first counts, and of those completed
by the same character the longest. This depends on the text alone, not on the pieces it comes in.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Lets text through up to the first stop string, and never the beginning of one that may still be completed."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """With `include` the stop string itself is let through, too."""
        assert all(stops), "an empty stop string would stop everything"
        self.found: str | None = None
        self._include = include
        self._stops = tuple(stops)
        self._held = ""

    def push(self, piece: str) -> str:
        """The text that is certain now. Once a stop string was found there is no more."""
        if self.found or not piece:
            return ""
        if not self._stops:
            return piece
        text = self._held + piece
        ends = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if ends:
            end, start, self.found = min(ends)
            self._held = ""
            return text[: end if self._include else start]
        certain = len(text) - max((_begun(text, stop) for stop in self._stops), default=0)
        self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held


def _begun(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop`, not complete, begins."""
    longest = min(len(stop) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
