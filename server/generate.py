"""Generates tokens after one prompt without a scheduler, from just a model and a cache of any strategy.

The prompt is prefilled in the chunks that an idle server would use, each further token is computed by `forward_step`,
and tokens are sampled as in the server, so the result is the same. Works on token ids; `server/llm.py` adds text.
"""

from __future__ import annotations

from array import array
from collections.abc import Generator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from cache_strategies.types import NO_SALT
from server.engine.instance import Instance
from server.engine.ipc.messages import SamplingParams
from server.engine.sampling.draw import NOTHING_ALLOWED, draw_tokens
from server.engine.sampling.sampler import make_draws
from server.engine.scheduling.request import OutputGrammar, Request, RequestError
from server.engine.scheduling.step import NON_FINITE_LOGITS_MESSAGE
from server.models.base import Model
from server.sequence import CachedSequence
from server.text.errors import GrammarError

FinishReason = Literal["stop", "length"]


class NonFiniteLogitsError(ArithmeticError):
    """Raised when the model's logits are NaN or infinite."""


class GeneratedToken(NamedTuple):
    """A generated token id. With the finish reason "stop" it is a stop token."""

    token: int
    finish_reason: FinishReason | None  # why the text ended; None except for the last token


def generate(
    model: Model,
    instance: Instance,
    prompt: Sequence[int],
    sampling: SamplingParams,
    grammar: OutputGrammar | None = None,
) -> Generator[GeneratedToken, None, None]:
    """Return an iterator over the tokens that follow a prompt; each is computed by `next()`.

    `grammar` is what they have to be, at its start. The sequence has a seat in the cache from the first token until the
    iterator ends, is closed, or raises: MemoryError if there is no room, StrategyError, NonFiniteLogitsError, or
    GrammarError if no token can follow. Log-probabilities are not computed. Raises ValueError at once for invalid
    arguments: an empty prompt, more tokens than the context, unknown token ids.
    """
    _check_arguments(model, instance, prompt, sampling)
    request = Request((0, ""), list(prompt), sampling, instance, "generate", NO_SALT, grammar=grammar)
    try:
        request.check_allowed_tokens(model.info.eos_ids)
    except RequestError as error:
        raise ValueError(error.message) from None
    return _generate_tokens(model, request)


def _check_arguments(model: Model, instance: Instance, prompt: Sequence[int], sampling: SamplingParams) -> None:
    """Raise ValueError for arguments of `generate` that the model or the cache cannot take."""
    total, context = len(prompt) + sampling.max_tokens, instance.setup.geometry.max_seq_len
    bounded = len(prompt) if instance.contract.unbounded else total
    if sampling.max_tokens < 1:
        raise ValueError(f"max_tokens is {sampling.max_tokens}: ask for at least one token")
    if sampling.min_tokens > sampling.max_tokens:
        raise ValueError(f"min_tokens is {sampling.min_tokens}, more than max_tokens ({sampling.max_tokens}): lower it")
    if not prompt:
        raise ValueError("the prompt is empty: give at least one token")
    if bounded > context:
        raise ValueError(
            f"prompt ({len(prompt)} tokens) and max_tokens ({sampling.max_tokens}) come to {total} tokens, "
            f"and the context is {context}: shorten the prompt or lower max_tokens; a strategy with an "
            "unbounded contract bounds the prompt only"
        )
    named: dict[str, Sequence[int]] = {
        "prompt": prompt,
        "stop_token_ids": sampling.stop_token_ids,
        "logit_bias": [token for token, _ in sampling.logit_bias],
        "allowed_token_ids": array("q", sampling.allowed_token_ids),
    }
    for name, ids in named.items():
        if ids and not 0 <= min(ids) <= max(ids) < model.info.vocab_size:
            raise ValueError(f"{name}: token ids should be from 0 to {model.info.vocab_size - 1}")


def _generate_tokens(model: Model, request: Request) -> Generator[GeneratedToken, None, None]:
    sequence = CachedSequence(request.instance, model.device, request.tokens)
    try:
        logits = _prefill(model, request, sequence)
        while True:
            token = _sample_token(model, request, logits)
            if token is None:
                sequence.discard()
                raise NonFiniteLogitsError(NON_FINITE_LOGITS_MESSAGE.format(request.instance.name))
            if token != NOTHING_ALLOWED:
                request.append_token(token, model.info.eos_ids)
            _check_grammar(request, token)
            yield GeneratedToken(token, request.finish_reason)
            if request.finish_reason is not None:
                return
            logits = _decode(model, token, sequence)
    finally:
        sequence.close()


def _check_grammar(request: Request, token: int) -> None:
    """Raise GrammarError for a text that is not complete and has no next token.

    Its grammar has given up, or the sampling parameters leave no token that it allows.
    """
    grammar = request.grammar
    if grammar is None or request.finish_reason is not None:
        return
    if grammar.fault is not None or token == NOTHING_ALLOWED:
        raise GrammarError(grammar.fault or "with the other parameters, it allows no token here")


@torch.inference_mode()
def _prefill(model: Model, request: Request, sequence: CachedSequence) -> Tensor:
    """Compute the part of the prompt that is not cached; return the logits [1, V] of the token after the prompt."""
    longest = request.instance.setup.geometry.max_num_batched_tokens
    while True:
        num_tokens = sequence.limit_row(min(longest, request.num_prompt_tokens - sequence.length))
        batch = sequence.begin(num_tokens)
        logits = model.forward(batch.input_ids, batch)
        sequence.commit()
        if sequence.length == request.num_prompt_tokens:
            return logits


@torch.inference_mode()
def _decode(model: Model, token: int, sequence: CachedSequence) -> Tensor:
    """Run the model on one token of the sequence; return the logits [1, V] of the next token."""
    embedding = model.embed(torch.tensor([token], device=model.device)).view(1, 1, -1)
    return model.forward_step(embedding, sequence.position, sequence)[0]


@torch.inference_mode()
def _sample_token(model: Model, request: Request, logits: Tensor) -> int | None:
    """Return the next token, sampled from logits [1, V]; None if they are NaN or infinite, or NOTHING_ALLOWED."""
    draws = make_draws(request, model.info.eos_ids)
    [token] = draw_tokens(logits, draws, request.instance.setup.ops.sample)
    return token
