"""Who computes what in the next step. Knows requests and the host's face of caches; no tensor, no strategy, no socket.

Continuous batching: each step takes one token of every request that decodes, then parts of prompts, within a budget of
tokens that decoding does not draw on; then admits who waits. A step that is half full and in which a prompt ends takes
no more of them: first tokens come earlier, for a little less throughput. What is left of the budget goes to guesses at
what those who decode will say. A request is preempted by taking its seat: it waits again, and recomputes what it had.

What keeps it moving: a request preempts only those behind it in line, and only if they are not in this step yet; if
nobody could be scheduled for want of room, the last in line gives way. So the first in line always gets what it needs,
which submit() has made sure exists. Who waits makes others give way only to a higher priority, never to an equal one:
those would take turns. Who is not ready just waits: for another's prefill, or for a restore.

A place in line is the time of arrival, moved by the priority: a level is worth some seconds of waiting. So a request
of the lowest priority comes before those of the highest in the end, and once it runs, those do not preempt it.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from server.engine.records import Wait
from server.engine.scheduling.request import Request, RequestError

if TYPE_CHECKING:
    from cache_strategies.base import KVCache, Seat


class Limits(NamedTuple):
    """What the settings allow."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_queued_requests: int
    max_seq_len: int
    kv_bytes: int
    kv_overcommit: float
    max_step_scores: int = 2**62  # tokens of prompts whose log-probabilities are computed in one step
    max_passed_over: int = 64  # admissions past a request that has no room, before no request may pass any more
    num_speculative_tokens: int = 0  # in a draft, for requests that do not say how many
    max_speculative_tokens: int = 16  # that a request may ask for
    priority_aging: float = 10.0  # seconds of waiting that are worth one level of priority
    max_priority_wait: float = 600.0  # seconds that a priority moves a request in line, at most


class Scheduled(NamedTuple):
    """A request's row of the step: tokens of its text, and behind its last one guesses at those that follow."""

    request: Request
    num_tokens: int
    draft: Sequence[int] = ()


@dataclass
class _Step:
    """A step being filled."""

    budget: int
    scores: int
    rows: list[Scheduled] = field(default_factory=list)
    members: set[Request] = field(default_factory=set)
    preempted: list[Request] = field(default_factory=list)
    short: bool = False  # a request had no room
    reserve: int = 0  # of the budget: not for prompts behind one that ends in this step
    prompt_ends: bool = False

    @property
    def open(self) -> bool:
        """Whether parts of prompts may still enter. Whose prompt ends does not wait for those behind it."""
        return self.budget > (self.reserve if self.prompt_ends else 0)

    def room_for(self, request: Request) -> int:
        """Tokens it may have of this step; one that decodes needs no budget."""
        room = max(self.budget, 1)
        return min(room, self.scores) if request.unscored else room

    def add(self, request: Request, num_tokens: int) -> None:
        if request.remaining > 1:
            self.budget -= num_tokens
            self.prompt_ends |= num_tokens == request.remaining
        if request.unscored:
            self.scores -= num_tokens
        self.rows.append(Scheduled(request, num_tokens))
        self.members.add(request)


