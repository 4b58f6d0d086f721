"""Samples the next tokens of a step's requests, verifies their drafts and scores tokens. Knows no cache.

A step computes the logits after every token of a draft at once, as if all of them were right. Then the token at each
position is drawn as it would have been without a draft, from the same logits with the noise of (seed, position). The
text goes on with these draws up to the first that differs from the draft; the rest is thrown away. So drafts decide how
many tokens a step brings, never which: greedy or random, a request's text is the one without drafts, given equal
logits.

That is speculative sampling (Leviathan et al. 2023) for drafts without a distribution of their own. There a draft token
x is accepted with probability p(x), else the token is drawn from p without x. Here it is accepted if the draw is x,
which has the probability p(x), and otherwise the draw is distributed as p without x: as many draft tokens are accepted,
and the noise is that of the text without drafts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import islice, zip_longest
from typing import NamedTuple

from torch import Tensor

from kernels import sampling as reference
from kernels.sampling import Sample
from server.engine.ipc.messages import PromptScores, TokenLogprob
from server.engine.sampling.draw import Draw, draw_tokens
from server.engine.sampling.logits_processors import EMPTY_HISTORY, TokenHistory, has_penalties
from server.engine.sampling.logprobs import compute_logprobs, compute_row_logprobs
from server.engine.scheduling.request import Request


class SamplerInput(NamedTuple):
    """A request whose known tokens have all entered, and the first of its rows of logits [1 + len(draft), V]."""

    request: Request
    draft: Sequence[int]
    first_logit_row: int

    @property
    def logit_rows(self) -> range:
        return range(self.first_logit_row, self.first_logit_row + 1 + len(self.draft))


class PromptInput(NamedTuple):
    """A request whose prompt is scored, and its rows of logits: one for each of the tokens that entered."""

    request: Request
    logit_rows: slice


class SampleResult(NamedTuple):
    """The tokens by which a step extends a text."""

    tokens: list[int]
    is_finite: bool = True  # False: the logits after these tokens are NaN or infinite

    @property
    def num_accepted(self) -> int:
        """The number of draft tokens that were accepted."""
        return len(self.tokens) - self.is_finite


class SamplerOutput(NamedTuple):
    """The tokens and log-probabilities of a step."""

    results: Mapping[Request, SampleResult]
    logprobs: Mapping[Request, list[TokenLogprob] | None]  # of the tokens; None: the request wants none
    prompt_logprobs: Mapping[Request, PromptScores]


class Sampler:
    """Samples the tokens of a step from its logits."""

    def __init__(self, eos_ids: Collection[int], operation: Sample = reference.sample) -> None:
        self._eos_ids = eos_ids
        self._operation = operation  # a backend's `Ops.sample`

    def sample(
        self, logits: Tensor, inputs: Sequence[SamplerInput], prompts: Sequence[PromptInput] = ()
    ) -> SamplerOutput:
        """Sample a token for each input, after its accepted draft tokens, from a step's logits [K, V]."""
        results = self._sample_tokens(logits, inputs)
        prompt_logprobs = {request: score_prompt(request, logits[rows]) for request, rows in prompts}
        return SamplerOutput(results, _compute_token_logprobs(logits, inputs, results), prompt_logprobs)

    def _sample_tokens(self, logits: Tensor, inputs: Sequence[SamplerInput]) -> dict[Request, SampleResult]:
        if not inputs:
            return {}
        rows = [row for each in inputs for row in each.logit_rows]
        if rows != list(range(len(logits))):
            logits = logits[rows]
        draws = [draw for each in inputs for draw in make_draws(each.request, self._eos_ids, each.draft)]
        tokens = iter(draw_tokens(logits, draws, self._operation))
        return {
            request: verify_draft(draft, list(islice(tokens, len(draft) + 1)), request.get_end_token_ids(self._eos_ids))
            for request, draft, _ in inputs
        }


def make_draws(request: Request, eos_ids: Collection[int], draft: Sequence[int] = ()) -> list[Draw]:
    """Return the draw of the next token, and of the one after each draft token, if all before it are accepted."""
    return [_make_draw(request, eos_ids, draft[:accepted]) for accepted in range(len(draft) + 1)]


def _make_draw(request: Request, eos_ids: Collection[int], accepted: Sequence[int]) -> Draw:
    sampling, split = request.sampling, request.num_prompt_tokens
    history = EMPTY_HISTORY
    if has_penalties(sampling):
        history = TokenHistory(request.tokens[:split], [*request.tokens[split:], *accepted])
    may_end = request.num_output_tokens + len(accepted) >= sampling.min_tokens
    banned = () if may_end else request.get_end_token_ids(eos_ids)
    return Draw(sampling, len(request.tokens) + len(accepted), history, banned)


def verify_draft(draft: Sequence[int], tokens: Sequence[int | None], end_token_ids: Collection[int]) -> SampleResult:
    """Return the draws [1 + len(draft)] up to the first that differs from the draft or ends the text."""
    kept: list[int] = []
    for token, draft_token in zip_longest(tokens, draft):
        if token is None:
            return SampleResult(kept, is_finite=False)
        kept.append(token)
        if token != draft_token or token in end_token_ids:
            break
    return SampleResult(kept)


def _compute_token_logprobs(
    logits: Tensor, inputs: Sequence[SamplerInput], results: Mapping[Request, SampleResult]
) -> dict[Request, list[TokenLogprob] | None]:
    """Return the log-probabilities of each request's new tokens; None for requests that want none."""
    sampled = [
        (each.request.sampling.logprobs, row, token)
        for each in inputs
        for row, token in zip(each.logit_rows, results[each.request].tokens, strict=False)
    ]
    tops, rows, tokens = zip(*sampled, strict=True) if sampled else ((), (), ())
    scores = iter(compute_row_logprobs(logits, rows, tokens, tops))
    return {
        each.request: [s for s in islice(scores, len(results[each.request].tokens)) if s is not None] or None
        for each in inputs
    }


def score_prompt(request: Request, logits: Tensor) -> PromptScores:
    """Return the log-probabilities of the prompt tokens that follow those of a row; logits [num_tokens, V].

    Tokens that are computed again after a preemption and were scored before are left out.
    """
    seat, top = request.seat, request.sampling.prompt_logprobs
    assert seat is not None
    assert top is not None
    first = seat.length + 1
    start = max(first, request.num_scored_tokens + 1)
    tokens = request.tokens[start : min(seat.length + len(logits) + 1, request.num_prompt_tokens)]
    return PromptScores(request.key[1], compute_logprobs(logits[start - first :][: len(tokens)], tokens, top))
