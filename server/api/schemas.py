"""What clients may send, checked strictly: `true` is no number, NaN is refused, an unknown field is named.

Every documented parameter is here. What is not built yet is accepted at the value that changes nothing, and refused
otherwise. Null is the same as absent. Knows neither the engine nor the tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

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


def _single_prompt(value: Any) -> Any:
    """A list of one prompt is that prompt."""
    if not isinstance(value, list) or not value or not isinstance(value[0], str | list):
        return value
    if len(value) > 1:
        raise ValueError("several prompts in one request are not supported yet; send a request for each")
    return value[0]


def _text_or_ids(value: Any) -> Any:
    if isinstance(value, str) or (isinstance(value, list) and all(type(item) is int for item in value)):
        return value
    raise ValueError("should be a string, or a list of token ids")


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def only(*neutral: Any) -> AfterValidator:
    """Refuses every value but those that change nothing."""

    def check(value: Any) -> Any:
        if value not in neutral:
            raise ValueError("this value is not supported yet; leave it out")
        return value

    return AfterValidator(check)


Prompt = Annotated[str | list[int], BeforeValidator(_text_or_ids), BeforeValidator(_single_prompt)]
StopString = Annotated[str, Field(min_length=1)]
Stop = Annotated[
    list[StopString],
    Field(max_length=4),
    BeforeValidator(_as_list, json_schema_input_type=StopString | list[StopString]),
]


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: Annotated[bool, only(False)] = False
    continuous_usage_stats: Annotated[bool, only(False)] = False


class NotBuiltYet(Body):
    """Parameters of OpenAI, and extensions that clients of other servers know."""

    echo: Annotated[bool, only(False)] = False
    suffix: Annotated[str, only("")] = ""
    logprobs: Annotated[int | None, only(None)] = None
    prompt_logprobs: Annotated[int | None, only(None)] = None
    logit_bias: Annotated[dict[str, float], BeforeValidator(_few(1024)), only({})] = Field(default_factory=dict)
    frequency_penalty: Annotated[float, only(0)] = 0.0
    presence_penalty: Annotated[float, only(0)] = 0.0
    repetition_penalty: Annotated[float, only(1)] = 1.0
    min_tokens: Annotated[int, only(0)] = 0
    stop_token_ids: Annotated[list[int], Field(max_length=1024), only([])] = Field(default_factory=list)
    include_stop_str_in_output: Annotated[bool, only(False)] = False
    skip_special_tokens: Annotated[bool, only(True)] = True
    spaces_between_special_tokens: Annotated[bool, only(True)] = True
    add_special_tokens: Annotated[bool, only(True)] = True
    truncate_prompt_tokens: Annotated[int | None, only(None)] = None
    return_token_ids: Annotated[bool, only(False)] = False
    response_format: Annotated[dict[str, Any], only({"type": "text"})] = Field(default={"type": "text"})


class WithoutEffect(Body):
    """Parameters of OpenAI that mean nothing to a server of one's own."""

    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None


class CompletionRequest(NotBuiltYet, WithoutEffect):
    """Body of POST /v1/completions."""

    model: str = Field(description="the model's name, or name:instance to choose a KV-cache strategy too")
    prompt: Prompt = Field(description="a text, or token ids")
    max_tokens: int = Field(16, ge=1)
    temperature: float = Field(1.0, ge=0, le=2, description="0 takes the likeliest token")
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=INT64, description="0 and -1: off")
    min_p: float = Field(0.0, ge=0, le=1)
    seed: int | None = Field(None, ge=-INT64, lt=INT64, description="choice i is drawn with seed + i; default: random")
    stop: Stop = Field(default_factory=list, description="up to 4 strings, each of which ends the text")
    n: int = Field(1, ge=1, le=128, description="choices")
    best_of: int | None = Field(None, description="not built yet: only the value of n")
    ignore_eos: bool = Field(False, description="go on after the end-of-sequence token")
    stream: bool = False
    stream_options: StreamOptions | None = Field(None, description="only with stream")
    priority: int = Field(0, ge=-(2**31), lt=2**31, description="lower runs first")
    cache_salt: str | None = Field(
        None, min_length=1, max_length=256, description="only requests with the same salt share what is cached"
    )
    skip_reading_prefix_cache: bool = Field(False, description="compute the whole prompt, whatever is cached")
    kv_cache_priority: int = Field(0, ge=0, le=100, description="of what it leaves cached: higher stays longer")
    kv_cache_ttl: float | None = Field(None, gt=0, description="seconds after which that makes room first")
    explain: bool = Field(False, description="tell with each choice how it came about")
    kv_cache: str | None = Field(
        None, max_length=LONGEST_NAME, description="KV-cache strategy instance; GET /v1/kv_cache lists them"
    )

    @field_validator("best_of")
    @classmethod
    def _best_of(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value != info.data.get("n", value):
            raise ValueError("only the value of n is supported yet; leave it out")
        return value

    @field_validator("stream_options")
    @classmethod
    def _stream_options(cls, value: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if info.data.get("stream") is False:
            raise ValueError("allowed only with stream: true")
        return value

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage
