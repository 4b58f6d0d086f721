"""Data that the modules of a benchmark exchange: a server, a request to it, its outcome."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from loadtest.bench.vocabulary import Prompt, PromptVocabulary
from loadtest.listing import Listing
from loadtest.stream import Reply


@dataclass(frozen=True)
class ServerInfo:
    """The server that is measured."""

    url: str
    listing: Listing
    version: str  # empty if the server does not report it
    vocabulary: PromptVocabulary


class BenchRequest(NamedTuple):
    """A request of a workload."""

    prompt: Prompt
    max_tokens: int


@dataclass(frozen=True)
class Outcome:
    """The outcome of a request: its answer as far as it came, and an error if it failed."""

    requested_tokens: int
    send_time: float
    reply: Reply
    error: str | None = None
