"""Makes a job of a checked body: the requests that the engine gets, one for each prompt and choice.

Checks a request against the server's limits, and finds the strategy in its model's name. What belongs to an API key is
in server/api/http/api_keys.py. Knows no endpoint's response.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

import msgspec
from fastapi import Depends, Header

from config.wording import format_values
from server.api.http.api_keys import LimitsByKey, get_tenant
from server.api.http.errors import ApiError
from server.api.openai.request_models import (
    MAX_NAME_LENGTH,
    SESSION_ID,
    CacheRequest,
    GenerationRequest,
    SamplingRequest,
)
from server.api.openai.tools.message_format import MessageFormat, MessageParsing
from server.engine.ipc.client import EngineClient
from server.engine.ipc.messages import Caching, Hello, SamplingParams, Speculation, Strategy, Submit
from server.engine.ipc.observations import ObservedCounts
from server.grammar.constraint import Constraint
from server.text.tokenizer import TokenizerBase

B = TypeVar("B", bound=GenerationRequest)

TOTAL_PROMPTS_FACTOR = 4  # all prompts of a request together may be this many times as long as the longest prompt
MAX_LOGPROBS = 1 << 21  # most log-probabilities in a response with several choices: more than 100 MB


@dataclass(frozen=True)
class PromptTokens:
    """A prompt's token ids, and its text where the response or the log shows it."""

    ids: list[int]
    text: str


class RequestHeaders(NamedTuple):
    """The headers of a request for generation, as the client sent them; None: not sent."""

    kv_cache: str | None = None  # X-KV-Cache
    session: str | None = None  # X-Session-Id
    authorization: str | None = None


async def read_headers(  # async, as FastAPI would call a plain function in a thread
    x_kv_cache: Annotated[str | None, Header(max_length=MAX_NAME_LENGTH)] = None,
    x_session_id: Annotated[str | None, Header(description=SESSION_ID)] = None,
    authorization: Annotated[str | None, Header(include_in_schema=False)] = None,
) -> RequestHeaders:
    """Return the headers of a request that concern its generation."""
    return RequestHeaders(x_kv_cache, x_session_id, authorization)


HeadersParam = Annotated[RequestHeaders, Depends(read_headers)]  # a parameter of the routes


class StrategyHints(NamedTuple):
    """The model's name in the response, and what beside the body chooses the instance and separates clients."""

    model: str
    system_fingerprint: str
    header: str | None  # the instance of the header X-KV-Cache
    alias: str | None  # the instance of the model's name
    tenant: str
    session: str | None  # the header X-Session-Id
    rollouts: bool  # whether a roll-out may choose the instance, or shadow the request, as its API key and body allow


