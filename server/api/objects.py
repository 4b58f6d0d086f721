"""What the completion endpoint answers, as OpenAI writes it. Data only; a field that is UNSET is left out."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType


class PromptTokensDetails(Struct):
    cached_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class KVCacheChoice(Struct):
    """Extension: the strategy instance that serves the request, why, and the prompt tokens it had in store."""

    instance: str
    reason: str
    cached_tokens: int


class Explanation(Struct):
    """Extension, with `explain: true`: how one choice came about. Seconds; what did not come about is null."""

    instance: str
    reason: str
    cached_tokens: int | None
    miss_reason: str | None
    peak_kv_bytes: int
    preemptions: int
    queue_seconds: float | None
    prefill_seconds: float | None
    decode_seconds: float | None


class CompletionChoice(Struct):
    index: int
    text: str
    finish_reason: str | None
    logprobs: None = None
    kv_cache: Explanation | UnsetType = UNSET


class Completion(Struct):
    """A whole completion, or a chunk of a streamed one."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: Literal["text_completion"] = "text_completion"
    usage: Usage | UnsetType | None = UNSET
    kv_cache: KVCacheChoice | UnsetType = UNSET
