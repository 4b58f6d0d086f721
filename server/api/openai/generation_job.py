"""From a checked body to the engine's messages: a request for each prompt and choice. Knows no endpoint's answer."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from server.api.http.errors import ApiError
from server.api.http.json_values import format_value
from server.api.openai.request_models import INT64, CacheRequest, GenerationRequest, SamplingRequest
from server.engine.ipc.messages import Caching, Hello, SamplingParams, Speculation, Submit


@dataclass(frozen=True)
class PromptTokens:
    """A prompt's token ids, and its text where the answer or the log shows it."""

    ids: list[int]
    text: str


class RequestLimits(NamedTuple):
    """The limits of one request."""

    max_choices: int  # of all prompts together
    max_prompt_characters: int  # of a prompt, before it becomes tokens
    max_token_characters: int | None  # of text in one token, at most; None: any number
    max_stop_strings: int

    def check_choices(self, prompts: int, choices: int) -> None:
        """Raise ApiError if there are too many choices in all."""
        if prompts * choices > self.max_choices:
            message = f"{prompts} prompts with {choices} choices each are too many: at most {self.max_choices} in all"
            raise ApiError(400, message, param="prompt" if prompts > 1 else "n")

    def check_stop(self, stop: Sequence[str]) -> None:
        """Raise ApiError for more stop strings than are looked for."""
        if len(stop) > self.max_stop_strings:
            message = f"stop: {len(stop)} strings are too many: at most {self.max_stop_strings} (max_stop_strings)"
            raise ApiError(400, message, param="stop")

    def check_length(self, text: object, param: str, context: int | None = None) -> None:
        """Raise ApiError for a text that is too long to be tokenised, or to fit a context of `context` tokens."""
        if isinstance(text, str) and len(text) > (
            longest := self.get_max_characters(context)
        ):  # ids are checked elsewhere
            message = f"{param}: longer than {longest} characters, which is all that can be read; make it shorter"
            if longest < self.max_prompt_characters:
                message = (
                    f"{param}: {len(text)} characters cannot fit: the model's context is {context} tokens long, and no "
                    f"token stands for more than {self.max_token_characters} characters; make it shorter"
                )
            raise ApiError(400, message, param=param, code="context_length_exceeded")

    def get_max_characters(self, context: int | None) -> int:
        """Return the number of characters a text may have, to be tokenised and to fit `context` tokens."""
        if context is None or self.max_token_characters is None:
            return self.max_prompt_characters
        return min(self.max_prompt_characters, context * self.max_token_characters)

    def check_total_length(self, texts: Iterable[object], param: str, times: int = 1) -> None:
        """Raise ApiError for texts that together have more characters than `times` the longest prompt."""
        most = times * self.max_prompt_characters
        if sum(len(text) for text in texts if isinstance(text, str)) > most:
            message = f"{param}: together longer than {most} characters; send less in one request"
            raise ApiError(400, message, param=param, code="context_length_exceeded")


TOTAL_PROMPTS_FACTOR = 4  # all prompts of a request together may be this many times as long as the longest prompt
MAX_LOGPROBS = 1 << 21  # log-probabilities in an answer with several choices: more than 100 MB


def check_num_logprobs(sampling: SamplingParams, prompts: Sequence[PromptTokens], choices: int) -> None:
    """Raise ApiError for more log-probabilities than fit one answer; a single choice may have any number."""

    def count_logprobs(tokens: int, top: int | None) -> int:
        return 0 if top is None else tokens * (top + 1)

    told = sum(count_logprobs(len(prompt.ids), sampling.prompt_logprobs) for prompt in prompts)
    told += len(prompts) * count_logprobs(sampling.max_tokens, sampling.logprobs)
    if len(prompts) * choices > 1 and told * choices > MAX_LOGPROBS:
        message = f"up to {told * choices} log-probabilities are too many for one answer: at most {MAX_LOGPROBS}; "
        raise ApiError(400, message + "ask for fewer choices, prompts, tokens or alternatives", param="logprobs")


@dataclass(frozen=True)
class StrategyHints:
    """The model's name in the answer, the strategy named outside of the body, and the tenant."""

    model: str
    system_fingerprint: str
    header: str | None
    alias: str | None
    tenant: str


