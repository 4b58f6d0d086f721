"""The fields that the bodies of both endpoints of generation have; an endpoint's own fields stand beside its route.

They are checked strictly: `true` is not a number, NaN is refused, and an error names an unknown field. Null is the same
as absent. Knows neither the engine nor the tokenizer.
"""

from __future__ import annotations

import secrets
from array import array
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SkipValidation,
    ValidationInfo,
    field_validator,
)

from config.settings import MAX_DRAFT_TOKENS
from config.units import Duration
from config.wording import format_value, format_values
from server.api.http.json_body import Body, Ignored, RefusingValidator, limit_members
from server.api.openai.structured.models import StructuredRequest
from server.engine.ipc.messages import SamplingParams

INT64, UINT64 = 2**63, 2**64
RANDOM_SEED = -1  # as in vLLM and llama.cpp
NO_LIMIT = -1  # as a number of tokens, as in llama.cpp: as many as fit the context
MAX_NAME_LENGTH = 128  # most characters of an instance's name; longer ones are not looked up
SESSION_ID = "name of the conversation: a roll-out serves all of its requests under one KV-cache strategy instance"


def _read_stop(value: Any) -> Any:
    """Return a list of stop strings without empty ones, which would end nothing."""
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list):
        raise ValueError(f"should be a text, or a list of texts, not {format_value(value)}")
    return [each for each in strings if each != ""]


def _read_no_limit(value: int | None) -> int | None:
    return None if value == NO_LIMIT else value


def _check_text_or_ids(value: Any) -> Any:
    if isinstance(value, str) or (isinstance(value, list) and {*map(type, value)} <= {int}):
        return value
    raise ValueError("should be a string, or a list of token ids")


def _parse_token_id_keys(value: Any) -> Any:
    """Return an object with its keys, which are strings in JSON, as token ids."""
    if not isinstance(value, dict):
        return value
    if wrong := [key for key in value if not (key.isascii() and key.isdigit() and len(key) < 10)]:
        raise ValueError(f"should have token ids for keys, not {format_values(wrong)}")
    return {int(key): bias for key, bias in value.items()}


def _check_not_empty(ids: list[int]) -> list[int]:
    if not ids:
        raise ValueError("should have at least one token id; leave it out to allow all")
    return ids


def allow_only(*neutral: Any, instead: str = "leave it out") -> RefusingValidator:
    """Return a validator that refuses every value but the `neutral` ones, which change nothing."""

    def check(value: Any) -> Any:
        if value not in neutral:
            raise ValueError(f"{format_value(value)} is not supported; {instead}")
        return value

    return RefusingValidator(check)


T = TypeVar("T")
LongList = Annotated[list[T], Field(fail_fast=True)]  # stops at the first wrong item, as errors for all take too long
TokenIds = LongList[int]
Prompt = Annotated[SkipValidation[str | list[int]], BeforeValidator(_check_text_or_ids)]
Unsupported = Annotated[Any, allow_only()]  # refused with any value, as ignoring it would change the response
AllowedTokens = Annotated[LongList[int], AfterValidator(_check_not_empty)]
StopString = Annotated[str, Field(min_length=1, max_length=1024)]
Stop = Annotated[
    LongList[StopString], BeforeValidator(_read_stop, json_schema_input_type=StopString | list[StopString])
]
MaxTokens = Annotated[int | None, Field(ge=NO_LIMIT, lt=INT64), AfterValidator(_read_no_limit)]  # None: no limit
LogitBias = Annotated[
    dict[int, Annotated[float, Field(ge=-100, le=100)]],
    BeforeValidator(_parse_token_id_keys, json_schema_input_type=dict[str, float]),
    BeforeValidator(limit_members(1024)),
]


class StreamOptions(Body):
    path_prefix = "stream_options."

    include_usage: bool = Field(False, description="send a last chunk with the usage of the whole request")
    continuous_usage_stats: bool = Field(
        False, description="with include_usage: each chunk also has the usage of its choice so far"
    )
    include_obfuscation: Ignored[bool] = None


