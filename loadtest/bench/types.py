"""What the modules of a benchmark pass on: a server, a request to it, its outcome. Plain data; sends nothing."""

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
    version: str  # empty where it does not say
    vocabulary: PromptVocabulary


class BenchRequest(NamedTuple):
    """One request."""

    prompt: Prompt
    max_tokens: int


@dataclass(frozen=True)
class Outcome:
    """One request: what came of it, or why not."""

    requested_tokens: int
    send_time: float
    reply: Reply
    error: str | None = None
