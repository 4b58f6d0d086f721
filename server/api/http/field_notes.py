"""What is noted while a body is checked: fields that have no effect, and the likely names of unknown ones.

It is the context of pydantic's validation. Knows neither fields nor HTTP.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from config.sources import did_you_mean

MAX_NAMES = 32  # of fields without effect that are reported
MAX_SUGGESTIONS = 8  # more than an error shows
MAX_NAME_LENGTH = 64  # characters of a field's name that are reported


@dataclass
class Reading:
    """The notes of one body. Names are paths without indices: `messages.refusal`."""

    ignore_unknown: bool = False  # otherwise they are refused
    ignored: dict[str, None] = field(default_factory=dict)  # a set in the order in which they were found
    suggestions: dict[str, str] = field(default_factory=dict)  # "; did you mean ...?", by the unknown name

    def filter_fields(
        self, values: Mapping[str, Any], path_prefix: str, known: Collection[str], no_effect_fields: Collection[str]
    ) -> dict[str, Any]:
        """Return an object's members that are to be checked; `path_prefix` is the path before their names.

        Unknown members are among them unless they are ignored: to refuse them is for the check.
        """
        effective = {}
        for name, value in values.items():
            if name in no_effect_fields or (self.ignore_unknown and name not in known):
                self._note_ignored(path_prefix + name)
            elif name not in known:
                self._note_suggestion(path_prefix, name, known)
            if name in known or not self.ignore_unknown:
                effective[name] = value
        return effective

    def _note_ignored(self, path: str) -> None:
        if len(self.ignored) <= MAX_NAMES:
            self.ignored[path[:MAX_NAME_LENGTH]] = None

    def _note_suggestion(self, path_prefix: str, name: str, known: Collection[str]) -> None:
        if len(self.suggestions) < MAX_SUGGESTIONS and len(name) <= MAX_NAME_LENGTH:
            self.suggestions[path_prefix + name] = did_you_mean(name, known)

    @property
    def header_value(self) -> str:
        """Return the fields without effect as a header has them: what a client made up is quoted as in a URL."""
        names = [quote(name, safe="") for name in self.ignored]
        return ", ".join(names[:MAX_NAMES] + ["..."] * (len(names) > MAX_NAMES))


def get_reading(context: Any) -> Reading:
    """Return the notes of the validation with this context; one without any refuses what is unknown."""
    return context if isinstance(context, Reading) else Reading()
