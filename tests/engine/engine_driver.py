"""Drives an engine's core without a socket: submits requests, steps until all have ended, collects what they were told.

After every step it checks what must hold whatever happens: the books of all caches and of the arena, the limits, that
somebody has progressed, and that events come in order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from config.errors import SettingsError
from config.settings import Settings
from server.engine.build import Engine, build_engine
from server.engine.core import StepResult
from server.engine.ipc.messages import (
    Admitted,
    Caching,
    Explained,
    Failed,
    FromEngine,
    Preempted,
    PromptScores,
    SamplingParams,
    Submit,
    TokenLogprob,
    Tokens,
)
from server.engine.scheduling.request import Request
from server.records import RequestRecord

WORKER = 0


@dataclass
class RequestEvents:
    """All that was said about one request."""

    tokens: list[int] = field(default_factory=list)
    scores: list[TokenLogprob] = field(default_factory=list)
    prompt_scores: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    admitted: Admitted | None = None
    failed: Failed | None = None
    explained: Explained | None = None
    first_step: int | None = None  # whose number the first word came in
    last_step: int | None = None
    preempted: int = 0  # times
    queued: float = field(default=0.0, compare=False)  # seconds, never twice the same

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None or self.failed is not None

    def hear(self, message: FromEngine, step: int) -> None:
        """Checks the order: Admitted once and first, then tokens up to a finish_reason; or Failed, and nothing more."""
        if isinstance(message, Explained):
            assert self.failed is None
            assert self.explained is None, "explained twice"
            self.explained = message
            return
        assert not self.ended, "told more after the end"
        self.first_step = step if self.first_step is None else self.first_step
        self.last_step = step
        match message:
            case Admitted():
                assert self.admitted is None, "admitted twice"
                assert not self.tokens
                self.queued = message.queue_seconds
                self.admitted = msgspec.structs.replace(message, queue_seconds=0.0)
            case Preempted():
                self.preempted += 1
            case PromptScores(_, scores):
                assert self.admitted is not None, "scores before admission"
                assert not self.tokens, "the prompt scored after it"
                self.prompt_scores += scores
            case Tokens(_, tokens, finish_reason, scores, drafted):
                assert self.admitted is not None, "tokens before admission"
                assert tokens or finish_reason
                assert len(tokens) <= drafted + 1
                assert scores is None or [score.token for score in scores] == tokens
                self.tokens += tokens
                self.scores += scores or []
                self.finish_reason = finish_reason
            case Failed():
                self.failed = message
            case _:
                raise AssertionError(f"not about a request: {message}")


class Driver:
    """A core and a worker that listens to it."""

    def __init__(self, directory: Path, *, gradual: bool = False, **settings: Any) -> None:
        defaults: dict[str, Any] = {"weights_cache": "off", "dtype": "float32", "threads": 1, "kv_memory": "12MiB"}
        self.engine: Engine = build_engine(Settings(model=str(directory), **(defaults | settings)), gradual=gradual)
        self.core = self.engine.core
        self.heard: dict[str, RequestEvents] = {}
        self.steps: list[StepResult] = []

    def submit(self, name: str, prompt: Sequence[int], max_tokens: int = 8, **options: Any) -> RequestEvents:
        """`options`: fields of Submit, of Caching (its priority as `kept`) or of Sampling.

        Greedy and without end token unless they say otherwise.
        """
        names = ("kv_cache", "header", "alias", "priority", "explain", "sibling_of", "speculation")
        ours = {key: options.pop(key) for key in names if key in options}
        caching = {key: options.pop(key) for key in ("tenant", "cache_salt", "max_cached", "ttl") if key in options}
        ours["caching"] = Caching(**caching, priority=options.pop("kept", 0))
        sampling = SamplingParams(max_tokens, **({"temperature": 0.0, "ignore_eos": True} | options))
        self.heard[name] = RequestEvents()
        refused = self.core.submit(WORKER, Submit(name, list(prompt), sampling, **ours))
        if refused is not None:
            self._hear(refused.message)
        return self.heard[name]

    def preempt(self, name: str) -> None:
        """Takes a running request's seat, as the scheduler does where there is no room."""
        request, scheduler = self.request(name), self.core.scheduler
        scheduler._unseat(request)
        request.num_preemptions += 1
        scheduler._add_waiting(request)

    def cancel(self, name: str, outcome: str = "cancelled") -> None:
        self.core.cancel(WORKER, name, outcome)
        self.check()

    def step(self) -> StepResult:
        """A step, and all that must hold after any."""
        busy = self.core.busy
        result = self.core.step()
        self.steps.append(result)
        for event in result.events:
            self._hear(event.message)
        self.check()
        assert result.report.rows or result.report.failures or result.finished or not busy, "nothing progresses"
        assert result.report.tokens <= self.limits.max_num_batched_tokens + self.limits.max_num_seqs
        assert len(self.core.scheduler.running) <= self.limits.max_num_seqs
        return result

    def run(self, at_most: int = 2000) -> None:
        """Steps until nobody is left."""
        for _ in range(at_most):
            if not self.core.busy:
                return
            self.step()
        raise AssertionError("the engine does not come to an end")

    def check(self) -> None:
        """The books add up."""
        for cache in self.core.caches.values():
            cache.check_integrity()
        self.core.arena.check_integrity()
        running, waiting = self.core.scheduler.running, self.core.scheduler.waiting
        assert running == sorted(running, key=lambda r: r.queue_key)
        assert waiting == sorted(waiting, key=lambda r: r.queue_key)
        assert all(request.seat is not None for request in running)
        assert all(request.seat is None for request in waiting)
        assert len(running) == sum(cache.usage().seats for cache in self.core.caches.values())

    def assert_nothing_leaked(self) -> None:
        """Nobody is left, and idle memory is all there is to give back."""
        assert not self.core.busy
        for cache in self.core.caches.values():
            usage = cache.usage()
            assert (usage.seats, usage.tokens, usage.used, usage.wasted) == (0, 0, 0, 0)
            cache.reclaim(self.core.arena.pages)
        assert self.core.arena.num_free_pages == self.core.arena.pages

    @property
    def limits(self) -> Any:
        return self.core.scheduler.limits

    @property
    def free_bytes(self) -> int:
        """Of the arena, idle memory of caches included."""
        idle = sum(cache.usage().idle for cache in self.core.caches.values())
        return self.core.arena.num_free_pages * self.core.arena.page_bytes + idle

    @property
    def records(self) -> list[RequestRecord]:
        return [record for result in self.steps for record in result.finished]

    def request(self, name: str) -> Request:
        """One that has not ended."""
        scheduler = self.core.scheduler
        return next(r for r in (*scheduler.running, *scheduler.waiting) if r.key == (WORKER, name))

    @property
    def requests(self) -> list[Request]:
        """Those that have not ended."""
        return [*self.core.scheduler.running, *self.core.scheduler.waiting]

    def running(self) -> list[str]:
        return [request.key[1] for request in self.core.scheduler.running]

    def waiting(self) -> list[str]:
        return [request.key[1] for request in self.core.scheduler.waiting]

    def _hear(self, message: FromEngine) -> None:
        assert isinstance(message, Admitted | Preempted | PromptScores | Tokens | Explained | Failed)
        self.heard[message.request_id].hear(message, len(self.steps))


def least_memory(directory: Path, **settings: Any) -> int:
    """The fewest bytes of KV memory that these settings can do with, as the refusal of one byte tells."""
    with pytest.raises(SettingsError, match="the least that suffices") as caught:
        Driver(directory, **settings, kv_memory="1")
    return int(re.findall(r"kv_memory=(\d+)", str(caught.value))[0])


def strategies(**options: Mapping[str, Any]) -> dict[str, Any]:
    """Settings for instances: strategies(paged={"kind": "paged"})."""
    return {name: dict(values) for name, values in options.items()}
