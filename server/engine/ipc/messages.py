"""The messages between API workers and the engine: token ids to it and back, and what operators ask for.

Plain msgspec structs, so both sides read them and neither needs the other's libraries.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from server.records import RequestRecord


class SamplingParams(msgspec.Struct, frozen=True):
    """How tokens are drawn, and which log-probabilities are returned.

    temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 switch the filter off, penalties of 0 (repetition: 1) too.
    """

    max_tokens: int  # 0: the prompt is computed, and nothing drawn
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    min_tokens: int = 0  # the first so many tokens are none that would end the text
    stop_token_ids: tuple[int, ...] = ()  # end the text, as the model's own end tokens do
    frequency_penalty: float = 0.0  # subtracted from a logit for each time its token was drawn
    presence_penalty: float = 0.0  # subtracted from a logit once its token was drawn
    repetition_penalty: float = 1.0  # divides positive logits of tokens in prompt and output, multiplies others
    logit_bias: tuple[tuple[int, float], ...] = ()  # added to the logits of these tokens
    allowed_token_ids: bytes = (
        b""  # the only tokens that may be drawn, as 64-bit integers of this machine; none: all may
    )
    logprobs: int | None = None  # of each token drawn, and of this many of the likeliest; None: none
    prompt_logprobs: int | None = None  # likewise of each token of the prompt


class Caching(msgspec.Struct, frozen=True):
    """Which cached tokens a request may use, and how long those that it leaves are kept."""

    tenant: str = ""  # only requests with the same tenant and the same cache_salt share what is cached
    cache_salt: str = ""
    max_cached: int | None = None  # prompt tokens that may be taken from the cache
    priority: int = 0  # of the blocks it leaves; those of higher priority stay longer
    ttl: float | None = None  # seconds after which these blocks are evicted first; None: as the instance has it


class Speculation(msgspec.Struct, frozen=True):
    """Drafts of the next tokens, looked up in the request's own text (`ngram_proposer.py`). Named as in vLLM."""

    num_speculative_tokens: int = 0  # of a draft, at most; 0: no drafts
    prompt_lookup_max: int = 3  # the longest end of the text that is looked up, in tokens
    prompt_lookup_min: int = 1  # the shortest


# ---------------------------------------------------------------- to the engine
class Submit(msgspec.Struct, tag=True, frozen=True):
    """A new request. `kv_cache`, `header`, `alias`: the instance that body, header, or the model's name ask for."""

    request_id: str
    prompt: list[int]
    sampling: SamplingParams
    kv_cache: str | None = None
    header: str | None = None
    alias: str | None = None
    priority: int = 0  # lower runs first
    caching: Caching = Caching()
    sibling_of: str | None = None  # an earlier request with the same prompt, whose computed prompt it may take over
    explain: bool = False  # the last event is an Explained, unless the request fails
    speculation: Speculation | None = None  # None: that of the settings


class Cancel(msgspec.Struct, tag=True, frozen=True):
    """Ends a request now and frees its memory; no more of its events are sent. Unknown ids are ignored."""

    request_id: str
    outcome: Literal["cancelled", "stop", "error"] = "cancelled"  # stop: at a stop string; error: by the worker


class Inspect(msgspec.Struct, tag=True, frozen=True):
    """Asks for an instance's requests, and what its memory holds."""

    instance: str


class Clear(msgspec.Struct, tag=True, frozen=True):
    """Clears what an instance has cached: for every tenant or one of them, and of it all or one cache_salt."""

    instance: str
    tenant: str | None = None  # None: every tenant
    cache_salt: str | None = None  # None: every cache_salt


class PinPrefix(msgspec.Struct, tag=True, frozen=True):
    """Pins what is cached of a prompt for `ttl` seconds."""

    instance: str
    tokens: list[int]
    ttl: float
    tenant: str = ""
    cache_salt: str = ""


