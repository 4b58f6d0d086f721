"""Parses responses, whole or streamed, into `Answer`, and compares two answers. Knows OpenAI's objects, not HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Fields of a chat completion as a whole; text completions have them in each choice.
PROMPT_FIELDS = ("prompt_token_ids", "prompt_logprobs")
IGNORED_FIELDS = {"index", "kv_cache", "delta", "message", "text"}  # fields of a choice that are read separately


@dataclass
class Answer:
    """The received part of a response."""

    choices: dict[int, dict[str, Any]] = field(default_factory=dict)  # by index: "text" and the other fields
    prompt_fields: dict[str, Any] = field(default_factory=dict)  # values of PROMPT_FIELDS outside of choices
    usage: tuple[int, int] | None = None  # tokens of the prompt, and of all choices
    cached_tokens: int | None = None

    def take(self, message: Mapping[str, Any]) -> None:
        """Add a whole response, or the next chunk of a stream."""
        for choice in message["choices"]:
            known = self.choices.setdefault(choice["index"], {"text": ""})
            known["text"] += _get_text(choice)
            for name, value in choice.items():
                if name not in IGNORED_FIELDS and value is not None:
                    known[name] = _merge_values(known.get(name), value)
        self.prompt_fields |= {name: message[name] for name in PROMPT_FIELDS if message.get(name) is not None}
        if usage := message.get("usage"):
            self.usage = usage["prompt_tokens"], usage["completion_tokens"]
            self.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]

    def list_fields(self) -> dict[str, Any]:
        """Return everything that equal answers have in common, by names for a message."""
        whole = {"choices": sorted(self.choices), "usage": self.usage, **self.prompt_fields}
        of_choices = {
            f"{name} of choice {i}": value for i, choice in self.choices.items() for name, value in choice.items()
        }
        return whole | of_choices


def _get_text(choice: Mapping[str, Any]) -> str:
    holder = choice.get("message") or choice.get("delta")
    return (choice.get("text") if holder is None else holder.get("content")) or ""


def _merge_values(known: Any, later: Any) -> Any:
    """Return two lists concatenated, also within objects; for anything else return the later value."""
    if isinstance(known, list) and isinstance(later, list):
        return known + later
    if isinstance(known, dict) and isinstance(later, dict):
        return {name: _merge_values(known.get(name), value) for name, value in later.items()}
    return later


def find_difference(expected: Answer, got: Answer) -> str | None:
    """Return a description of the first difference between two whole answers; None if they are equal, bit for bit."""
    known, found = expected.list_fields(), got.list_fields()
    for name in known | found:
        if name == "usage" and None in (expected.usage, got.usage):
            continue  # a stream has it on request
        if known.get(name) != found.get(name):
            return f"{name}: {found.get(name)!r} instead of {known.get(name)!r}"
    return None


def find_partial_difference(expected: Answer, got: Answer) -> str | None:
    """Return a description of a difference if `got` is not a beginning of `expected`; None if it is."""
    for index, found in got.choices.items():
        if (known := expected.choices.get(index)) is None:
            return f"there is a choice {index}"
        if not known["text"].startswith(found["text"]):
            return f"text of choice {index} begins {found['text']!r} instead of {known['text']!r}"
        ids, known_ids = found.get("token_ids", []), known.get("token_ids", [])
        if known_ids[: len(ids)] != ids:
            return f"token_ids of choice {index} begin {ids} instead of {known_ids}"
    return None
