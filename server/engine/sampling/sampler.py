"""Samples the next tokens of a step's requests, verifies their drafts and computes log-probabilities. Knows no cache.

A step computes the logits after all tokens of a draft at once. Then the token at each position is drawn as it would be
without a draft: from the same logits, with the random number of (seed, position). The text continues with these draws
up to and including the first that differs from the draft; the others are discarded. So drafts change how many tokens a
step produces, but not which: given equal logits, the text is the same as without drafts, greedy or not.

This is speculative sampling (Leviathan et al. 2023) for drafts without a probability distribution. There a draft token
x is accepted with probability p(x), and otherwise a token is drawn from p without x. Here x is accepted if the draw is
x, which has the probability p(x), and otherwise the draw is distributed as p without x. So the acceptance rate is the
same, and the random numbers are those of the text without drafts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import islice, zip_longest
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kernels import sampling as reference
from kernels.sampling import Sample
from server.engine.ipc.messages import PromptScores, TokenLogprob
from server.engine.sampling.draw import NOTHING_ALLOWED, Draw, draw_tokens
from server.engine.sampling.logits_processors import EMPTY_HISTORY, TokenHistory, allow_only, has_penalties
from server.engine.sampling.logprobs import compute_logprobs, compute_row_logprobs
from server.engine.scheduling.request import ReasoningLimit, Request


class SamplerInput(NamedTuple):
    """A request whose next token is sampled, its draft, and its rows in the step's logits."""

    request: Request
    draft: Sequence[int]
    first_logit_row: int  # index of the logits after the request's last token; the logits after each draft token follow

    @property
    def logit_rows(self) -> range:
        return range(self.first_logit_row, self.first_logit_row + 1 + len(self.draft))


class PromptInput(NamedTuple):
    """A request with prompt_logprobs, and its rows of logits: one for each of its tokens in the step."""

    request: Request
    logit_rows: slice


class SampleResult(NamedTuple):
    """The tokens that a step appends to a request's text: its accepted draft tokens, then a sampled one."""

    tokens: list[int]
    is_finite: bool = True  # False: the logits after these tokens were NaN or infinite, so none was sampled
    is_allowed: bool = True  # False: the grammar, with other parameters, allows no token after these

    @property
    def num_accepted(self) -> int:
        """The number of accepted draft tokens."""
        return len(self.tokens) - (self.is_finite and self.is_allowed)


class SamplerOutput(NamedTuple):
    """The sampled tokens and log-probabilities of a step, by request."""

    results: Mapping[Request, SampleResult]
    logprobs: Mapping[Request, list[TokenLogprob] | None]  # log-probabilities of the new tokens; None: not requested
    prompt_logprobs: Mapping[Request, PromptScores]


class Sampler:
    """Samples the tokens of a step's requests from its logits."""

    def __init__(
        self, eos_ids: Collection[int], operation: Sample = reference.sample, host_operation: Sample = reference.sample
    ) -> None:
        """`operation` is the device's `Ops.sample`, `host_operation` that of the CPU; they may be the same."""
        self._eos_ids = eos_ids
        self._operation, self._host_operation = operation, host_operation

    def sample(
        self, logits: Tensor, inputs: Sequence[SamplerInput], prompts: Sequence[PromptInput] = ()
    ) -> SamplerOutput:
        """Sample from a step's logits [K, V] a token for each input, after its accepted draft tokens.

        Also compute the log-probabilities of the new tokens and of `prompts`, where requested.
        """
        results = self._sample_tokens(logits, inputs)
        prompt_logprobs = {request: score_prompt(request, logits[rows]) for request, rows in prompts}
        return SamplerOutput(results, _compute_token_logprobs(logits, inputs, results), prompt_logprobs)

    def _sample_tokens(self, logits: Tensor, inputs: Sequence[SamplerInput]) -> dict[Request, SampleResult]:
        if not inputs:
            return {}
        rows = [row for _, draft, first in inputs for row in range(first, first + 1 + len(draft))]
        if rows != list(range(len(logits))):
            logits = logits[rows]
        draws = [draw for each in inputs for draw in make_draws(each.request, self._eos_ids, each.draft)]
        operation = self._operation
        if logits.device.type != "cpu" and any(draw.sampling.temperature > 0 or draw.changes_logits for draw in draws):
            # To draw a row takes a dozen launches on a device, to copy the logits one. The host has to wait either way:
            # for the logits, or for the tokens.
            logits, operation = logits.cpu(), self._host_operation
        tokens = iter(draw_tokens(logits, draws, operation))
        return {
            request: verify_draft(draft, list(islice(tokens, len(draft) + 1)), request.get_end_token_ids(self._eos_ids))
            for request, draft, _ in inputs
        }


