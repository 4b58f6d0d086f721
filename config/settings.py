"""Every setting of the server: its name, type, bounds, default and description, once, in the class of its group.

Flags, environment variables, help and docs/reference/settings.md are made from these fields. A value from any source
(`sources.py`) beats the default, and values of all sources are checked alike. Does not know the strategies: the options
of an instance are checked by its kind, in the engine.
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from config.errors import SettingsError
from config.presets import PresetName, apply_preset
from config.quantities import MAX_TIMEOUT
from config.rollouts import GuardSettings, RolloutSettings, check_rollouts
from config.sizes import Share, exceeds, parse_bytes
from config.sources import ENV_PREFIX, Sources, did_you_mean, read_environment, read_file
from config.units import Duration, Metavar, Proportion, Size
from config.wording import explain_problem

Device = Literal["auto", "cpu", "mps", "cuda", "metal-emulated", "metal-checked"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
Weights = Literal["auto", "f32", "bf16", "f16", "int8", "int4"]
ModelImpl = Literal["auto", "lean", "transformers"]

MAX_DEPTH = 16  # maximum depth of tables within tables in a setting's value
MIN_API_KEY_LENGTH = 8  # minimum number of characters of an API key that cannot easily be guessed
MAX_DRAFT_TOKENS = 16  # maximum number of draft tokens in a step

MEBIBYTE = 2**20
BODY_OVERHEAD_BYTES = MEBIBYTE  # bytes allowed in a request's body in addition to its prompts
BYTES_PER_TOKEN_ID = 8  # bytes of a prompt's token id in JSON ("123456, "); a token of text takes fewer
MAX_DEFAULT_BODY_BYTES = 32 * MEBIBYTE


# ---------------------------------------------------------------- types of settings
def _split_words(value: Any) -> Any:
    """Split the text "a,b" of a flag or an environment variable into ["a", "b"], as a settings file has it.

    Raises ValueError if a word is empty, or if the value is neither a text nor a list with words.
    """
    words = [word.strip() for word in value.split(",")] if isinstance(value, str) else value
    if words is not None and not (isinstance(words, list) and words and all(words)):
        raise ValueError("should be a word, or several with commas between; leave it out to have none")
    return words


def _parse_object(value: Any) -> Any:
    """Return the object of a JSON text; other values as they are."""
    if not isinstance(value, str):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError("should be an object in JSON, such as '{\"enable_thinking\": false}'")
    return found


def _check_names(value: str | None) -> str | None:
    if value is not None and not all(name.strip() for name in value.split(",")):
        raise ValueError(f"{value!r} has an empty name: write 'name' or 'name,alias'")
    return value


def _check_api_keys(value: list[str] | None) -> list[str] | None:
    for number, key in enumerate(value or [], start=1):  # errors say the number, not the key: they are logged
        if not all("!" <= letter <= "~" for letter in key):
            raise ValueError(f"key {number} should be letters, digits and signs of ASCII, no spaces")
    return value


def _check_url(text: str) -> str:
    """Return a URL as it is. Raises ValueError if the text is none; the message does not quote it, for passwords."""
    try:
        url = urlsplit(text)
        if url.scheme in ("http", "https") and url.hostname and url.port != 0 and text.split() == [text]:
            return text
    except ValueError:  # the text has an unclosed bracket or an impossible port
        pass
    raise ValueError("should be a URL like http://127.0.0.1:4318")


def _at_least(least: str, reason: str) -> BeforeValidator:
    """Return a validator of amounts of memory, which gives the reason for refusing one below the least."""

    def check(value: Any) -> str:
        if parse_bytes(value) < parse_bytes(least):
            raise ValueError(f"should be {least} or more: {reason}")
        return str(value)  # in a settings file the value may be an integer, a number of bytes

    return BeforeValidator(check)


def _check_kv_memory(value: Any) -> str:
    if value != "auto":
        parse_bytes(str(value))
    return str(value)


def _check_characters(value: Any, depth: int = MAX_DEPTH) -> None:
    """Raise ValueError if a text in a value, or in the tables within it, has control characters or is not UTF-8."""
    if isinstance(value, str):
        # the error message does not quote the text, which may be an API key
        if any(unicodedata.category(character) in ("Cc", "Cs") for character in value):
            raise ValueError("has control characters, or bytes that are not UTF-8")
    elif isinstance(value, (Mapping, list)):
        if not depth:
            raise ValueError(f"has tables nested more than {MAX_DEPTH} deep")
        for part in value:
            _check_characters(part, depth - 1)
            if isinstance(value, Mapping):
                _check_characters(value[part], depth - 1)


Address = Annotated[str, Metavar("ADDRESS")]
Port = Annotated[int, Field(ge=0, le=65535)]
Timeout = Annotated[Duration, Field(gt=0, le=MAX_TIMEOUT)]
Period = Annotated[Duration, Field(ge=0, le=MAX_TIMEOUT)]
Memory = Annotated[str, Metavar("SIZE")]
ModelNames = Annotated[str, Metavar("NAME[,ALIAS]"), AfterValidator(_check_names)]
JsonObject = Annotated[dict[str, Any], Metavar("JSON"), BeforeValidator(_parse_object)]
StringList = Annotated[list[str] | None, NoDecode, BeforeValidator(_split_words)]


# ---------------------------------------------------------------- tables of a settings file
class StrategySettings(BaseModel):
    """A named instance of a kind of cache strategy. Fields that are not declared here are options of the kind."""

    model_config = ConfigDict(extra="allow")

    kind: str = Field(
        description="built-in kind, such as paged or streaming, the name a plug-in registered, or module:Class"
    )
    floor: Share = Field("0%", description="KV memory that no other instance may take")
    limit: Share = Field("100%", description="KV memory that it may hold at most")
    fallback: str | None = Field(
        None, description="instance that serves its requests while it gets none, after repeated faults"
    )

    checkpoints: str = Field(
        "interval",
        description="policy that chooses where recurrent states are kept for later texts, if the model has any: "
        "branches, interval, messages, the name a plug-in registered, or module:Class",
    )
    checkpoint_interval: int = Field(
        1024, ge=1, description="tokens between two checkpoints of the policies interval and messages"
    )
    checkpoint_share: Share = Field("100%", description="part of `limit` that checkpoints may take at most")

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, value: Any) -> Any:
        """Add the settings of the preset that the table names, if any."""
        return apply_preset(value) if isinstance(value, Mapping) else value

    @model_validator(mode="after")
    def _check_floor(self) -> StrategySettings:
        if exceeds(self.floor, self.limit):
            raise ValueError(f"floor {self.floor} is more than limit {self.limit}; raise the limit or lower the floor")
        return self

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class KeyLimits(BaseModel):
    """Bounds of the priorities that requests with one API key may ask for, and whether roll-outs include them.

    If a bound is None, the server's setting of the same name applies.
    """

    model_config = ConfigDict(extra="forbid")

    min_priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    max_kv_cache_priority: int | None = Field(None, ge=0, le=100)
    rollouts: bool = True


class SelectionRule(BaseModel):
    """A rule that chooses the instance `use` for a request that names none, if all of the rule's conditions hold."""

    model_config = ConfigDict(extra="forbid")

    use: str = Field(description="strategy instance that serves the requests to which the rule applies")
    shadow: str | None = Field(
        None, description="instance under which these requests also run, to be compared; their answers stay as they are"
    )
    min_prompt_tokens: int | None = Field(None, ge=0)
    max_prompt_tokens: int | None = Field(None, ge=0)
    min_priority: int | None = None
    max_priority: int | None = None
    kv_usage_above: Proportion | None = Field(
        None, ge=0, le=1, description="the rule applies above this share of KV memory in use"
    )


