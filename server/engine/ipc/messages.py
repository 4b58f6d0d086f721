"""The messages between API workers and the engine: requests and operators' commands, tokens and answers.

Plain msgspec structs, so both sides read them and neither needs the other's libraries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from server.records import ConstraintName, ConstraintRefusal, RequestFidelity, RequestRecord, WeightUsage

NUM_SEEDS = 1 << 63  # seeds are from 0 to one less


class ThinkingBudget(msgspec.Struct, frozen=True):
    """The most tokens that a text may reason with. Markers are sequences of token ids."""

    num_tokens: int
    is_open: bool  # whether the prompt has begun the reasoning
    openings: tuple[tuple[int, ...], ...]  # markers that begin it
    ends: tuple[tuple[int, ...], ...]  # markers that end it
    closing: tuple[int, ...]  # what is written to end it


class SamplingParams(msgspec.Struct, frozen=True):
    """How tokens are drawn, and which log-probabilities are returned.

    temperature 0 is greedy. top_k 0, top_p 1, min_p 0, frequency and presence penalties of 0 and a repetition penalty
    of 1 have no effect.
    """

    max_tokens: int  # maximum number of output tokens; 0: only the prompt is computed
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    min_tokens: int = 0  # number of output tokens before a token that ends the text may be drawn
    stop_token_ids: tuple[int, ...] = ()  # tokens that end the text, beside the model's own end tokens
    frequency_penalty: float = 0.0  # subtracted from a token's logit once for each time it was drawn
    presence_penalty: float = 0.0  # subtracted once from the logit of each token that was drawn
    # The repetition penalty divides positive logits of tokens in prompt and output, and multiplies negative ones.
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # pairs of a token id and the number added to its logit
    allowed_token_ids: bytes = (
        b""  # the only tokens that may be drawn, as 64-bit integers in this machine's byte order; empty: all tokens
    )
    thinking: ThinkingBudget | None = None
    # Number of likeliest tokens returned with each drawn token's log-probability; None: no log-probabilities
    logprobs: int | None = None
    # number of likeliest tokens returned with each prompt token's log-probability; None: no log-probabilities
    prompt_logprobs: int | None = None

    def for_choice(self, choice: int) -> SamplingParams:
        """Return the parameters of another choice of the prompt: with its own seed, and without prompt_logprobs."""
        return self if not choice else replace(self, seed=(self.seed + choice) % NUM_SEEDS, prompt_logprobs=None)


class Caching(msgspec.Struct, frozen=True):
    """Which cached tokens a request may use, and how long the blocks that it leaves in the cache are kept."""

    tenant: str = ""  # only requests with the same tenant and the same cache_salt share cached tokens
    cache_salt: str = ""
    max_cached: int | None = None  # maximum number of prompt tokens that may be taken from the cache; None: no limit
    # Priority of the blocks that the request leaves in the cache; blocks of higher priority are evicted later
    priority: int = 0
    # seconds of disuse after which the request's blocks are evicted before others; None: the instance's option `ttl`
    ttl: float | None = None


class Speculation(msgspec.Struct, frozen=True):
    """Drafts of the next tokens, looked up in the request's own text (`ngram_proposer.py`). Names are those of vLLM."""

    num_speculative_tokens: int = 0  # maximum number of tokens in a draft; 0: no drafts
    prompt_lookup_max: int = 3  # maximum number of last tokens of the text that are looked up
    prompt_lookup_min: int = 1  # minimum number of last tokens that must match


# ---------------------------------------------------------------- to the engine
class Submit(msgspec.Struct, tag=True, frozen=True):
    """A new request."""

    request_id: str
    prompt: list[int]
    sampling: SamplingParams
    kv_cache: str | None = None  # the instance that the request names; None: the settings choose it
    named_by: Literal["request", "header", "model"] = "request"  # where it does: its body, a header, the model's name
    priority: int = 0  # lower runs first
    caching: Caching = Caching()
    # Id of an earlier request with the same prompt, whose keys and values this request may take over
    sibling_of: str | None = None
    explain: bool = False  # whether an Explained (its record) follows its last tokens; none follows a failure
    speculation: Speculation | None = None  # None: speculation as in the settings
    # What is equal for all requests of a conversation, so that a roll-out serves them alike; empty: no conversation
    conversation: str = ""
    rollouts: bool = True  # whether a roll-out may choose the request's instance, or shadow it
    # Instance under which the text is computed as well, to compare its tokens; Compared events follow
    reference: str | None = None
    # What the text has to be: a grammar in llguidance's Lark, checked before; None: any text
    grammar: str | None = None
    reports_progress: bool = False  # whether Progress events tell how much of the prompt is computed


