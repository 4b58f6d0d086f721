"""Every setting of the server, its default, and which values are refused.

A value from any source (`sources.py`) beats the default, and values of all sources are checked alike. Does not know the
strategies: the options of an instance are checked by its kind, in the engine.
"""

from __future__ import annotations

import json
import math
import os
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from config.errors import SettingsError
from config.rollouts import GuardSettings, RolloutSettings, check_rollouts
from config.sizes import Share, exceeds, parse_bytes
from config.sources import (
    ENV_PREFIX,
    Sources,
    apply_renames,
    check_environment,
    did_you_mean,
    read_file,
    read_renamed_environment,
)
from config.units import Duration, Proportion, Size
from config.wording import explain_problem

Device = Literal["auto", "cpu", "mps", "cuda", "metal-emulated", "metal-checked"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
Weights = Literal["auto", "f32", "bf16", "f16", "int8", "int4"]
ModelImpl = Literal["auto", "lean", "transformers"]


def _split_words(value: Any) -> Any:
    """Split the text "a,b" of a flag or an environment variable into ["a", "b"], as a settings file has it.

    Raises ValueError if a word is empty, or if the value is neither a text nor a list with words.
    """
    words = [word.strip() for word in value.split(",")] if isinstance(value, str) else value
    if words is not None and not (isinstance(words, list) and words and all(words)):
        raise ValueError("should be a word, or several with commas between; leave it out to have none")
    return words


MAX_DEPTH = 16  # maximum depth of tables within tables in a setting's value


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


JsonObject = Annotated[dict[str, Any], BeforeValidator(_parse_object)]  # a flag has it as JSON
StringList = Annotated[list[str] | None, NoDecode, BeforeValidator(_split_words)]


def _check_memory(value: Any, least: str, reason: str) -> str:
    """Return an amount of memory as text. Raises ValueError with the reason if it is below the least."""
    if parse_bytes(value) < parse_bytes(least):
        raise ValueError(f"should be {least} or more: {reason}")
    return str(value)


def _is_url(text: str) -> bool:
    """Return whether a text is a URL that begins with http:// or https:// and has a host."""
    try:
        url = urlsplit(text)
        return url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0 and text.split() == [text]
    except ValueError:  # the text has an unclosed bracket or an impossible port
        return False


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


MAX_TIMEOUT = 7 * 24 * 3600  # maximum of any timeout, in seconds
SECRETS = frozenset(
    {"api_keys", "key_limits", "admin_token", "metrics_key", "otlp_traces_endpoint"}
)  # settings whose values no message shows
MIN_API_KEY_LENGTH = 8  # minimum number of characters of an API key that cannot easily be guessed
MAX_DRAFT_TOKENS = 16  # maximum number of draft tokens in a step

MEBIBYTE = 2**20
BODY_OVERHEAD_BYTES = MEBIBYTE  # bytes allowed in a request's body in addition to its prompts
BYTES_PER_TOKEN_ID = 8  # bytes of a prompt's token id in JSON ("123456, "); a token of text takes fewer
MAX_DEFAULT_BODY_BYTES = 32 * MEBIBYTE


class StrategySettings(BaseModel):
    """A named instance of a kind of cache strategy. Fields that are not declared here are options of the kind."""

    model_config = ConfigDict(extra="allow")

    kind: str = Field(
        description="contiguous, sliding_window, paged, quest, compressed, mirrored, the name a plug-in registered, or "
        "module:Class"
    )
    floor: Share = Field("0%", description="KV memory that no other instance may take")
    limit: Share = Field("100%", description="KV memory that it may hold at most")
    fallback: str | None = Field(
        None, description="instance that serves its requests while it gets none, after repeated faults"
    )

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
    """Return one instance of each built-in kind that is not only for comparison, under the kind's own name.

    An instance of `mirrored` would raise the least KV memory of every server, as its longest sequence must fit.
    """
    return {
        "paged": StrategySettings(kind="paged"),
        "contiguous": StrategySettings(kind="contiguous"),
        "sliding_window": StrategySettings(kind="sliding_window"),
    }


class Settings(BaseSettings):
    """The server's settings. Each field is also a flag (`--max-seq-len`) and a variable (`KVMUX_MAX_SEQ_LEN`)."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, env_nested_delimiter="__", extra="forbid")

    model: str = Field(
        "tiny",
        description="directory of a Hugging Face model, its name on the hub, or a GGUF file; 'tiny': the model "
        "that is embedded in kvmux",
    )
    revision: str | None = Field(
        None, description="branch, tag or commit of a model on the Hugging Face hub; default: main"
    )
    allow_symlinks: bool = Field(
        False,
        description="follow symbolic links in the model's directory even if they lead out of it; otherwise such a link "
        "is an error",
    )
    model_name: str | None = Field(
        None,
        description="model name that clients use in requests, or several, separated by commas; default: the model's "
        "own name",
    )
    skip_model_name_validation: bool = Field(
        False, description="accept any model name in a request, and use the model that is served"
    )
    kernels: Literal["auto", "reference"] = Field(
        "auto",
        description="implementation of attention and the other operations; auto: the fastest for the device; "
        "reference: plain PyTorch, slower, to compare results or to rule out a bug in the kernels",
    )
    metal_capture_steps: int | None = Field(
        None,
        ge=1,
        description="number of steps, from the first, whose GPU launches on mps are recorded in 0000-kvmux.gputrace, "
        "for Xcode; needs MTL_CAPTURE_ENABLED=1 in the environment; default: none",
    )
    model_impl: ModelImpl = Field(
        "auto",
        description="implementation of the model; lean: kvmux's own decoder; auto: lean if it supports the model, else "
        "transformers",
    )
    host: str = Field("127.0.0.1", description="address that the server listens on")
    port: int = Field(8000, ge=0, le=65535, description="port that the server listens on; 0: any free port")
    workers: int = Field(1, ge=1, le=64, description="number of API processes, which receive and answer requests")
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="separate port for /metrics, which `port` then does not serve; default: /metrics is on `port`",
    )
    metrics_host: str | None = Field(
        None, description="address that the port for /metrics listens on; default: the address `host`"
    )
    deterministic: bool = Field(
        False,
        description="refuse to start unless a request's results are bitwise the same whatever other requests run; "
        "possible with CPU kernels only",
    )
    device: Device = Field(
        "auto",
        description="device that runs the model; auto: cuda, else mps, else cpu; metal-emulated: the Metal kernels on "
        "this machine's CPU, slowly, to try them without a Mac; metal-checked: the same, checked for races and bounds",
    )
    dtype: DType = Field(
        "auto",
        description="dtype of activations, keys and values; auto: the model's own dtype if the device is fast at it",
    )
    weights: Weights = Field(
        "auto",
        description="format of the weights in memory; auto: as in the checkpoint if that is quantized, else in "
        "the dtype of activations (`dtype`); int8 costs hardly any quality, int4 as much as a Q4_K_M file",
    )
    weights_cache: str | None = Field(
        None,
        description="folder that keeps the weights quantized to int8 or int4 for the next start; off: keep nothing; "
        "default: a folder in the user's cache directory",
    )
    threads: int | None = Field(
        None, ge=1, le=1024, description="CPU threads of the engine; default: one per core, one fewer for small models"
    )

    admin_token: str | None = Field(
        None,
        min_length=8,
        description="token that an operator's request needs to clear, pin or resize caches or to record profiles; "
        "default: no request may do that",
    )
    api_keys: StringList = Field(
        None,
        description="API keys, separated by commas, one of which is required for /v1/*, the same routes without /v1 "
        "and the tokenizer's routes; default: no key is needed",
    )
    metrics_key: str | None = Field(
        None, min_length=8, description="key that is required for /metrics; default: no key is needed"
    )
    unknown_fields: Literal["reject", "ignore"] = Field(
        "reject",
        description="what to do with a request's fields that the server does not know; reject: answer 400; ignore: "
        "name them in a header of the response",
    )
    cors_origins: StringList = Field(
        None,
        description="origins of the web pages that may call the server, such as 'https://a.example', separated by "
        "commas; '*': all; default: none",
    )
    max_body_bytes: Size | None = Field(
        None,
        ge=1024,
        description="maximum number of bytes of a request's body; a longer one is answered 413; default: 1 MiB + "
        "max(max_prompt_characters, 8 x max_choices x max_seq_len), but no more than 32 MiB",
    )
    max_inflight_body_bytes: Size | None = Field(
        None,
        ge=1024,
        description="maximum number of bytes of all request bodies that an API process receives, parses and tokenizes "
        "at a time; further requests are answered 429; default: 4 times max_body_bytes, but no less than 64 MiB",
    )
    max_header_bytes: Size = Field(
        64 * 2**10,
        ge=1024,
        description="maximum number of bytes of a request's line and headers; longer ones are answered 431",
    )
    header_timeout: Duration = Field(
        30.0,
        gt=0,
        le=MAX_TIMEOUT,
        description="maximum number of seconds until a request's line and headers have arrived; then it is "
        "answered 408",
    )
    body_timeout: Duration = Field(
        30.0,
        gt=0,
        le=MAX_TIMEOUT,
        description="maximum number of seconds in which nothing of a request's body arrives; then it is answered 408",
    )
    keep_alive_timeout: Duration = Field(
        120.0,
        gt=0,
        le=MAX_TIMEOUT,
        description="number of seconds that a connection stays open without a request; should be longer than clients "
        "keep theirs (Go 90 s), so that none is closed while a client uses it again",
    )
    queue_timeout: Duration | None = Field(
        None,
        gt=0,
        le=MAX_TIMEOUT,
        description="maximum number of seconds that a request waits for a seat in its cache; then it is answered 503; "
        "default: no limit while its client is connected",
    )
    request_timeout: Duration | None = Field(
        None,
        gt=0,
        le=MAX_TIMEOUT,
        description="maximum number of seconds from a request's arrival to the end of its answer; then it fails with "
        "status 504; default: no limit",
    )
    drain_seconds: Duration = Field(
        15.0,
        ge=0,
        le=MAX_TIMEOUT,
        description="number of seconds in which running requests may finish after the server has received SIGTERM",
    )

    strategy_timeout: Duration = Field(
        5.0,
        ge=0.1,
        le=MAX_TIMEOUT,
        description="number of seconds after which a call of a strategy that has not returned, or a sequence that it "
        "does not let go on, counts as a fault of the strategy",
    )
    watchdog_timeout: Duration = Field(
        120.0,
        ge=1,
        le=MAX_TIMEOUT,
        description="number of seconds without a heartbeat after which the engine or an API process is killed and "
        "restarted; has to be more than the longest step takes",
    )

    kv_memory: str = Field(
        "auto",
        description="memory for the keys and values of all instances, such as '2GiB'; auto: the share kv_memory_share "
        "of the free memory",
    )
    kv_memory_share: Proportion = Field(
        0.3, gt=0, lt=1, description="with kv_memory=auto: share of the memory that is free once the weights are loaded"
    )
    kv_memory_at_start: bool = Field(
        False,
        description="take all KV memory from the system before the server is ready, not while it serves: the start "
        "takes longer, and memory that is missing ends it",
    )
    kv_overcommit: float = Field(
        1.5,
        ge=1,
        description="maximum multiple of the KV memory that all admitted requests together could fill at their full "
        "lengths; a request that would exceed it waits",
    )
    max_seq_len: int | None = Field(
        None,
        ge=2,
        description="maximum number of tokens of prompt and completion together, or of the prompt alone under "
        "strategies of kind streaming; default: the model's context, at most 8192",
    )
    max_num_seqs: int = Field(64, ge=1, le=4096, description="maximum number of sequences that run at a time")
    max_num_batched_tokens: int | None = Field(
        None,
        ge=1,
        le=65536,
        description="maximum number of prompt tokens in a step; default: 512 on the CPU, else 1024",
    )
    max_choices: int = Field(256, ge=1, description="maximum number of choices of a request: prompts times `n`")
    max_stop_strings: int = Field(64, ge=4, le=1024, description="maximum number of strings in `stop` of a request")
    max_prompt_characters: int = Field(
        2**21, ge=1, description="maximum number of characters of a prompt, before it is tokenized"
    )
    text_timeout: Duration = Field(
        10.0,
        gt=0,
        le=MAX_TIMEOUT,
        description="maximum number of seconds of CPU time that the model's chat template and tokenizer may take for a "
        "prompt; then the request is answered 400",
    )
    text_memory: str = Field(
        "1GiB",
        description="maximum of the memory that the chat template and the tokenizer may take for a prompt, in addition "
        "to the loaded tokenizer; if it needs more, the request is answered 400",
    )
    max_grammar_bytes: Size = Field(
        2**18,
        ge=1,
        le=2**24,
        description="maximum number of bytes of a JSON schema, regular expression, list of choices or grammar that "
        "constrains a text",
    )
    grammar_timeout: Duration = Field(
        5.0,
        gt=0,
        le=MAX_TIMEOUT,
        description="maximum number of seconds of CPU time that checking such a schema or grammar may take; then the "
        "request is answered 400",
    )
    grammar_memory: str = Field(
        "512MiB",
        description="maximum of the memory that checking such a schema or grammar may take; if it needs more, the "
        "request is answered 400",
    )
    max_queued_requests: int = Field(
        1024, ge=0, description="maximum number of waiting requests; further ones are answered 429"
    )

    priority_aging: Duration = Field(
        10.0,
        ge=0,
        le=MAX_TIMEOUT,
        description="number of seconds of waiting in the queue that count as much as one level of `priority`",
    )
    max_priority_wait: Duration = Field(
        600.0,
        ge=0,
        le=MAX_TIMEOUT,
        description="maximum number of seconds by which `priority` moves a request forward or back in the queue, "
        "which limits how long it waits for requests that arrived later",
    )
    min_priority: int = Field(
        0, ge=-(2**31), lt=2**31, description="lowest, that is most urgent, `priority` that a request may ask for"
    )
    max_kv_cache_priority: int = Field(
        0, ge=0, le=100, description="highest `kv_cache_priority` that a request may ask for"
    )
    key_limits: dict[str, KeyLimits] = Field(
        default_factory=dict,
        description="limits of requests with a certain API key: bounds of priorities, and opt-out from roll-outs",
    )

    num_speculative_tokens: int = Field(
        0,
        ge=0,
        le=MAX_DRAFT_TOKENS,
        description="number of draft tokens per step (speculative decoding) of requests that ask for no other number",
    )
    max_speculative_tokens: int = Field(
        MAX_DRAFT_TOKENS,
        ge=0,
        le=MAX_DRAFT_TOKENS,
        description="maximum number of draft tokens that a request may ask for",
    )

    default_strategy: str = Field("paged", description="strategy instance for requests that name none")
    strategies: dict[str, StrategySettings] = Field(
        default_factory=dict, description="named strategy instances, beside `paged`, `contiguous` and `sliding_window`"
    )
    rules: list[SelectionRule] = Field(
        default_factory=list,
        description="rules that choose an instance for requests that name none; the first match wins",
    )
    rollouts: dict[str, RolloutSettings] = Field(
        default_factory=dict,
        description="staged roll-outs, in which another instance serves a growing share of an instance's requests",
    )
    rollouts_file: str | None = Field(
        None,
        description="file that keeps the state of roll-outs for the next start; off: keep nothing; default: a file for "
        "this model, host and port in the user's state directory",
    )
    check_integrity: bool = Field(
        False,
        description="check the bookkeeping of caches and of the KV memory while the engine is idle, and stop the "
        "engine if it is inconsistent; for developers of strategies",
    )
    tool_call_parser: str = Field(
        "auto",
        description="how the model writes tool calls: a family's name, as in docs/guide/tools.md; auto: as its chat "
        "template shows; off: calls are text, and requests with tools are refused",
    )
    reasoning_parser: str = Field(
        "auto",
        description="how the model marks its reasoning: a family's name, as in docs/guide/tools.md; auto: as its chat "
        "template shows; off: reasoning is a part of the content",
    )
    default_chat_template_kwargs: JsonObject = Field(
        {},
        description="variables of the chat template for requests that do not set them, such as "
        '{"enable_thinking": false}',
    )
    split_special_tokens: bool = Field(
        False,
        description="read what a request says as text, even where it spells special tokens such as <|im_end|>, which "
        "would end a turn; only those of the chat template count then",
    )
    enable_tokenizer_info_endpoint: bool = Field(
        False, description="let GET /tokenizer_info return the tokenizer's configuration and the chat template"
    )
    vllm_metric_names: bool = Field(
        False, description="return the metrics of /metrics a second time, under vLLM's names"
    )
    list_strategies: bool = Field(
        False, description="list the model in /v1/models under each strategy instance, too, as name:instance"
    )
    ui: bool = Field(True, description="serve a page at /ui that shows the server's KV memory, requests and rates live")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="lowest level of the messages that are logged to stderr"
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="format of the log; json: one JSON object per line, and no banner on stdout"
    )
    log_prompts: bool = Field(False, description="include prompts and generated text in the log; for debugging")
    otlp_traces_endpoint: str | None = Field(
        None, description="URL to which OpenTelemetry spans are sent; needs kvmux[otel]; default: none"
    )

    @field_validator("*", mode="before")
    @classmethod
    def _check_text(cls, value: Any) -> Any:
        """Return the value as it is. Raises ValueError if a text in it has control characters or is not UTF-8."""
        _check_characters(value)
        return value

    @field_validator("strategies", mode="before")
    @classmethod
    def _fill_built_in_kinds(cls, value: Any) -> Any:
        """Add the field `kind` to built-in instances: `[strategies.paged] limit = "50%"` need not repeat the kind."""
        if not isinstance(value, dict):
            return value
        built_in = default_strategies()
        return {
            name: {"kind": name} | given if name in built_in and isinstance(given, dict) else given
            for name, given in value.items()
        }

    @field_validator("api_keys")
    @classmethod
    def _check_api_keys(cls, value: list[str] | None) -> list[str] | None:
        for number, key in enumerate(value or [], start=1):  # errors say the number, not the key: they are logged
            if not all("!" <= letter <= "~" for letter in key):
                raise ValueError(f"key {number} should be letters, digits and signs of ASCII, no spaces")
        return value

    @field_validator("otlp_traces_endpoint")
    @classmethod
    def _check_traces_endpoint(cls, value: str | None) -> str | None:
        if value is not None and not _is_url(value):  # the message does not quote the URL, which may have a password
            raise ValueError("should be a URL like http://127.0.0.1:4318")
        return value

    @field_validator("text_memory", mode="before")
    @classmethod
    def _check_text_memory(cls, value: Any) -> str:
        return _check_memory(value, "16MiB", "ordinary prompts need that much")

    @field_validator("grammar_memory", mode="before")
    @classmethod
    def _check_grammar_memory(cls, value: Any) -> str:
        return _check_memory(value, "128MiB", "the table of a large vocabulary takes half of that")

    @field_validator("kv_memory", mode="before")
    @classmethod
    def _check_kv_memory(cls, value: Any) -> str:
        text = str(value)  # in a settings file the value may be an integer, a number of bytes
        if text != "auto":
            parse_bytes(text)
        return text

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
        resolve_fallbacks({name: each.fallback for name, each in self.strategies.items()})
        return self

    @field_validator("model_name")
    @classmethod
    def _check_model_name(cls, value: str | None) -> str | None:
        if value is not None and not all(name.strip() for name in value.split(",")):
            raise ValueError(f"{value!r} has an empty name: write 'name' or 'name,alias'")
        return value

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

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)  # pydantic reads no other source: load_settings() has merged them all


def load_settings(file: Path | None, values: Mapping[str, Any], *, are_flags: bool = True) -> Settings:
    """Merge the settings of `file`, the environment and `values`; a later one of these takes precedence.

    If `are_flags`, errors name `values` as flags of the command line; else they are arguments in Python. Raises
    SettingsError for an unknown setting or a value that cannot be used; the message names the setting and the source.
    """
    check_environment(os.environ, Settings.model_fields)
    try:
        environment = EnvSettingsSource(Settings)() | read_renamed_environment(os.environ)
        in_file, in_environment, given = map(apply_renames, (read_file(file) if file else {}, environment, values))
        sources = Sources(file, in_file, in_environment, given, caller_gives_flags=are_flags)
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
