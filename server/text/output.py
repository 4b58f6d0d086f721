"""The text of one choice: tokens in, text out that ends at a stop string. Knows neither requests nor HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from server.text.detokenizer import MAX_PENDING_TOKENS, REPLACEMENT, Detokenizer
from server.text.vocabulary import Vocabulary

MAX_BROKEN_LENGTH = 4 * MAX_PENDING_TOKENS  # characters that bytes become which are none: of as many tokens as may wait


class StopStrings:
    """Lets text through up to the first stop string, and never the beginning of one that may still be completed."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """Look for these strings. With `include` the stop string itself is returned, too."""
        assert all(stops), "an empty stop string would stop everything"
        self.matched_stop: str | None = None
        self._include = include
        self._searches = [_Search(stop) for stop in stops]
        self._held = ""

    def push(self, piece: str) -> str:
        """Return the text that is certain after a piece. After a stop string was found, there is none."""
        if self.matched_stop or not piece:
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
            end, start, self.matched_stop = min(ends)
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


class Placed(NamedTuple):
    """A token of a choice, and where its text begins in the choice's."""

    token: int
    offset: int  # characters
    shown: bool = True  # False: a stop string took its text away


class Released(NamedTuple):
    """Text that is certain now, and the tokens that came out with it, in order."""

    text: str
    tokens: list[Placed]


def locate_tokens(tokenizer: Vocabulary, ids: Sequence[int], text: str) -> list[Placed]:
    """Return where each token begins in its text; a special token that the text does not spell has no length."""
    detokenizer, length, found = Detokenizer(tokenizer, [], skip_special=False), 0, []
    for token in ids:
        piece, begin = "", 0
        if tokenizer.has_text(token) or _continues_with(
            tokenizer.piece(token), text, length, has_pending=detokenizer.has_pending
        ):
            piece, begin = _push_token(detokenizer, token)
        found.append(Placed(token, length + begin))
        length += len(piece)
    return found


def _continues_with(piece: str, text: str, length: int, *, has_pending: bool) -> bool:
    """Return whether the text goes on with this piece, maybe after bytes of tokens that wait for a character."""
    ahead = text[length : length + MAX_BROKEN_LENGTH + len(piece)]
    return ahead.startswith(piece) or (has_pending and ahead.lstrip(REPLACEMENT).startswith(piece))


def _push_token(detokenizer: Detokenizer, token: int) -> tuple[str, int]:
    """Return the text that comes out with a token, and where in it the token's own begins.

    What comes out with it of tokens before it begins where it does, or is bytes that became no character.
    """
    had_pending = detokenizer.has_pending
    piece = detokenizer.push(token)
    own = piece.lstrip(REPLACEMENT) if had_pending else piece
    return piece, len(piece) - len(own or piece)


class OutputText:
    """Puts a choice's tokens through its detokenizer and its stop strings until one of them, or the engine, ends it."""

    def __init__(
        self, detokenizer: Detokenizer, stop: Sequence[str] = (), *, include_stop: bool = False, min_tokens: int = 0
    ) -> None:
        """Start a text. Stop strings are not looked for in the text of the first `min_tokens`."""
        self.num_tokens = 0  # up to the one that completed a stop string
        self.finish_reason: str | None = None
        self.stop_reason: str | None = None  # a stop string
        self._detokenizer = detokenizer
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._stop = StopStrings(stop, include=include_stop)
        self._length = 0  # of the text that the detokenizer gave
        self._released = 0  # of the text that is out
        self._held: list[Placed] = []  # tokens whose text is not out

    def push(self, tokens: Sequence[int], finish_reason: str | None = None) -> Released:
        """Return the text that is certain now; all of it, once `finish_reason` is set. Nothing may follow after that.

        With the reason 'stop' the last token is one that ends texts, and no part of this one.
        """
        assert self.finish_reason is None, "the choice has ended"
        pieces = []
        for i, token in enumerate(tokens):
            self.num_tokens += 1
            ends = finish_reason == "stop" and i == len(tokens) - 1
            piece, begin = _push_token(self._detokenizer, token) if not ends or self._include_stop else ("", 0)
            self._held.append(Placed(token, self._length + begin))
            pieces.append(self._apply_stop_strings(piece))
            if self._stop.matched_stop:
                break
        else:
            if finish_reason is not None:
                pieces += [self._apply_stop_strings(self._detokenizer.flush()), self._stop.flush()]
        self.finish_reason = "stop" if self._stop.matched_stop else finish_reason
        self.stop_reason = self._stop.matched_stop
        return self._release("".join(pieces))

    def _apply_stop_strings(self, piece: str) -> str:
        self._length += len(piece)
        return self._stop.push(piece) if self.num_tokens > self._min_tokens else piece

    def _release(self, text: str) -> Released:
        """Return the text, and the tokens that begin in the released part; at the end all of them."""
        self._released += len(text)
        out, self._held = self._held, []
        if self._stop.matched_stop:
            out = [placed._replace(shown=placed.offset < self._released) for placed in out]
        elif self.finish_reason is None:
            while out and out[-1].offset >= self._released:
                self._held.insert(0, out.pop())
        return Released(text, out)
