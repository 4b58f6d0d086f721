"""What the scheduler decides about a step: its rows, and what is left of its budgets while it is scheduled.

Data only; scheduler.py fills it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from server.engine.isolation.errors import StrategyError
from server.engine.scheduling.request import Request


class Scheduled(NamedTuple):
    """A row of a step: `num_tokens` tokens of the request's text and, if they reach its end, draft tokens."""

    request: Request
    num_tokens: int
    draft: Sequence[int] = ()
    # Number of the row's last tokens whose logits are compared (engine/shadow), where nothing is sampled; None: the
    # row is not a shadow's
    num_compared: int | None = None


class FailedRequest(NamedTuple):
    """A request that cannot go on because its strategy is at fault; it has no seat any more and does not wait."""

    request: Request
    error: StrategyError


class Schedule(NamedTuple):
    """A step's rows, the requests that were preempted for them, and those that failed meanwhile."""

    rows: Sequence[Scheduled]
    preempted: Sequence[Request]
    failed: Sequence[FailedRequest]


@dataclass
class PartialStep:
    """A step that is being scheduled: its rows so far and what is left of its budgets."""

    token_budget: int  # number of prompt and draft tokens that may still be added
    logprob_budget: int  # number of prompt tokens with log-probabilities that may still be added
    rows: list[Scheduled] = field(default_factory=list)
    scheduled_requests: set[Request] = field(default_factory=set)
    preempted: list[Request] = field(default_factory=list)
    failed: list[FailedRequest] = field(default_factory=list)
    lacks_room: bool = False  # whether a request could not be scheduled for lack of memory
    reserved_tokens: int = 0  # tokens of the budget that prompts may not use once a prompt ends in this step
    prompt_ends: bool = False

    @property
    def accepts_prompts(self) -> bool:
        """Whether more prompt tokens may enter: less of the budget is used once a prompt ends in this step."""
        return self.token_budget > (self.reserved_tokens if self.prompt_ends else 0)

    def room_for(self, request: Request) -> int:
        """Return the maximum number of tokens of a request in this step; a decoding request may always have one."""
        room = max(self.token_budget, 1)
        return min(room, self.logprob_budget) if request.needs_prompt_logprobs else room

    def add(self, request: Request, num_tokens: int) -> None:
        if request.num_remaining_tokens > 1:
            self.token_budget -= num_tokens
            self.prompt_ends |= num_tokens == request.num_remaining_tokens
        if request.needs_prompt_logprobs:
            self.logprob_budget -= num_tokens
        self.rows.append(Scheduled(request, num_tokens))
        self.scheduled_requests.add(request)