class Cancel(msgspec.Struct, tag=True, frozen=True):
    """Ends a request now and frees its memory. Unknown ids are ignored.

    Only an Explained and Compared events may follow, after "stop".
    """

    request_id: str
    # cancelled: the client does not wait any more; stop: the text reached a stop string; error: the API worker failed
    outcome: Literal["cancelled", "stop", "error"] = "cancelled"


class Inspect(msgspec.Struct, tag=True, frozen=True):
    """Asks for an instance's requests and the contents of its memory."""

    instance: str


class DescribeBlock(msgspec.Struct, tag=True, frozen=True):
    """Asks for the state and the contents of one block, by the numbers of its region and of itself."""

    instance: str
    region: int
    block: int


class Clear(msgspec.Struct, tag=True, frozen=True):
    """Clears an instance's idle cached tokens: all of them, or only those of a tenant or a cache_salt."""

    instance: str
    tenant: str | None = None  # None: every tenant
    cache_salt: str | None = None  # None: every cache_salt


class PinPrefix(msgspec.Struct, tag=True, frozen=True):
    """Pins the cached beginning of a prompt, which is then not evicted for `ttl` seconds."""

    instance: str
    tokens: list[int]
    ttl: float
    tenant: str = ""
    cache_salt: str = ""


class PinCachedPrefix(msgspec.Struct, tag=True, frozen=True):
    """Pins a cached prefix by its id in the answer to the question "prefixes"."""

    instance: str
    prefix_id: str
    ttl: float


class DropPrefix(msgspec.Struct, tag=True, frozen=True):
    """Removes a cached prefix, and all that continue it, from an instance's cache, by its id."""

    instance: str
    prefix_id: str


class Unpin(msgspec.Struct, tag=True, frozen=True):
    """Ends a pin, so that the prefix that it protects can be evicted again."""

    instance: str
    pin_id: str


class Share(msgspec.Struct, tag=True, frozen=True):
    """Changes an instance's floor and limit (minimum and maximum KV memory), as in the settings; None: no change."""

    instance: str
    floor: str | None
    limit: str | None


class StartRollout(msgspec.Struct, tag=True, frozen=True):
    """Starts a roll-out; `settings` are those of a table [rollouts.NAME], `by` names the operator in the log."""

    name: str
    settings: dict[str, Any]
    by: str


class ControlRollout(msgspec.Struct, tag=True, frozen=True):
    """Pauses, resumes, advances or aborts a roll-out; `by` names the operator in the log."""

    name: str
    action: Literal["pause", "resume", "advance", "abort"]
    by: str


RolloutQuery = (
    Literal["rollouts", "fidelity"] | StartRollout | ControlRollout
)  # what the controller of roll-outs answers


class Abort(msgspec.Struct, tag=True, frozen=True):
    """Ends a request of any API worker on an operator's order: its client gets an error."""

    worker: int
    request_id: str


class Profile(msgspec.Struct, tag=True, frozen=True):
    """Records the next `steps` steps with torch's profiler, for at most `seconds` seconds; the answer is the trace."""

    steps: int
    seconds: float


class Observed(msgspec.Struct, tag=True, frozen=True):
    """What an API worker counted since its last Observed, and its resident memory."""

    responses: dict[int, int]  # number of responses by HTTP status
    memory_bytes: int
    constraints: dict[ConstraintName, int] = {}  # number of requests whose texts are constrained, by what does so
    refusals: dict[ConstraintRefusal, int] = {}  # number of requests that their constraints ended, by the reason


ReadingCommand = Inspect | DescribeBlock  # commands that change nothing, so that answers to questions stay right
Command = ReadingCommand | Clear | PinPrefix | PinCachedPrefix | DropPrefix | Unpin | Share | Abort


