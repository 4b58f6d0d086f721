"""Writes the rules of a grammar in llguidance's dialect of Lark, piece by piece. Knows neither messages nor models."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from server.grammar.constraint import BOUNDED_WHITESPACE, add_json_options

ANY_TEXT = "TEXT"  # the terminal of a text without special tokens
ANY_TEXT_BODY = r"/(.|\n)*/"


class GrammarRules:
    """The rules of one grammar. A method that adds a rule returns the name by which others refer to it."""

    def __init__(self, markers: Iterable[str], find_token: Callable[[str], int | None]) -> None:
        """Start without rules.

        `find_token` returns the id of a marker that is a special token, which rules then name instead of its text.
        """
        found = {marker: find_token(marker) for marker in markers}
        self._special = {marker: token for marker, token in found.items() if token is not None}
        # A marker that has special tokens within it is not one string: `quote` splits it at these
        whole = [marker for marker in found if marker in self._special or not any(map(marker.count, self._special))]
        self._pattern = "|".join(map(re.escape, sorted(whole, key=len, reverse=True)))
        self._rules: dict[str, str] = {}

    def quote(self, text: str) -> str:
        """Return a text as strings of the grammar, and special tokens.

        Each marker is a string by itself, because llguidance's lexer takes the longest string and does not go back: if
        two texts differ only after a marker, both are recognised only if the marker is the first string of each.
        """
        parts = re.split(f"({self._pattern})", text) if self._pattern else [text]
        return " ".join(
            f"<[{self._special[part]}]>" if part in self._special else quote_string(part) for part in parts if part
        )

    def is_special(self, marker: str) -> bool:
        """Return whether a marker is a special token."""
        return marker in self._special

    def add(self, name: str, body: str) -> str:
        """Add a rule, or replace the one of this name."""
        self._rules[name] = body
        return name

    def add_json(self, name: str, schema: Mapping[str, Any]) -> str:
        """Add the rule of JSON that a schema accepts."""
        return self.add(name, f"%json {json.dumps(add_json_options(schema, BOUNDED_WHITESPACE), ensure_ascii=False)}")

    def add_text(self) -> str:
        """Add the rule of any text without special tokens."""
        return self.add(ANY_TEXT, ANY_TEXT_BODY)

    def add_text_until(self, name: str, markers: Iterable[str]) -> str:
        """Add the rule of a text up to the first of these markers, and the marker."""
        markers, text = list(markers), self.add_text()
        special = [marker for marker in markers if marker.startswith(tuple(self._special))]
        plain = [quote_string(marker) for marker in markers if marker not in special]
        alternatives = [f"{text} {self.quote(marker)}" for marker in special]
        if plain:  # lazy: it ends with the first marker
            rule = self.add(f"{name}_plain[lazy]", f"{text} ({' | '.join(plain)})")
            alternatives.append(rule.removesuffix("[lazy]"))
        return self.add(name, " | ".join(alternatives))

    def add_members(self, name: str, members: Sequence[tuple[str, bool]], separator: str) -> str:
        """Add the rules of members in this order, each with whether it is required; return how others refer to them.

        Rule `{name}_from_{number}` is for the members from that number on, as separators stand only between members.
        """
        following, must_follow = "", False
        for number, (member, is_required) in reversed(list(enumerate(members))):
            more = f" {quote_string(separator)} {following}" if following else ""
            present = member + (more if must_follow or not more else f" ({more})?")
            absent = f" | {following}" if following and not is_required else ""
            following = self.add(f"{name}_from_{number}", present + absent)
            must_follow |= is_required
        return following if must_follow or not following else f"{following}?"

    def write(self, start: str) -> str:
        """Return the grammar, of which `start` is the first rule."""
        return "\n".join([f"start: {start}", *(f"{name}: {body}" for name, body in self._rules.items())]) + "\n"


def quote_string(text: str) -> str:
    """Return a text as a string of the grammar."""
    return json.dumps(text, ensure_ascii=False)
