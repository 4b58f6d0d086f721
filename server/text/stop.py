"""Stop strings: the text of a completion ends where one begins. Knows characters only, no tokens.

Generation ends as soon as the text ends with a stop string. So the one completed first counts, and of those completed
by the same character the longest. This depends on the text alone, not on the pieces it comes in.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Lets text through up to the first stop string, and never the beginning of one that may still be completed."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """Look for these strings. With `include` the stop string itself is returned, too."""
        assert all(stops), "an empty stop string would stop everything"
        self.found: str | None = None
        self._include = include
        self._searches = [_Search(stop) for stop in stops]
        self._held = ""

    def push(self, piece: str) -> str:
        """Return the text that is certain after a piece. After a stop string was found, there is none."""
        if self.found or not piece:
            return ""
        if not self._searches:
            return piece
        text, before = self._held + piece, len(self._held)
        ends = [
            (before + end, before + end - len(search.stop), search.stop)
            for search in self._searches
            if (end := search.push(piece)) is not None
        ]
        if ends:
            end, start, self.found = min(ends)
            self._held = ""
            return text[: end if self._include else start]
        certain = len(text) - max(search.matched for search in self._searches)
        self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """Return the text that was held back, when no more follows."""
        held, self._held = self._held, ""
        return held


class _Search:
    """Looks for one stop string; a character costs the same however much of it the text ends with.

    Knuth, Morris, Pratt 1977: Fast pattern matching in strings.
    """

    __slots__ = ("_borders", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0  # characters of `stop` with which the text ends
        self._borders = [0]  # by length, from 1 on: how much of a beginning of `stop` is its end, too

    def push(self, piece: str) -> int | None:
        """Return the number of characters of the piece that complete the stop string; None if none do."""
        if not self.matched and self.stop[0] not in piece:
            return None
        for count, character in enumerate(piece, start=1):
            self.matched = self._next(self.matched, character)
            if self.matched == len(self.stop):
                return count
        return None

    def _next(self, matched: int, character: str) -> int:
        while matched and self.stop[matched] != character:
            matched = self._border(matched)
        return matched + (self.stop[matched] == character)

    def _border(self, length: int) -> int:
        """Return a border's length; borders are computed as far as a text has matched."""
        while len(self._borders) < length:
            self._borders.append(self._next(self._borders[-1], self.stop[len(self._borders)]))
        return self._borders[length - 1]