class WithoutEffect(Body):
    """Parameters of OpenAI that change no response of this server: only their outermost type is checked."""

    metadata: Ignored[dict[str, Any]] = None
    store: Ignored[bool] = None
    service_tier: Ignored[str] = None
    safety_identifier: Ignored[str] = None
    prompt_cache_retention: Ignored[str] = None
    prompt_cache_options: Ignored[dict[str, Any]] = None
    prediction: Ignored[dict[str, Any]] = None
    verbosity: Ignored[str] = None


class SamplingRequest(Body):
    """Fields that say how tokens are drawn, and where a text ends."""

    temperature: float = Field(1.0, ge=0, le=2, description="0: always the likeliest token")
    top_p: float = Field(
        1.0, gt=0, le=1, description="draw from the likeliest tokens that together have this probability"
    )
    top_k: int = Field(0, ge=-1, lt=INT64, description="draw from the k likeliest tokens; 0 and -1: from all")
    min_p: float = Field(
        0.0, ge=0, le=1, description="draw from tokens that are at least this times as likely as the likeliest one"
    )
    frequency_penalty: float = Field(
        0.0,
        ge=-2,
        le=2,
        description="subtracted from a token's logit for each time it was drawn before; the prompt does not count",
    )
    presence_penalty: float = Field(
        0.0, ge=-2, le=2, description="subtracted from the logits of tokens that were drawn before, likewise"
    )
    repetition_penalty: float = Field(
        1.0, gt=0, le=10, description="above 1: tokens that are in the prompt or the output become less likely"
    )
    logit_bias: LogitBias = Field(
        default_factory=dict,
        description="numbers to add to the logits of tokens, by token id: up to 1,024, from -100 to 100",
    )
    allowed_token_ids: AllowedTokens = Field(
        default_factory=list,
        description="only these tokens are drawn, whatever their bias; if none of them ends the text, max_tokens does; "
        "default: all",
    )
    seed: int | None = Field(
        None,
        ge=-INT64,
        lt=UINT64,
        description="the same seed draws the same noise, whatever else runs; choice i is drawn with seed + i; -1: "
        "random, as in vLLM; default: random",
    )
    n: int = Field(1, ge=1, le=128, description="number of choices of each prompt, which is computed once")
    stop: Stop = Field(
        default_factory=list,
        description="the text ends before any of these strings, at most max_stop_strings (setting); an echoed prompt "
        "is not searched",
    )
    stop_token_ids: list[int] = Field(
        default_factory=list,
        max_length=128,
        description="ids of tokens that end the text, also with ignore_eos; stop_reason of the choice names the token",
    )
    include_stop_str_in_output: bool = Field(
        False, description="the text includes the stop string or stop token that ended it"
    )
    min_tokens: int = Field(
        0,
        ge=0,
        lt=INT64,
        description="number of tokens to generate, up to max_tokens, before stop tokens and strings can end the text",
    )
    ignore_eos: bool = Field(False, description="go on after an end-of-sequence token")
    skip_special_tokens: bool = Field(True, description="leave special tokens out of the text")
    spaces_between_special_tokens: Annotated[bool, allow_only(True)] = True

    def to_sampling(
        self, max_tokens: int, *, logprobs: int | None = None, prompt_logprobs: int | None = None
    ) -> SamplingParams:
        """Return the engine's sampling parameters of the first choice; its seed is random if the request has none."""
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_k=max(0, self.top_k),
            top_p=self.top_p,
            min_p=self.min_p,
            seed=(secrets.randbits(63) if self.seed in (None, RANDOM_SEED) else self.seed) % INT64,
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            stop_token_ids=tuple(self.stop_token_ids),
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=tuple(self.logit_bias.items()),
            allowed_token_ids=array("q", self.allowed_token_ids).tobytes(),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )


