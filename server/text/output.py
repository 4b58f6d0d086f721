"""The text of one choice: takes tokens, and returns text that ends at a stop string. Knows neither requests nor HTTP.

`Detokenizer` adds a piece of text for each token, and the pieces together are the completion's text:

    decode(prompt + completion) == decode(prompt) + pieces

(A character that begins in the prompt and ends in the completion belongs to the completion.) It is not built on
tokenizers.DecodeStream: if the prompt ends within a character, DecodeStream returns the whole prompt; it raises on
bytes that are not UTF-8; and at the end it cannot return the text that it holds back. `StopStrings` ends a text at a
stop string, and `OutputText` combines both classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from server.text.vocabulary import Vocabulary

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # stands in decoded text for bytes that are not UTF-8, or not complete yet
CONTEXT = 16  # number of earlier tokens decoded together with a new one, for leading spaces and split characters
MAX_PENDING_TOKENS = 48  # most tokens whose bytes are held back until they are a complete character
MAX_PARTIAL_BYTES = 3  # most bytes of an incomplete UTF-8 character


class TokenDecoder(NamedTuple):
    """A tokenizer's `decode` and `has_text` with a fixed choice of whether special tokens have text."""

    tokenizer: Vocabulary
    skip_special: bool

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=self.skip_special)

    def has_text(self, token: int) -> bool:
        return self.tokenizer.has_text(token, skip_special_tokens=self.skip_special)


class Detokenizer:
    """The detokenizer of one completion. It decodes only the last few tokens at each step, whatever the length."""

    def __init__(self, tokenizer: Vocabulary, prompt: Sequence[int], *, skip_special: bool = True) -> None:
        """Start the text that follows `prompt`, without its own text. With `skip_special`, special tokens have none."""
        self._decoder = TokenDecoder(tokenizer, skip_special)
        self._window = _find_context(self._decoder, prompt)  # latest tokens, decoded together with the next one
        self._num_emitted = len(self._window)  # number of the window's first tokens whose text was returned
        # Pairs (n, text of the window's first n tokens, which was returned before); several pairs if the prompt may end
        # within a character.
        self._emitted_prefixes = [(self._num_emitted, self._decoder.decode(self._window))]
        if self._emitted_prefixes[0][1].endswith(REPLACEMENT):
            shorter = range(self._num_emitted - 1, max(0, self._num_emitted - MAX_PARTIAL_BYTES) - 1, -1)
            self._emitted_prefixes += [(size, self._decoder.decode(self._window[:size])) for size in shorter]

    @property
    def has_pending(self) -> bool:
        """Whether there are tokens whose text will be returned with that of a later token."""
        return len(self._window) > self._num_emitted

    def push(self, token: int) -> str:
        """Add a token; return the text that is certain now: empty for special tokens and incomplete characters."""
        if not self._decoder.has_text(token):
            return ""
        self._window.append(token)
        text = self._decoder.decode(self._window)
        num_emitted, piece = self._find_new_text(text)
        if piece and not text.endswith(REPLACEMENT):
            new = self._window[num_emitted:]  # tokens that begin within a character decode differently by themselves
            new_text = self._decoder.decode(new)
            if piece.endswith(new_text):
                self._set_window(new, new_text)
            else:
                self._set_window(self._window, text)
            return piece
        if len(self._window) - self._num_emitted <= MAX_PENDING_TOKENS:
            return ""
        held = min(len(text) - len(text.rstrip(REPLACEMENT)), MAX_PARTIAL_BYTES, len(piece))
        window = self._window[-CONTEXT:]
        emitted = self._decoder.decode(window)
        self._set_window(window, emitted[: len(emitted) - held])
        return piece[: len(piece) - held]

    def flush(self) -> str:
        """Return the text that was held back; call it when no more tokens follow."""
        text = self._decoder.decode(self._window)
        _, piece = self._find_new_text(text)
        self._set_window(self._window, text)
        return piece

    def _find_new_text(self, text: str) -> tuple[int, str]:
        """Return (number of the window's first tokens whose text was returned, the rest of the window's `text`)."""
        for num_emitted, emitted in self._emitted_prefixes:
            if text.startswith(emitted):
                return num_emitted, text[len(emitted) :]
        # Byte fallback: an invalid byte turns the characters just before it into replacement characters.
        return self._num_emitted, self._decoder.decode(self._window[self._num_emitted :])

    def _set_window(self, window: list[int], emitted: str) -> None:
        """Set the window to these tokens; `emitted` is the part of their text that was returned."""
        self._window = window
        self._num_emitted = len(window)
        self._emitted_prefixes = [(len(window), emitted)]


def _find_context(decoder: TokenDecoder, prompt: Sequence[int]) -> list[int]:
    """Return the last tokens of the prompt that have text: enough to decode the next one as after the whole prompt."""
    size = CONTEXT
    while True:
        window = [token for token in prompt[-size:] if decoder.has_text(token)]
        text = decoder.decode(window)
        cut_within_bytes = text.startswith(REPLACEMENT)
        if size >= len(prompt) or (text and not cut_within_bytes):
            return window
        size *= 4


# ---------------------------------------------------------------- stop strings
MAX_BROKEN_LENGTH = 4 * MAX_PENDING_TOKENS  # most replacement characters that pending tokens can decode to


