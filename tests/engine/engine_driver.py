"""Drives an engine's core without a socket: submits requests, runs steps, collects the events of each request.

After every step it checks the limits, that some request has progressed, and the order of events; and the integrity of
all caches and of the memory after each of the first steps, later after some, as it takes as long as a step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch import Tensor

from cache_strategies.base import KVCache, Locations, Rows
from config.errors import SettingsError
from config.settings import Settings
from server.engine.batch import attend_at
from server.engine.build import Engine, build_engine
from server.engine.extension import StepExtension
from server.engine.instance_reports import read_usage
from server.engine.ipc.messages import (
    Admitted,
    Caching,
    Compared,
    Explained,
    Failed,
    FromEngine,
    Preempted,
    Progress,
    PromptScores,
    SamplingParams,
    Submit,
    TokenLogprob,
    Tokens,
)
from server.engine.results import StepResult
from server.engine.scheduling.request import PlannedShadow, Request
from server.records import RequestFidelity, RequestRecord

WORKER = 0
CHECKED_STEPS, CHECK_INTERVAL = 30, 10  # integrity is checked after each of the first steps, then after every tenth


@dataclass
class RequestEvents:
    """The events of one request."""

    tokens: list[int] = field(default_factory=list)
    scores: list[TokenLogprob] = field(default_factory=list)
    prompt_scores: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    admitted: Admitted | None = None
    failed: Failed | None = None
    explained: Explained | None = None
    compared: list[Compared] = field(default_factory=list)
    first_step: int | None = None  # whose number the first word came in
    last_step: int | None = None
    preempted: int = 0  # times
    progress: list[int] = field(default_factory=list)  # numbers of computed tokens of the prompt
    queued: float = field(default=0.0, compare=False)  # seconds, never twice the same

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None or self.failed is not None

    def hear(self, message: FromEngine, step: int) -> None:
        """Record an event and check the order of events.

        Admitted comes once and first, then tokens up to a finish_reason; or Failed comes last.
        """
        if isinstance(message, Explained):
            assert self.failed is None
            assert self.explained is None, "explained twice"
            self.explained = message
            return
        if isinstance(message, Compared):
            assert self.failed is None
            assert not (self.compared and self.compared[-1].is_last), "compared more after the last"
            self.compared.append(message)
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
            case Progress(_, num_tokens):
                assert self.admitted is not None, "progress before admission"
                assert not self.tokens, "progress of the prompt after it"
                self.progress.append(num_tokens)
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
    """A core, and a worker that receives its events."""

    def __init__(self, directory: Path, *, extensions: Sequence[StepExtension] = (), **settings: Any) -> None:
        defaults: dict[str, Any] = {"weights_cache": "off", "dtype": "float32", "threads": 1, "kv_memory": "4MiB"}
        defaults["device"] = "cpu"  # where there is a card, too, unless a test names another device
        self.engine: Engine = build_engine(
            Settings(model=str(directory), **(defaults | settings)), extensions=extensions
        )
        self._with_seats: Sequence[Any] = [self.engine.shadows, *extensions]  # len() is the number of their seats
        self.core = self.engine.core
        self.heard: dict[str, RequestEvents] = {}
        self.steps: list[StepResult] = []

    def submit(self, name: str, prompt: Sequence[int], max_tokens: int = 8, **options: Any) -> RequestEvents:
        """Submit a request; `options` are fields of Submit, of Caching (its priority as `kept`) or of SamplingParams.

        The defaults are greedy sampling without an end token.
        """
        names = (
            "kv_cache",
            "named_by",
            "priority",
            "explain",
            "reports_progress",
            "sibling_of",
            "speculation",
            "reference",
            "grammar",
        )
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
        """Preempt a running request, as the scheduler does without memory."""
        request, scheduler = self.request(name), self.core.scheduler
        scheduler._unseat(request)
        request.num_preemptions += 1
        scheduler._add_waiting(request)

    def shadow(self, name: str, instance: str) -> None:
        """Let a request that waits also run under another instance."""
        self.engine.shadows.plan(self.request(name), PlannedShadow(self.core.instances[instance]))

    def cancel(self, name: str, outcome: str = "cancelled") -> None:
        self.core.cancel(WORKER, name, outcome)
        self.check()

    def step(self) -> StepResult:
        """Run a step, and check all that must hold after every step."""
        busy = self.core.busy
        result = self.core.step()
        self.steps.append(result)
        for event in result.events:
            self._hear(event.message)
        if len(self.steps) <= CHECKED_STEPS or len(self.steps) % CHECK_INTERVAL == 0 or not self.core.busy:
            self.check()
        computed = result.report.rows or result.report.shadow_tokens
        progress = computed or result.report.failures or result.finished or result.events
        assert progress or not busy, "nothing progresses"
        assert result.report.tokens <= self.limits.max_num_batched_tokens + self.limits.max_num_seqs
        assert len(self.core.scheduler.running) <= self.limits.max_num_seqs
        return result

    def run(self, at_most: int = 2000) -> None:
        """Run steps until all requests have ended."""
        for _ in range(at_most):
            if not self.core.busy:
                return
            self.step()
        raise AssertionError("the engine does not come to an end")

    def check(self) -> None:
        """Assert that the engine's bookkeeping is consistent."""
        for cache in self.core.instances.values():
            cache.check_integrity()
        self.core.memory.check_integrity()
        running, waiting = self.core.scheduler.running, self.core.scheduler.waiting
        assert running == sorted(running, key=lambda r: r.queue_key)
        assert waiting == sorted(waiting, key=lambda r: r.queue_key)
        assert all(request.sequence is not None for request in running)
        assert all(request.sequence is None for request in waiting)
        seats = sum(read_usage(cache).seats for cache in self.core.instances.values())
        assert len(running) + sum(map(len, self._with_seats)) == seats

    def assert_nothing_leaked(self) -> None:
        """Assert that no request is left, and that all memory is free once idle memory is evicted."""
        assert not self.core.busy
        for cache in self.core.instances.values():
            usage = read_usage(cache)
            assert (usage.seats, usage.tokens, usage.used) == (0, 0, 0), (cache.name, usage)
            fills_pages = all(store.block_bytes % store.page_bytes == 0 for store in cache.strategy.stores)
            assert usage.wasted == 0 or not fills_pages, (cache.name, usage)
            cache.evict(self.core.memory.planned_bytes)
            assert read_usage(cache).reserved == 0, cache.name
        assert self.core.memory.held_bytes == 0

    def block_bytes(self, name: str = "paged") -> int:
        """Return the bytes of a block of an instance's first region."""
        return self.core.memory.list_regions(name)[0].size

    @property
    def limits(self) -> Any:
        return self.core.scheduler.limits

    @property
    def free_bytes(self) -> int:
        """Return the free bytes of the KV memory, including idle memory."""
        idle = sum(read_usage(cache).idle for cache in self.core.instances.values())
        return self.core.memory.free_bytes + idle

    @property
    def fidelities(self) -> list[RequestFidelity]:
        """Return the results of the comparisons with candidate instances that have ended."""
        return [fidelity for result in self.steps for fidelity in result.report.shadows]

    @property
    def records(self) -> list[RequestRecord]:
        return [record for result in self.steps for record in result.finished]

    def request(self, name: str) -> Request:
        """Return a request that has not ended."""
        scheduler = self.core.scheduler
        return next(r for r in (*scheduler.running, *scheduler.waiting) if r.key == (WORKER, name))

    @property
    def requests(self) -> list[Request]:
        """Return the requests that have not ended."""
        return [*self.core.scheduler.running, *self.core.scheduler.waiting]

    def running(self) -> list[str]:
        return [request.key[1] for request in self.core.scheduler.running]

    def waiting(self) -> list[str]:
        return [request.key[1] for request in self.core.scheduler.waiting]

    def _hear(self, message: FromEngine) -> None:
        assert isinstance(
            message, Admitted | Preempted | Progress | PromptScores | Tokens | Explained | Compared | Failed
        )
        self.heard[message.request_id].hear(message, len(self.steps))


