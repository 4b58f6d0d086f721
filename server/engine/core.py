"""The engine without its socket: requests in, steps, events out. One thread calls it, and it makes every device call.

Wires scheduler, batch, model and sampler; knows what none of them knows: that a step can fail and be repeated.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from cache_strategies.base import KVCache, Row
from kernels.arena import Arena
from kernels.ops import Ops
from kernels.stopwatch import Stopwatch
from server.engine.accounts import parts_of, prompt_scores, record_of
from server.engine.batch import Batch, StrategyError, Work
from server.engine.messages import Admitted, Explained, Failed, FromEngine, Preempted, Submit, Tokens
from server.engine.report import Admission, Draft, Outcome, RequestRecord, StepPart, StepReport
from server.engine.request import Request, RequestError
from server.engine.scheduler import Scheduled, Scheduler
from server.engine.selection import Selector
from server.engine.speculation import lookup_for, speculation_of
from server.engine.verification import Taken, Turn, drawn, scored
from server.models.base import Model

log = logging.getLogger(__name__)

NO_NUMBER = "the model's logits are no numbers: are its weights sound? If they are, --dtype float32 may help"
TIMED = 61  # the operations of one step in so many are timed; a prime, so that nothing that repeats is always met


class Event(NamedTuple):
    """Something to tell an API worker."""

    worker: int
    message: FromEngine


class StepResult(NamedTuple):
    """What a step brought."""

    events: Sequence[Event]
    report: StepReport
    finished: Sequence[RequestRecord]


@dataclass
class _Since:
    """What has happened since the last step, by instance or in its order."""

    failures: Counter[str] = field(default_factory=Counter)
    generated: Counter[str] = field(default_factory=Counter)  # tokens
    drafts: defaultdict[str, list[Draft]] = field(default_factory=lambda: defaultdict(list))
    forked: Counter[str] = field(default_factory=Counter)  # requests
    admitted: list[Admission] = field(default_factory=list)
    gaps: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    left: list[RequestRecord] = field(default_factory=list)
    explanations: list[Event] = field(default_factory=list)


class Core:
    """The running server's state: the model, the caches, and the requests in the scheduler."""

    def __init__(
        self,
        model: Model,
        caches: Mapping[str, KVCache],
        arena: Arena,
        scheduler: Scheduler,
        selector: Selector,
        stopwatch: Stopwatch,
        ops: Ops,
    ) -> None:
        self.model = model
        self.caches = caches
        self.arena = arena
        self.scheduler = scheduler
        self._selector = selector
        self._requests: dict[tuple[int, str], Request] = {}
        self._since = _Since()
        self._evicted: Counter[str] = Counter()  # pages, up to the last step
        self.timed_every = TIMED  # steps; 0: none is
        self._stopwatch = stopwatch
        self._ops = ops
        self._steps = 0

    @property
    def busy(self) -> bool:
        return bool(self._requests)

    # ---------------------------------------------------------------- requests
    def submit(self, worker: int, message: Submit) -> Event | None:
        """Takes a request in line; the event says why not, if not."""
        try:
            name, reason = self._selector.choose(message, self.arena.in_use)
            cache = self.caches[name]
            speculation = speculation_of(message.speculation, self.scheduler.limits)
            request = Request(
                (worker, message.request_id),
                list(message.prompt),
                message.sampling,
                cache,
                reason,
                priority=message.priority,
                caching=message.caching,
                explain=message.explain,
                siblings=self._siblings(worker, message, cache),
            )
            self.scheduler.submit(request)
        except RequestError as error:
            return Event(worker, error.told(message.request_id))
        request.lookup = lookup_for(request, speculation)
        self._requests[request.key] = request
        request.siblings.append(request)
        return None

    def _siblings(self, worker: int, message: Submit, cache: KVCache) -> list[Request]:
        """Those of a request that is to come, if there is one whose prompt it can take over; otherwise a new list."""
        sibling = self._requests.get((worker, message.sibling_of)) if message.sibling_of is not None else None
        if sibling is None or sibling.cache is not cache or sibling.caching != message.caching:
            return []
        return sibling.siblings if sibling.tokens[: sibling.prompt_tokens] == message.prompt else []

    def cancel(self, worker: int, request_id: str, outcome: Outcome = "cancelled") -> None:
        """Frees the request's memory now; no effect if it has ended."""
        request = self._requests.get((worker, request_id))
        if request is not None:
            self._remove(request, outcome)

    def cancel_worker(self, worker: int) -> None:
        """An API worker is gone, and with it everybody who waited for its answers."""
        for key in [key for key in self._requests if key[0] == worker]:
            self.cancel(*key)

    def set_share(self, name: str, *, floor: int, limit: int) -> None:
        """Another floor and limit, in pages, at once. Raises RequestError.

        Idle memory beyond the limit goes now; running requests end as they would have, and until they need no more
        than the limit no others of the instance begin.
        """
        if floor > limit:
            raise RequestError(400, f"a floor of {floor} pages is more than the limit, {limit}", param="floor")
        if (why_not := self.arena.objection(name, floor=floor, limit=limit)) is not None:
            raise RequestError(409, f"with that, {why_not}", code="no_room")
        self.arena.set_share(name, floor=floor, limit=limit)
        self._drain(name)
        self.scheduler.room_changed()

    def _drain(self, name: str) -> None:
        """An instance above a lowered limit comes down to it as its requests end."""
        running = [r for r in self.scheduler.running if r.cache.name == name]
        needed = sum(r.cache.bytes_for(r.most_tokens) for r in running)
        pinned = len(self.caches[name].pinned_pages())
        self.arena.drain(name, -(-needed // self.arena.page_bytes) + pinned)

    # ---------------------------------------------------------------- a step
    def step(self) -> StepResult:
        """Computes the next tokens of some requests; with nobody to serve, nothing."""
        began = time.monotonic()
        for cache in self.caches.values():
            cache.poll()
            if cache.draining:
                self._drain(cache.name)
                if not cache.draining:
                    self.scheduler.room_changed()
        scheduled, preempted = self.scheduler.schedule()
        self._steps += bool(scheduled)
        timed = bool(scheduled and self.timed_every) and self._steps % self.timed_every == 0
        with self._stopwatch if timed else nullcontext() as watch:
            parts, events = self._compute(scheduled)
        since, self._since = self._since, _Since()
        report = StepReport(
            seconds=time.monotonic() - began,
            parts=parts,
            preempted=Counter(r.cache.name for r in preempted),
            failures=since.failures,
            gaps=since.gaps,
            generated=since.generated,
            drafts=since.drafts,
            forked=since.forked,
            admitted=since.admitted,
            evicted=self._newly_evicted(),
            happened={name: told for name, cache in self.caches.items() if (told := cache.happened()) is not None},
            kernels=None if watch is None else watch.seconds,
        )
        gave_way = [Event(r.key[0], Preempted(r.key[1])) for r in preempted]
        return StepResult(gave_way + events + since.explanations, report, since.left)

    def _newly_evicted(self) -> dict[str, int]:
        """Bytes, by instance."""
        evicted: dict[str, int] = {}
        for name in self.caches:
            if pages := self.arena.reclaimed(name) - self._evicted[name]:
                evicted[name] = pages * self.arena.page_bytes
                self._evicted[name] += pages
        return evicted

    @torch.inference_mode()
    def _compute(self, scheduled: Sequence[Scheduled]) -> tuple[Mapping[str, StepPart], list[Event]]:
        """Runs the rows, without those of a strategy that fails twice; what was computed, and the events."""
        events: list[Event] = []
        failed_before: set[str] = set()
        while scheduled:
            parts = parts_of(scheduled)  # before the weights pass through the processor's caches, and not behind
            try:
                batch, logits = self._forward(scheduled)
            except StrategyError as error:
                log.exception(
                    "step failed; %s", "giving up its rows" if error.instance in failed_before else "repeating it"
                )
                self._since.failures[error.instance] += 1
                if error.instance in failed_before:
                    gone = [s.request for s in scheduled if s.request.cache.name == error.instance]
                    events += self._fail(gone, f"{error}; other strategies go on", "strategy_failed")
                    scheduled = [s for s in scheduled if s.request.cache.name != error.instance]
                failed_before.add(error.instance)
            else:
                return parts, events + self._advance([scheduled[i] for i in batch.order], batch, logits)
        return {}, events

    def _forward(self, scheduled: Sequence[Scheduled]) -> tuple[Batch, Tensor]:
        """Logits of the rows that reach the end of their text. Moves no state, so it can be repeated."""
        batch = Batch([_work(s) for s in scheduled], self.model.device)
        return batch, self.model.forward(batch.ids, batch)

    def _advance(self, scheduled: Sequence[Scheduled], batch: Batch, logits: Tensor) -> list[Event]:
        """Draw what follows, commit the tokens that have entered with it, and tell all that is wanted."""
        ends = list(accumulate(batch.logit_counts))
        turns = [
            Turn(request, draft, end - 1 - len(draft))
            for (request, num_tokens, draft), end in zip(scheduled, ends, strict=True)
            if num_tokens == request.remaining
        ]
        taken = self._drawn(turns, logits)
        _commit(scheduled, batch, taken)
        events: list[Event] = []
        for (request, _, _), count, end in zip(scheduled, batch.logit_counts, ends, strict=True):
            if request.cached_tokens is None:
                events += self._admit(request)
            if request.unscored:
                events.append(Event(request.key[0], prompt_scores(request, logits[end - count : end])))
        forks = [Turn(request, (), turn.first) for turn in turns for request in self._fork(turn.request)]
        events += [event for fork in forks if fork.request.cached_tokens is None for event in self._admit(fork.request)]
        taken |= self._drawn(forks, logits)
        turns += forks
        events += [self._finish(turn.request) for turn in turns if turn.request not in taken]
        return events + self._extend([turn for turn in turns if turn.request in taken], taken, logits)

    def _drawn(self, turns: Sequence[Turn], logits: Tensor) -> dict[Request, Taken]:
        """What goes on of these; a request may want its prompt computed and nothing else."""
        going = [turn for turn in turns if turn.request.sampling.max_tokens]
        return drawn(going, logits, self.model.facts.eos_ids, self._ops.sample)

    def _admit(self, request: Request) -> list[Event]:
        """Once, when the first row has run: from then on `cached` is final."""
        assert request.seat is not None
        seat, name = request.seat, request.cache.name
        request.cached_tokens, request.miss = (seat.length, None) if request.forked else (seat.cached, seat.miss)
        found = request.cached_tokens
        self._since.admitted.append(Admission(name, request.prompt_tokens, found, request.miss, request.forked))
        worker, request_id = request.key
        queued = request.times.admitted - request.times.arrived
        return [Event(worker, Admitted(request_id, name, request.reason, found, request.miss, queued))]

    def _extend(self, turns: Sequence[Turn], taken: Mapping[Request, Taken], logits: Tensor) -> list[Event]:
        """The texts go on with what was drawn, and their clients hear of it."""
        events = []
        for turn, told in zip(turns, scored(turns, taken, logits), strict=True):
            request, (tokens, sound) = turn.request, taken[turn.request]
            if turn.draft:
                accepted = taken[request].accepted
                request.verified(len(turn.draft), accepted)
                self._since.drafts[request.cache.name].append(Draft(len(turn.draft), accepted))
            for token in tokens:
                self._append(request, token)
            if tokens:
                worker, request_id = request.key
                message = Tokens(request_id, tokens, request.finish_reason, told, len(turn.draft))
                events.append(Event(worker, message))
            if not sound:
                assert request.seat is not None
                request.cache.discard(request.seat)
                events += self._fail([request], NO_NUMBER, "not_a_number")
            elif request.finish_reason is not None:
                self._remove(request, request.finish_reason)
        return events

    def _append(self, request: Request, token: int) -> None:
        before = request.times.last_token
        request.extend(token, self.model.facts.eos_ids)
        self._since.generated[request.cache.name] += 1
        if before:
            self._since.gaps[request.cache.name].append(request.times.last_token - before)

    def _finish(self, request: Request) -> Event:
        """Its prompt has been computed, and no token is wanted."""
        self._remove(request, "length")
        worker, request_id = request.key
        return Event(worker, Tokens(request_id, [], "length"))

    def _fork(self, request: Request) -> list[Request]:
        """Siblings that take over the prompt it has just computed; who finds no room waits for a seat of its own."""
        if request.generated:
            return []
        forked = [r for r in request.siblings if r.held_back and r.seat is None and self.scheduler.fork(r, request)]
        self._since.forked[request.cache.name] += len(forked)
        return forked

    def _fail(self, requests: Sequence[Request], message: str, code: str) -> list[Event]:
        for request in requests:
            self._remove(request, "error")
        return [Event(r.key[0], Failed(r.key[1], 500, message, code)) for r in requests]

    def _remove(self, request: Request, outcome: Outcome) -> None:
        del self._requests[request.key]
        request.siblings.remove(request)
        self.scheduler.remove(request)
        record = record_of(request, outcome)
        self._since.left.append(record)
        if request.explain and outcome in ("stop", "length"):
            worker, request_id = request.key
            self._since.explanations.append(Event(worker, Explained(request_id, record)))


def _work(scheduled: Scheduled) -> Work:
    request, num_tokens, draft = scheduled
    assert request.seat is not None
    first = request.seat.length
    tokens = [*request.tokens[first : first + num_tokens], *draft]
    logits = num_tokens if request.unscored else int(num_tokens == request.remaining) + len(draft)
    return Work(request.cache, Row(request.seat, len(tokens)), tokens, logits)


def _commit(scheduled: Sequence[Scheduled], batch: Batch, taken: Mapping[Request, Taken]) -> None:
    """Guesses that came true have entered; the others never have, and their room is free again."""
    batch.commit([s.num_tokens + (taken[s.request].accepted if s.draft else 0) for s in scheduled])
    for request in (s.request for s in scheduled if s.draft):
        assert request.seat is not None
        request.cache.crop(request.seat, request.seat.length)
