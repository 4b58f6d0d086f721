"""Keeps what a request says from becoming special tokens, such as the one that ends a turn.

A mark is put into each text of a special token before the chat template is rendered, and the prompt is encoded in parts
between the marks: so the template's own special tokens are found, and those of the messages are texts like others.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Any

import tokenizers


class SpecialTexts:
    """The texts of a tokenizer's special tokens."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        added = backend.get_added_tokens_decoder().values()
        texts = [each.content for each in added if each.special and each.content]
        # The first character of each, found by looking ahead, as one may begin within another
        self._first = re.compile("|".join(f"{re.escape(text[0])}(?={re.escape(text[1:])})" for text in texts) or "(?!)")
        self._longest = max(map(len, texts), default=1)

    def begin(self) -> Marker:
        """Return what marks the values of one conversation."""
        return Marker(self._first, self._longest)


class Marker:
    """Marks the special texts in the values of one conversation, by a text that only this object knows."""

    def __init__(self, first: re.Pattern[str], longest: int) -> None:
        self._first = first
        self._longest = longest
        self._mark = f"x{secrets.token_hex(12)}x"  # JSON and repr() write it unchanged
        self._num_marks = 0

    @property
    def num_added_characters(self) -> int:
        return self._num_marks * len(self._mark)

    def mark(self, value: Any) -> Any:
        """Return a value of JSON with a mark after the first character of each special text in its texts and keys.

        A text that completes what the text before it in a list begins has a mark before it: templates write the parts
        of a message one after another.
        """
        match value:
            case str():
                marked, num_found = self._first.subn(lambda found: found[0] + self._mark, value)
                self._num_marks += num_found
                return marked
            case dict():
                return {self.mark(key): self.mark(each) for key, each in value.items()}
            case list():
                return self._mark_list(value)
        return value

    def split(self, prompt: str) -> list[str]:
        """Return the parts of a prompt made of what was marked, which are to be encoded one by one."""
        return prompt.split(self._mark)

    def _mark_list(self, values: Sequence[Any]) -> list[Any]:
        marked, before = [], ""
        for value in values:
            each, text = self.mark(value), value.get("text") if isinstance(value, dict) else value
            if isinstance(text, str):
                if self._spans(before, text[: self._longest]):
                    each = each | {"text": self._mark + each["text"]} if isinstance(each, dict) else self._mark + each
                    self._num_marks += 1
                before = (before + text)[-self._longest :]
            marked.append(each)
        return marked

    def _spans(self, before: str, text: str) -> bool:
        """Return whether a special text begins in one text and ends in the next."""
        whole, parts = self._first.findall(before + text), [*self._first.findall(before), *self._first.findall(text)]
        return len(whole) > len(parts)