def make_draws(request: Request, eos_ids: Collection[int], draft: Sequence[int] = ()) -> list[Draw]:
    """Return the parameters of 1 + len(draft) draws: of the next token, and of the token after each draft token."""
    masks: Sequence[NDArray[np.bool_] | None] = [None] * (len(draft) + 1)
    if request.grammar is not None:
        masks = request.grammar.compute_masks(draft, request.get_end_token_ids(eos_ids), eos_ids)
    draws = [_make_draw(request, eos_ids, draft[:accepted], mask) for accepted, mask in enumerate(masks)]
    return draws if request.thinking is None else _force_tokens(draws, request, request.thinking, draft)


def _make_draw(
    request: Request, eos_ids: Collection[int], accepted: Sequence[int], allowed: NDArray[np.bool_] | None
) -> Draw:
    sampling, split = request.sampling, request.num_prompt_tokens
    history = EMPTY_HISTORY
    if has_penalties(sampling):
        history = TokenHistory(request.tokens[:split], [*request.tokens[split:], *accepted])
    can_end = request.num_output_tokens + len(accepted) >= sampling.min_tokens
    banned = () if can_end else request.get_end_token_ids(eos_ids)
    if banned and allowed is not None and not _allows_others(allowed, banned):
        banned = ()  # the text is complete before min_tokens
    return Draw(sampling, len(request.tokens) + len(accepted), history, banned, allowed)


def _force_tokens(
    draws: Sequence[Draw], request: Request, thinking: ReasoningLimit, draft: Sequence[int]
) -> list[Draw]:
    """Return the draws, of which some can only be the token that ends the reasoning."""
    forced = thinking.find_forced_tokens(request.tokens, request.num_prompt_tokens, draft)
    return [
        draw if token is None else draw._replace(sampling=allow_only(draw.sampling, token), banned_token_ids=())
        for draw, token in zip(draws, forced, strict=True)
    ]


def _allows_others(allowed: NDArray[np.bool_], banned: Collection[int]) -> bool:
    """Return whether a mask [V] allows a token that is not banned."""
    return bool(allowed.sum() > sum(allowed[token] for token in {*banned}))


def verify_draft(draft: Sequence[int], tokens: Sequence[int | None], end_token_ids: Collection[int]) -> SampleResult:
    """Return the drawn `tokens`, up to and including the first that differs from the draft or ends the text.

    There are 1 + len(draft) drawn tokens. One is None if its logits were not finite, or NOTHING_ALLOWED; then the
    result ends before it.
    """
    kept: list[int] = []
    for token, draft_token in zip_longest(tokens, draft):
        if token is None:
            return SampleResult(kept, is_finite=False)
        if token == NOTHING_ALLOWED:
            return SampleResult(kept, is_allowed=False)
        kept.append(token)
        if token != draft_token or token in end_token_ids:
            break
    return SampleResult(kept)


def _compute_token_logprobs(
    logits: Tensor, inputs: Sequence[SamplerInput], results: Mapping[Request, SampleResult]
) -> dict[Request, list[TokenLogprob] | None]:
    """Return the log-probabilities of each request's new tokens; None for requests without `logprobs`."""
    sampled = [
        (request.sampling.logprobs, row, token)
        for request, _, first in inputs
        for row, token in enumerate(results[request].tokens, first)
    ]
    tops, rows, tokens = zip(*sampled, strict=True) if sampled else ((), (), ())
    logprobs = iter(compute_row_logprobs(logits, rows, tokens, tops))
    return {
        each.request: [x for x in islice(logprobs, len(results[each.request].tokens)) if x is not None] or None
        for each in inputs
    }


def score_prompt(request: Request, logits: Tensor) -> PromptScores:
    """Return log-probabilities of the prompt tokens after each of the request's n tokens of a step, by logits [n, V].

    Tokens that were scored before a preemption, and are computed again, are left out.
    """
    length, top = request.num_computed_tokens, request.sampling.prompt_logprobs
    assert top is not None
    first = length + 1
    start = max(first, request.num_scored_tokens + 1)
    tokens = request.tokens[start : min(length + len(logits) + 1, request.num_prompt_tokens)]
    return PromptScores(request.key[1], compute_logprobs(logits[start - first :][: len(tokens)], tokens, top))