@dataclass(frozen=True)
class Job(Generic[B]):
    """A body, the requests that the engine gets for it, and the fields that each chunk of the response has."""

    body: B
    id: str
    model: str
    system_fingerprint: str
    prompts: Sequence[PromptTokens]
    choices_per_prompt: int  # number of choices generated for each prompt
    submits: Sequence[Submit]  # the engine's requests: one for each choice of the first prompt, then of the second ...
    parsing: MessageParsing | None = None  # how the choices' texts are split; None: they are not
    created: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def common_fields(self) -> dict[str, Any]:
        """Return the fields that all responses and chunks of this job have: id, created, model, system_fingerprint."""
        return {name: getattr(self, name) for name in ("id", "created", "model", "system_fingerprint")}

    def get_prompt(self, choice: int) -> PromptTokens:
        return self.prompts[choice // self.choices_per_prompt]

    def get_first_choice(self, choice: int) -> int:
        """Return the index of the same prompt's first choice; only that choice gets the prompt's log-probabilities."""
        return choice // self.choices_per_prompt * self.choices_per_prompt


def make_job(
    kind: str,
    body: B,
    prompts: Sequence[PromptTokens],
    sampling: SamplingParams,
    choices: int,
    hints: StrategyHints,
    conversations: Sequence[str],
    grammar: str | None = None,
    parsing: MessageParsing | None = None,
) -> Job[B]:
    """Make the job of a request.

    `kind` begins its id; `sampling` is that of each prompt's first choice; `conversations` has each prompt's
    conversation key; `grammar` is what every text has to be, as `check_constraint` returns it. Raises ApiError for too
    many log-probabilities.
    """
    check_num_logprobs(sampling, prompts, choices)
    name, named_by = find_named_instance(body, hints)
    key, caching, speculation = uuid.uuid4().hex, make_caching(body, hints.tenant), make_speculation(body)
    submits = [
        Submit(
            request_id=f"{key}-{p}-{choice}",
            prompt=prompt.ids,
            sampling=sampling.for_choice(choice),
            kv_cache=name,
            named_by=named_by,
            priority=body.priority,
            caching=caching,
            explain=body.explain,
            reports_progress=body.stream and body.return_progress,
            speculation=speculation,
            sibling_of=f"{key}-{p}-0" if choice else None,
            conversation=conversation,
            rollouts=hints.rollouts,
            reference=body.kv_cache_reference,
            grammar=grammar,
        )
        for p, (prompt, conversation) in enumerate(zip(prompts, conversations, strict=True))
        for choice in range(choices)
    ]
    job_id = f"{kind}-{body.request_id or key}"
    return Job(body, job_id, hints.model, hints.system_fingerprint, prompts, choices, submits, parsing)


def make_sampling(
    body: SamplingRequest, hello: Hello, *, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    """Return the sampling parameters of the first choice; those of other choices differ in the seed.

    Raises ApiError for token ids that the model does not have, or min_tokens above max_tokens.
    """
    check_ids(list(body.logit_bias), hello, "logit_bias")
    check_ids(body.stop_token_ids, hello, "stop_token_ids")
    check_ids(body.allowed_token_ids, hello, "allowed_token_ids")
    if body.min_tokens > max_tokens:
        message = f"min_tokens: should be at most {max_tokens}, the tokens there may be, not {body.min_tokens}"
        raise ApiError(400, message, param="min_tokens")
    return body.to_sampling(max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs)


def make_caching(body: CacheRequest, tenant: str) -> Caching:
    return Caching(
        tenant=tenant,
        cache_salt=body.cache_salt or "",
        max_cached=0 if body.skip_reading_prefix_cache else None,
        priority=body.kv_cache_priority,
        ttl=body.kv_cache_ttl,
    )


def make_speculation(body: GenerationRequest) -> Speculation | None:
    """Return the speculative decoding that a request sets; None: as the server's settings say."""
    config = body.speculative_config
    return None if config is None else msgspec.convert(config, Speculation, from_attributes=True)


# ---------------------------------------------------------------- limits
class RequestLimits(NamedTuple):
    """The limits of one request's choices, prompts and stop strings."""

    max_choices: int  # most choices of all prompts together
    max_prompt_characters: int  # most characters of a prompt, before it becomes tokens
    max_stop_strings: int
    max_grammar_bytes: int  # most bytes of a schema or grammar that constrains a text

    def check_choices(self, prompts: int, choices: int) -> None:
        """Raise ApiError if all prompts together have more than `max_choices` choices."""
        if prompts * choices > self.max_choices:
            message = f"{prompts} prompts with {choices} choices each are too many: at most {self.max_choices} in all"
            raise ApiError(400, message, param="prompt" if prompts > 1 else "n")

    def check_stop(self, stop: Sequence[str]) -> None:
        """Raise ApiError for more than `max_stop_strings` stop strings."""
        if len(stop) > self.max_stop_strings:
            message = f"stop: {len(stop)} strings are too many: at most {self.max_stop_strings} (max_stop_strings)"
            raise ApiError(400, message, param="stop")

    def check_constraint(self, constraint: Constraint) -> None:
        """Raise ApiError for a schema or grammar of more than `max_grammar_bytes` bytes."""
        if (size := len(constraint.text.encode())) > self.max_grammar_bytes:
            message = f"{size} bytes are too many: at most {self.max_grammar_bytes} (max_grammar_bytes)"
            raise ApiError(400, f"{constraint.param}: {message}", param=constraint.param, code="grammar_too_large")

    def check_length(self, text: object, param: str) -> None:
        """Raise ApiError for a text that is too long to be tokenised; token ids are checked elsewhere."""
        if isinstance(text, str) and len(text) > (most := self.max_prompt_characters):
            message = f"{param}: longer than {most} characters, which is all that can be read; make it shorter"
            raise ApiError(400, message, param=param, code="context_length_exceeded")

    def check_total_length(self, texts: Iterable[object], param: str, times: int = 1) -> None:
        """Raise ApiError for texts that together have more than `times` x `max_prompt_characters` characters."""
        most = times * self.max_prompt_characters
        if sum(len(text) for text in texts if isinstance(text, str)) > most:
            message = f"{param}: together longer than {most} characters; send less in one request"
            raise ApiError(400, message, param=param, code="context_length_exceeded")


def check_num_logprobs(sampling: SamplingParams, prompts: Sequence[PromptTokens], choices: int) -> None:
    """Raise ApiError for more than MAX_LOGPROBS log-probabilities; a single choice may have any number."""

    def count_logprobs(tokens: int, top: int | None) -> int:
        return 0 if top is None else tokens * (top + 1)

    count = sum(count_logprobs(len(prompt.ids), sampling.prompt_logprobs) for prompt in prompts)
    count += len(prompts) * count_logprobs(sampling.max_tokens, sampling.logprobs)
    if len(prompts) * choices > 1 and count * choices > MAX_LOGPROBS:
        message = f"up to {count * choices} log-probabilities are too many for one answer: at most {MAX_LOGPROBS}; "
        raise ApiError(400, message + "ask for fewer choices, prompts, tokens or alternatives", param="logprobs")


def check_ids(ids: Sequence[int], hello: Hello, param: str) -> None:
    """Raise ApiError for token ids outside of the model's vocabulary; `param` is their field in the body."""
    if ids and not 0 <= min(ids) <= max(ids) < hello.vocab_size:
        wrong = [token for token in ids if not 0 <= token < hello.vocab_size]
        message = f"{param}: token ids should be from 0 to {hello.vocab_size - 1}, not {format_values(wrong)}"
        raise ApiError(400, message, param=param)


def check_prompt(prompt: Sequence[int], max_tokens: int, hello: Hello, *, unbounded: bool = False) -> None:
    """Raise ApiError for an empty prompt, one that does not fit the context, and ids that the model does not have.

    `unbounded`: only the prompt has to fit; the engine checks it again, once the strategy is chosen.
    """
    if not prompt:
        raise ApiError(400, "prompt: should have at least one token", param="prompt")
    if (len(prompt) if unbounded else len(prompt) + max_tokens) > hello.max_seq_len:
        raise ApiError(
            400,
            f"the model's context is {hello.max_seq_len} tokens long, but {len(prompt) + max_tokens} were asked for: "
            f"{len(prompt)} in the prompt and {max_tokens} in the completion; make either shorter"
            + _describe_unbounded(hello),
            param="prompt" if len(prompt) >= hello.max_seq_len else "max_tokens",
            code="context_length_exceeded",
        )
    check_ids(prompt, hello, "prompt")  # checked last: it takes long for more ids than fit the context


def resolve_max_tokens(requested: int | None, prompts: Sequence[PromptTokens], hello: Hello) -> int:
    """Return the most tokens of each text; without a request, as many as fit the context behind the longest prompt."""
    return requested if requested is not None else max(1, hello.max_seq_len - max(len(each.ids) for each in prompts))


def find_named_instance(
    body: GenerationRequest, hints: StrategyHints
) -> tuple[str | None, Literal["request", "header", "model"]]:
    """Return the instance that a request names, and where: in its body, else in a header, else in the model's name."""
    if body.kv_cache is not None:
        return body.kv_cache, "request"
    return (hints.header, "header") if hints.header is not None else (hints.alias, "model")


def may_be_unbounded(hello: Hello, body: GenerationRequest, hints: StrategyHints) -> bool:
    """Return whether a request's text may become longer than the context; if it names no strategy, under any one."""
    name, _ = find_named_instance(body, hints)
    return any(each.unbounded for each in hello.strategies if name in (None, each.name))


def _describe_unbounded(hello: Hello) -> str:
    """Return the end of a sentence about a text that is too long: under which strategies only the prompt has to fit."""
    names = [repr(each.name) for each in hello.strategies if each.unbounded]
    return f"; under strategy {' or '.join(names)} only the prompt has to fit" if names else ""


# ---------------------------------------------------------------- the model's name
def list_model_names(hello: Hello) -> dict[str, Strategy | None]:
    """Return the strategy, or None, for every valid name: model and aliases, plain or followed by `:instance`."""
    return {
        name if strategy is None else f"{name}:{strategy.name}": strategy
        for name in (hello.model, *hello.aliases)
        for strategy in (None, *hello.strategies)
    }


def find_strategy(hello: Hello, model: str) -> Strategy | None:
    """Return the strategy of a name `model:instance`; None for a plain model. Raises ApiError 404 for unknown names."""
    names = list_model_names(hello)
    if model not in names:
        raise ApiError(
            404,
            f"the model {model[:200]!r} does not exist; there is {', '.join(names)}",
            param="model",
            code="model_not_found",
            log_message="there is no model of that name",
        )
    return names[model]


def find_instance(hello: Hello, model: str) -> str | None:
    """Return the instance of a name `model:instance`; None for a plain model. Raises ApiError 404 for unknown names."""
    strategy = find_strategy(hello, model)
    return strategy.name if strategy else None


def resolve_model_name(hello: Hello, model: str | None, *, any_name: bool = False) -> str:
    """Return the requested model's name, or the served model's if the request names none.

    With `any_name`, the served model's name also replaces an unknown one.
    """
    return hello.model if not model or (any_name and model not in list_model_names(hello)) else model


# ---------------------------------------------------------------- what endpoints share
class Deadlines(NamedTuple):
    """The longest times that a request may take, in seconds after it was sent to the engine; None: no limit."""

    queue_timeout: float | None = None  # most seconds until the request is admitted
    request_timeout: float | None = None  # most seconds until the request has ended


@dataclass(frozen=True)
class Serving:
    """What the endpoints of generation share: the connection to the engine, the tokenizer, and limits of requests."""

    client: EngineClient
    tokenizer: TokenizerBase
    limits: RequestLimits
    deadlines: Deadlines
    limits_by_key: LimitsByKey
    message_format: MessageFormat
    counts: ObservedCounts
    log_prompts: bool = False
    any_model_name: bool = False  # whether an unknown model name means the served model

    def resolve_request(self, body: GenerationRequest, headers: RequestHeaders) -> tuple[Hello, StrategyHints]:
        """Return the engine's Hello (model, strategies, limits) and the request's StrategyHints.

        Raises EngineLost without an engine, ApiError for an unknown model or priorities outside of their bounds.
        """
        hello = self.client.get_hello()
        key_limits = self.limits_by_key.get(headers.authorization)
        key_limits.check_priorities(body.priority, body.kv_cache_priority)
        model = resolve_model_name(hello, body.model, any_name=self.any_model_name)
        return hello, StrategyHints(
            model,
            hello.system_fingerprint,
            headers.kv_cache,
            find_instance(hello, model),
            get_tenant(headers.authorization),
            headers.session,
            body.kv_cache_rollout and key_limits.rollouts,
        )
