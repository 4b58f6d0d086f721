"""The responses of the endpoints that generate text, in OpenAI's form. Data only; UNSET fields are left out."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from server.api.openai.logprobs import ChatLogprobs, CompletionLogprobs, PromptLogprobs
from server.records import Routing


class PromptTokensDetails(Struct):
    cached_tokens: int


class CompletionTokensDetails(Struct):
    reasoning_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET  # of models whose reasoning is known


class Timings(Struct):
    """How fast prompt and output were computed, as llama.cpp's server writes it; times in milliseconds."""

    cache_n: int
    prompt_n: int  # without those in the cache
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class PromptProgress(Struct):
    """How many tokens of a prompt are computed, as llama.cpp's server writes it."""

    total: int
    cache: int
    processed: int  # those in the cache included
    time_ms: int


class KVCacheChoice(Struct):
    """Extension of OpenAI's response: the instance that serves the request, why, and its number of cached tokens."""

    instance: str
    reason: str
    cached_tokens: int


class ShadowFidelity(Struct):
    """How far the candidate was from the served instance, over the tokens compared when the choice ended."""

    tokens: int
    kl_mean: float | None  # nats
    top1: float | None  # share of tokens with the same likeliest token


class TokenComparison(Struct):
    """Extension of OpenAI's choices, with `kv_cache_reference`: how far tokens are from what that instance predicts."""

    indexes: list[int]  # of the tokens in the choice's output, ascending
    kl: list[float]  # KL(reference || instance that served the choice) at each token, nats
    top1: list[bool]  # whether both have the same likeliest token
    rank: list[int]  # rank of the token under the reference; 1: the likeliest
    ended_early: Literal["room", "failed"] | UnsetType = UNSET  # why not all tokens were compared


class Explanation(Struct, rename={"miss": "miss_reason", "kv_bytes": "peak_kv_bytes"}):
    """Extension of OpenAI's choices, with `explain: true`: how one choice was served, copied from its RequestRecord."""

    instance: str
    reason: str
    cached_tokens: int | None
    miss: str | None
    recomputed_tokens: int
    kv_bytes: int
    kept_tokens: int
    dropped_tokens: int
    budget_tokens: int | None
    compactions: int
    compaction_seconds: float
    drafted_tokens: int
    accepted_tokens: int
    preemptions: int
    queue_seconds: float | None
    prefill_seconds: float | None
    decode_seconds: float | None
    rollout: str | None
    shadow: str | None  # the candidate instance under which the choice also ran
    fidelity: ShadowFidelity | None = None
    routed: Routing | UnsetType = UNSET  # only if several replicas serve the model


class Choice(Struct, kw_only=True):
    """The fields that every choice has, in completions and chats, whole or in a chunk."""

    index: int
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType = UNSET  # as in vLLM
    token_ids: list[int] | UnsetType | None = UNSET
    kv_cache: Explanation | UnsetType = UNSET
    kv_cache_comparison: TokenComparison | UnsetType = UNSET


class CompletionChunkChoice(Choice, kw_only=True):
    text: str = ""
    logprobs: CompletionLogprobs | None = None
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET


class CompletionChoice(CompletionChunkChoice, kw_only=True):
    """A choice of a whole completion. vLLM's clients read these fields without asking whether they exist."""

    token_ids: list[int] | UnsetType | None = None
    prompt_token_ids: list[int] | UnsetType | None = None
    prompt_logprobs: PromptLogprobs | UnsetType | None = None


class GenerationResponse(Struct, kw_only=True):
    """The fields, except choices, of a whole response or a streamed chunk, for completions and chats."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET
    kv_cache: KVCacheChoice | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET


class CompletionChunk(GenerationResponse, kw_only=True):
    choices: list[CompletionChunkChoice]
    object: Literal["text_completion"] = "text_completion"


class CompletionResponse(GenerationResponse, kw_only=True):
    choices: list[CompletionChoice]
    object: Literal["text_completion"] = "text_completion"


# ---------------------------------------------------------------- chats
class FunctionCall(Struct):
    name: str
    arguments: str  # JSON


class MessageToolCall(Struct):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class DeltaFunctionCall(Struct):
    arguments: str  # JSON, or a part of it
    name: str | UnsetType = UNSET


class DeltaToolCall(Struct):
    """A call, or more of the arguments of the call with this index: then without id, type and name."""

    index: int
    function: DeltaFunctionCall
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatMessage(Struct):
    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET  # the older name, which many clients read
    tool_calls: list[MessageToolCall] | UnsetType = UNSET


class Delta(Struct):
    content: str | UnsetType = UNSET
    role: Literal["assistant"] | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[DeltaToolCall] | UnsetType = UNSET


class ChatChoice(Choice, kw_only=True):
    token_ids: list[int] | UnsetType | None = None  # as in a whole completion
    message: ChatMessage
    logprobs: ChatLogprobs | None = None


class ChatChunkChoice(Choice, kw_only=True):
    delta: Delta
    logprobs: ChatLogprobs | None = None


class ChatAnswer(GenerationResponse, kw_only=True):
    """A chat's response or chunk: with the prompt's fields outside of the choices, as in vLLM."""

    prompt_token_ids: list[int] | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET


class ChatCompletion(ChatAnswer, kw_only=True):
    prompt_token_ids: list[int] | UnsetType | None = None  # as in the choices of a whole completion
    prompt_logprobs: PromptLogprobs | UnsetType | None = None
    choices: list[ChatChoice]
    object: Literal["chat.completion"] = "chat.completion"


class ChatChunk(ChatAnswer, kw_only=True):
    choices: list[ChatChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
