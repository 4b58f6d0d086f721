"""One shadow: a request that also runs under a second instance, fed with the tokens that the served instance drew.

The second instance is the candidate of a roll-out, or the reference to which a client wants a request compared. Keeps
the served logits of tokens that it has not predicted yet, since it may lag behind: it computes the prompt later, and
drafts are verified without it. Knows neither the scheduler nor where results are sent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from statistics import fmean
from typing import Any, Literal, NamedTuple

from torch import Tensor

from server.engine.instance import Instance
from server.engine.scheduling.request import Request
from server.engine.shadow.divergence import Divergence
from server.records import RequestFidelity

EndedEarly = Literal["room", "failed"]


class Comparable(NamedTuple):
    """Tokens that both instances have predicted, with the logits [V] of each."""

    served: list[Tensor]
    shadow: list[Tensor]
    tokens: list[int]
    indexes: list[int]  # of the tokens in the text


class ComparedToken(NamedTuple):
    """The divergence at one output token, by the token's index among them."""

    output_index: int
    divergence: Divergence


@dataclass(eq=False, slots=True)
class Shadow:
    """A request that shadows a served one under a second instance, and the comparison so far."""

    served: Request
    request: Request  # the shadow's own; its `tokens` are the list of the served request
    served_instance: Instance  # of the served request when the shadow began; a fallback may serve it later
    rollout: str | None  # as in `PlannedShadow`
    is_reference: bool = False
    unsent: list[ComparedToken] = field(default_factory=list)  # of a reference: what the client has not got yet
    divergences: list[Divergence] = field(default_factory=list)  # of tokens at which both logits are finite
    is_finite: bool = True  # whether all logits were so far
    unmeasured: Comparable = field(default_factory=lambda: Comparable([], [], [], []))
    served_end: float = math.inf  # time.monotonic() when the served request ended
    num_idle_steps: int = 0  # number of steps since the shadow last had a row
    last_row: float = -math.inf  # time.monotonic() when it last had one
    # Served logits [V] by the index of the token that they predict, in order; only those not compared yet
    _kept: dict[int, Tensor] = field(default_factory=dict)  # copies
    _fresh: dict[int, Tensor] = field(default_factory=dict)  # rows of the logits of the present step

    @property
    def has_served_ended(self) -> bool:
        return self.served_end < math.inf

    @property
    def awaited_since(self) -> float:
        """Time since when the served request has ended and the shadow has had no row; infinite before the end."""
        return max(self.served_end, self.last_row)

    @property
    def is_behind(self) -> bool:
        """Whether served logits wait for the second instance's."""
        return bool(self._kept or self._fresh)

    def count_computable_tokens(self, *, served_samples: bool) -> int:
        """Return how many tokens the shadow may compute in a step; `served_samples`: the served request samples in it.

        The last token of the text is computed in no step before the one in which the served request computes it, so
        that the logits after it can be compared at once.
        """
        return len(self.served.tokens) - (not served_samples) - self.request.num_computed_tokens

    def count_compared(self, num_tokens: int) -> int:
        """Return how many of the last tokens of the shadow's next row, of `num_tokens`, have logits to be compared."""
        first = next(iter(self._kept), len(self.served.tokens))  # index of the first token whose prediction is needed
        return min(num_tokens, max(0, self.request.num_computed_tokens + num_tokens + 1 - first))

    def add_served_logits(self, logits: Tensor) -> None:
        """Add the logits [n, V] from which the last n tokens of the served text were drawn."""
        self._fresh.update(enumerate(logits, len(self.served.tokens) - len(logits)))

    def match(self, logits: Tensor) -> None:
        """Add to `unmeasured` what can be compared, given the logits [n, V] after the shadow's last n committed tokens.

        Logits are copied: a row of a step's logits would keep all of them in memory.
        """
        first = self.request.num_computed_tokens - len(logits) + 1  # index of the token that the first row predicts
        for token, row in enumerate(logits, first):
            fresh = self._fresh.pop(token, None)
            served = self._kept.pop(token, None) if fresh is None else fresh.clone()
            if served is not None:
                self.unmeasured.served.append(served)
                self.unmeasured.shadow.append(row.clone())
                self.unmeasured.tokens.append(self.served.tokens[token])
                self.unmeasured.indexes.append(token)

    def take_divergences(self, divergences: Iterator[Divergence]) -> None:
        """Take the divergences of the unmeasured tokens, which come first."""
        taken = list(islice(divergences, len(self.unmeasured.tokens)))
        self.divergences += (each for each in taken if each.is_finite)
        self.is_finite &= all(each.is_finite for each in taken)
        if self.is_reference:
            first = self.served.num_prompt_tokens
            of_tokens = zip(self.unmeasured.indexes, taken, strict=True)
            self.unsent += (ComparedToken(index - first, each) for index, each in of_tokens if each.is_finite)
        self.unmeasured = Comparable([], [], [], [])

    def keep_served_logits(self, most: int) -> None:
        """Copy the step's served logits that could not be compared yet, and drop the oldest ones beyond `most`."""
        self._kept |= {token: row.clone() for token, row in self._fresh.items()}
        self._fresh.clear()
        for token in list(self._kept)[: max(0, len(self._kept) - most)]:
            del self._kept[token]

    def summarize(self) -> dict[str, Any]:
        """Return the fields of the served request's RequestRecord that tell of the comparison so far."""
        compared = self.divergences
        return {
            "shadow": self.request.instance.name,
            "fidelity_tokens": len(compared),
            "fidelity_kl": fmean(each.kl for each in compared) if compared else None,
            "fidelity_top1": fmean(each.agreed for each in compared) if compared else None,
        }

    def make_record(self, ended_early: EndedEarly | None) -> RequestFidelity:
        """Return the results of the comparison."""
        return RequestFidelity(
            served=self.served_instance.name,
            candidate=self.request.instance.name,
            rollout=self.rollout,
            kl=[each.kl for each in self.divergences],
            agreed=[each.agreed for each in self.divergences],
            rank=[each.rank for each in self.divergences],
            served_bytes=self.served.kv_bytes,
            candidate_bytes=self.request.kv_bytes,
            ended_early=ended_early,
        )
