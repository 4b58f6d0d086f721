"""What is noted while a body is checked: fields that have no effect, and the likely names of unknown ones.

It is the context of pydantic's validation. Knows neither fields nor HTTP.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from config.sources import did_you_mean

MOST_NAMES = 32  # of fields without effect that are reported
MOST_SUGGESTIONS = 8  # more than an error shows
LONGEST_NAME = 64  # characters of a field's name that are reported


@dataclass
class Reading:
    """The notes of one body. Names are paths without indices: `messages.refusal`."""

    ignore_unknown: bool = False  # otherwise they are refused
    ignored: dict[str, None] = field(default_factory=dict)  # a set in the order in which they were found
    suggestions: dict[str, str] = field(default_factory=dict)  # "; did you mean ...?", by the unknown name

    def effective(
        self, values: Mapping[str, Any], place: str, known: Collection[str], without_effect: Collection[str]
    ) -> dict[str, Any]:
        """Return an object's members that are to be checked; `place` is the path before their names.

        Unknown members are among them unless they are ignored: to refuse them is for the check.
        """
        effective = {}
        for name, value in values.items():
            if name in without_effect or (self.ignore_unknown and name not in known):
                self._ignore(place + name)
            elif name not in known:
                self._suggest(place, name, known)
            if name in known or not self.ignore_unknown:
                effective[name] = value
        return effective

    def _ignore(self, path: str) -> None:
        if len(self.ignored) <= MOST_NAMES:
            self.ignored[path[:LONGEST_NAME]] = None

    def _suggest(self, place: str, name: str, known: Collection[str]) -> None:
        if len(self.suggestions) < MOST_SUGGESTIONS and len(name) <= LONGEST_NAME:
            self.suggestions[place + name] = did_you_mean(name, known)

    @property
    def header(self) -> str:
        """Return the fields without effect as a header has them: what a client made up is quoted as in a URL."""
        names = [quote(name, safe="") for name in self.ignored]
        return ", ".join(names[:MOST_NAMES] + ["..."] * (len(names) > MOST_NAMES))


def reading_of(context: Any) -> Reading:
    """Return the notes of the validation with this context; one without any refuses what is unknown."""
    return context if isinstance(context, Reading) else Reading()