def resolve_fallbacks(fallbacks: Mapping[str, str | None]) -> dict[str, tuple[str, ...]]:
    """Return, for each instance, those that may serve its requests in its place: its fallback, the fallback's, etc.

    `fallbacks` has the setting `fallback` of every instance. Raises ValueError if it is not an instance, or if an
    instance would be a fallback of itself.
    """
    chains = {}
    for name in fallbacks:
        chain: list[str] = []
        while (following := fallbacks[chain[-1] if chain else name]) is not None:
            if following not in fallbacks:
                owner, there = chain[-1] if chain else name, ", ".join(sorted(fallbacks))
                raise ValueError(
                    f"strategies.{owner}.fallback: there is no instance {following!r}; instances are {there}"
                )
            if following == name or following in chain:
                circle = " -> ".join((name, *chain, following))
                raise ValueError(
                    f"strategies.{name}.fallback: the fallbacks form a circle, {circle}; the last must have none"
                )
            chain.append(following)
        chains[name] = tuple(chain)
    return chains


def default_strategies() -> dict[str, StrategySettings]:
    """Return the instances that every server has, under the names of their kinds.

    An instance of `mirrored` would raise the least KV memory of every server, as its longest sequence must fit.
    """
    return {
        "paged": StrategySettings(kind="paged"),
        "contiguous": StrategySettings(kind="contiguous"),
        "sliding_window": StrategySettings(kind="sliding_window"),
    }