class StopStrings:
    """Cuts a text that arrives in pieces at the first stop string; holds back text that may be the start of one."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """Look for these strings. With `include` the stop string itself is returned, too."""
        assert all(stops), "an empty stop string would stop everything"
        self.matched_stop: str | None = None
        self._include = include
        self._searches = [_Search(stop) for stop in stops]
        self._held = ""

    def push(self, piece: str) -> str:
        """Add a piece of text; return the text that cannot be part of a stop string, empty once one was found."""
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
        """Return the text that was held back; call it when no more text follows."""
        held, self._held = self._held, ""
        return held


class _Search:
    """Searches a text that arrives in pieces for one stop string, in constant time for each character.

    Knuth, Morris, Pratt 1977: Fast pattern matching in strings.
    """

    __slots__ = ("_borders", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0  # length of the longest prefix of `stop` that the text ends with
        self._borders = [0]  # by length n >= 1: the longest proper prefix of stop[:n] that is also its suffix

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
        """Return the length of the longest proper prefix of stop[:length] that is also its suffix (its border)."""
        while len(self._borders) < length:
            self._borders.append(self._next(self._borders[-1], self.stop[len(self._borders)]))
        return self._borders[length - 1]


class OutputToken(NamedTuple):
    """A token of a choice, and the offset at which its text begins in the choice's text."""

    token: int
    offset: int  # characters
    shown: bool = True  # False: its text was cut off by a stop string


class TextDelta(NamedTuple):
    """The text that a choice gains in one step, and the tokens whose text begins in it, in order."""

    text: str
    tokens: list[OutputToken]


def locate_tokens(tokenizer: Vocabulary, ids: Sequence[int], text: str) -> list[OutputToken]:
    """Return each of `ids` with its offset in `text`; a special token that the text does not contain has no length."""
    detokenizer, length, found = Detokenizer(tokenizer, [], skip_special=False), 0, []
    for token in ids:
        piece, begin = "", 0
        if tokenizer.has_text(token) or _continues_with(
            tokenizer.piece(token), text, length, has_pending=detokenizer.has_pending
        ):
            piece, begin = _push_token(detokenizer, token)
        found.append(OutputToken(token, length + begin))
        length += len(piece)
    return found


def _continues_with(piece: str, text: str, length: int, *, has_pending: bool) -> bool:
    """Return whether `text` has `piece` at offset `length`, or after the replacement characters of pending bytes."""
    ahead = text[length : length + MAX_BROKEN_LENGTH + len(piece)]
    return ahead.startswith(piece) or (has_pending and ahead.lstrip(REPLACEMENT).startswith(piece))


def _push_token(detokenizer: Detokenizer, token: int) -> tuple[str, int]:
    """Push a token; return the text that the detokenizer gives, and the offset in it where the token's own begins.

    Replacement characters at the start are the bytes of earlier tokens that did not become a character.
    """
    had_pending = detokenizer.has_pending
    piece = detokenizer.push(token)
    own = piece.lstrip(REPLACEMENT) if had_pending else piece
    return piece, len(piece) - len(own or piece)


class OutputText:
    """Turns a choice's tokens into text that ends at a stop string, or where the engine ends the choice."""

    def __init__(
        self, detokenizer: Detokenizer, stop: Sequence[str] = (), *, include_stop: bool = False, min_tokens: int = 0
    ) -> None:
        """Start a text. Stop strings are not looked for in the text of the first `min_tokens` tokens."""
        self.num_tokens = 0  # number of tokens pushed, up to the one that completed a stop string
        self.finish_reason: str | None = None
        self.stop_reason: str | None = None  # the stop string that was found
        self._detokenizer = detokenizer
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._stop = StopStrings(stop, include=include_stop)
        self._length = 0  # number of characters that the detokenizer has returned
        self._released = 0  # number of characters that `push` has returned
        self._held: list[OutputToken] = []  # tokens whose text has not been returned

    def push(
        self, tokens: Sequence[int], finish_reason: str | None = None, *, ends_with_text: bool = False
    ) -> TextDelta:
        """Add tokens; return the text that is certain now. With `finish_reason`, it is the whole rest of the text.

        With the reason 'stop' the last token is a stop token, which is left out of the text, unless `ends_with_text`.
        """
        assert self.finish_reason is None, "the choice has ended"
        pieces = []
        for i, token in enumerate(tokens):
            self.num_tokens += 1
            ends = finish_reason == "stop" and not ends_with_text and i == len(tokens) - 1
            piece, begin = _push_token(self._detokenizer, token) if not ends or self._include_stop else ("", 0)
            self._held.append(OutputToken(token, self._length + begin))
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

    def _release(self, text: str) -> TextDelta:
        """Return `text`, which is certain now, with the tokens whose text begins in what was returned so far.

        Other tokens are held until their text is returned. At the end all of them are, and those that a stop string cut
        off are not `shown`.
        """
        self._released += len(text)
        out, self._held = self._held, []
        if self._stop.matched_stop:
            out = [token._replace(shown=token.offset < self._released) for token in out]
        elif self.finish_reason is None:
            while out and out[-1].offset >= self._released:
                self._held.insert(0, out.pop())
        return TextDelta(text, out)
