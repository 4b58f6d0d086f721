"""One shadow: a request that also runs under a candidate instance, fed with the tokens that the served instance drew.

Keeps the served logits of tokens that the candidate has not predicted yet, since the candidate may lag behind: it
computes the prompt later, and drafts are verified without it. Knows neither the scheduler nor where results are sent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch import Tensor

from server.engine.isolation.errors import StrategyError
from server.engine.scheduling.request import Request
from server.engine.shadow.divergence import Divergence
from server.records import RequestFidelity

EndedEarly = Literal["room", "failed"]


class Comparable(NamedTuple):
    """Tokens that both instances have predicted, with the logits [V] of each."""

    served: list[Tensor]
    candidate: list[Tensor]
    tokens: list[int]


@dataclass(eq=False, slots=True)
class Shadow:
    """A request that shadows a served one under a candidate instance, and the comparison so far."""

    served: Request
    request: Request  # the shadow's own; its `tokens` are the list of the served request
    rollout: str | None  # the roll-out for which the request is shadowed; None: a rule's
    # Served logits [V] by the index of the token that they predict, in order; only those not compared yet
    pending: dict[int, Tensor] = field(default_factory=dict)
    divergences: list[Divergence] = field(default_factory=list)
    served_ended: bool = False
    num_idle_steps: int = 0  # number of steps since the shadow last had a row

    def count_computable_tokens(self, *, served_samples: bool) -> int:
        """Return how many tokens the shadow may compute in a step; `served_samples`: the served request samples in it.

        The last token of the text is computed in no step before the one in which the served request computes it, so
        that the logits after it can be compared at once.
        """
        assert self.request.seat is not None
        return len(self.served.tokens) - (not served_samples) - self.request.seat.length

    def add_served_logits(self, logits: Tensor) -> None:
        """Add the logits [n, V] from which the last n tokens of the served text were drawn."""
        self.pending.update(enumerate(logits, len(self.served.tokens) - len(logits)))

    def match(self, logits: Tensor) -> Comparable:
        """Return what can be compared, given the logits [n, V] after the shadow's last n committed tokens."""
        assert self.request.seat is not None
        first = self.request.seat.length - len(logits) + 1  # index of the token that the first row predicts
        found = [(t, row) for t, row in enumerate(logits, first) if t in self.pending]
        served = [self.pending.pop(t) for t, _ in found]
        return Comparable(served, [row for _, row in found], [self.served.tokens[t] for t, _ in found])

    def keep_pending(self, most: int) -> None:
        """Copy served logits that could not be compared in their step, and drop the oldest beyond `most`."""
        for index in list(self.pending)[: max(0, len(self.pending) - most)]:
            del self.pending[index]
        for index, row in self.pending.items():
            if row._base is not None:
                self.pending[index] = row.clone()

    def make_record(self, ended_early: EndedEarly | None) -> RequestFidelity:
        """Return the results of the comparison, without tokens whose logits were not finite."""
        finite = [each for each in self.divergences if each.is_finite]
        return RequestFidelity(
            served=self.served.cache.name,
            candidate=self.request.cache.name,
            rollout=self.rollout,
            kl=[each.kl for each in finite],
            agreed=[each.agreed for each in finite],
            rank=[each.rank for each in finite],
            served_bytes=_bytes_for(self.served),
            candidate_bytes=_bytes_for(self.request),
            ended_early=ended_early,
        )


def count_predicting_tokens(request: Request, num_tokens: int) -> int:
    """Return how many of the last tokens of a shadow's next row, of `num_tokens`, predict output tokens."""
    assert request.seat is not None
    first = request.seat.length
    return max(0, first + num_tokens - max(first, request.num_prompt_tokens - 1))


def _bytes_for(request: Request) -> int:
    """Return the bytes of KV memory of a request's text; 0 if the strategy does not say."""
    try:
        return request.cache.bytes_for(len(request.tokens))
    except StrategyError:
        return 0