class Scheduler:
    """Holds the requests: `waiting` and `running`, both in line."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._waiting_for: Counter[KVCache] = Counter()  # how many of each instance wait
        self._arrivals = 0
        self._room_changes = 0

    # ---------------------------------------------------------------- requests come and go
    def submit(self, request: Request) -> None:
        """Queue a request. Raises RequestError if it can never run, or too many wait."""
        limits, total = self.limits, request.most_tokens
        if total > limits.max_seq_len:
            message = (
                f"prompt ({request.prompt_tokens} tokens) and max_tokens ({request.sampling.max_tokens}) come to "
                f"{total} tokens, and the context is {limits.max_seq_len}: shorten the prompt or lower max_tokens"
            )
            raise RequestError(400, message, code="context_length_exceeded", param="prompt")
        if (need := request.cache.bytes_for(total)) > (most := request.cache.limit_bytes):
            message = f"needs {need} bytes of KV memory, and {request.cache.name} may hold {most}: ask for fewer tokens"
            raise RequestError(400, message, code="context_length_exceeded", param="prompt")
        free_seats = max(0, limits.max_num_seqs - len(self.running))
        if len(self.waiting) >= limits.max_queued_requests + free_seats:  # a free seat is taken in the next step
            raise RequestError(429, f"{len(self.waiting)} requests wait already: try again later", code="queue_full")
        self._arrivals += 1
        request.arrival = self._arrivals
        request.due = request.times.arrived + self._delay(request.priority)
        self._wait(request)

    def _delay(self, priority: int) -> float:
        """Return the seconds by which a priority moves a request in line; negative ones move it forward.

        That is aging without a clock: of two requests, the one that waited longer gains on the other as fast as time
        passes, so their order never changes, and the lowest priority waits for those that come within a bound only.
        """
        longest = self.limits.max_priority_wait
        return max(-longest, min(priority * self.limits.priority_aging, longest))

    def remove(self, request: Request) -> None:
        """Remove a request that has finished, was cancelled or failed, and free its memory."""
        if request.seat is not None:
            self._unseat(request)
        else:
            self._wait_no_more(request)

    def fork(self, request: Request, sibling: Request) -> bool:
        """Give a waiting request a copy of its sibling's seat, if it may run and there is room."""
        assert sibling.seat is not None
        if self._allowed(request, self.running):
            request.seat = request.cache.fork(sibling.seat)
        if request.seat is None:
            return False
        request.forked = True
        self._run(request)
        return True

    def waits(self) -> Counter[tuple[str, Wait]]:
        """Count the waiting requests by instance and by what they wait for, such as memory or their turn.

        Behind one that found no room when it was last asked, all of its instance wait for memory.
        """
        full = {request.cache.name for request in self._candidates() if request.refused_at >= 0}
        seats = len(self.running) < self.limits.max_num_seqs

        def wait_of(request: Request) -> Wait:
            if request.held_back:
                return "sibling"
            if not seats:
                return "seats"
            return "memory" if request.cache.name in full else "turn"

        return Counter((request.cache.name, wait_of(request)) for request in self.waiting)

    def room_changed(self) -> None:
        """Note that there may be room where there was none: waiting requests try again."""
        self._room_changes += 1

    def memory_changed(self, kv_bytes: int) -> None:
        """Set the bytes of KV memory that there are from now on."""
        self.limits = self.limits._replace(kv_bytes=kv_bytes)
        self.room_changed()

    # ---------------------------------------------------------------- a step
    def schedule(self) -> tuple[Sequence[Scheduled], Sequence[Request]]:
        """Return the step's rows, and the requests that were preempted for them."""
        tokens = self.limits.max_num_batched_tokens
        step = _Step(tokens, self.limits.max_step_scores, reserve=tokens // 2)
        self._make_way(step)
        while True:
            step.short = False
            for request in sorted(self.running, key=lambda r: r.remaining > 1):
                if request.seat is not None and (step.open or request.remaining == 1):
                    self._advance(request, step)
            if step.rows or not step.short:
                break
            self._preempt(self.running[-1], step)
        if not step.preempted:
            self._admit(step)
            self._speculate(step)
        return step.rows, step.preempted

    def _advance(self, request: Request, step: _Step) -> None:
        """Add the request's next row, if its cache is ready and there is, or can be made, room."""
        cache, seat = request.cache, request.seat
        assert seat is not None
        if not cache.ready(seat):
            return
        remaining = request.remaining
        num_tokens = min(remaining, step.room_for(request), cache.contract.max_row or remaining)
        if not num_tokens:
            return
        while not cache.grow(seat, num_tokens):
            victim = self._victim(request, step)
            if victim is None:
                step.short = True
                return
            self._preempt(victim, step)
        step.add(request, num_tokens)

    def _speculate(self, step: _Step) -> None:
        """Give drafts what the rows have left of the step; no request waits or is preempted for one."""
        for i, (request, num_tokens, _) in enumerate(step.rows):
            room = min(step.budget, step.scores, (request.cache.contract.max_row or step.budget + 1) - num_tokens)
            draft = request.draft(room)
            assert request.seat is not None
            if draft and request.cache.grow(request.seat, num_tokens + len(draft)):
                step.rows[i] = Scheduled(request, num_tokens, draft)
                step.budget -= len(draft)
                step.scores -= len(draft)

    def _victim(self, request: Request, step: _Step) -> Request | None:
        """Return the request to preempt, from those behind `request`; None if there is none.

        Those that are cheap to recompute come first, then those of its own instance, then the last in line.
        """
        behind = [r for r in self.running if r.place > request.place and r not in step.members]
        if request.cache.at_limit:
            behind = [r for r in behind if r.cache is request.cache]
        return max(behind, key=lambda r: (r.cache.contract.replayable, r.cache is request.cache, r.place), default=None)

    def _preempt(self, request: Request, step: _Step) -> None:
        self._unseat(request)
        request.preemptions += 1
        self._wait(request)
        step.preempted.append(request)

    # ---------------------------------------------------------------- admission
    def _make_way(self, step: _Step) -> None:
        """Seat waiting requests of higher priority than running ones; these are preempted, the last in line first."""
        for request in self._candidates():
            lower = [r for r in self.running if r.priority > request.priority and r.place > request.place]
            if not lower or not self._could_seat(request, lower):
                return
            while not self._seat(request):
                if not lower:
                    request.passed_over = self.limits.max_passed_over  # or they would come back, to give way again
                    return
                self._preempt(lower.pop(), step)

    def _could_seat(self, request: Request, lower: Sequence[Request]) -> bool:
        """Return whether a request would have room without `lower`.

        Shared memory counts for each, so this errs towards no.
        """
        stay = [r for r in self.running if r not in lower]
        own = [r for r in stay if r.cache is request.cache]
        return (
            self._allowed(request, stay)
            and _bytes([*stay, request]) <= self.limits.kv_bytes
            and _bytes([*own, request]) <= request.cache.limit_bytes
        )

    def _admit(self, step: _Step) -> None:
        """Seat waiting requests in order; an instance without room holds up only its own, up to a point."""
        without_room: list[Request] = []
        for request in self._candidates():
            if not step.open or any(r.passed_over >= self.limits.max_passed_over for r in without_room):
                return
            if any(r.cache is request.cache for r in without_room):
                continue
            if not self._seat(request):
                if len(self.running) >= self.limits.max_num_seqs:
                    return
                without_room.append(request)
                if len(without_room) == len(self._waiting_for):
                    return
                continue
            for passed in without_room:
                passed.passed_over += 1
            self._advance(request, step)

    def _seat(self, request: Request) -> bool:
        """Seat a request and return whether there was room.

        Looks again only when that may have changed: it reads the whole prompt.
        """
        if self.running and request.refused_at == self._room_changes:
            return False
        if self._allowed(request, self.running):
            request.seat = _open(request)
        if request.seat is None:
            request.refused_at = self._room_changes
            return False
        self._run(request)
        return True

    def _candidates(self) -> Iterator[Request]:
        """Return the requests that wait for nothing but a seat, in order."""
        return (request for request in self.waiting.copy() if not request.held_back)

    def _run(self, request: Request) -> None:
        self._wait_no_more(request)
        request.refused_at = -1
        insort(self.running, request, key=lambda r: r.place)
        request.times.admitted = request.times.admitted or time.monotonic()

    def _allowed(self, request: Request, others: Sequence[Request]) -> bool:
        """Return whether a request may run beside `others`, by their number and by the bytes that all may come to."""
        if request.cache.draining:
            return False
        limits = self.limits
        projected = sum(r.cache.bytes_for(r.most_tokens) for r in (*others, request))
        return len(others) < limits.max_num_seqs and (not others or projected <= limits.kv_overcommit * limits.kv_bytes)

    def _unseat(self, request: Request) -> None:
        assert request.seat is not None
        self.running.remove(request)
        request.cache.close(request.seat)
        request.seat = None
        self.room_changed()

    def _wait(self, request: Request) -> None:
        insort(self.waiting, request, key=lambda r: r.place)
        self._waiting_for[request.cache] += 1

    def _wait_no_more(self, request: Request) -> None:
        self.waiting.remove(request)
        self._waiting_for[request.cache] -= 1
        if not self._waiting_for[request.cache]:
            del self._waiting_for[request.cache]


def _open(request: Request) -> Seat | None:
    cache, wants = request.cache, request.caching
    seat = cache.open(request.tokens, salt=wants.salt, max_cached=request.max_cached)
    if seat is not None:
        cache.retain(seat, priority=wants.priority, ttl=wants.ttl)
    return seat


def _bytes(requests: Sequence[Request]) -> int:
    """Return the bytes that requests hold with the tokens they have."""
    return sum(r.cache.bytes_for(len(r.tokens)) for r in requests)
