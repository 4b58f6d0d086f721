"""Who computes what in the next step. Knows requests and the host's face of caches; no tensor, no strategy, no socket.

Continuous batching: each step takes one token of every request that decodes, then parts of prompts, within a budget of
tokens; then admits who waits. A request is preempted by taking its seat: it waits again, and recomputes what it had.

What keeps it moving: a request preempts only those behind it in line, and only if they are not in this step yet; if
nobody could be scheduled at all, the last in line gives way. So the first in line always gets what it needs, which
submit() has made sure exists.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from server.engine.request import Request, RequestError


class Limits(NamedTuple):
    """What the settings allow."""

    max_num_seqs: int
    max_step_tokens: int
    max_waiting: int
    max_seq_len: int
    kv_bytes: int
    kv_overcommit: float
    max_passed_over: int = 64  # admissions past a request that has no room, before nobody may pass any more


class Scheduled(NamedTuple):
    """A request's row of the step."""

    request: Request
    num_tokens: int


@dataclass
class _Step:
    """A step being filled."""

    budget: int
    rows: list[Scheduled] = field(default_factory=list)
    members: set[Request] = field(default_factory=set)
    preempted: list[Request] = field(default_factory=list)

    def add(self, request: Request, num_tokens: int) -> None:
        self.rows.append(Scheduled(request, num_tokens))
        self.members.add(request)
        self.budget -= num_tokens


class Scheduler:
    """Holds the requests: `waiting` and `running`, both in line."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._arrivals = 0

    # ---------------------------------------------------------------- requests come and go
    def submit(self, request: Request, *, capacity: int) -> None:
        """Takes a request in line; its instance may hold `capacity` bytes. Raises RequestError if it can never run."""
        limits, total = self.limits, request.most_tokens
        if total > limits.max_seq_len:
            message = (
                f"prompt ({request.prompt_tokens} tokens) and max_tokens ({request.sampling.max_tokens}) come to "
                f"{total} tokens, and the context is {limits.max_seq_len}: shorten the prompt or lower max_tokens"
            )
            raise RequestError(400, message, code="context_length_exceeded", param="prompt")
        if (need := request.cache.bytes_for(total)) > capacity:
            message = (
                f"needs {need} bytes of KV memory, and {request.cache.name} may hold {capacity}: ask for fewer tokens"
            )
            raise RequestError(400, message, code="context_length_exceeded", param="prompt")
        if len(self.waiting) >= limits.max_waiting:
            raise RequestError(429, f"{len(self.waiting)} requests wait already: try again later", code="queue_full")
        self._arrivals += 1
        request.arrival = self._arrivals
        self._wait(request)

    def remove(self, request: Request) -> None:
        """Finished, cancelled or failed: its memory is free at once."""
        if request.seat is not None:
            self._unseat(request)
        else:
            self.waiting.remove(request)

    # ---------------------------------------------------------------- a step
    def schedule(self) -> tuple[Sequence[Scheduled], Sequence[Request]]:
        """The step's rows, and the requests that were preempted for them."""
        step = _Step(self.limits.max_step_tokens)
        while True:
            for request in sorted(self.running, key=lambda r: (r.remaining > 1, r.place)):
                if request.seat is not None and step.budget:
                    self._advance(request, step)
            if step.rows or not self.running:
                break
            self._preempt(self.running[-1], step)
        if not step.preempted:
            self._admit(step)
        return step.rows, step.preempted

    def _advance(self, request: Request, step: _Step) -> None:
        """Adds the request's next row, if its cache is ready and there is, or can be made, room."""
        cache, seat = request.cache, request.seat
        assert seat is not None
        if not cache.ready(seat):
            return
        num_tokens = min(request.remaining, step.budget, cache.contract.max_row or step.budget)
        while not cache.grow(seat, num_tokens):
            victim = self._victim(request, step)
            if victim is None:
                return
            self._preempt(victim, step)
        step.add(request, num_tokens)

    def _victim(self, request: Request, step: _Step) -> Request | None:
        """Who gives way: the last in line behind `request`, of its own instance and cheap to recompute if possible."""
        behind = [r for r in self.running if r.place > request.place and r not in step.members]
        return max(behind, key=lambda r: (r.cache.contract.replayable, r.cache is request.cache, r.place), default=None)

    def _preempt(self, request: Request, step: _Step) -> None:
        self._unseat(request)
        request.preemptions += 1
        self._wait(request)
        step.preempted.append(request)

    # ---------------------------------------------------------------- admission
    def _admit(self, step: _Step) -> None:
        """Seats for those who wait, in line; an instance without room holds up only its own, up to a point."""
        without_room: list[Request] = []
        for request in list(self.waiting):
            if not step.budget or any(r.passed_over >= self.limits.max_passed_over for r in without_room):
                return
            if any(r.cache is request.cache for r in without_room):
                continue
            if not self._seat(request, step):
                if len(self.running) >= self.limits.max_num_seqs:
                    return
                without_room.append(request)
                continue
            for passed in without_room:
                passed.passed_over += 1
            self._advance(request, step)

    def _seat(self, request: Request, step: _Step) -> bool:
        """A seat, if need be at the cost of lower priorities; never of equal ones, or both would take turns."""
        while not self._open(request):
            lower = [r for r in self.running if r.priority > request.priority and r not in step.members]
            if not lower:
                return False
            self._preempt(max(lower, key=lambda r: r.place), step)
        self.waiting.remove(request)
        insort(self.running, request, key=lambda r: r.place)
        request.times.admitted = request.times.admitted or time.monotonic()
        return True

    def _open(self, request: Request) -> bool:
        limits = self.limits
        if len(self.running) >= limits.max_num_seqs:
            return False
        if self.running and self._projected(request) > limits.kv_overcommit * limits.kv_bytes:
            return False
        request.seat = request.cache.open(request.tokens)
        return request.seat is not None

    def _projected(self, request: Request) -> int:
        """Bytes that all who run, and this one, can come to."""
        return sum(r.cache.bytes_for(r.most_tokens) for r in (*self.running, request))

    def _unseat(self, request: Request) -> None:
        assert request.seat is not None
        self.running.remove(request)
        request.cache.close(request.seat)
        request.seat = None

    def _wait(self, request: Request) -> None:
        insort(self.waiting, request, key=lambda r: r.place)

    def find(self, wanted: Callable[[Request], bool]) -> list[Request]:
        """The requests, running or waiting, that are wanted."""
        return [r for r in (*self.running, *self.waiting) if wanted(r)]