def compute_by_hooks(cache: KVCache, attend: Callable[[int, Callable[[], None], Tensor], None]) -> None:
    """Let a cache compute its attention by its hook: attend(layer, what computes it, where it is written)."""
    right, right_hook = cache.locate, cache.attend
    located: list[Locations] = []

    def locate(rows: Rows) -> Locations:
        located[:] = [right(rows)]
        return Locations([None] * len(cache.setup.geometry.layers))

    def hook(layer: int, rows: Rows, *tensors: Tensor) -> None:
        by_layer, tap, _ = located[0]
        location = by_layer[layer]
        run = partial(right_hook, layer, rows, *tensors)
        if location is not None:
            run = partial(attend_at, cache.setup, location, tap, layer, *tensors)
        attend(layer, run, tensors[-1])

    cache.locate, cache.attend = locate, hook  # type: ignore[method-assign,assignment]


def least_memory(directory: Path, **settings: Any) -> int:
    """Return the minimum bytes of KV memory for these settings, from the error message for a single byte."""
    with pytest.raises(SettingsError, match="the minimum is kv_memory") as caught:
        Driver(directory, **settings, kv_memory="1")
    return int(re.findall(r"kv_memory=(\d+)", str(caught.value))[0])


def strategies(**options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of instances given by name, as in strategies(paged={"kind": "paged"})."""
    return {name: dict(values) for name, values in options.items()}
