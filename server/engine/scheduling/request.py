"""A request inside the engine: its tokens, its seat, and what is remembered about it. Knows no tensor and no socket."""

from __future__ import annotations

import time
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from server.engine.ipc.messages import Caching, Failed, Sampling
from server.engine.sampling.draw import NOTHING, Draw, Text, penalises

if TYPE_CHECKING:
    from cache_strategies.base import KVCache, Seat
    from server.engine.sampling.ngram_proposer import NgramProposer


class RequestError(Exception):
    """A request that cannot be served; becomes an HTTP error of this status."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param

    def told(self, request_id: str = "") -> Failed:
        """Return the message for the API worker."""
        return Failed(request_id, self.status, self.message, self.code, self.param)


@dataclass(slots=True)
class Times:
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
    sampling: Sampling
    cache: KVCache
    reason: str  # why this cache
    priority: int = 0
    caching: Caching = field(default_factory=Caching)
    explain: bool = False
    siblings: list[Request] = field(default_factory=list)  # same prompt; itself too, once it is in line
    lookup: NgramProposer | None = None  # where guesses at its next tokens come from; None: it wants none
    due: float = 0.0  # monotonic seconds: its arrival, moved by its priority; set by the scheduler
    arrival: int = 0  # number of the request, which orders those that are due at the same time
    seat: Seat | None = None
    cached_tokens: int | None = None  # of the prompt, found in the cache; None until its first row has run
    miss: str | None = None  # why no more was found
    forked: bool = False  # it took over a sibling's prompt
    preemptions: int = 0
    refused_at: int = -1  # the scheduler's count of changes when it was last asked and found no room; -1: it was not
    passed_over: int = 0  # requests that were admitted while this one, before them in line, had no room
    scored: int = 0  # tokens of the prompt whose log-probabilities have been sent
    drafted_tokens: int = 0  # guesses that were verified,
    accepted_tokens: int = 0  # and those that came true
    finish_reason: Literal["stop", "length"] | None = None
    prompt_tokens: int = field(init=False)
    times: Times = field(default_factory=lambda: Times(time.monotonic()))

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)

    @property
    def place(self) -> tuple[float, int]:
        """Return its place in line: a lower one runs first and is preempted last."""
        return self.due, self.arrival

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def held_back(self) -> bool:
        """A sibling computes their prompt, or will: the others wait to take it over."""
        if self.generated or not self.cache.contract.forkable:
            return False
        return next((sibling for sibling in self.siblings if not sibling.generated), self) is not self

    @property
    def remaining(self) -> int:
        """Tokens that have not entered the cache."""
        assert self.seat is not None
        return len(self.tokens) - self.seat.length

    @property
    def most_tokens(self) -> int:
        """Tokens it can come to."""
        return self.prompt_tokens + self.sampling.max_tokens

    @property
    def unscored(self) -> bool:
        """Its prompt's log-probabilities are wanted, and not told yet: all of it has to be computed."""
        return self.sampling.prompt_logprobs is not None and self.scored < self.prompt_tokens - 1

    @property
    def max_cached(self) -> int | None:
        """Tokens it may take from the cache."""
        return 0 if self.unscored else self.caching.max_cached

    def draft(self, most: int) -> list[int]:
        """Return at most `most` draft tokens, if the request decodes and wants any; else an empty list."""
        if self.lookup is None or not self.generated or self.remaining > 1:
            return []
        most = min(most, self.sampling.max_tokens - self.generated - 1)  # behind the last of them one more is drawn
        return self.lookup.draft(self.tokens, most) if most > 0 else []

    def verified(self, drafted: int, accepted: int) -> None:
        """Count the draft tokens that entered a step, and those of them that were accepted."""
        self.drafted_tokens += drafted
        self.accepted_tokens += accepted
        if self.lookup is not None:
            self.lookup.learn(accepted)

    def draws(self, eos_ids: Collection[int], draft: Sequence[int] = ()) -> list[Draw]:
        """Return how the next token is drawn, and the one after each draft token, if all before it are accepted."""
        return [self._draw(eos_ids, draft[:guesses]) for guesses in range(len(draft) + 1)]

    def _draw(self, eos_ids: Collection[int], draft: Sequence[int]) -> Draw:
        sampling, split = self.sampling, self.prompt_tokens
        text = Text(self.tokens[:split], [*self.tokens[split:], *draft]) if penalises(sampling) else NOTHING
        banned = self.ends(eos_ids) if self.generated + len(draft) < sampling.min_tokens else ()
        return Draw(sampling, len(self.tokens) + len(draft), text, banned)

    def extend(self, token: int, eos_ids: Collection[int]) -> None:
        """Append a sampled token; set finish_reason if it is the last."""
        self.tokens.append(token)
        now = time.monotonic()
        self.times.first_token = self.times.first_token or now
        self.times.last_token = now
        if token in self.ends(eos_ids):
            self.finish_reason = "stop"
        elif self.generated >= self.sampling.max_tokens:
            self.finish_reason = "length"

    def check_draws(self, eos_ids: Collection[int]) -> None:
        """Raise RequestError if none of the allowed tokens may be drawn before the text may end."""
        if not (self.sampling.allowed_token_ids and self.sampling.min_tokens):
            return
        if {*array("q", self.sampling.allowed_token_ids)} <= {*self.ends(eos_ids)}:
            message = "allowed_token_ids: all of them end the text, and min_tokens lets none of these come first"
            raise RequestError(400, message, param="allowed_token_ids")

    def ends(self, eos_ids: Collection[int]) -> Collection[int]:
        """Return the tokens that end the text."""
        if self.sampling.ignore_eos:
            return self.sampling.stop_token_ids
        return {*eos_ids, *self.sampling.stop_token_ids} if self.sampling.stop_token_ids else eos_ids
