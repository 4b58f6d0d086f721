"""Chooses fallbacks: the instances that serve requests in place of one that gets none now, or that is at fault.

A request of which nothing was sent yet is moved to the fallback, also if the logits of its first token are not finite.
Knows the settings' fallbacks and the state of the instances; not why an instance is at fault.
"""

from __future__ import annotations

import logging

from cache_strategies.errors import StrategyError
from server.engine.extension import StepExtension
from server.engine.instance import Instance
from server.engine.isolation.isolation import Isolation
from server.engine.model_runner import StepOutput
from server.engine.scheduling.request import Request, RequestError
from server.engine.scheduling.scheduler import Scheduler
from server.engine.scheduling.step import RequestFailure

log = logging.getLogger(__name__)


# Codes of errors that are their strategy's fault: requests that end with one may be moved to a fallback
STRATEGY_CODES = frozenset({"strategy_failed", "strategy_quarantined"})


class Fallbacks(StepExtension):
    """Finds an instance for each request, and moves requests to other ones."""

    def __init__(self, isolation: Isolation, scheduler: Scheduler) -> None:
        self._isolation = isolation
        self._scheduler = scheduler

    def choose(self, chosen: str, num_prompt_tokens: int, max_tokens: int) -> str:
        """Return the chosen instance or, if it gets no requests now, its first fallback that can serve the request.

        Raises RequestError, with the reason why the chosen one gets none, if no fallback can.
        """
        try:
            self._isolation.check_admission(chosen)
        except RequestError:
            if (fallback := self._find(chosen, num_prompt_tokens, max_tokens)) is None:
                raise
            return fallback
        return chosen

    def _find(self, name: str, num_prompt_tokens: int, max_tokens: int) -> str | None:
        """Return the first fallback of an instance that gets requests now and has room for such a request."""
        candidates = self._isolation.fallbacks.get(name, ())
        return next((each for each in candidates if self._can_serve(each, num_prompt_tokens, max_tokens)), None)

    def _can_serve(self, name: str, num_prompt_tokens: int, max_tokens: int) -> bool:
        try:
            self._isolation.check_admission(name)
        except RequestError:
            return False
        return self.has_room(name, num_prompt_tokens, max_tokens)

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
        return self._find(request.instance.name, request.num_prompt_tokens, request.sampling.max_tokens)

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
        set_fallback_of(request, request.fallback_of or origin)
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


def set_fallback_of(request: Request, chosen: str) -> None:
    """Note that a fallback of the chosen instance serves a request."""
    request.fallback_of, request.reason = chosen, f"fallback of {chosen}"


def _reset(request: Request, instance: Instance) -> None:
    """Give a request without a seat, of which nothing was sent, another instance, as if it had not waited or run."""
    assert request.sequence is None
    assert not request.num_output_tokens
    request.instance, request.siblings = instance, [request]
    request.refused_at, request.refusal, request.passed_over, request.times.admitted = -1, None, 0, 0.0
    request.num_compactions, request.compaction_seconds = 0, 0.0
    if not instance.contract.chunk_invariant:
        request.proposer = None  # drafts would change the text, as in RequestFactory
