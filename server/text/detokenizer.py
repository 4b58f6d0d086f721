"""Text of tokens as they come, such that all pieces together are the text of all tokens:

    decode(prompt + completion) == decode(prompt) + pieces

(A character that the prompt only began belongs to the completion.) Knows no stop strings. Not built on
tokenizers.DecodeStream: after a prompt that ends within a character that one returns the whole prompt, it raises on
bytes that are no UTF-8, and at the end there is no way to get what it holds back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from server.text.vocabulary import Vocabulary

UNKNOWN = "\N{REPLACEMENT CHARACTER}"  # what tokenizers decode bytes to that are no UTF-8, or not yet
CONTEXT = 16  # tokens before the new ones that decide how these are decoded: a leading space, bytes of a character
PATIENCE = 48  # tokens to wait for bytes to become a character
LONGEST_PART = 3  # bytes of a character that is not complete


class Spelling(NamedTuple):
    """Decodes tokens, with special tokens or without."""

    tokenizer: Vocabulary
    skip_special: bool

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=self.skip_special)

    def has_text(self, token: int) -> bool:
        return self.tokenizer.has_text(token, skip_special_tokens=self.skip_special)


class Detokenizer:
    """One completion's text. Decodes only a few tokens at a time, however long the text has become."""

    def __init__(self, tokenizer: Vocabulary, prompt: Sequence[int], *, skip_special: bool = True) -> None:
        """Start after a prompt. Special tokens have no text with `skip_special`, and are spelled otherwise."""
        self._spelling = Spelling(tokenizer, skip_special)
        self._window = _context(self._spelling, prompt)  # tokens decoded together with the next one
        self._settled = len(self._window)  # tokens of the window whose text is out
        self._readings = [(self._settled, self._spelling.decode(self._window))]  # ... and it, as it may turn out
        if self._readings[0][1].endswith(UNKNOWN):
            shorter = range(self._settled - 1, max(0, self._settled - LONGEST_PART) - 1, -1)
            self._readings += [(size, self._spelling.decode(self._window[:size])) for size in shorter]

    @property
    def waits(self) -> bool:
        """Are there tokens whose text comes out with a later one's?"""
        return len(self._window) > self._settled

    def push(self, token: int) -> str:
        """Return the text that is certain after a token: none of incomplete characters and of special tokens."""
        if not self._spelling.has_text(token):
            return ""
        self._window.append(token)
        text = self._spelling.decode(self._window)
        settled, piece = self._unshown(text)
        if piece and not text.endswith(UNKNOWN):
            new = self._window[settled:]  # which may begin within a character, and then is none alone
            alone = self._spelling.decode(new)
            if piece.endswith(alone):
                self._keep(new, alone)
            else:
                self._keep(self._window, text)
            return piece
        if len(self._window) - self._settled <= PATIENCE:
            return ""
        held = min(len(text) - len(text.rstrip(UNKNOWN)), LONGEST_PART, len(piece))
        window = self._window[-CONTEXT:]
        shown = self._spelling.decode(window)
        self._keep(window, shown[: len(shown) - held])
        return piece[: len(piece) - held]

    def flush(self) -> str:
        """Return the text that was held back, when no more tokens follow."""
        text = self._spelling.decode(self._window)
        _, piece = self._unshown(text)
        self._keep(self._window, text)
        return piece

    def _unshown(self, text: str) -> tuple[int, str]:
        """Return the number of tokens of the window whose text is out, and the rest of its text."""
        for settled, shown in self._readings:
            if text.startswith(shown):
                return settled, text[len(shown) :]
        # Byte fallback: a byte that belongs to no character undoes the characters just before it.
        return self._settled, self._spelling.decode(self._window[self._settled :])

    def _keep(self, window: list[int], shown: str) -> None:
        """Go on after these tokens, of whose text `shown` is out."""
        self._window = window
        self._settled = len(window)
        self._readings = [(len(window), shown)]


def _context(spelling: Spelling, prompt: Sequence[int]) -> list[int]:
    """Return the last tokens of the prompt with text: enough to decode the next one as after the whole prompt."""
    size = CONTEXT
    while True:
        window = [token for token in prompt[-size:] if spelling.has_text(token)]
        text = spelling.decode(window)
        cut_within_bytes = text.startswith(UNKNOWN)
        if size >= len(prompt) or (text and not cut_within_bytes):
            return window
        size *= 4