# Questions are answered with JSON, except "metrics": with an encoded `server.metrics` Snapshot, and "routing": with
# MessagePack, as it has bytes
Question = Literal["kv_cache", "settings", "metrics", "live", "prefixes", "routing"]
ANSWER_TTL = 1.0  # seconds after its computation for which an answer to a question is reused
# The same for "live", which clients ask twice a second, for "prefixes", whose answer is large, and for "routing"
ANSWER_TTLS: Mapping[str, float] = {"live": 0.45, "prefixes": 2.0, "routing": 0.45}


def get_answer_ttl(question: str) -> float:
    """Return the seconds after its computation for which an answer to a question is reused."""
    return ANSWER_TTLS.get(question, ANSWER_TTL)


QueryPayload = Question | Command | RolloutQuery | Profile


class Query(msgspec.Struct, tag=True, frozen=True):
    """Asks the engine for an Answer: to a question, the result of a command, or the trace of a Profile."""

    query_id: int
    payload: QueryPayload


# ---------------------------------------------------------------- from the engine
class Strategy(msgspec.Struct, frozen=True):
    """A cache strategy with its options, under a name by which requests may choose it."""

    name: str
    kind: str  # such as "paged"
    unbounded: bool = False  # whether a text may become longer than max_seq_len, as in `Contract`; a prompt may not
    # What the names of its cached blocks are made of (config/block_hashes.py); 0: it keeps none for other requests
    block_size: int = 0
    hash_root: bytes = b""


class BoardBounds(msgspec.Struct, frozen=True):
    """What a board of `kvmux evaluate --board` allows the candidates of roll-outs."""

    exact: list[str]  # the instances that it may be compared with
    bounds: dict[str, dict[str, float]]  # by candidate; the keys are those of a roll-out's guard
    refusals: dict[str, str]  # why the other instances have none

    def find(self, baseline: str, candidate: str) -> dict[str, float] | None:
        """Return the bounds of a roll-out; None if one of its instances is disabled, so that none is watched.

        Raises ValueError that says why there are none.
        """
        if not {baseline, candidate} <= self.bounds.keys() | self.refusals.keys():
            return None
        if candidate in self.refusals:
            raise ValueError(self.refusals[candidate])
        if baseline not in self.exact:
            raise ValueError(
                f"the board compares with exact caching, which {baseline!r} is not: write bounds, or begin with "
                f"{' or '.join(map(repr, self.exact)) or 'an exact strategy'}"
            )
        return self.bounds[candidate]


class Hello(msgspec.Struct, tag=True, frozen=True):
    """First message on every connection: the engine is ready; the fields tell what it serves."""

    model: str
    aliases: list[str]  # other names of the model in the API
    max_seq_len: int
    vocab_size: int
    strategies: list[Strategy]
    system_fingerprint: str = ""  # the field of this name in responses; it changes with model, code or settings
    weight_formats: dict[str, WeightUsage] = {}  # how many weights there are in each format
    board: BoardBounds | None = None  # for the controller of roll-outs


class Admitted(msgspec.Struct, tag=True, frozen=True):
    """The request got its seat in `instance`, chosen by `reason`; `cached_tokens` of its prompt were in the cache."""

    request_id: str
    instance: str
    reason: str
    cached_tokens: int
    miss: str | None = None  # why no more were in the cache (`cache_strategies.base.Miss`); None: all reusable were
    queue_seconds: float = 0.0  # from the request's arrival to its first admission


class Preempted(msgspec.Struct, tag=True, frozen=True):
    """The request lost its memory to other requests; it waits and goes on later."""

    request_id: str


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """A token's log-probability under the model: from its logits before temperature and penalties."""

    token: int
    logprob: float
    rank: int  # 1: the likeliest
    top_logprobs: list[tuple[int, float]]  # the likeliest tokens and their log-probabilities


class Progress(msgspec.Struct, tag=True, frozen=True):
    """So many tokens of the request's prompt are computed, or were in the cache."""

    request_id: str
    num_tokens: int


class PromptScores(msgspec.Struct, tag=True, frozen=True):
    """Log-probabilities of the prompt's tokens from the second on, in order; a long prompt takes several messages."""

    request_id: str
    logprobs: list[TokenLogprob]


