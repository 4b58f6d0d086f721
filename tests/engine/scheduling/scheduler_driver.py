"""A scheduler without a model: in each step the scheduled tokens enter without being computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cache_strategies.base import KVCache
from cache_strategies.types import NO_SALT
from plugin_kit.driver.steps import raise_as_it_was
from server.engine.instance import Instance
from server.engine.ipc.messages import SamplingParams
from server.engine.scheduling.request import Request
from server.engine.scheduling.scheduler import Limits, Scheduler

LIMITS = Limits(
    max_num_seqs=4,
    max_num_batched_tokens=10,
    max_queued_requests=100,
    max_seq_len=100,
    kv_bytes=1000,
    kv_overcommit=10,
)
TOKEN = 7


class SchedulerDriver:
    """A scheduler, and steps in which the scheduled tokens enter and texts that end get a new token."""

    def __init__(self, **limits: Any) -> None:
        self.scheduler = Scheduler(LIMITS._replace(**limits))
        self.names: dict[Request, str] = {}
        self.instances: dict[KVCache, Instance] = {}

    def submit(
        self,
        name: str,
        cache: KVCache,
        prompt: int,
        max_tokens: int = 3,
        priority: int = 0,
        arrived: float | None = None,
    ) -> Request:
        """Queue a request, with the current time or a given second as its arrival."""
        instance = self.instances.setdefault(cache, Instance(cache, raise_as_it_was))
        request = Request((0, name), [TOKEN] * prompt, SamplingParams(max_tokens), instance, "test", NO_SALT, priority)
        if arrived is not None:
            request.times.arrived = arrived
        self.scheduler.submit(request)
        self.names[request] = name
        return request

    def step(self) -> dict[str, int]:
        """Run a step; return the number of tokens scheduled by request, in the order of rows."""
        rows, *_ = self.scheduler.schedule()
        for request, num_tokens, *_ in rows:
            enter(self.scheduler, request, num_tokens)
        return {self.names[request]: num_tokens for request, num_tokens, *_ in rows}


def enter(scheduler: Scheduler, request: Request, num_tokens: int, accepted: int = 0) -> None:
    """Enter the row's tokens, and the first `accepted` of its draft tokens."""
    assert request.sequence is not None
    at_end = num_tokens == request.num_remaining_tokens
    request.sequence.advance(num_tokens + accepted)  # type: ignore[union-attr]
    request.num_computed_tokens, request.has_committed = request.sequence.length, True
    for _ in range(accepted + 1 if at_end else 0):
        request.append_token(TOKEN, eos_ids=())
    if request.finish_reason:
        scheduler.remove(request)


class PerfectProposer:
    """Proposes draft tokens that are all accepted."""

    def __init__(self, count: int) -> None:
        self.count = count

    def propose(self, text: Sequence[int], most: int) -> list[int]:
        assert most > 0
        return [TOKEN] * min(most, self.count)

    def update_draft_length(self, accepted: int) -> None:
        """Do nothing."""