class SettingsGroup(BaseSettings):
    """Settings that the help and the documents list together, under the group's title.

    The text below a field is its description in both. A setting's flag and variable follow from its name.
    """

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        extra="forbid",
        use_attribute_docstrings=True,
        defer_build=True,  # only `Settings` is made
    )

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)  # pydantic reads no other source: load_settings() has merged them all


class ModelSettings(SettingsGroup, title="model"):
    """Which model is served, and how it computes."""

    model: Annotated[str, Metavar("MODEL")] = "tiny"
    """directory of a Hugging Face model, its name on the hub, or a GGUF file; 'tiny': the model that is embedded in
    kvmux"""
    revision: str | None = None
    """branch, tag or commit of a model on the Hugging Face hub; default: main"""
    allow_symlinks: bool = False
    """follow symbolic links in the model's directory even if they lead out of it; otherwise such a link is an error"""
    model_name: ModelNames | None = None
    """model name that clients use in requests, or several, separated by commas; default: the model's own name"""
    skip_model_name_validation: bool = False
    """accept any model name in a request, and use the model that is served"""
    kernels: Literal["auto", "metal", "reference"] = "auto"
    """implementation of attention and the other operations; auto: the fastest for the device that was measured there;
    metal: the Metal kernels, on cuda too, where they are translated to CUDA C++ and never ran yet; reference: plain
    PyTorch, slower, to compare results or to rule out a bug in the kernels"""
    metal_capture_steps: int | None = Field(None, ge=1)
    """number of steps, from the first, whose GPU launches on mps are recorded in 0000-kvmux.gputrace, for Xcode; needs
    MTL_CAPTURE_ENABLED=1 in the environment; default: none"""
    model_impl: ModelImpl = "auto"
    """implementation of the model; lean: kvmux's own decoder; auto: lean if it supports the model, else transformers"""
    device: Device = "auto"
    """device that runs the model; auto: cuda, else mps, else cpu; metal-emulated: the Metal kernels on this machine's
    CPU, slowly, to try them without a Mac; metal-checked: the same, checked for races and bounds"""
    dtype: DType = "auto"
    """dtype of activations, keys and values; auto: the model's own dtype if the device is fast at it"""
    weights: Weights = "auto"
    """format of the weights in memory; auto: as in the checkpoint if that is quantized, else in the dtype of
    activations (`dtype`); int8 costs hardly any quality, int4 as much as a Q4_K_M file"""
    weights_cache: Annotated[str | None, Metavar("FOLDER")] = None
    """folder that keeps the weights quantized to int8 or int4 for the next start; off: keep nothing; default: a folder
    in the user's cache directory"""
    threads: int | None = Field(None, ge=1, le=1024)
    """CPU threads of the engine; default: one per core, one fewer for small models"""
    tool_call_parser: str = "auto"
    """how the model writes tool calls: a family's name, as in docs/guide/tools.md; auto: as its chat template shows;
    off: calls are text, and requests with tools are refused"""
    reasoning_parser: str = "auto"
    """how the model marks its reasoning: a family's name, as in docs/guide/tools.md; auto: as its chat template shows;
    off: reasoning is a part of the content"""
    default_chat_template_kwargs: JsonObject = {}
    """variables of the chat template for requests that do not set them, such as {"enable_thinking": false}"""
    split_special_tokens: bool = False
    """read what a request says as text, even where it spells special tokens such as <|im_end|>, which would end a turn;
    only those of the chat template count then"""


