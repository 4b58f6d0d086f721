"""A request inside the engine: its tokens, its seat, and what is remembered about it. Knows no tensor and no socket."""

from __future__ import annotations

import time
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from server.engine.ipc.messages import Caching, Failed, SamplingParams

if TYPE_CHECKING:
    from cache_strategies.base import KVCache, Salt, Seat


class RequestError(Exception):
    """A request that cannot be served; becomes an HTTP error of this status."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param

    def to_message(self, request_id: str = "") -> Failed:
        """Return the message for the API worker."""
        return Failed(request_id, self.status, self.message, self.code, self.param)


class DraftProposer(Protocol):
    """Proposes drafts of a text's next tokens."""

    def propose(self, text: Sequence[int], max_tokens: int) -> list[int]:
        """Return up to `max_tokens` draft tokens to follow the text."""

    def update_draft_length(self, accepted: int) -> None:
        """Set the length of the next draft from the number of accepted tokens of the last one."""


@dataclass(slots=True)
class RequestTimes:
    """Monotonic seconds; 0 while it has not happened."""

    arrived: float
    admitted: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0


@dataclass(eq=False, slots=True)
class Request:
    """Waiting while it has no seat, running while it has one; preemption takes the seat and keeps everything else."""

    key: tuple[int, str]  # API worker, and the id it gave the request
    tokens: list[int]  # prompt and output
    sampling: SamplingParams
    cache: KVCache
    reason: str  # why this cache
    salt: Salt  # only sequences with an equal one share memory with it
    priority: int = 0
    caching: Caching = field(default_factory=Caching)
    explain: bool = False
    siblings: list[Request] = field(default_factory=list)  # same prompt; itself too, once it is in line
    proposer: DraftProposer | None = None  # None: the request has no drafts
    due: float = 0.0  # monotonic seconds: its arrival, moved by its priority; set by the scheduler
    arrival_index: int = 0  # number of the request, which orders those that are due at the same time
    seat: Seat | None = None
    num_cached_tokens: int | None = None  # of the prompt, found in the cache; None until its first row has run
    miss: str | None = None  # why no more was found
    forked: bool = False  # it took over a sibling's prompt
    num_preemptions: int = 0
    refused_at: int = -1  # the scheduler's count of changes when it was last asked and found no room; -1: it was not
    passed_over: int = 0  # requests that were admitted while this one, before them in line, had no room
    num_scored_tokens: int = 0  # tokens of the prompt whose log-probabilities have been sent
    num_draft_tokens: int = 0  # guesses that were verified,
    num_accepted_tokens: int = 0  # and those that came true
    finish_reason: Literal["stop", "length"] | None = None
    num_prompt_tokens: int = field(init=False)
    times: RequestTimes = field(default_factory=lambda: RequestTimes(time.monotonic()))

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.tokens)

    @property
    def queue_key(self) -> tuple[float, int]:
        """Return its place in line: a lower one runs first and is preempted last."""
        return self.due, self.arrival_index

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def waits_for_sibling(self) -> bool:
        """A sibling computes their prompt, or will: the others wait to take it over."""
        if self.num_output_tokens or not self.cache.contract.forkable:
            return False
        return next((sibling for sibling in self.siblings if not sibling.num_output_tokens), self) is not self

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens that have not entered the cache."""
        assert self.seat is not None
        return len(self.tokens) - self.seat.length

    @property
    def max_total_tokens(self) -> int:
        """Tokens it can come to."""
        return self.num_prompt_tokens + self.sampling.max_tokens

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Its prompt's log-probabilities are wanted, and not told yet: all of it has to be computed."""
        return self.sampling.prompt_logprobs is not None and self.num_scored_tokens < self.num_prompt_tokens - 1

    @property
    def max_cached(self) -> int | None:
        """Tokens it may take from the cache."""
        return 0 if self.needs_prompt_logprobs else self.caching.max_cached

    def propose_draft(self, max_tokens: int) -> list[int]:
        """Return at most `max_tokens` draft tokens, if the request decodes and wants any; else an empty list."""
        if self.proposer is None or not self.num_output_tokens or self.num_remaining_tokens > 1:
            return []
        max_tokens = min(
            max_tokens, self.sampling.max_tokens - self.num_output_tokens - 1
        )  # behind the last of them one more is drawn
        return self.proposer.propose(self.tokens, max_tokens) if max_tokens > 0 else []

    def record_draft(self, drafted: int, accepted: int) -> None:
        """Count the draft tokens that entered a step, and those of them that were accepted."""
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        if self.proposer is not None:
            self.proposer.update_draft_length(accepted)

    def append_token(self, token: int, eos_ids: Collection[int]) -> None:
        """Append a sampled token; set finish_reason if it is the last."""
        self.tokens.append(token)
        now = time.monotonic()
        self.times.first_token = self.times.first_token or now
        self.times.last_token = now
        if token in self.get_end_token_ids(eos_ids):
            self.finish_reason = "stop"
        elif self.num_output_tokens >= self.sampling.max_tokens:
            self.finish_reason = "length"

    def check_allowed_tokens(self, eos_ids: Collection[int]) -> None:
        """Raise RequestError if none of the allowed tokens may be drawn before the text may end."""
        if not (self.sampling.allowed_token_ids and self.sampling.min_tokens):
            return
        if {*array("q", self.sampling.allowed_token_ids)} <= {*self.get_end_token_ids(eos_ids)}:
            message = "allowed_token_ids: all of them end the text, and min_tokens lets none of these come first"
            raise RequestError(400, message, param="allowed_token_ids")

    def get_end_token_ids(self, eos_ids: Collection[int]) -> Collection[int]:
        """Return the tokens that end the text."""
        if self.sampling.ignore_eos:
            return self.sampling.stop_token_ids
        return {*eos_ids, *self.sampling.stop_token_ids} if self.sampling.stop_token_ids else eos_ids