class Tokens(msgspec.Struct, tag=True, frozen=True):
    """New tokens of a request; if finish_reason ('stop' or 'length') is set, they are the last ones and may be none.

    With 'stop' the last token is one that ends texts, unless `completes_grammar` is set.
    """

    request_id: str
    tokens: list[int]
    finish_reason: str | None = None
    logprobs: list[TokenLogprob] | None = None  # one for each token; None if the request has no `logprobs`
    num_draft_tokens: int = 0  # number of verified draft tokens; all of `tokens` except the last were in the draft
    # Whether the text ends because nothing can follow it by its grammar; the last token belongs to the text then
    completes_grammar: bool = False


class Explained(msgspec.Struct, tag=True, frozen=True):
    """The record of a request with `explain`: follows its last tokens, or its Cancel with "stop"."""

    request_id: str
    record: RequestRecord


class Compared(msgspec.Struct, tag=True, frozen=True):
    """How far output tokens of a request with a `reference` are from what that instance predicts; may be none.

    These events may come later than the tokens, and end with one that `is_last`, unless the request fails.
    """

    request_id: str
    indexes: list[int] = []  # of the tokens among the output tokens, ascending
    kl: list[float] = []  # KL(reference || instance that serves the request) of each token, nats
    agreed: list[bool] = []  # whether both have the same likeliest token
    rank: list[int] = []  # rank of the token under the reference; 1: the likeliest
    is_last: bool = False
    ended_early: Literal["room", "failed"] | None = None  # why not all tokens were compared: no memory, or a failure


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The request failed. `status` is the HTTP status of the response, if the response has not begun."""

    request_id: str
    status: int
    message: str
    code: str | None = None
    param: str | None = None
    retry_after: float | None = None  # seconds after which another attempt may succeed; None: unknown


class Answer(msgspec.Struct, tag=True, frozen=True):
    """The reply to a Query; `error` is set if the query was refused or failed."""

    query_id: int
    body: bytes  # JSON, encoded metrics or a gzipped trace, as the Query asks; empty if `error` is set
    error: Failed | None = None
    # When it was computed, in seconds of the monotonic clock, which all processes of this machine share
    created_at: float = 0.0


RequestEvent = Admitted | Preempted | Progress | PromptScores | Tokens | Explained | Compared | Failed


# ---------------------------------------------------------------- between the engine and the controller of roll-outs
class Split(msgspec.Struct, frozen=True):
    """How a roll-out divides the requests of an instance; shares are from 0 to 1."""

    rollout: str
    served: str  # the instance whose requests are divided
    candidate: str
    share: float  # of the conversations, which the candidate serves
    shadow_share: float  # of the requests that stay, which also run under the candidate
    is_complete: bool = False  # whether the candidate serves all requests for good, and is not watched any more


class SetSplits(msgspec.Struct, tag=True, frozen=True):
    """From the controller: how requests are divided from now on, and the states of roll-outs for metrics."""

    splits: list[Split]
    states: dict[str, tuple[str, float]] = {}  # by roll-out: its state ("paused" while it is), the candidate's share
    pairs: list[tuple[str, str]] = []  # (served, candidate) of the instances that roll-outs compare
    rolled_back: list[str] = []  # names of the roll-outs that a guard has rolled back since the last SetSplits


class RolloutQuestion(msgspec.Struct, tag=True, frozen=True):
    """To the controller: an API worker's query, which a RolloutAnswer answers."""

    worker: int
    query_id: int
    payload: RolloutQuery


class RolloutAnswer(msgspec.Struct, tag=True, frozen=True):
    """From the controller: the answer to a RolloutQuestion of an API worker."""

    worker: int
    answer: Answer


class RolloutSamples(msgspec.Struct, tag=True, frozen=True):
    """To the controller: what has ended in a step, and candidates that get no requests any more."""

    records: list[RequestRecord] = []  # of requests that count in an arm of a roll-out
    fidelities: list[RequestFidelity] = []
    unusable: list[str] = []  # names of instances


ToEngine = Submit | Cancel | Query | Observed | SetSplits | RolloutAnswer
FromEngine = Hello | RequestEvent | Answer | RolloutQuestion | RolloutSamples
