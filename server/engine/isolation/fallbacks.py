"""Chooses fallbacks: the instances that serve requests in place of one that gets none now, or that is at fault.

A request of which nothing was sent yet is moved to the fallback, also if the logits of its first token are not finite.
Knows the settings' fallbacks and the state of the instances; not why an instance is at fault.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from cache_strategies.errors import StrategyError
from server.engine.extension import StepExtension
from server.engine.instance import Instance
from server.engine.isolation.isolation import Isolation
from server.engine.model_runner import StepOutput
from server.engine.scheduling.request import Request, RequestError
from server.engine.scheduling.scheduler import Scheduler
from server.engine.scheduling.selection import find_fallback
from server.engine.scheduling.step import RequestFailure

log = logging.getLogger(__name__)


# Codes of errors that are their strategy's fault: requests that end with one may be moved to a fallback
STRATEGY_CODES = frozenset({"strategy_failed", "strategy_quarantined"})


class Fallbacks(StepExtension):
    """Moves requests to other instances; tells the choice of an instance which ones can serve."""

    def __init__(self, isolation: Isolation, scheduler: Scheduler) -> None:
        self._isolation = isolation
        self._scheduler = scheduler

    # ---------------------------------------------------------------- what the choice of an instance asks
    def is_usable(self, name: str) -> bool:
        return self._isolation.usable(name)

    def check_admission(self, name: str) -> None:
        self._isolation.check_admission(name)

    def list_fallbacks(self, name: str) -> Sequence[str]:
        return self._isolation.fallbacks.get(name, ())

    def has_room(self, name: str, num_prompt_tokens: int, max_tokens: int) -> bool:
        """Return whether an instance can ever hold such a request, as the scheduler's `submit` checks."""
        instance, total = self._isolation.instances[name], num_prompt_tokens + max_tokens
        bounded = num_prompt_tokens if instance.contract.unbounded else total
        try:
            return bounded <= self._scheduler.limits.max_seq_len and instance.bytes_for(total) <= instance.limit_bytes
        except StrategyError:
            return False

    # ---------------------------------------------------------------- requests that were queued
    def find_for(self, request: Request) -> str | None:
        """Return the fallback to which a request can be moved; None if there is none, or something was sent."""
        if request.num_cached_tokens is not None:
            return None  # its client knows the instance
        size = request.num_prompt_tokens, request.sampling.max_tokens
        return find_fallback(request.instance.name, self, *size)

    def rescue(self, failure: RequestFailure) -> bool:
        """Move a request whose strategy is at fault to a fallback; return whether it was moved."""
        return failure.code in STRATEGY_CODES and self.move(failure.request)

    def move(self, request: Request) -> bool:
        """Queue a request under a fallback of its instance, if there is one and nothing of the request was sent.

        Return whether it was queued. It loses its seat and keeps its place in the queue, in which the other choices
        (n > 1) of its prompt do not wait for it any more.
        """
        name = self.find_for(request)
        if name is None:
            return False
        before = request.instance, request.reason, request.fallback_of
        origin = request.instance.name
        self._scheduler.remove(request)
        self._isolation.end(request, "error")
        if request in request.siblings:
            request.siblings.remove(request)
        _reset(request, self._isolation.instances[name])
        request.fallback_of = request.fallback_of or origin
        request.reason = f"fallback of {request.fallback_of}"
        try:
            self._scheduler.submit(request)
        except (RequestError, StrategyError) as error:
            log.warning("a request of cache strategy %r could not be moved to its fallback %r: %s", origin, name, error)
            request.instance, request.reason, request.fallback_of = before
            return False
        self._isolation.begin(request)
        return True

    def committed(self, output: StepOutput) -> StepOutput:
        """Move requests whose first logits are NaN or infinite, with the other choices (n > 1) that wait for them.

        Return the output of all other requests; those that can be moved to no fallback after all have failed.
        """
        moved: set[Request] = set()
        failed: list[RequestFailure] = []
        for request, _, _ in output.to_sample:
            result = output.sampled.results.get(request)
            if result is None or result.is_finite or self.find_for(request) is None:
                continue
            assert request.sequence is not None
            request.instance.mark_spoiled(request.sequence)
            group = [request, *(sibling.request for sibling in output.siblings.get(request, ()))]
            failed += [RequestFailure.from_logits(each) for each in group if not self.move(each)]
            moved.update(group)
        return output.without(moved)._replace(failed=[*output.failed, *failed]) if moved else output


def _reset(request: Request, instance: Instance) -> None:
    """Give a request without a seat, of which nothing was sent, another instance, as if it had not waited or run."""
    assert request.sequence is None
    assert not request.num_output_tokens
    request.instance, request.siblings = instance, [request]
    request.refused_at, request.refusal, request.passed_over, request.times.admitted = -1, None, 0, 0.0
    request.num_compactions, request.compaction_seconds = 0, 0.0
    if not instance.contract.chunk_invariant:
        request.proposer = None  # drafts would change the text, as in RequestFactory