@dataclass(frozen=True)
class Job:
    """The engine's requests for one body, and the fields that all parts of the answer repeat."""

    id: str
    model: str
    system_fingerprint: str
    prompts: Sequence[PromptTokens]
    choices_per_prompt: int  # that are written for each prompt
    submits: Sequence[Submit]  # of the first prompt, then of the second ...
    created: int = field(default_factory=lambda: int(time.time()))

    def get_prompt(self, choice: int) -> PromptTokens:
        return self.prompts[choice // self.choices_per_prompt]

    def get_first_choice(self, choice: int) -> int:
        """Return the choice that computes the same prompt, and has its log-probabilities."""
        return choice // self.choices_per_prompt * self.choices_per_prompt


def make_job(
    kind: str,
    body: GenerationRequest,
    prompts: Sequence[PromptTokens],
    sampling: SamplingParams,
    choices: int,
    hints: StrategyHints,
) -> Job:
    """Make the job of a request. `kind` begins the id; `sampling` is that of the first choice. Raises ApiError."""
    check_num_logprobs(sampling, prompts, choices)
    key, caching, speculation = uuid.uuid4().hex, make_caching(body, hints.tenant), make_speculation(body)
    submits = [
        Submit(
            request_id=f"{key}-{p}-{choice}",
            prompt=prompt.ids,
            sampling=_make_choice_sampling(sampling, choice),
            kv_cache=body.kv_cache,
            header=hints.header,
            alias=hints.alias,
            priority=body.priority,
            caching=caching,
            explain=body.explain,
            speculation=speculation,
            sibling_of=f"{key}-{p}-0" if choice else None,
        )
        for p, prompt in enumerate(prompts)
        for choice in range(choices)
    ]
    return Job(
        f"{kind}-{body.request_id or key}",
        hints.model,
        hints.system_fingerprint,
        prompts,
        choices,
        submits,
    )


def make_sampling(
    body: SamplingRequest, hello: Hello, *, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    """Return how the first choice is sampled. Raises ApiError for tokens that the model does not have."""
    check_ids(list(body.logit_bias), hello, "logit_bias")
    check_ids(body.stop_token_ids, hello, "stop_token_ids")
    check_ids(body.allowed_token_ids, hello, "allowed_token_ids")
    if body.min_tokens > max_tokens:
        message = f"min_tokens: should be at most {max_tokens}, the tokens there may be, not {body.min_tokens}"
        raise ApiError(400, message, param="min_tokens")
    return body.to_sampling(max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs)


def _make_choice_sampling(sampling: SamplingParams, choice: int) -> SamplingParams:
    """Return the sampling of a choice: with a seed of its own, and the prompt scored for the first choice only."""
    changes = {"seed": (sampling.seed + choice) % INT64} | ({"prompt_logprobs": None} if choice else {})
    return msgspec.structs.replace(sampling, **changes)


def make_caching(body: CacheRequest, tenant: str) -> Caching:
    return Caching(
        tenant=tenant,
        cache_salt=body.cache_salt or "",
        max_cached=0 if body.skip_reading_prefix_cache else None,
        priority=body.kv_cache_priority,
        ttl=body.kv_cache_ttl,
    )


def make_speculation(body: GenerationRequest) -> Speculation | None:
    """Return the speculative decoding that a request asks for; None: as the settings say."""
    asked = body.speculative_config
    return None if asked is None else msgspec.convert(asked, Speculation, from_attributes=True)


def check_ids(ids: Sequence[int], hello: Hello, param: str) -> None:
    """Raise ApiError for ids that the model does not have."""
    if ids and not 0 <= min(ids) <= max(ids) < hello.vocab_size:
        wrong = min(ids) if min(ids) < 0 else max(ids)
        message = f"{param}: token ids should be from 0 to {hello.vocab_size - 1}, not {format_value(wrong)}"
        raise ApiError(400, message, param=param)


def check_prompt(prompt: Sequence[int], max_tokens: int, hello: Hello) -> None:
    """Raise ApiError for an empty prompt, one that does not fit the context, and ids that the model does not have."""
    if not prompt:
        raise ApiError(400, "prompt: should have at least one token", param="prompt")
    if len(prompt) + max_tokens > hello.max_seq_len:
        raise ApiError(
            400,
            f"the model's context is {hello.max_seq_len} tokens long, but {len(prompt) + max_tokens} were asked for: "
            f"{len(prompt)} in the prompt and {max_tokens} in the completion; make either shorter",
            param="prompt" if len(prompt) >= hello.max_seq_len else "max_tokens",
            code="context_length_exceeded",
        )
    check_ids(prompt, hello, "prompt")  # takes long for more than fit