class HTTPSettings(SettingsGroup, title="HTTP"):
    """Where the server listens, and what its routes show."""

    host: Address = "127.0.0.1"
    """address that the server listens on"""
    port: Port = 8000
    """port that the server listens on; 0: any free port"""
    workers: int = Field(1, ge=1, le=64)
    """number of API processes, which receive and answer requests"""
    metrics_port: Port | None = None
    """separate port for /metrics, which `port` then does not serve; default: /metrics is on `port`"""
    metrics_host: Address | None = None
    """address that the port for /metrics listens on; default: the address `host`"""
    unknown_fields: Literal["reject", "ignore"] = "reject"
    """what to do with a request's fields that the server does not know; reject: answer 400; ignore: name them in a
    header of the response"""
    enable_tokenizer_info_endpoint: bool = False
    """let GET /tokenizer_info return the tokenizer's configuration and the chat template"""
    vllm_metric_names: bool = False
    """return the metrics of /metrics a second time, under vLLM's names"""
    list_strategies: bool = False
    """list the model in /v1/models under each strategy instance, too, as name:instance"""
    ui: bool = True
    """serve a page at /ui that shows the server's KV memory, requests and rates live"""


class LogSettings(SettingsGroup, title="logs"):
    """What is logged, and where traces go."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """lowest level of the messages that are logged to stderr"""
    log_format: Literal["text", "json"] = "text"
    """format of the log; json: one JSON object per line, and no banner on stdout"""
    log_prompts: bool = False
    """include prompts and generated text in the log; for debugging"""
    otlp_traces_endpoint: Annotated[str, AfterValidator(_check_url)] | None = Field(None, repr=False)
    """URL to which OpenTelemetry spans are sent; needs kvmux[otel]; default: none"""


class AccessSettings(SettingsGroup, title="access"):
    """Who may use the server, and what for."""

    admin_token: Annotated[str | None, Metavar("TOKEN")] = Field(None, min_length=8, repr=False)
    """token that an operator's request needs to clear, pin or resize caches or to record profiles; default: no request
    may do that"""
    api_keys: Annotated[StringList, Metavar("KEY[,KEY]"), AfterValidator(_check_api_keys)] = Field(None, repr=False)
    """API keys, separated by commas, one of which is required for /v1/*, the same routes without /v1 and the
    tokenizer's routes; default: no key is needed"""
    metrics_key: Annotated[str | None, Metavar("KEY")] = Field(None, min_length=8, repr=False)
    """key that is required for /metrics; default: no key is needed"""
    cors_origins: Annotated[StringList, Metavar("ORIGIN[,ORIGIN]")] = None
    """origins of the web pages that may call the server, such as 'https://a.example', separated by commas; '*': all;
    default: none"""
    min_priority: int = Field(0, ge=-(2**31), lt=2**31)
    """lowest, that is most urgent, `priority` that a request may ask for"""
    max_kv_cache_priority: int = Field(0, ge=0, le=100)
    """highest `kv_cache_priority` that a request may ask for"""


class LimitSettings(SettingsGroup, title="limits"):
    """How much, and for how long, a request or a call may occupy the server."""

    max_body_bytes: Size | None = Field(None, ge=1024)
    """maximum number of bytes of a request's body; a longer one is answered 413; default: 1 MiB +
    max(max_prompt_characters, 8 x max_choices x max_seq_len), but no more than 32 MiB"""
    max_inflight_body_bytes: Size | None = Field(None, ge=1024)
    """maximum number of bytes of all request bodies that an API process receives, parses and tokenizes at a time;
    further requests are answered 429; default: 4 times max_body_bytes, but no less than 64 MiB"""
    max_header_bytes: Size = Field(64 * 2**10, ge=1024)
    """maximum number of bytes of a request's line and headers; longer ones are answered 431"""
    header_timeout: Timeout = 30.0
    """maximum number of seconds until a request's line and headers have arrived; then it is answered 408"""
    body_timeout: Timeout = 30.0
    """maximum number of seconds in which nothing of a request's body arrives; then it is answered 408"""
    keep_alive_timeout: Timeout = 120.0
    """number of seconds that a connection stays open without a request; should be longer than clients keep theirs (Go
    90 s), so that none is closed while a client uses it again"""
    queue_timeout: Timeout | None = None
    """maximum number of seconds that a request waits for a seat in its cache; then it is answered 503; default: no
    limit while its client is connected"""
    request_timeout: Timeout | None = None
    """maximum number of seconds from a request's arrival to the end of its answer; then it fails with status 504;
    default: no limit"""
    drain_seconds: Period = 15.0
    """number of seconds in which running requests may finish after the server has received SIGTERM"""
    strategy_timeout: Duration = Field(5.0, ge=0.1, le=MAX_TIMEOUT)
    """number of seconds after which a call of a strategy that has not returned, or a sequence that it does not let go
    on, counts as a fault of the strategy"""
    watchdog_timeout: Duration = Field(120.0, ge=1, le=MAX_TIMEOUT)
    """number of seconds without a heartbeat after which the engine or an API process is killed and restarted; has to be
    more than the longest step takes"""
    max_choices: int = Field(256, ge=1)
    """maximum number of choices of a request: prompts times `n`"""
    max_stop_strings: int = Field(64, ge=4, le=1024)
    """maximum number of strings in `stop` of a request"""
    max_prompt_characters: int = Field(2**21, ge=1)
    """maximum number of characters of a prompt, before it is tokenized"""
    text_timeout: Timeout = 10.0
    """maximum number of seconds of CPU time that the model's chat template and tokenizer may take for a prompt; then
    the request is answered 400"""
    text_memory: Annotated[Memory, _at_least("16MiB", "ordinary prompts need that much")] = "1GiB"
    """maximum of the memory that the chat template and the tokenizer may take for a prompt, in addition to the loaded
    tokenizer; if it needs more, the request is answered 400"""
    max_grammar_bytes: Size = Field(2**18, ge=1, le=2**24)
    """maximum number of bytes of a JSON schema, regular expression, list of choices or grammar that constrains a
    text"""
    grammar_timeout: Timeout = 5.0
    """maximum number of seconds of CPU time that checking such a schema or grammar may take; then the request is
    answered 400"""
    grammar_memory: Annotated[Memory, _at_least("128MiB", "the table of a large vocabulary takes half of that")] = (
        "512MiB"
    )
    """maximum of the memory that checking such a schema or grammar may take; if it needs more, the request is answered
    400"""


class KVMemorySettings(SettingsGroup, title="KV memory"):
    """How much memory keys and values may take."""

    kv_memory: Annotated[Memory, BeforeValidator(_check_kv_memory)] = "auto"
    """memory for the keys and values of all instances, such as '2GiB'; auto: the share kv_memory_share of the free
    memory"""
    kv_memory_share: Proportion = Field(0.3, gt=0, lt=1)
    """with kv_memory=auto: share of the memory that is free once the weights are loaded"""
    kv_memory_at_start: bool = False
    """take all KV memory from the system before the server is ready, not while it serves: the start takes longer, and
    memory that is missing ends it"""
    kv_overcommit: float = Field(1.5, ge=1)
    """maximum multiple of the KV memory that all admitted requests together could fill at their full lengths; a request
    that would exceed it waits"""


class BatchingSettings(SettingsGroup, title="batching"):
    """Which requests run together, and which wait."""

    deterministic: bool = False
    """refuse to start unless a request's results are bitwise the same whatever other requests run; possible with CPU
    kernels only"""
    max_seq_len: int | None = Field(None, ge=2)
    """maximum number of tokens of prompt and completion together, or of the prompt alone under strategies of kind
    streaming; default: the model's context, at most 8192"""
    max_num_seqs: int = Field(64, ge=1, le=4096)
    """maximum number of sequences that run at a time"""
    max_num_batched_tokens: int | None = Field(None, ge=1, le=65536)
    """maximum number of prompt tokens in a step; default: 512 on the CPU, else 1024"""
    max_queued_requests: int = Field(1024, ge=0)
    """maximum number of waiting requests; further ones are answered 429"""
    priority_aging: Period = 10.0
    """number of seconds of waiting in the queue that count as much as one level of `priority`"""
    max_priority_wait: Period = 600.0
    """maximum number of seconds by which `priority` moves a request forward or back in the queue, which limits how long
    it waits for requests that arrived later"""


class SpeculationSettings(SettingsGroup, title="speculation"):
    """How many tokens are drafted for requests."""

    num_speculative_tokens: int = Field(0, ge=0, le=MAX_DRAFT_TOKENS)
    """number of draft tokens per step (speculative decoding) of requests that ask for no other number"""
    max_speculative_tokens: int = Field(MAX_DRAFT_TOKENS, ge=0, le=MAX_DRAFT_TOKENS)
    """maximum number of draft tokens that a request may ask for"""


class CacheSettings(SettingsGroup, title="cache strategies"):
    """Which strategy serves a request that names none, and how strategies are watched."""

    default_strategy: str = "paged"
    """strategy instance for requests that name none"""
    preset: PresetName | None = None
    """ready choice of a strategy (`kvmux doctor` lists them): an instance of that name, the default unless
    `default_strategy` is given"""
    rollouts_file: Annotated[str | None, Metavar("FILE")] = None
    """file that keeps the state of roll-outs for the next start; off: keep nothing; default: a file for this model,
    host and port in the user's state directory"""
    board: Annotated[str | None, Metavar("FOLDER")] = None
    """folder of a board that `kvmux evaluate --board` has measured of this model: the bounds of roll-outs with
    `guard = "board"`"""
    check_integrity: bool = False
    """check the bookkeeping of caches and of the KV memory while the engine is idle, and stop the engine if it is
    inconsistent; for developers of strategies"""


class Settings(
    CacheSettings,  # pydantic puts the fields of the last base first
    SpeculationSettings,
    BatchingSettings,
    KVMemorySettings,
    LimitSettings,
    AccessSettings,
    LogSettings,
    HTTPSettings,
    ModelSettings,
    title="tables of the settings file",
    defer_build=False,
):
    """All settings: those of the groups, which are flags, and tables, which are not."""

    key_limits: dict[str, KeyLimits] = Field(default_factory=dict, repr=False)
    """limits of requests with a certain API key: bounds of priorities, and opt-out from roll-outs"""
    strategies: dict[str, StrategySettings] = Field(default_factory=dict)
    """named strategy instances, beside `paged`, `contiguous` and `sliding_window`"""
    rules: list[SelectionRule] = Field(default_factory=list)
    """rules that choose an instance for requests that name none; the first match wins"""
    rollouts: dict[str, RolloutSettings] = Field(default_factory=dict)
    """staged roll-outs, in which another instance serves a growing share of an instance's requests"""

    @field_validator("*", mode="before")
    @classmethod
    def _check_text(cls, value: Any) -> Any:
        """Return the value as it is. Raises ValueError if a text in it has control characters or is not UTF-8."""
        _check_characters(value)
        return value

    @field_validator("strategies", mode="before")
    @classmethod
    def _fill_built_in_kinds(cls, value: Any) -> Any:
        """Add the field `kind` to built-in instances: `[strategies.paged] limit = "50%"` need not repeat the kind.

        A preset has a kind of its own.
        """
        if not isinstance(value, dict):
            return value
        filled = dict(value)
        for name in default_strategies().keys() & value.keys():
            if isinstance(value[name], dict) and "preset" not in value[name]:
                filled[name] = {"kind": name} | value[name]
        return filled

    @model_validator(mode="after")
    def _check_consistency(self) -> Settings:
        if self.admin_token in (self.api_keys or ()):
            raise ValueError(
                "admin_token is one of api_keys, so a client could administer the server; choose another token"
            )
        if any(key not in (self.api_keys or ()) for key in self.key_limits):  # the error does not quote the key
            raise ValueError("key_limits names a key that is not one of api_keys; add it to api_keys, or correct it")
        if self.metrics_key is not None and self.metrics_key in (self.admin_token, *(self.api_keys or ())):
            raise ValueError("metrics_key equals the admin_token or one of api_keys; choose another key")
        if self.metrics_port and self.metrics_port == self.port:
            raise ValueError(
                f"metrics_port and port are both {self.port}; choose another port, or leave metrics_port out"
            )
        if self.num_speculative_tokens > self.max_speculative_tokens:
            raise ValueError(
                f"num_speculative_tokens {self.num_speculative_tokens} is more than max_speculative_tokens "
                f"{self.max_speculative_tokens}; raise the latter or lower the former"
            )
        if (self.max_body_bytes or 0) > (self.max_inflight_body_bytes or math.inf):
            raise ValueError(
                f"max_body_bytes {self.max_body_bytes} is more than max_inflight_body_bytes "
                f"{self.max_inflight_body_bytes}; raise the latter or lower the former"
            )
        self._apply_default_preset()
        self.strategies = default_strategies() | self.strategies
        chosen = {"default_strategy": self.default_strategy}
        chosen |= {f"rules[{i}].use": rule.use for i, rule in enumerate(self.rules)}
        chosen |= {f"rules[{i}].shadow": rule.shadow for i, rule in enumerate(self.rules) if rule.shadow is not None}
        for where, name in chosen.items():
            if name not in self.strategies:
                raise ValueError(
                    f"{where}: there is no instance {name!r}; instances are {', '.join(sorted(self.strategies))}"
                )
        for name in self.strategies:
            if not (name.isascii() and name.replace("_", "").replace("-", "").isalnum()):
                raise ValueError(f"strategies: {name!r} is not a name: use letters, digits, '-' and '_'")
        check_rollouts(self.rollouts, self.strategies)
        for name, rollout in self.rollouts.items():
            if rollout.guard.board and self.board is None:
                raise ValueError(f'rollouts.{name}.guard: name the folder of the board: board = "FOLDER"')
        resolve_fallbacks({name: each.fallback for name, each in self.strategies.items()})
        return self

    def _apply_default_preset(self) -> None:
        """Declare the instance of the preset, if one is set; it is the default unless `default_strategy` is given."""
        if self.preset is None:
            return
        preset = StrategySettings.model_validate({"preset": self.preset})
        own = self.strategies.setdefault(self.preset, preset)
        if own.kind != preset.kind or not preset.options.keys() <= own.options.keys():
            raise ValueError(
                f"preset {self.preset!r} would be the instance of that name, which [strategies.{self.preset}] declares "
                f'without it: add preset = "{self.preset}" to the table, or choose another name for it'
            )
        if "default_strategy" not in self.model_fields_set:
            self.default_strategy = self.preset

    @property
    def model_names(self) -> list[str]:
        """Return the model names that a request may use: the model's main name first, then its aliases."""
        return [name.strip() for name in (self.model_name or Path(self.model).name).split(",")]

    @property
    def fallbacks(self) -> dict[str, tuple[str, ...]]:
        """Return, for each instance, those that may serve its requests in its place, in the order of their trial."""
        return resolve_fallbacks({name: each.fallback for name, each in self.strategies.items()})

    @property
    def short_api_keys(self) -> list[int]:
        """Return the positions in api_keys, counted from 1, of keys with fewer than MIN_API_KEY_LENGTH characters."""
        return [number for number, key in enumerate(self.api_keys or (), start=1) if len(key) < MIN_API_KEY_LENGTH]

    def compute_body_limits(self, max_seq_len: int) -> tuple[int, int]:
        """Return (max_body_bytes, max_inflight_body_bytes); for None, the default for a context of `max_seq_len`."""
        ids = BYTES_PER_TOKEN_ID * max_seq_len * self.max_choices
        one = min(BODY_OVERHEAD_BYTES + max(self.max_prompt_characters, ids), MAX_DEFAULT_BODY_BYTES)
        one = min(one, self.max_inflight_body_bytes or one) if self.max_body_bytes is None else self.max_body_bytes
        return one, self.max_inflight_body_bytes or max(4 * one, 64 * MEBIBYTE)


SECRETS = frozenset(name for name, field in Settings.model_fields.items() if not field.repr)  # which no message shows


def group_settings() -> dict[str, list[str]]:
    """Return the names of the settings that can be flags, by the title of their group."""
    groups = [base for base in reversed(Settings.__bases__) if issubclass(base, SettingsGroup)]
    return {str(group.model_config["title"]): list(group.model_fields) for group in groups}


# ---------------------------------------------------------------- loading
def load_settings(file: Path | None, values: Mapping[str, Any], *, are_flags: bool = True) -> Settings:
    """Merge the settings of `file`, the environment and `values`; a later one of these takes precedence.

    If `are_flags`, errors name `values` as flags of the command line; else they are arguments in Python. Raises
    SettingsError for an unknown setting or a value that cannot be used; the message names the setting and the source.
    """
    try:
        in_environment = read_environment(Settings)
        sources = Sources(file, read_file(file) if file else {}, in_environment, values, caller_gives_flags=are_flags)
        return Settings(**sources.merge())
    except RecursionError:
        raise SettingsError("the settings have tables that are nested too deep") from None
    except ValidationError as error:
        raise SettingsError("; ".join(_format_validation_error(e, sources) for e in error.errors())) from None


def _mask_api_key(path: tuple[str | int, ...], sources: Sources) -> tuple[str | int, ...]:
    """Return a setting's path with the API key in it replaced by its position in key_limits: errors are logged."""
    if path[:1] != ("key_limits",) or len(path) == 1:
        return path
    return "key_limits", f"(key {list(sources.merge()['key_limits']).index(path[1]) + 1})", *path[2:]


def _format_validation_error(error: Any, sources: Sources) -> str:
    """Return a message for a validation error: the setting, the source of its value, and what is wrong with it."""
    path: tuple[str | int, ...] = error["loc"]
    where = ".".join(str(part) for part in _mask_api_key(path, sources))
    if error["type"] == "extra_forbidden":
        rollouts = GuardSettings if "guard" in path[2:-1] else RolloutSettings
        table = {"rules": SelectionRule, "rollouts": rollouts}.get(str(path[0]), Settings)
        return f"{where}{sources.format_origin(path)} is not a setting{did_you_mean(str(path[-1]), table.model_fields)}"
    origin = sources.format_origin(path[:-1] if error["type"] == "missing" else path)
    return explain_problem(f"{where}{origin}", error, shows_value=not path or path[0] not in SECRETS)
