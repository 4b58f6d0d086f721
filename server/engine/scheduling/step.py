"""What the scheduler decides about a step: its rows, and what is left of its budgets while it is scheduled.

Data only; scheduler.py fills it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cache_strategies.errors import StrategyError
from server.engine.scheduling.request import Request

NON_FINITE_LOGITS_MESSAGE = (
    "the model's logits are NaN or infinite under cache strategy {!r}: if they are so under other strategies, too, "
    "check the model's weights; if they are intact, --dtype float32 may help"
)


class Scheduled(NamedTuple):
    """A row of a step: `num_tokens` tokens of the request's text and, if they reach its end, draft tokens."""

    request: Request
    num_tokens: int
    draft: Sequence[int] = ()
    samples: bool = False  # whether the row reaches the end of the text, so that a token is sampled after it
    scores_prompt: bool = False  # whether the log-probabilities of its tokens are computed
    # For a row that an extension has added, where nothing is sampled: the number of last tokens whose logits it gets.
    # Its draft tokens are computed, and never enter the cache
    num_observed: int | None = None


class RequestFailure(NamedTuple):
    """A request that cannot go on, and the error that its client gets."""

    request: Request
    message: str
    code: str
    status: int = 500

    @classmethod
    def from_fault(cls, request: Request, error: StrategyError) -> RequestFailure:
        """Return the failure of a request whose strategy is at fault."""
        return cls(request, error.message, "strategy_failed")

    @classmethod
    def from_logits(cls, request: Request) -> RequestFailure:
        """Return the failure of a request whose logits are NaN or infinite."""
        return cls(request, NON_FINITE_LOGITS_MESSAGE.format(request.instance.name), "not_a_number")


class Schedule(NamedTuple):
    """A step's rows, the requests that were preempted for them, and those that failed meanwhile: they have no seat.

    `skipped` have a seat, and no row for lack of budget alone.
    """

    rows: Sequence[Scheduled]
    preempted: Sequence[Request]
    failed: Sequence[RequestFailure]
    skipped: Sequence[Request]


@dataclass
class PartialStep:
    """A step that is being scheduled: its rows so far and what is left of its budgets."""

    token_budget: int  # number of prompt and draft tokens that may still be added
    logprob_budget: int  # number of prompt tokens with log-probabilities that may still be added
    rows: list[Scheduled] = field(default_factory=list)
    scheduled_requests: set[Request] = field(default_factory=set)
    preempted: list[Request] = field(default_factory=list)
    failed: list[RequestFailure] = field(default_factory=list)
    skipped: list[Request] = field(default_factory=list)
    lacks_room: bool = False  # whether a request could not be scheduled for lack of memory
    reserved_tokens: int = 0  # tokens of the budget that prompts may not use once a prompt ends in this step
    prompt_ends: bool = False

    @property
    def accepts_prompts(self) -> bool:
        """Whether more prompt tokens may enter: less of the budget is used once a prompt ends in this step."""
        return self.token_budget > (self.reserved_tokens if self.prompt_ends else 0)

    def add(self, request: Request, num_tokens: int, *, scores_prompt: bool) -> None:
        """Add a row of `num_tokens` of the tokens of a request that are not computed yet."""
        remaining = len(request.tokens) - request.num_computed_tokens
        samples, request.refusal = num_tokens == remaining, None
        if remaining > 1:
            self.token_budget -= num_tokens
            self.prompt_ends |= samples
        if scores_prompt:
            self.logprob_budget -= num_tokens
        self.rows.append(Scheduled(request, num_tokens, samples=samples, scores_prompt=scores_prompt))
        self.scheduled_requests.add(request)