class CacheRequest(Body):
    """Fields that choose a request's KV cache, what it reuses from that, and how long its own blocks stay cached."""

    kv_cache: str | None = Field(
        None,
        max_length=MAX_NAME_LENGTH,
        description="name of a KV-cache strategy instance, as in GET /v1/kv_cache; default: by header, model, rules or "
        "default_strategy",
    )
    cache_salt: str | None = Field(
        None, min_length=1, max_length=256, description="only requests with the same salt share what is cached"
    )
    skip_reading_prefix_cache: bool = Field(
        False, description="compute the whole prompt, even if it is cached, as in vLLM"
    )
    kv_cache_priority: int = Field(
        0,
        ge=0,
        le=100,
        description="priority of the blocks that the request leaves cached: higher ones stay longer; at most "
        "max_kv_cache_priority (setting)",
    )
    kv_cache_ttl: Duration | None = Field(
        None,
        gt=0,
        description="time after which the blocks that the request leaves cached are evicted first: seconds, or a text "
        "such as '10m'; default: the instance's ttl",
    )
    kv_cache_reference: str | None = Field(
        None,
        max_length=MAX_NAME_LENGTH,
        description="name of an instance, usually an exact one, under which the text is computed as well: each choice "
        "gets how far each of its tokens is from what that instance predicts",
    )
    explain: bool = Field(False, description="add to each choice how it was served: instance, cached tokens, times")
    kv_cache_rollout: bool = Field(
        True,
        description="whether a roll-out may choose the KV-cache strategy instance, or run the request under a second "
        "one to compare them",
    )
    prompt_cache_key: str | None = Field(
        None, description="name of the conversation for a roll-out, if there is no header X-Session-Id"
    )
    user: str | None = Field(
        None, description="name of the conversation for a roll-out, if there is no prompt_cache_key either"
    )


class SpeculativeConfig(Body):
    """Draft tokens, looked up in the request's own text; fields as in vLLM's setting of this name."""

    path_prefix = "speculative_config."

    method: Literal["ngram"] = Field("ngram", description="prompt lookup, the only method")
    num_speculative_tokens: int = Field(ge=0, le=MAX_DRAFT_TOKENS, description="most draft tokens in a step; 0: none")
    prompt_lookup_max: int = Field(
        3, ge=1, le=64, description="most tokens of the n-gram at the text's end that is searched for in the text"
    )
    prompt_lookup_min: int = Field(
        1,
        ge=1,
        le=64,
        description="fewest tokens of the n-gram at the text's end that is searched for in the text",
    )

    @field_validator("prompt_lookup_min")
    @classmethod
    def _check_prompt_lookup_min(cls, value: int, info: ValidationInfo) -> int:
        if value > info.data.get("prompt_lookup_max", value):
            raise ValueError(f"should be at most prompt_lookup_max, not {value}")
        return value


class GenerationRequest(SamplingRequest, StructuredRequest, CacheRequest, WithoutEffect):
    """The fields that completions and chats have in common."""

    model: str = Field(
        "",
        description="the model's name, one of its aliases, or name:instance to choose a KV-cache strategy, too; "
        "default: the model that is served",
    )
    stream: bool = Field(False, description="send the response as server-sent events; the last one is [DONE]")
    stream_options: StreamOptions | None = Field(
        None, description="options of a streamed response; only with stream: true"
    )
    priority: int = Field(
        0, ge=-(2**31), lt=2**31, description="requests with lower numbers run first; at least min_priority (setting)"
    )
    prompt_logprobs: int | None = Field(
        None,
        ge=0,
        le=20,
        description="return log-probabilities of the prompt's tokens, with this many alternatives: in each choice, of "
        "a chat beside the choices",
    )
    return_token_ids: bool = Field(
        False, description="return the token ids of each choice, and those of the prompt where prompt_logprobs are"
    )
    return_tokens_as_token_ids: bool = Field(
        False, description="in log-probabilities, write tokens as token_id:5 instead of their text"
    )
    truncate_prompt_tokens: int | None = Field(
        None, ge=1, lt=INT64, description="keep only this many tokens of the prompt, the last ones"
    )
    speculative_config: SpeculativeConfig | None = Field(
        None, description="draft tokens, looked up in the text; default: the setting num_speculative_tokens"
    )
    timings_per_token: bool = Field(
        False, description="return the speed so far (timings) in each chunk and in a whole response, as in llama.cpp"
    )
    return_progress: bool = Field(
        False,
        description="begin a stream with chunks that tell how much of the prompt is computed (prompt_progress), as in "
        "llama.cpp; only with stream: true",
    )
    request_id: str | None = Field(
        None, pattern=r"^[!-~]{1,128}$", description="becomes part of the response's id; up to 128 printable characters"
    )

    @field_validator("stream_options")
    @classmethod
    def _check_stream_options(cls, value: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if info.data.get("stream") is False:
            raise ValueError("allowed only with stream: true")
        return value

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats
