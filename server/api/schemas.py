"""What clients may send, checked strictly: `true` is no number, NaN is refused, an unknown field is named.

What both endpoints of generation take; what else a body has stands beside its route. Null is the same as absent.
Knows neither the engine nor the tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from config.settings import LONGEST_DRAFT

INT64 = 2**63
MOST_FIELDS = 100  # of an object, each of which may be an error
LONGEST_NAME = 128  # characters of an instance's name; longer ones are not even looked up


def _few(most: int) -> Callable[[Any], Any]:
    """Refuses a larger object before each of its members is looked at, and found wrong."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            raise ValueError(f"should have at most {most} members")
        return value

    return check


class Body(BaseModel):
    """What all bodies have in common."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, values: Any) -> Any:
        _few(MOST_FIELDS)(values)
        return (
            {key: value for key, value in values.items() if value is not None} if isinstance(values, dict) else values
        )


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _text_or_ids(value: Any) -> Any:
    if isinstance(value, str) or (isinstance(value, list) and all(type(item) is int for item in value)):
        return value
    raise ValueError("should be a string, or a list of token ids")


def _token_ids(value: Any) -> Any:
    """JSON has strings for keys; OpenAI's are token ids."""
    if not isinstance(value, dict):
        return value
    if not all(key.isascii() and key.isdigit() and len(key) < 10 for key in value):
        raise ValueError("should have token ids for keys")
    return {int(key): bias for key, bias in value.items()}


def only(*neutral: Any) -> AfterValidator:
    """Refuses every value but those that change nothing."""

    def check(value: Any) -> Any:
        if value not in neutral:
            raise ValueError("this value is not supported; leave it out")
        return value

    return AfterValidator(check)


T = TypeVar("T")
LongList = Annotated[list[T], Field(fail_fast=True)]  # an error for each item would take longer than the longest answer
Prompt = Annotated[str | LongList[int], BeforeValidator(_text_or_ids)]
StopString = Annotated[str, Field(min_length=1, max_length=1024)]
Stop = Annotated[
    list[StopString],
    Field(max_length=4),
    BeforeValidator(_as_list, json_schema_input_type=StopString | list[StopString]),
]
LogitBias = Annotated[
    dict[int, Annotated[float, Field(ge=-100, le=100)]],
    BeforeValidator(_token_ids, json_schema_input_type=dict[str, float]),
    BeforeValidator(_few(1024)),
]


class StreamOptions(Body):
    include_usage: bool = Field(False, description="a last chunk with the usage of the whole request")
    include_obfuscation: Annotated[bool, only(False)] = False
    continuous_usage_stats: Annotated[bool, only(False)] = False


class WithoutEffect(Body):
    """Parameters of OpenAI that mean nothing to a server of one's own."""

    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None


class SamplingRequest(Body):
    """How tokens are drawn, and where a text ends."""

    temperature: float = Field(1.0, ge=0, le=2, description="0 takes the likeliest token")
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=INT64, description="0 and -1: off")
    min_p: float = Field(0.0, ge=0, le=1)
    frequency_penalty: float = Field(0.0, ge=-2, le=2, description="off a logit for each time its token was drawn")
    presence_penalty: float = Field(0.0, ge=-2, le=2, description="off a logit once its token was drawn")
    repetition_penalty: float = Field(
        1.0, gt=0, le=10, description="over 1: what is there already, prompt too, is less likely"
    )
    logit_bias: LogitBias = Field(default_factory=dict, description="by token id, added to its logit")
    seed: int | None = Field(None, ge=-INT64, lt=INT64, description="choice i is drawn with seed + i; default: random")
    n: int = Field(1, ge=1, le=128, description="choices")
    stop: Stop = Field(default_factory=list, description="up to 4 strings, each of which ends the text")
    stop_token_ids: list[int] = Field(default_factory=list, max_length=128, description="tokens that end the text")
    include_stop_str_in_output: bool = Field(False, description="the text has what ended it")
    min_tokens: int = Field(0, ge=0, lt=INT64, description="before so many, no token that ends the text is drawn")
    ignore_eos: bool = Field(False, description="go on after the end-of-sequence token")
    skip_special_tokens: bool = Field(True, description="special tokens have no text")
    spaces_between_special_tokens: Annotated[bool, only(True)] = True
    response_format: Annotated[dict[str, Any], only({"type": "text"})] = Field(default={"type": "text"})


class CacheRequest(Body):
    """What becomes of the keys and values."""

    kv_cache: str | None = Field(
        None, max_length=LONGEST_NAME, description="KV-cache strategy instance; GET /v1/kv_cache lists them"
    )
    cache_salt: str | None = Field(
        None, min_length=1, max_length=256, description="only requests with the same salt share what is cached"
    )
    skip_reading_prefix_cache: bool = Field(False, description="compute the whole prompt, whatever is cached")
    kv_cache_priority: int = Field(0, ge=0, le=100, description="of what it leaves cached: higher stays longer")
    kv_cache_ttl: float | None = Field(None, gt=0, description="seconds after which that makes room first")
    explain: bool = Field(False, description="tell with each choice how it came about")


class SpeculativeConfig(Body):
    """Guesses at the next tokens, from the request's own text; fields as in vLLM's setting of this name."""

    method: Literal["ngram"] = "ngram"
    num_speculative_tokens: int = Field(ge=0, le=LONGEST_DRAFT, description="guesses a step, at most; 0: none")
    prompt_lookup_max: int = Field(3, ge=1, le=64, description="so many of the last tokens are looked for in the text,")
    prompt_lookup_min: int = Field(1, ge=1, le=64, description="and no fewer than so many")

    @field_validator("prompt_lookup_min")
    @classmethod
    def _prompt_lookup_min(cls, value: int, info: ValidationInfo) -> int:
        if value > info.data.get("prompt_lookup_max", value):
            raise ValueError("should be at most prompt_lookup_max")
        return value


class GenerationRequest(SamplingRequest, CacheRequest, WithoutEffect):
    """What completions and chats have in common."""

    model: str = Field(description="the model's name, or name:instance to choose a KV-cache strategy too")
    stream: bool = False
    stream_options: StreamOptions | None = Field(None, description="only with stream")
    priority: int = Field(0, ge=-(2**31), lt=2**31, description="lower runs first")
    prompt_logprobs: int | None = Field(None, ge=0, le=20, description="log-probabilities of the prompt's tokens")
    return_token_ids: bool = Field(False, description="tell the ids of prompt and output")
    truncate_prompt_tokens: int | None = Field(None, ge=1, lt=INT64, description="keep so many, the last ones")
    speculative_config: SpeculativeConfig | None = Field(None, description="default: as the server's settings say")
    request_id: str | None = Field(None, pattern=r"^[!-~]{1,128}$", description="part of the answer's id")

    @field_validator("stream_options")
    @classmethod
    def _stream_options(cls, value: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if info.data.get("stream") is False:
            raise ValueError("allowed only with stream: true")
        return value

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage
