"""Data that the modules of a benchmark exchange: a server, a request to it, its outcome."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from loadtest.bench.vocabulary import Prompt, PromptVocabulary
from loadtest.listing import Listing
from loadtest.stream import Reply


@dataclass(frozen=True)
class ServerInfo:
    """The server that is measured: its URL, its model, its version, and the vocabulary for random prompts."""

    url: str
    listing: Listing
    version: str  # the server's version; empty if it does not report one
    vocabulary: PromptVocabulary


class BenchRequest(NamedTuple):
    """A request of a benchmark: a prompt, and the exact number of tokens of its answer."""

    prompt: Prompt
    max_tokens: int


@dataclass(frozen=True)
class Outcome:
    """The outcome of a request: the part of its answer that arrived, and an error message if it failed."""

    requested_tokens: int
    send_time: float
    reply: Reply
    error: str | None = None
