"""Text of tokens as they come, such that all pieces together are the text of all tokens.

    decode(prompt + completion) == decode(prompt) + pieces

(A character that the prompt only began belongs to the completion.) Knows no stop strings. Not built on
tokenizers.DecodeStream: after a prompt that ends within a character that one returns the whole prompt, it raises on
bytes that are no UTF-8, and at the end there is no way to get what it holds back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from server.text.vocabulary import Vocabulary

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what tokenizers decode bytes to that are no UTF-8, or not yet
CONTEXT = 16  # tokens before the new ones that decide how these are decoded: a leading space, bytes of a character
MAX_PENDING_TOKENS = 48  # tokens to wait for bytes to become a character
MAX_PARTIAL_BYTES = 3  # bytes of a character that is not complete


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
        self._window = _find_context(self._spelling, prompt)  # tokens decoded together with the next one
        self._num_emitted = len(self._window)  # tokens of the window whose text is out
        # The number of those tokens and their text, as it may turn out.
        self._emitted_prefixes = [(self._num_emitted, self._spelling.decode(self._window))]
        if self._emitted_prefixes[0][1].endswith(REPLACEMENT):
            shorter = range(self._num_emitted - 1, max(0, self._num_emitted - MAX_PARTIAL_BYTES) - 1, -1)
            self._emitted_prefixes += [(size, self._spelling.decode(self._window[:size])) for size in shorter]

    @property
    def has_pending(self) -> bool:
        """Whether there are tokens whose text comes out with a later one's."""
        return len(self._window) > self._num_emitted

    def push(self, token: int) -> str:
        """Return the text that is certain after a token: none of incomplete characters and of special tokens."""
        if not self._spelling.has_text(token):
            return ""
        self._window.append(token)
        text = self._spelling.decode(self._window)
        num_emitted, piece = self._find_new_text(text)
        if piece and not text.endswith(REPLACEMENT):
            new = self._window[num_emitted:]  # which may begin within a character, and then is none alone
            new_text = self._spelling.decode(new)
            if piece.endswith(new_text):
                self._set_window(new, new_text)
            else:
                self._set_window(self._window, text)
            return piece
        if len(self._window) - self._num_emitted <= MAX_PENDING_TOKENS:
            return ""
        held = min(len(text) - len(text.rstrip(REPLACEMENT)), MAX_PARTIAL_BYTES, len(piece))
        window = self._window[-CONTEXT:]
        emitted = self._spelling.decode(window)
        self._set_window(window, emitted[: len(emitted) - held])
        return piece[: len(piece) - held]

    def flush(self) -> str:
        """Return the text that was held back, when no more tokens follow."""
        text = self._spelling.decode(self._window)
        _, piece = self._find_new_text(text)
        self._set_window(self._window, text)
        return piece

    def _find_new_text(self, text: str) -> tuple[int, str]:
        """Return the number of tokens of the window whose text is out, and the rest of its text."""
        for num_emitted, emitted in self._emitted_prefixes:
            if text.startswith(emitted):
                return num_emitted, text[len(emitted) :]
        # Byte fallback: a byte that belongs to no character undoes the characters just before it.
        return self._num_emitted, self._spelling.decode(self._window[self._num_emitted :])

    def _set_window(self, window: list[int], emitted: str) -> None:
        """Go on after these tokens, of whose text `shown` is out."""
        self._window = window
        self._num_emitted = len(window)
        self._emitted_prefixes = [(len(window), emitted)]


def _find_context(spelling: Spelling, prompt: Sequence[int]) -> list[int]:
    """Return the last tokens of the prompt with text: enough to decode the next one as after the whole prompt."""
    size = CONTEXT
    while True:
        window = [token for token in prompt[-size:] if spelling.has_text(token)]
        text = spelling.decode(window)
        cut_within_bytes = text.startswith(REPLACEMENT)
        if size >= len(prompt) or (text and not cut_within_bytes):
            return window
        size *= 4
