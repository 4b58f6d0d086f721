"""Every setting of the server, its default, and which values are refused.

A value from any source (`sources.py`) beats the default, and values of all sources are checked alike. Does not know the
strategies: the options of an instance are checked by its kind, in the engine.
"""

from __future__ import annotations

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

Device = Literal["auto", "cpu", "mps", "cuda", "metal-emulated", "metal-checked"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
Weights = Literal["auto", "f32", "bf16", "f16", "int8", "int4"]
ModelImpl = Literal["auto", "lean", "transformers"]


def _split_words(value: Any) -> Any:
    """Split what a flag or a variable gives as "a,b" into the file's ["a", "b"]."""
    words = [word.strip() for word in value.split(",")] if isinstance(value, str) else value
    if words is not None and not (isinstance(words, list) and words and all(words)):
        raise ValueError("should be a word, or several with commas between; leave it out to have none")
    return words


MAX_DEPTH = 16  # tables within tables

StringList = Annotated[list[str] | None, NoDecode, BeforeValidator(_split_words)]


def _is_url(text: str) -> bool:
    """Return whether a text is the URL of a server that speaks HTTP."""
    try:
        url = urlsplit(text)
        return url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0 and text.split() == [text]
    except ValueError:  # brackets that do not close, or an impossible port
        return False


def _check_characters(value: Any, depth: int = MAX_DEPTH) -> None:
    """Raise ValueError if a text in a value, or in the tables within it, has control characters or is not UTF-8."""
    if isinstance(value, str):
        if any(unicodedata.category(character) in ("Cc", "Cs") for character in value):  # never shown: it may be a key
            raise ValueError("has control characters, or bytes that are not UTF-8")
    elif isinstance(value, (Mapping, list)):
        if not depth:
            raise ValueError(f"has tables nested more than {MAX_DEPTH} deep")
        for part in value:
            _check_characters(part, depth - 1)
            if isinstance(value, Mapping):
                _check_characters(value[part], depth - 1)


MAX_TIMEOUT = 7 * 24 * 3600  # seconds of any timeout
MIN_API_KEY_LENGTH = 8  # characters; an API key of fewer may be guessed
MAX_DRAFT_TOKENS = 16  # tokens

MEBIBYTE = 2**20
BODY_OVERHEAD_BYTES = MEBIBYTE  # bytes of a body beside its prompts
BYTES_PER_TOKEN_ID = 8  # in JSON, "123456, "; a token of text is shorter, even where half of its letters are escaped
MAX_DEFAULT_BODY_BYTES = 32 * MEBIBYTE


class StrategySettings(BaseModel):
    """A named instance of a strategy kind. Fields that are not declared here are options of the kind."""

    model_config = ConfigDict(extra="allow")

    kind: str = Field(description="contiguous, sliding_window, paged, or the name a plug-in registered")
    floor: Share = Field("0%", description="KV memory that no other instance may take")
    limit: Share = Field("100%", description="KV memory that it may hold at most")

    @model_validator(mode="after")
    def _check_floor(self) -> StrategySettings:
        if exceeds(self.floor, self.limit):
            raise ValueError(f"floor {self.floor} is more than limit {self.limit}; raise the limit or lower the floor")
        return self

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class KeyLimits(BaseModel):
    """Bounds of the requests with one API key. None: the server's setting of that name holds."""

    model_config = ConfigDict(extra="forbid")

    min_priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    max_kv_cache_priority: int | None = Field(None, ge=0, le=100)


class SelectionRule(BaseModel):
    """A rule that sends a request that names no strategy to an instance, if all of the rule's conditions hold."""

    model_config = ConfigDict(extra="forbid")

    use: str = Field(description="instance that serves the request")
    min_prompt_tokens: int | None = Field(None, ge=0)
    max_prompt_tokens: int | None = Field(None, ge=0)
    min_priority: int | None = None
    max_priority: int | None = None
    kv_usage_above: float | None = Field(None, ge=0, le=1, description="share of the KV memory in use")


def default_strategies() -> dict[str, StrategySettings]:
    """Return one instance of each built-in kind, under the kind's own name."""
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
        description="directory of a Hugging Face model, its name on the hub, or a GGUF file; 'tiny': the embedded one",
    )
    revision: str | None = Field(None, description="branch, tag or commit of a model on the hub; default: main")
    allow_symlinks: bool = Field(
        False, description="follow links in the model's directory wherever they lead; otherwise they are refused"
    )
    model_name: str | None = Field(
        None, description="name clients ask for, or several with commas between; default: the model's own"
    )
    skip_model_name_validation: bool = Field(
        False, description="accept any model name in a request, and answer with the model that is served"
    )
    kernels: Literal["auto", "reference"] = Field(
        "auto",
        description="implementation of the operations; reference: plain torch, slower, to compare with or to rule out "
        "kernels as the cause of a fault",
    )
    metal_capture_steps: int | None = Field(
        None,
        ge=1,
        description="record the GPU launches of the first N steps on mps in 0000-kvmux.gputrace, for Xcode; needs "
        "MTL_CAPTURE_ENABLED=1 in the environment; default: none",
    )
    model_impl: ModelImpl = Field(
        "auto",
        description="implementation of the model; auto: the lean decoder if it supports the model, else transformers",
    )
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes any free one")
    workers: int = Field(1, ge=1, le=64, description="number of API processes")
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="port for /metrics, which is then not on `port`; default: on `port`"
    )
    metrics_host: str | None = Field(None, description="address to listen on for metrics_port; default: host")
    deterministic: bool = Field(
        False,
        description="refuse to start unless results are bitwise the same whatever else runs; CPU kernels only",
    )
    device: Device = Field(
        "auto",
        description="auto: cuda, else mps, else cpu; metal-emulated: the Metal kernels on this machine's CPU, slowly, "
        "to try them without a Mac; metal-checked: the same, checked for races and bounds",
    )
    dtype: DType = Field(
        "auto", description="dtype of activations and K/V; auto: the model's own if the device is fast at it"
    )
    weights: Weights = Field(
        "auto", description="format of the weights in memory; auto: dtype, or as quantized in the checkpoint"
    )
    weights_cache: str | None = Field(
        None,
        description="folder that keeps the weights quantized to int8 or int4 for the next start; off: none; default: "
        "in the user's cache directory",
    )
    threads: int | None = Field(
        None, ge=1, le=1024, description="CPU threads of the engine; default: one per core, one fewer for small models"
    )

    admin_token: str | None = Field(
        None,
        min_length=8,
        description="token for clearing, pinning and resizing caches and for recording profiles; default: not allowed",
    )
    api_keys: StringList = Field(
        None,
        description="keys, with commas between, one of which is required for /v1/*, the same routes without /v1 and "
        "the tokenizer's routes; default: no key is needed",
    )
    metrics_key: str | None = Field(
        None, min_length=8, description="key that is required for /metrics; default: no key is needed"
    )
    unknown_fields: Literal["reject", "ignore"] = Field(
        "reject",
        description="request fields that the server does not know; reject: answer 400; ignore: list them in a header",
    )
    cors_origins: StringList = Field(
        None,
        description="origins of web pages that may call the server, 'https://a.example', with commas between; "
        "'*': all; default: none",
    )
    max_body_bytes: int | None = Field(
        None,
        ge=1024,
        description="bytes of a request's body, else 413; default: 1 MiB plus the greater of max_prompt_characters and "
        "8 bytes per token of max_choices prompts as long as the context, at most 32 MiB",
    )
    max_inflight_body_bytes: int | None = Field(
        None,
        ge=1024,
        description="bytes of all bodies that an API process receives, parses and tokenizes at a time, else 429; "
        "default: 4 times max_body_bytes, at least 64 MiB",
    )
    max_header_bytes: int = Field(64 * 2**10, ge=1024, description="bytes of a request's line and headers, else 431")
    header_timeout: float = Field(
        30.0, gt=0, le=MAX_TIMEOUT, description="seconds in which a request's line and headers have to arrive, else 408"
    )
    body_timeout: float = Field(
        30.0, gt=0, le=MAX_TIMEOUT, description="seconds without progress of a request's body, else 408"
    )
    queue_timeout: float | None = Field(
        None,
        gt=0,
        le=MAX_TIMEOUT,
        description="seconds a request may wait for its seat, else 503; default: as long as its client is connected",
    )
    request_timeout: float | None = Field(
        None,
        gt=0,
        le=MAX_TIMEOUT,
        description="seconds from a request's arrival to the end of its answer, else 504; default: no limit",
    )
    drain_seconds: float = Field(
        15.0, ge=0, le=MAX_TIMEOUT, description="seconds that running requests have to finish after SIGTERM"
    )

    watchdog_timeout: float = Field(
        120.0,
        ge=1,
        le=MAX_TIMEOUT,
        description="seconds without a heartbeat after which the engine or an API process is killed and restarted; has "
        "to be more than the longest step takes",
    )

    kv_memory: str = Field(
        "auto", description="memory for keys and values, '2GiB'; auto: kv_memory_share of the free memory"
    )
    kv_memory_share: float = Field(
        0.3, gt=0, lt=1, description="with kv_memory=auto: share of the memory that is free once the weights are loaded"
    )
    kv_overcommit: float = Field(
        1.5, ge=1, description="admit requests while all together could fill at most this multiple of the KV memory"
    )
    max_seq_len: int | None = Field(
        None, ge=2, description="tokens of prompt and completion together; default: the model's context, at most 8192"
    )
    max_num_seqs: int = Field(64, ge=1, le=4096, description="maximum number of sequences in a batch")
    max_num_batched_tokens: int | None = Field(
        None,
        ge=1,
        le=65536,
        description="maximum number of prompt tokens in a step; default: 512 on the CPU, else 1024",
    )
    max_choices: int = Field(256, ge=1, description="maximum of prompts times choices (`n`) of a request")
    max_stop_strings: int = Field(64, ge=4, le=1024, description="maximum number of strings in `stop` of a request")
    max_prompt_characters: int = Field(
        2**21, ge=1, description="maximum number of characters of a prompt, before it is tokenized"
    )
    text_timeout: float = Field(
        10.0,
        gt=0,
        le=MAX_TIMEOUT,
        description="seconds that the model's chat template and tokenizer may take for a prompt, else 400",
    )
    text_memory: str = Field(
        "1GiB",
        description="memory that the chat template and the tokenizer may take for a prompt, in addition to the loaded "
        "tokenizer, else 400",
    )
    max_queued_requests: int = Field(
        1024, ge=0, description="maximum number of waiting requests; further ones are answered 429"
    )

    priority_aging: float = Field(
        10.0, ge=0, le=MAX_TIMEOUT, description="seconds of waiting that count as much as one level of `priority`"
    )
    max_priority_wait: float = Field(
        600.0,
        ge=0,
        le=MAX_TIMEOUT,
        description="maximum number of seconds by which `priority` may move a request in the queue, and so wait for "
        "requests that arrived later",
    )
    min_priority: int = Field(
        0, ge=-(2**31), lt=2**31, description="lowest, that is most urgent, `priority` that a request may ask for"
    )
    max_kv_cache_priority: int = Field(
        0, ge=0, le=100, description="highest `kv_cache_priority` that a request may ask for"
    )
    key_limits: dict[str, KeyLimits] = Field(
        default_factory=dict, description="bounds of priorities for single API keys"
    )

    num_speculative_tokens: int = Field(
        0,
        ge=0,
        le=MAX_DRAFT_TOKENS,
        description="draft tokens per step of requests that ask for no other number; they are verified in one step",
    )
    max_speculative_tokens: int = Field(
        MAX_DRAFT_TOKENS,
        ge=0,
        le=MAX_DRAFT_TOKENS,
        description="maximum number of draft tokens that a request may ask for",
    )

    default_strategy: str = Field("paged", description="strategy instance for requests that name none")
    strategies: dict[str, StrategySettings] = Field(
        default_factory=dict, description="named strategy instances, in addition to one per built-in kind"
    )
    rules: list[SelectionRule] = Field(
        default_factory=list,
        description="rules that choose an instance for requests that name none; the first match wins",
    )
    check_integrity: bool = Field(
        False,
        description="check the caches' and the arena's bookkeeping while the engine is idle, and stop the engine if it "
        "is inconsistent; for developers of strategies",
    )
    enable_tokenizer_info_endpoint: bool = Field(
        False, description="GET /tokenizer_info returns the tokenizer's configuration and the chat template"
    )
    vllm_metric_names: bool = Field(
        False, description="expose the metrics of /metrics a second time under vLLM's names"
    )
    list_strategies: bool = Field(
        False, description="list the model in /v1/models under each strategy, too: name:instance"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="lowest level that is logged to stderr"
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="json: one object per line, and no banner on stdout"
    )
    log_prompts: bool = Field(False, description="log prompts and generated text, too; for debugging")
    otlp_traces_endpoint: str | None = Field(
        None, description="URL to which OpenTelemetry spans are sent; needs kvmux[otel]; default: none"
    )

    @field_validator("*", mode="before")
    @classmethod
    def _check_text(cls, value: Any) -> Any:
        """Refuse text that paths, headers or JSON cannot take."""
        _check_characters(value)
        return value

    @field_validator("strategies", mode="before")
    @classmethod
    def _fill_built_in_kinds(cls, value: Any) -> Any:
        """Add the kind of built-in instances: `[strategies.paged] limit = "50%"` need not repeat it."""
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
        for number, key in enumerate(value or [], start=1):  # never shown: it would be in the log
            if not all("!" <= letter <= "~" for letter in key):
                raise ValueError(f"key {number} should be letters, digits and signs of ASCII, no spaces")
        return value

    @field_validator("otlp_traces_endpoint")
    @classmethod
    def _check_traces_endpoint(cls, value: str | None) -> str | None:
        if value is not None and not _is_url(value):  # never shown: it may have a password
            raise ValueError("should be a URL like http://127.0.0.1:4318")
        return value

    @field_validator("text_memory", mode="before")
    @classmethod
    def _check_text_memory(cls, value: Any) -> str:
        if parse_bytes(value) < 2**24:
            raise ValueError("should be 16MiB or more, which ordinary prompts need")
        return str(value)

    @field_validator("kv_memory", mode="before")
    @classmethod
    def _check_kv_memory(cls, value: Any) -> str:
        text = str(value)  # a file may give a bare number
        if text != "auto":
            parse_bytes(text)
        return text

    @model_validator(mode="after")
    def _check_consistency(self) -> Settings:
        if self.admin_token in (self.api_keys or ()):
            raise ValueError(
                "admin_token is one of api_keys, so every client could administer the server; choose another"
            )
        if any(key not in (self.api_keys or ()) for key in self.key_limits):  # never shown: it may be a key after all
            raise ValueError("key_limits names a key that is not one of api_keys; add it there, or correct it")
        if self.metrics_key is not None and self.metrics_key in (self.admin_token, *(self.api_keys or ())):
            raise ValueError("metrics_key is the admin_token or one of api_keys; choose another")
        if self.metrics_port and self.metrics_port == self.port:
            raise ValueError(f"metrics_port is {self.port}, as port is; choose another, or leave it out")
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
        for where, name in chosen.items():
            if name not in self.strategies:
                raise ValueError(f"{where} is {name!r}; instances are {', '.join(sorted(self.strategies))}")
        for name in self.strategies:
            if not (name.isascii() and name.replace("_", "").replace("-", "").isalnum()):
                raise ValueError(f"strategies: {name!r} is not a name: use letters, digits, '-' and '_'")
        return self

    @field_validator("model_name")
    @classmethod
    def _check_model_name(cls, value: str | None) -> str | None:
        if value is not None and not all(name.strip() for name in value.split(",")):
            raise ValueError(f"{value!r} has an empty name: write 'name' or 'name,alias'")
        return value

    @property
    def model_names(self) -> list[str]:
        """Return the names that requests may give: the model's own first, then aliases."""
        return [name.strip() for name in (self.model_name or Path(self.model).name).split(",")]

    @property
    def short_api_keys(self) -> list[int]:
        """Return the positions in api_keys, from 1, of the keys that are short enough to be guessed."""
        return [number for number, key in enumerate(self.api_keys or (), start=1) if len(key) < MIN_API_KEY_LENGTH]

    def compute_body_limits(self, max_seq_len: int) -> tuple[int, int]:
        """Return max_body_bytes and max_inflight_body_bytes for a context of `max_seq_len` tokens."""
        ids = BYTES_PER_TOKEN_ID * max_seq_len * self.max_choices
        one = min(BODY_OVERHEAD_BYTES + max(self.max_prompt_characters, ids), MAX_DEFAULT_BODY_BYTES)
        one = min(one, self.max_inflight_body_bytes or one) if self.max_body_bytes is None else self.max_body_bytes
        return one, self.max_inflight_body_bytes or max(4 * one, 64 * MEBIBYTE)

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)  # load_settings() merges the sources itself, and knows where each value came from


