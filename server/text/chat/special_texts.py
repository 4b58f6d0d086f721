"""Keeps texts of messages from becoming special tokens, such as the one that ends a turn.

A mark is put into each text of a special token before the chat template is rendered, and the prompt is encoded in parts
between the marks: so the template's own special tokens are found, and those of the messages are texts like others.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tokenizers


class MarkedMessages(NamedTuple):
    """Messages with marks in the texts of special tokens."""

    messages: list[dict[str, Any]]
    mark: str
    num_added_characters: int

    def split(self, prompt: str) -> list[str]:
        """Return the parts of a prompt made of these messages, which are to be encoded one by one."""
        return prompt.split(self.mark)


class SpecialTexts:
    """The texts of a tokenizer's special tokens."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        special = [
            each.content for each in backend.get_added_tokens_decoder().values() if each.special and each.content
        ]
        # The first character of each, found by looking ahead, as one may begin within another
        self._first = re.compile(
            "|".join(f"{re.escape(text[0])}(?={re.escape(text[1:])})" for text in special) or r"(?!)"
        )

    def mark(self, messages: Sequence[Mapping[str, Any]]) -> MarkedMessages:
        """Return the messages with a mark, a new one in each call, after the first character of each special text."""
        mark = f"x{secrets.token_hex(12)}x"  # which JSON's and Python's forms of a text have as it is
        num_marks = 0

        def change(value: Any) -> Any:
            nonlocal num_marks
            if isinstance(value, str):
                value, num_found = self._first.subn(lambda found: found[0] + mark, value)
                num_marks += num_found
            elif isinstance(value, dict):
                return {key: change(inner) for key, inner in value.items()}
            elif isinstance(value, list):
                return [change(inner) for inner in value]
            return value

        changed = [{key: each if key == "role" else change(each) for key, each in m.items()} for m in messages]
        return MarkedMessages(changed, mark, num_marks * len(mark))
