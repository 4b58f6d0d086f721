"""From a checked body to the engine's messages: a request for each prompt and choice. Knows no endpoint's answer."""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from server.api.errors import ApiError
from server.api.schemas import INT64, CacheRequest, GenerationRequest, SamplingRequest
from server.api.tenants import salt_of
from server.engine.messages import Caching, Hello, Sampling, Speculation, Submit


@dataclass(frozen=True)
class PromptTokens:
    """A prompt, and what it says, if somebody wants to hear it."""

    ids: list[int]
    text: str


class Most(NamedTuple):
    """What one request may ask for."""

    choices: int  # of all prompts together
    prompt_characters: int  # of a prompt, before it becomes tokens

    def check_choices(self, prompts: int, choices: int) -> None:
        """Raises ApiError."""
        if prompts * choices > self.choices:
            message = f"{prompts} prompts with {choices} choices each are too many: at most {self.choices} in all"
            raise ApiError(400, message, param="prompt" if prompts > 1 else "n")

    def check_text(self, text: object, param: str) -> None:
        """Raises ApiError for a text that is too long to be read; token ids are checked elsewhere."""
        if isinstance(text, str) and len(text) > self.prompt_characters:
            message = f"{param}: longer than {self.prompt_characters} characters"
            raise ApiError(400, message, param=param, code="context_length_exceeded")


MOST_SCORES = 1 << 21  # log-probabilities in an answer with several choices: more than 100 MB


def check_scores(sampling: Sampling, prompts: Sequence[PromptTokens], choices: int) -> None:
    """Raises ApiError for more log-probabilities than can be told in one answer. One choice may have all it wants."""

    def numbers(tokens: int, top: int | None) -> int:
        return 0 if top is None else tokens * (top + 1)

    told = sum(numbers(len(prompt.ids), sampling.prompt_logprobs) for prompt in prompts)
    told += len(prompts) * numbers(sampling.max_tokens, sampling.logprobs)
    if len(prompts) * choices > 1 and told * choices > MOST_SCORES:
        message = f"up to {told * choices} log-probabilities are too many for one answer: at most {MOST_SCORES}; "
        raise ApiError(400, message + "ask for fewer choices, prompts, tokens or alternatives", param="logprobs")


@dataclass(frozen=True)
class Choosing:
    """Where a strategy may have been named beside the body, and whose the request is."""

    header: str | None
    alias: str | None
    tenant: str


@dataclass(frozen=True)
class Job:
    """What the engine is asked for, and what all parts of the answer repeat."""

    id: str
    model: str
    prompts: Sequence[PromptTokens]
    choices: int  # that are written for each prompt
    submits: Sequence[Submit]  # of the first prompt, then of the second ...
    created: int = field(default_factory=lambda: int(time.time()))

    def prompt_of(self, choice: int) -> PromptTokens:
        return self.prompts[choice // self.choices]

    def first_of(self, choice: int) -> int:
        """The choice that computes the same prompt, and has its log-probabilities."""
        return choice // self.choices * self.choices


def job_of(
    kind: str, body: GenerationRequest, prompts: Sequence[PromptTokens], sampling: Sampling, choices: int, how: Choosing
) -> Job:
    """`kind` begins the id; `sampling` is that of the first choice. Raises ApiError."""
    check_scores(sampling, prompts, choices)
    key, caching, speculation = uuid.uuid4().hex, caching_of(body, how.tenant), speculation_of(body)
    submits = [
        Submit(
            request_id=f"{key}-{p}-{choice}",
            prompt=prompt.ids,
            sampling=_of_choice(sampling, choice),
            kv_cache=body.kv_cache,
            header=how.header,
            alias=how.alias,
            priority=body.priority,
            caching=caching,
            explain=body.explain,
            speculation=speculation,
            sibling_of=f"{key}-{p}-0" if choice else None,
        )
        for p, prompt in enumerate(prompts)
        for choice in range(choices)
    ]
    return Job(f"{kind}-{body.request_id or key}", body.model, prompts, choices, submits)


def sampling_of(
    body: SamplingRequest, hello: Hello, *, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None
) -> Sampling:
    """Of the first choice. Raises ApiError for tokens that the model does not have."""
    for field_, ids in (("logit_bias", body.logit_bias), ("stop_token_ids", body.stop_token_ids)):
        check_ids(list(ids), hello, field_)
    if body.min_tokens > max_tokens:
        raise ApiError(400, f"min_tokens: should be at most {max_tokens}, the tokens there may be", param="min_tokens")
    return Sampling(
        max_tokens=max_tokens,
        temperature=body.temperature,
        top_k=max(0, body.top_k),
        top_p=body.top_p,
        min_p=body.min_p,
        seed=(secrets.randbits(63) if body.seed is None else body.seed) % INT64,
        ignore_eos=body.ignore_eos,
        min_tokens=body.min_tokens,
        stop_token_ids=tuple(body.stop_token_ids),
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=tuple(body.logit_bias.items()),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _of_choice(sampling: Sampling, choice: int) -> Sampling:
    """Drawn with a seed of its own; the prompt is scored once."""
    changes = {"seed": (sampling.seed + choice) % INT64} | ({"prompt_logprobs": None} if choice else {})
    return msgspec.structs.replace(sampling, **changes)


def caching_of(body: CacheRequest, tenant: str) -> Caching:
    return Caching(
        salt=salt_of(tenant, body.cache_salt),
        max_cached=0 if body.skip_reading_prefix_cache else None,
        priority=body.kv_cache_priority,
        ttl=body.kv_cache_ttl,
    )


def speculation_of(body: GenerationRequest) -> Speculation | None:
    """None: as the settings say."""
    asked = body.speculative_config
    return None if asked is None else msgspec.convert(asked, Speculation, from_attributes=True)


def check_ids(ids: Sequence[int], hello: Hello, param: str) -> None:
    """Raises ApiError for ids that are no tokens of the model."""
    if ids and not 0 <= min(ids) <= max(ids) < hello.vocab_size:
        raise ApiError(400, f"{param}: token ids should be from 0 to {hello.vocab_size - 1}", param=param)


def check_prompt(prompt: Sequence[int], max_tokens: int, hello: Hello) -> None:
    """Raises ApiError for a prompt that the model has no tokens or no room for."""
    if not prompt:
        raise ApiError(400, "prompt: should have at least one token", param="prompt")
    check_ids(prompt, hello, "prompt")
    if len(prompt) + max_tokens > hello.max_seq_len:
        raise ApiError(
            400,
            f"the model's context is {hello.max_seq_len} tokens long, but {len(prompt) + max_tokens} were asked for: "
            f"{len(prompt)} in the prompt and {max_tokens} in the completion; make either shorter",
            param="prompt" if len(prompt) >= hello.max_seq_len else "max_tokens",
            code="context_length_exceeded",
        )