def load_settings(file: Path | None, values: Mapping[str, Any], *, are_flags: bool = True) -> Settings:
    """Merge settings from `file` < environment < `values`. Raises SettingsError naming what is wrong.

    `values` are flags of a command line, and errors name them as such; else they are arguments in Python.
    """
    check_environment(os.environ, Settings.model_fields)
    try:
        environment = EnvSettingsSource(Settings)() | read_renamed_environment(os.environ)
        in_file, in_environment, given = map(apply_renames, (read_file(file) if file else {}, environment, values))
        sources = Sources(file, in_file, in_environment, given, caller_gives_flags=are_flags)
        return Settings(**sources.merge())
    except RecursionError:
        raise SettingsError("the settings have tables nested far too deep") from None
    except ValidationError as error:
        raise SettingsError("; ".join(_format_validation_error(e, sources) for e in error.errors())) from None


_PLAIN_MESSAGES = {  # pydantic's words for these are about Python
    "missing": "is required",
    "dict_type": "must be a table",
    "model_type": "must be a table",
    "list_type": "must be a list of tables",
}


def _mask_api_key(path: tuple[str | int, ...], sources: Sources) -> tuple[str | int, ...]:
    """Return the path with an API key replaced by its position in key_limits, since errors are logged."""
    if path[:1] != ("key_limits",) or len(path) == 1:
        return path
    return "key_limits", f"(key {list(sources.merge()['key_limits']).index(path[1]) + 1})", *path[2:]


def _format_validation_error(error: Any, sources: Sources) -> str:
    """Describe a validation error: which setting, where its value came from, what is wrong with it."""
    path: tuple[str | int, ...] = error["loc"]
    where = ".".join(str(part) for part in _mask_api_key(path, sources))
    if error["type"] == "extra_forbidden":
        table = SelectionRule if path[0] == "rules" else Settings
        return f"{where}{sources.format_origin(path)} is not a setting{did_you_mean(str(path[-1]), table.model_fields)}"
    if error["type"] in _PLAIN_MESSAGES:
        given = path[:-1] if error["type"] == "missing" else path
        return f"{where}{sources.format_origin(given)} {_PLAIN_MESSAGES[error['type']]}"
    message = error["msg"].removeprefix("Value error, ")
    return f"{where}{sources.format_origin(path)}: {message}" if where else message
