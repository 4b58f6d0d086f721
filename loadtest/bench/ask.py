"""What goes between those who make load: a server, a request to it, what came of that. Plain data; sends nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from loadtest.bench.vocabulary import Prompt, PromptVocabulary
from loadtest.listing import Listing
from loadtest.stream import Reply


@dataclass(frozen=True)
class ServerInfo:
    """What is loaded."""

    url: str
    listing: Listing
    version: str  # empty where it does not tell
    vocabulary: PromptVocabulary


class Ask(NamedTuple):
    """One request."""

    prompt: Prompt
    answer: int  # tokens


@dataclass(frozen=True)
class Outcome:
    """One request: what came of it, or why not."""

    asked: int  # tokens
    sent: float
    reply: Reply
    error: str | None = None
