"""What texts go on with: the token each request draws, or several where a draft had guessed them. Knows no cache.

A step computes the logits behind every guess of a draft at once, as if all of them were right. Then the token at each
position is drawn as it would have been without a draft, from the same logits with the noise of (seed, position), and
the text goes on with these draws up to the first that is not what the draft said; what was computed behind that one is
thrown away. So drafts decide how many tokens a step brings, and never which: greedy or drawn, a request's text is the
one it would have had without, given equal logits.

That is speculative sampling (Leviathan et al. 2023) for drafts without a distribution of their own. There a guess x is
accepted with probability p(x), else the token is drawn from p without x. Here it is accepted if the draw is x, which
has the probability p(x), and otherwise the draw is distributed as p without x: as many guesses are accepted, and the
noise is that of the text without drafts besides.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice, zip_longest
from typing import NamedTuple

from torch import Tensor

from kernels import sampling as plain
from kernels.sampling import Sample
from server.engine.ipc.messages import TokenLogprob
from server.engine.sampling.logprobs import compute_row_logprobs
from server.engine.sampling.sampler import sample
from server.engine.scheduling.request import Request


class VerifiedRequest(NamedTuple):
    """A request whose text goes on, and the first of its rows of the logits [1 + guesses, V]."""

    request: Request
    draft: Sequence[int]
    first_logit_row: int

    @property
    def logit_rows(self) -> range:
        return range(self.first_logit_row, self.first_logit_row + 1 + len(self.draft))


class SampleResult(NamedTuple):
    """The draws of a turn that count."""

    tokens: list[int]
    is_finite: bool = True  # False: the logits behind these tokens are not numbers

    @property
    def num_accepted(self) -> int:
        """Guesses that came true, and have another token behind them."""
        return len(self.tokens) - self.is_finite


def sample_and_verify(
    turns: Sequence[VerifiedRequest], logits: Tensor, eos_ids: Collection[int], operation: Sample = plain.sample
) -> dict[Request, SampleResult]:
    """Return the accepted and drawn tokens of each request, from the logits [K, V] of the step, by `operation`."""
    if not turns:
        return {}
    rows = [row for turn in turns for row in turn.logit_rows]
    if rows != list(range(len(logits))):
        logits = logits[rows]
    draws = [draw for turn in turns for draw in turn.request.make_draws(eos_ids, turn.draft)]
    tokens = iter(sample(logits, draws, operation))
    return {
        request: verify_draft(draft, list(islice(tokens, len(draft) + 1)), request.get_end_token_ids(eos_ids))
        for request, draft, _ in turns
    }


def verify_draft(draft: Sequence[int], tokens: Sequence[int | None], ends: Collection[int]) -> SampleResult:
    """Of the draws [1 + guesses] those up to the first that was not guessed, or that ends the text."""
    counted: list[int] = []
    for token, guess in zip_longest(tokens, draft):
        if token is None:
            return SampleResult(counted, is_finite=False)
        counted.append(token)
        if token != guess or token in ends:
            break
    return SampleResult(counted)


def compute_sample_logprobs(
    turns: Sequence[VerifiedRequest], taken: Mapping[Request, SampleResult], logits: Tensor
) -> Iterator[list[TokenLogprob] | None]:
    """How likely the tokens were that each turn took; None for requests that do not ask."""
    tokens = [
        (turn, row, token)
        for turn in turns
        for row, token in zip(turn.logit_rows, taken[turn.request].tokens, strict=False)
    ]
    tops = [turn.request.sampling.logprobs for turn, _, _ in tokens]
    told = iter(compute_row_logprobs(logits, [row for _, row, _ in tokens], [token for _, _, token in tokens], tops))
    for turn in turns:
        yield [score for score in islice(told, len(taken[turn.request].tokens)) if score is not None] or None