class Unpin(msgspec.Struct, tag=True, frozen=True):
    """Releases a pinned prefix."""

    instance: str
    pin_id: str


class Share(msgspec.Struct, tag=True, frozen=True):
    """Changes an instance's floor and limit, written as in the settings; None leaves one as it is."""

    instance: str
    floor: str | None
    limit: str | None


class Profile(msgspec.Struct, tag=True, frozen=True):
    """Records at most `steps` next steps with torch's profiler, for at most `seconds`; answered when that is over."""

    steps: int
    seconds: float


class Observed(msgspec.Struct, tag=True, frozen=True):
    """The responses of an API worker by status since its last such message, and its resident memory in bytes."""

    responses: dict[int, int]
    memory_bytes: int


Command = Inspect | Clear | PinPrefix | Unpin | Share


Question = Literal["kv_cache", "settings", "metrics"]  # answered as JSON; metrics as a `server.metrics` Snapshot
ANSWER_TTL = 1.0  # seconds for which an answer to a question is reused


class Query(msgspec.Struct, tag=True, frozen=True):
    """Asks for an Answer: to a question, the result of a command, or a profile."""

    query_id: int
    payload: Question | Command | Profile


ToEngine = Submit | Cancel | Query | Observed


# ---------------------------------------------------------------- from the engine
class Strategy(msgspec.Struct, frozen=True):
    """A strategy instance that requests may choose."""

    name: str
    kind: str


class Hello(msgspec.Struct, tag=True, frozen=True):
    """First message on every connection: the engine is ready, and this is what it serves."""

    model: str
    aliases: list[str]  # other names of it
    max_seq_len: int
    vocab_size: int
    strategies: list[Strategy]
    system_fingerprint: str = ""  # of responses


class Admitted(msgspec.Struct, tag=True, frozen=True):
    """The request got its seat: in which instance and why, and how many prompt tokens were found in the cache."""

    request_id: str
    instance: str
    reason: str
    cached_tokens: int
    miss: str | None = None  # as in its RequestRecord
    queue_seconds: float = 0.0


class Preempted(msgspec.Struct, tag=True, frozen=True):
    """The request lost its memory to others; it goes on later."""

    request_id: str


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """A token's log-probability under the model: from its logits before temperature and penalties."""

    token: int
    logprob: float
    rank: int  # 1: the likeliest
    top_logprobs: list[tuple[int, float]]  # the likeliest tokens and their log-probabilities


class PromptScores(msgspec.Struct, tag=True, frozen=True):
    """The scores of the prompt's tokens from the second on, in order; a long prompt's come in several of these."""

    request_id: str
    logprobs: list[TokenLogprob]


class Tokens(msgspec.Struct, tag=True, frozen=True):
    """New tokens; with a finish_reason ('stop', 'length') they are the last, and there may be none.

    With 'stop' the last one is a token that ends texts.
    """

    request_id: str
    tokens: list[int]
    finish_reason: str | None = None
    logprobs: list[TokenLogprob] | None = None  # one for each token; None if the request wants none
    num_draft_tokens: int = 0  # that were verified; all of `tokens` but the last were among them


class Explained(msgspec.Struct, tag=True, frozen=True):
    """The record of a request with `explain`: comes after its last tokens, or after it was stopped."""

    request_id: str
    record: RequestRecord


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The request failed. `status` is the HTTP status of the response, if that has not begun."""

    request_id: str
    status: int
    message: str
    code: str | None = None
    param: str | None = None
    retry_after: float | None = None  # seconds after which another attempt may succeed, where that is known


class Answer(msgspec.Struct, tag=True, frozen=True):
    """The reply to a Query; with `error` if it was refused or failed."""

    query_id: int
    body: bytes
    error: Failed | None = None
    created_at: float = 0.0  # monotonic seconds, on the clock of all processes of this machine


RequestEvent = Admitted | Preempted | PromptScores | Tokens | Explained | Failed
FromEngine = Hello | RequestEvent | Answer
